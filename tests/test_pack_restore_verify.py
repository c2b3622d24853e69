"""The commands: documents, messages, exit codes, and files that appear whole or not at all."""

import json
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from clirun import ROOT, environment, heed_interrupts, in_process, python
from poolkit import make_dump, values

from coldkv.dumps import open_dump

TORCH = ("--backend", "torch")


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    path = tmp_path_factory.mktemp("dump") / "d.safetensors"
    shape = {"tokens": 100, "heads": 2, "head_dim": 64, "queries": True}
    make_dump(path, {0: shape, 2: shape, 5: {**shape, "tokens": 70}})
    return path


def run_json(capsys, *args):
    done = in_process(capsys, *args, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out), done.err


def test_pack_restore_verify_inspect_speak_json(dump, tmp_path, capsys):
    pool, out = tmp_path / "p.ckv", tmp_path / "r.safetensors"
    packed, err = run_json(
        capsys, "pack", dump, "-o", pool, *TORCH, "--table", "0-2:int8,5:nvfp4", "--cold-keep-tokens", 30
    )
    assert packed["schema"] == "coldkv.pack/1" and packed["backend"] == "torch"
    # 64 sink tokens are 4 pages of 16; (100 - 30) // 16 = 4: nothing is old enough and no sink
    assert packed["pages"] == {"cold": 0, "no_codec": 5, "recent": 6, "sink": 8}
    assert "layers 5 stay hot: tier nvfp4" in err
    packed, _ = run_json(
        capsys, "pack", dump, "-o", pool, *TORCH, "--cold-sink-tokens", 17, "--cold-keep-tokens", 0, "--layers", "0,5"
    )
    assert packed["pages"] == {"cold": 6, "recent": 2, "sink": 4}
    slot_bytes = 16 + 16 * 64 // 2 + 16 * 4
    assert packed["slot_bytes"] == 6 * 2 * 2 * slot_bytes
    assert packed["cold_hot_bytes"] == 6 * 2 * 2 * 16 * 66 and packed["hot_bytes"] == 170 * 2 * 2 * 66
    assert packed["file_bytes"] == pool.stat().st_size
    verified, _ = run_json(capsys, "verify", pool, "--against", dump, *TORCH)
    assert verified["ok"] and verified["slot_records"] == verified["against"]["slot_records"] == 24
    assert verified["hot_records"] == verified["against"]["hot_records"] == 24 and verified["against"]["same_file"]
    for layer in verified["against"]["layers"]:
        for plane in "kv":
            assert 0.003 < layer["planes"][plane]["nmse_hot"] < 0.02
    info, _ = run_json(capsys, "inspect", pool)
    assert info["kind"] == "pool" and sum(info["bytes"].values()) == info["file_bytes"] == packed["file_bytes"]
    assert info["bytes"]["slots"] == packed["slot_bytes"] and info["hot_bytes_replaced"] == packed["cold_hot_bytes"]
    restored, err = run_json(capsys, "restore", pool, "-o", out, *TORCH)
    assert restored["pages"] == {"slots": 6, "replicas": 0, "hot": 6} and restored["inexact_values"] == 0 and not err
    with open_dump(out) as after:
        assert [layer.index for layer in after.layers] == [0, 5] and after.layers[0].planes["k"].dtype == "fp32"


def test_text_output_and_one_slot(dump, tmp_path, capsys):
    pool = tmp_path / "p.ckv"
    done = in_process(capsys, "pack", dump, "-o", pool, *TORCH, "--cold-keep-tokens", 0)
    assert done.code == 0 and "1.784x" in done.out and "hot: first tokens" in done.out
    done = in_process(capsys, "verify", pool, "--against", dump, *TORCH)
    assert done.code == 0 and "every slot as encoded from the dump" in done.out and "k nmse_hot" in done.out
    done = in_process(capsys, "inspect", pool)
    assert done.code == 0 and "k:e2m1-g16/592" in done.out and "policy: name window" in done.out
    done = in_process(capsys, "inspect", pool, "--slot", "2:v:5:1")
    assert done.code == 0 and "slot of 592 bytes: 16 tokens x 64 channels, codec e2m1-g16" in done.out
    done = in_process(capsys, "restore", pool, "-o", tmp_path / "r.safetensors", "--dtype", "bf16", *TORCH)
    assert done.code == 0 and "3 layers as bf16" in done.out and "values are not exact in bf16" in done.err


@pytest.mark.parametrize(
    "args,text",
    [
        (("inspect", "POOL", "--slot", "2:v:0:1"), "layer 2, plane v, page 0, head 1: the page is hot"),
        (("inspect", "POOL", "--slot", "2:v:5"), "expected LAYER:PLANE:PAGE:HEAD"),
        (("inspect", "POOL", "--slot", "2:v:7:0"), "only 7 pages and 2 heads exist"),
        (("inspect", "POOL", "--slot", "2:x:5:0"), "expected plane k or v"),
        (("inspect", "POOL", "--slot", "1:k:5:0"), "no layer 1; layers: [0, 2, 5]"),
        (("inspect", "POOL", "--hex"), "name it with --slot"),
        (("verify", "DUMP"), "this is a dump, not a pool; coldkv pack makes a pool of it"),
        (("verify", "gone.ckv"), "pool gone.ckv: no such file"),
        (("restore", "DUMP", "-o", "OUT.safetensors"), "this is a dump, not a pool"),
        (("restore", "POOL", "-o", "OUT.npz"), "expected a name ending in .safetensors"),
        (("restore", "POOL", "-o", "OUT/x/y.safetensors"), "does not exist; create it first"),
        (("pack", "DUMP", "-o", "OUT.safetensors"), "expected a name ending in .ckv"),
        (("pack", "POOL", "-o", "OUT.ckv"), ".ckv"),
        (("pack", "DUMP", "-o", "OUT.ckv", "--codec", "native"), "codec native: fits planes of nvfp4, iso3"),
        (("pack", "DUMP", "-o", "OUT.ckv", "--codec", "zip"), "codec: expected one of"),
        (("pack", "DUMP", "-o", "OUT.ckv", "--layers", "0,9"), "has no layer 9"),
        (("pack", "DUMP", "-o", "OUT.ckv", "--table", "seed-10-6"), "table seed-10-6: is for another number of layers"),
        (("pack", "DUMP", "-o", "OUT.ckv", "--cold-host-bytes", "4x"), "bytes '4x': expected N, Nk, Nm or Ng"),
        (("pack", "DUMP", "-o", "OUT.ckv", "--cold-keep-tokens", "-1"), "cold-keep-tokens"),
        (("pack", "DUMP", "-o", "OUT.ckv", "--cold-policy", "lru"), "cold-policy"),
        (("pack", "-o", "OUT.ckv"), "no dump given"),
        (("pack", "DUMP", "--sample", "-o", "OUT.ckv"), "expected no DUMP beside it"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(dump, tmp_path_factory, tmp_path, capsys, args, text):
    pool = tmp_path / "p.ckv"
    in_process(capsys, "pack", dump, "-o", pool, *TORCH, "--cold-keep-tokens", 0, "--codec", "e2m1-g64")
    before = sorted(tmp_path.iterdir())
    places = {"DUMP": str(dump), "POOL": str(pool)}
    args = [places.get(arg, arg.replace("OUT", str(tmp_path / "out"))) for arg in args]
    more = TORCH if args[0] in ("pack", "restore") else ()
    done = in_process(capsys, *args, *more)
    assert done.code == 2 and done.out == "" and len(done.err.splitlines()) == 1, done
    assert text in done.err
    assert sorted(tmp_path.iterdir()) == before


def test_another_dump_is_found_by_against(dump, tmp_path, capsys):
    pool, other = tmp_path / "p.ckv", tmp_path / "other.safetensors"
    in_process(capsys, "pack", dump, "-o", pool, *TORCH, "--cold-keep-tokens", 0, "--codec", "e2m1-g64")
    content = bytearray(dump.read_bytes())
    with open_dump(dump) as opened:
        begin = opened.layers[1].planes["v"]._info.begin
    at = begin + ((4 * 16 + 3) * 2 + 1) * 64 * 2 + 11  # page 4, token 3, head 1: the high byte of a bf16
    content[at] ^= 0x80  # the sign
    other.write_bytes(content)
    done = in_process(capsys, "verify", pool, "--against", other, *TORCH)
    assert done.code == 1 and "sha256 differs" in done.err and "1 problems" in done.err
    assert (
        "layer 2, plane v, page 4, head 1: layers.2.slots: slot 0: differs from the dump's encoding in 1 of" in done.out
    )
    shape = {"tokens": 100, "heads": 2, "head_dim": 64}
    make_dump(other, {0: shape, 2: {**shape, "tokens": 96}, 5: shape})
    done = in_process(capsys, "verify", pool, "--against", other, *TORCH)
    assert done.code == 2 and "layer 2: expected 100 tokens" in done.err


def test_the_order_of_options_does_not_matter(dump, tmp_path, capsys):
    options = [
        ("--cold-policy", "host"),
        ("--cold-keep-tokens", "20"),
        ("--cold-sink-tokens", "5"),
        ("--cold-host-bytes", "9k"),
    ]
    files = []
    for number, order in enumerate((options, options[::-1])):
        path = tmp_path / f"{number}.ckv"
        done = in_process(capsys, "pack", dump, *sum(order, ()), "-o", path, *TORCH, "--codec", "e2m1-g64")
        assert done.code == 0
        files.append(path.read_bytes())
    assert files[0] == files[1]
    info, _ = run_json(capsys, "inspect", path)
    assert info["policy"] == {"name": "host", "keep_tokens": 20, "sink_tokens": 5, "host_bytes": 9216}


def test_verify_inspect_and_help_do_not_import_torch(dump, tmp_path, capsys):
    pool = tmp_path / "p.ckv"
    in_process(capsys, "pack", dump, "-o", pool, *TORCH, "--cold-keep-tokens", 0, "--codec", "e2m1-g64")
    code = (
        "import sys; from coldkv.cli import main\n"
        "for args in (['verify', sys.argv[1]], ['inspect', sys.argv[1]], ['pack', '--help'], ['restore', '--help']):\n"
        "    assert main(args) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = python(code, pool)
    assert done.code == 0, done.err


@contextmanager
def files_limited_to(size):
    """Writes past `size` bytes fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("part", [0.01, 0.5, 0.99])
def test_a_full_disk_leaves_nothing(dump, tmp_path, capsys, part):
    pool, out = tmp_path / "p.ckv", tmp_path / "r.safetensors"
    in_process(capsys, "pack", dump, "-o", pool, *TORCH, "--codec", "e2m1-g64")
    in_process(capsys, "restore", pool, "-o", out, *TORCH)
    sizes = {"pack": pool.stat().st_size, "restore": out.stat().st_size}
    folder = tmp_path / "out"
    folder.mkdir()
    older = folder / "older.ckv"
    older.write_bytes(b"older")
    for args in (("pack", dump, "-o", older), ("restore", pool, "-o", folder / "r.safetensors")):
        with files_limited_to(int(sizes[args[0]] * part)):
            done = in_process(capsys, *args, *TORCH)
        assert done.code == 2 and len(done.err.splitlines()) == 1, done
        assert str(args[-1]) in done.err and done.out == ""
        assert [path.name for path in folder.iterdir()] == ["older.ckv"] and older.read_bytes() == b"older"


SLOWLY = """
import os, sys, time
os.environ["OMP_NUM_THREADS"] = "1"
import coldkv.pool.file, coldkv.dumps
from coldkv.cli import main
count = 0
def slow(write):
    def wrapped(*args):
        global count
        write(*args)
        count += 1
        if count == 4:
            print("writing", flush=True)
            time.sleep(60)
    return wrapped
for kind in (coldkv.pool.file.PoolWriter, coldkv.dumps.DumpWriter):
    kind.write = slow(kind.write)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "sent",
    [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL],
    ids=["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"],
)
def test_a_signal_in_the_middle_of_writing_leaves_no_partial_file(dump, tmp_path, capsys, sent):
    pool = tmp_path / "p.ckv"
    in_process(capsys, "pack", dump, "-o", pool, *TORCH, "--codec", "e2m1-g64")
    folder = tmp_path / "out"
    folder.mkdir()
    older = folder / "older.ckv"
    older.write_bytes(b"older")
    commands = [("pack", dump, "-o", older), ("restore", pool, "-o", folder / "r.safetensors")]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SLOWLY, *map(str, args), *TORCH],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_interrupts,
        )
        for args in commands
    ]
    for process in running:
        assert process.stdout.readline() == "writing\n"
    assert len(list(folder.iterdir())) == 3, "both are writing to temporary files"
    for process in running:
        process.send_signal(sent)
        _, err = process.communicate(timeout=30)
        if sent == signal.SIGKILL:
            assert process.returncode == -signal.SIGKILL
        else:
            said = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "terminated"}[sent]
            assert process.returncode == 2 and err == f"coldkv: {said}\n"
    visible = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    assert visible == ["older.ckv"] and older.read_bytes() == b"older"
    assert len(list(folder.iterdir())) == (3 if sent == signal.SIGKILL else 1)


MEMORY = """
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"  # the tensors are small: more threads only spin
from pathlib import Path
from coldkv.cli import main
folder = Path(sys.argv[1])
def peak():  # not ru_maxrss, which a process inherits from the one that started it
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])
peaks = []
for count in (4, 4, 16):  # the first round also pays for what is loaded once
    dump, pool, out = (str(folder / f"{count}.{end}") for end in ("safetensors", "ckv", "out.safetensors"))
    common = ["--backend", "torch"]
    window = ["--cold-keep-tokens", "3900", "--codec", "e2m1-g64"]  # few cold pages: about buffers, not arithmetic
    assert main(["pack", dump, "-o", pool, "--tier", "bf16", *window, *common]) == 0
    assert main(["restore", pool, "-o", out, "--dtype", "bf16", *common]) == 0
    assert main(["verify", pool]) == 0
    peaks.append(peak())
print(*peaks, file=sys.stderr)
"""


def test_memory_does_not_grow_with_the_number_of_layers(tmp_path, monkeypatch):
    # fixed thresholds: by default the allocator keeps what was freed, more or less of it as threads happen to be timed
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(128 << 10))
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(128 << 10))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    block = values(64 * 64, 2, 256, 1)  # 4 MiB
    for layers in (4, 16):
        tensors = {f"layers.{i}.{p}": block for i in range(layers) for p in "kv"}
        path = tmp_path / f"{layers}.safetensors"
        make_dump(path, {0: {}}, page_tokens=64, change=lambda found, new=tensors: (found.clear(), found.update(new)))
    done = python(MEMORY, tmp_path)
    assert done.code == 0, done.err
    few, many = (int(kib) for kib in done.err.split()[-2:])
    # holding all layers would cost the 96 MiB by which the dump grew, or more
    assert many - few < 32 << 10, f"{few} KiB for 32 MiB of dump, {many} KiB for 128 MiB"


def test_the_sample_goes_round(tmp_path, capsys):
    pool = tmp_path / "p.ckv"
    packed, _ = run_json(capsys, "pack", "--sample", "-o", pool, *TORCH, "--codec", "e2m1-g64")
    assert packed["cold_hot_bytes"] / packed["slot_bytes"] == 16896 / 9232
    verified, _ = run_json(capsys, "verify", pool)
    assert verified["ok"] and verified["slot_records"] == 98
    run_json(capsys, "restore", pool, "-o", tmp_path / "r.safetensors", *TORCH)
    with (
        open_dump(ROOT / "coldkv" / "data" / "sample.safetensors") as before,
        open_dump(tmp_path / "r.safetensors") as after,
    ):
        assert before.meta["model"] == after.meta["model"] and before.meta["provenance"] == after.meta["provenance"]
        assert all(
            torch.equal(a, b) for a, b in zip(before.layers[0].queries(), after.layers[0].queries(), strict=True)
        )


def test_an_output_never_replaces_its_input(dump, tmp_path, capsys):
    pool, linked_pool = tmp_path / "p.ckv", tmp_path / "link.ckv"
    linked_pool.symlink_to(dump)
    before = dump.read_bytes()
    for args in (("pack", dump, "-o", linked_pool), ("measure", dump, "--results", dump, *TORCH)):
        done = in_process(capsys, *args)
        assert done.code == 2 and "is the input" in done.err
    assert dump.read_bytes() == before
    assert in_process(capsys, "pack", dump, "-o", pool, *TORCH).code == 0
    linked_dump, held = tmp_path / "link.safetensors", pool.read_bytes()
    linked_dump.symlink_to(pool)
    done = in_process(capsys, "restore", pool, "-o", linked_dump, *TORCH)
    assert done.code == 2 and "is the input" in done.err and pool.read_bytes() == held
