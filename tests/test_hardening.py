"""Inputs that once ended in "unexpected ...", a crash or a silent loss: each is one line that says what is wrong."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from clirun import ROOT, coldkv, environment, in_process


def one_line(done, *words):
    assert done.code == 2 and done.out == "", done
    assert len(done.err.splitlines()) == 1 and "unexpected" not in done.err
    for word in words:
        assert word in done.err


@pytest.fixture
def dump(tmp_path):
    path = tmp_path / "d.npz"
    values = np.random.default_rng(0).standard_normal((70, 1, 64)).astype(np.float32)
    np.savez(path, layer_0_k=values, layer_0_v=values)
    return path


@pytest.mark.parametrize(
    "content,words",
    [
        ('{"layers": {"0": "int8", "0": "fp8"}}', "'0' is there twice"),
        ('{"layers": {"%s": "int8"}}' % ("9" * 5000), "expected numbers and ranges"),
        ('{"layers": %s}' % ("9" * 5000), "not valid JSON"),
    ],
)
def test_tables(tmp_path, capsys, dump, content, words):
    path = tmp_path / "t.json"
    path.write_text(content)
    one_line(in_process(capsys, "measure", dump, "--table", path), words)


@pytest.mark.parametrize(
    "content,words",
    [
        ('{"text_config": 5}', "text_config: expected an object, found int"),
        ('{"head_dim": 64, "head_dim": 128, "kv_heads": 1}', "'head_dim' is there twice"),
        ('{"head_dim": 64, "kv_heads": 1, "page_tokens": 0}', "page_tokens: expected 1 to"),
        ('{"head_dim": 64, "kv_heads": 1, "page_tokens": false}', "page_tokens: expected a whole number"),
    ],
)
def test_geometry_files(tmp_path, capsys, dump, content, words):
    path = tmp_path / "g.json"
    path.write_text(content)
    done = in_process(capsys, "measure", dump, "--geometry", path)
    one_line(done, words)
    assert done.err.count("g.json") == 1


def test_a_null_text_config_is_as_if_it_were_absent(tmp_path, capsys, dump):
    path = tmp_path / "g.json"
    path.write_text('{"text_config": null, "head_dim": 64, "kv_heads": 1}')
    assert in_process(capsys, "measure", dump, "--geometry", path).code == 0


@pytest.mark.parametrize("column", ["elements", "hot_bytes", "ratio", "nmse_hot", "logit_rmse", "pages"])
def test_absurd_integers_in_results(tmp_path, capsys, column):
    doc = json.loads((ROOT / "results" / "baseline.json").read_text())
    doc["rows"][0][column] = 10**400
    path = tmp_path / "r.json"
    path.write_text(json.dumps(doc))
    one_line(in_process(capsys, "report", path), "r.json", column)
    path.write_text('{"a": %s}' % ("9" * 5000))
    one_line(in_process(capsys, "report", path), "r.json")


@pytest.mark.parametrize("args", [["inspect"], ["measure", "--table"], ["measure", "--geometry"]])
def test_a_fifo_is_refused_not_waited_for(tmp_path, dump, args):
    fifo = tmp_path / "f.json"
    os.mkfifo(fifo)
    done = coldkv(*args, fifo, *([dump] if args[0] == "measure" else []), timeout=30)
    one_line(done, "f.json", "expected a file")


def test_values_beyond_bf16_are_refused_not_made_infinite(tmp_path, capsys):
    path = tmp_path / "d.npz"
    k = np.ones((70, 1, 64), dtype=np.float32)
    k[3, 0, 5] = 3.4e38
    np.savez(path, layer_0_k=k, layer_0_v=np.ones_like(k))
    for args in (("measure", path), ("pack", path, "-o", tmp_path / "p.ckv", "--cold-keep-tokens", 0)):
        one_line(in_process(capsys, *args, "--tier", "bf16"), "layer_0_k", "3.4e+38", "beyond bf16")
    assert not (tmp_path / "p.ckv").exists()


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_tensors_without_plain_memory(tmp_path, capsys, kind):
    tensor = torch.ones(1, 1, 70, 64)
    odd = tensor.to_sparse() if kind == "sparse" else tensor.to("meta")
    torch.save({"key_cache": [odd], "value_cache": [tensor]}, tmp_path / "d.pt")
    one_line(in_process(capsys, "measure", tmp_path / "d.pt"), "expected a plain dense tensor")


def test_tensors_with_gradients_are_read_quietly(tmp_path):
    tensor = torch.ones(1, 1, 70, 64, requires_grad=True)
    torch.save({"key_cache": [tensor], "value_cache": [tensor]}, tmp_path / "d.pt")
    done = coldkv("measure", tmp_path / "d.pt")
    assert done.code == 0 and done.err == ""


def test_sink_tokens_without_end(tmp_path, capsys, dump):
    assert in_process(capsys, "pack", dump, "-o", tmp_path / "p.ckv", "--cold-sink-tokens", 10**30).code == 0


@pytest.mark.parametrize("args", [("--head-pages", 10**18), ("--threads", 10**14), ("--repeat", 0)])
def test_bench_sizes_have_limits(capsys, args):
    one_line(in_process(capsys, "bench", *args), args[0])


def test_a_closed_stdout_does_not_end_in_an_exception():
    command = f"{sys.executable} -m coldkv report {ROOT / 'results' / 'baseline.json'} >&-"
    done = subprocess.run(["sh", "-c", command], env=environment(), capture_output=True, text=True, timeout=60)
    assert "unexpected" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("compiler", ["'", "true", "/nonexistent/g++"])
def test_a_useless_compiler_falls_back_to_torch_with_one_line(tmp_path, dump, compiler):
    done = coldkv("measure", dump, "--json", env={"CXX": compiler, "COLDKV_CACHE_DIR": str(tmp_path / "cache")})
    assert done.code == 0 and json.loads(done.out)["run"]["backend"] == "torch"
    assert len(done.err.splitlines()) == 1 and "no compiled kernels" in done.err


@pytest.mark.parametrize("keep", [0, 20_000])
def test_a_library_that_was_cut_short_is_built_again(tmp_path, dump, keep):
    env = {"COLDKV_CACHE_DIR": str(tmp_path / "cache")}
    first = coldkv("measure", dump, "--json", env=env)
    if json.loads(first.out)["run"]["backend"] != "cpu":
        pytest.skip("no C++ compiler here")
    (library,) = (tmp_path / "cache").glob("*.so")
    library.write_bytes(library.read_bytes()[:keep])
    again = coldkv("measure", dump, "--json", env=env)
    assert again.code == 0 and again.err == "" and json.loads(again.out)["run"]["backend"] == "cpu"
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.name.startswith("build-")] == []
