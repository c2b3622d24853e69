"""`coldkv bench`: every operation is timed, ratios are to memcpy of the same bytes, files are readable by report."""

import json

import pytest
from clirun import coldkv

from coldkv.backends import get_backend
from coldkv.bench import SCHEMA, run_bench
from coldkv.errors import InputError, ToolError
from coldkv.report import bench as report_bench

SMALL = {"head_dim": 64, "page_tokens": 16, "head_pages": 64, "repeat": 2}


def backends():
    try:
        get_backend("cpu")
    except ToolError:
        return ("torch",)
    return ("torch", "cpu")


@pytest.mark.parametrize("backend", backends())
def test_rows_cover_tier_and_codecs(backend):
    document = run_bench(backend=backend, tier="int8", **SMALL)
    assert document["schema"] == SCHEMA == report_bench.SCHEMA
    report_bench.validate(document, "bench")
    found = {(row["op"], row["codec"]) for row in document["rows"]}
    codecs = ("e2m1-g16", "e2m1-g64", "rans-e2m1")
    assert found == {(op, "-") for op in ("load", "quantize", "dequantize", "stats")} | {
        (op, codec) for op in ("encode", "decode", "restore") for codec in codecs
    } | {("lengths", "rans-e2m1")}
    encode = next(row for row in document["rows"] if row["op"] == "encode" and row["codec"] == "e2m1-g64")
    assert encode["bytes"] == 64 * (16 * 64 + 16 * 2 + 16 + 16 * 32 + 16 * 4)  # plane read, slot written
    assert all(row["gbps"] > 0 and row["memcpy_ratio"] > 0 for row in document["rows"])
    assert any(report_bench.is_ratio(column) for column in encode)


def test_a_codec_that_does_not_fit_is_an_error():
    with pytest.raises(InputError, match="none of native takes planes of tier int8"):
        run_bench(codec_ids=("native",), tier="int8", backend="torch", **SMALL)


def test_command_prints_json_and_writes_the_same(tmp_path):
    out = tmp_path / "bench.json"
    sizes = ["--head-pages", 64, "--repeat", 1, "--head-dim", 64, "--page-tokens", 16]
    done = coldkv("bench", "--backend", "torch", *sizes, "--codec", "e2m1-g64", "--json", "--results", out)
    assert done.code == 0, done.err
    assert json.loads(done.out) == json.loads(out.read_text())
    assert {row["codec"] for row in json.loads(done.out)["rows"]} == {"-", "e2m1-g64"}
