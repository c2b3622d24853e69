"""`coldkv measure` end to end: real bytes, the sample's figures, invalid pages, bad input, equal backends."""

import json

import numpy as np
import pytest
import torch
from clirun import coldkv, in_process

from coldkv.backends import get_backend
from coldkv.codecs import get_codec
from coldkv.dumps import open_dump, sample_path
from coldkv.errors import InputError, ToolError
from coldkv.geometry import Geometry
from coldkv.measure import choose_codecs, measure, plan
from coldkv.pipeline import plane_chunks, to_head_pages, to_tokens
from coldkv.table import assign, parse_table, uniform_table


def backends():
    try:
        get_backend("cpu")
    except ToolError:
        return ["torch"]
    return ["torch", "cpu"]


def rows_of(path, tier="int8", codecs=None, backend="torch", nan="reject", page_tokens=None):
    with open_dump(path) as dump:
        if page_tokens:
            dump.page_tokens = page_tokens
        assignment = assign(uniform_table(tier), [layer.index for layer in dump.layers])
        chosen = choose_codecs([get_codec(c) for c in codecs] if codecs else None, [assignment])
        return measure(plan(dump, "d", assignment, chosen), get_backend(backend, threads=1), nan=nan)


def npz(path, layers=2, tokens=70, heads=2, head_dim=64, seed=0, **changes):
    rng = np.random.default_rng(seed)
    shape = (tokens, heads, head_dim)
    arrays = {f"layer_{i}_{p}": rng.standard_normal(shape).astype(np.float32) for i in range(layers) for p in "kv"}
    np.savez(path, **(arrays | changes))
    return path


@pytest.fixture(scope="module")
def sample_doc(tmp_path_factory):
    done = coldkv("measure", "--sample", "--table", "seed-10-6", "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_the_sample_meets_the_figures_of_the_seed_and_ours(sample_doc):
    int8 = [row for row in sample_doc["rows"] if row["tier"] == "int8"]
    for row in int8:
        if row["codec"] == "rans-e2m1":
            continue
        assert row["ratio"] == 16896 / 9232
        low, high = (0.011, 0.015) if row["plane"] == "v" else (0.012, 0.026)
        if row["codec"] == "e2m1-g64":
            assert low <= row["nmse_hot"] <= high
        assert (row["logit_rmse"] is not None) == (row["plane"] == "k")
        assert row["nmse_centered"] > row["nmse_hot"]
    g16 = [row["nmse_hot"] for row in int8 if row["codec"] == "e2m1-g16"]
    assert len(g16) == 14 and sum(g16) / len(g16) <= 0.0080
    summary = {entry["codec"]: entry for entry in sample_doc["summary"]["codecs"]}
    assert summary["e2m1-g16"]["aggregate_ratio"] == pytest.approx(193536 / (6 * 9232 + 10 * 9216), abs=0, rel=1e-12)
    assert summary["e2m1-g64"]["aggregate_ratio"] == pytest.approx(193536 / (16 * 9232), rel=1e-12)
    assert summary["native"]["nmse_hot"] == 0
    claimed = [claim for claim in sample_doc["summary"]["claims"] if claim["claimed"] == "~1.66x"]
    assert claimed and all(claim["holds"] is not True for claim in claimed)


def test_the_sample_is_a_real_dump_with_both_kinds_of_layers():
    with open_dump(sample_path()) as dump:
        assert {layer.kind for layer in dump.layers} == {"full", "sliding"}
        assert all(layer.tokens // 64 >= 10 and layer.queries() is not None for layer in dump.layers)
        assert sample_path().stat().st_size <= 6_000_000
        assert dump.meta["provenance"]


@pytest.mark.parametrize("tier", ["int8", "nvfp4", "bf16", "fp8", "fp16", "iso3"])
def test_every_backend_gives_the_same_rows(tmp_path, tier):
    path = npz(tmp_path / "d.npz", head_dim=80)
    found = {backend: rows_of(path, tier, backend=backend, page_tokens=16) for backend in backends()}
    rows, layers = found["torch"]
    assert {row["codec"] for row in rows} and all(entry["partial_tokens"] == 70 % 16 for entry in layers)
    for other in found.values():
        for a, b in zip(rows, other[0], strict=True):
            for key, value in a.items():
                if key == "backend":
                    continue
                if isinstance(value, float):
                    assert b[key] == pytest.approx(value, rel=1e-11), key
                else:
                    assert b[key] == value, key


@pytest.mark.parametrize("backend", backends())
def test_refused_pages_stay_hot_and_are_counted_at_hot_size(tmp_path, backend):
    k = np.ones((70, 2, 64), dtype=np.float32)
    k[20, 1, 5] = 2.0**125  # beyond what e2m1-g16 takes; page 1 of head 1
    path = npz(tmp_path / "d.npz", layer_0_k=k)
    rows, _ = rows_of(path, "bf16", ["e2m1-g16"], backend, page_tokens=16)
    row = next(r for r in rows if (r["layer"], r["plane"], r["head"]) == (0, "k", 1))
    slot, page = get_codec("e2m1-g16").slot_bytes(Geometry(64, 16), "bf16"), 16 * 64 * 2
    assert row["invalid_pages"] == 1 and row["pages"] == 4
    assert row["cold_bytes"] == 3 * slot + page and row["hot_bytes"] == 4 * page
    assert row["nmse_hot"] < 1e-60  # all of the error sits in the small pages, all of the energy in the refused one
    assert all(r["invalid_pages"] == 0 for r in rows if r is not row)


def test_chunks_do_not_change_the_figures(tmp_path):
    path = npz(tmp_path / "d.npz", tokens=200)
    backend = get_backend("torch")
    with open_dump(path) as dump:
        source = dump.layers[0].planes["k"]
        geometry = Geometry(64, 16, 2)
        whole = list(plane_chunks(source, "int8", geometry, backend))
        parts = list(plane_chunks(source, "int8", geometry, backend, chunk_elements=3 * 16 * 64 * 2))
    assert [(c.first_page, c.pages) for c in parts] == [(0, 3), (3, 3), (6, 3), (9, 3)]
    assert len(whole) == 1
    assert torch.equal(torch.cat([c.ref for c in parts]), whole[0].ref)
    assert torch.equal(torch.cat([c.hot.codes for c in parts]), whole[0].hot.codes)


def test_head_pages_and_tokens_are_inverse():
    tokens = torch.arange(6 * 16 * 3 * 10).reshape(96, 3, 10)
    geometry = Geometry(10, 16, 3)
    paged = to_head_pages(tokens, geometry)
    assert torch.equal(paged[4], tokens[16:32, 1])  # page 1, head 1
    assert torch.equal(to_tokens(paged, geometry), tokens)


def test_codecs_that_fit_some_tiers_leave_the_others_hot():
    table = assign(parse_table("0:int8,1:nvfp4"), [0, 1])
    assert [c.id for c in choose_codecs(None, [table])] == ["e2m1-g16", "e2m1-g64", "native", "rans-e2m1"]
    assert [c.id for c in choose_codecs([get_codec("native")], [table])] == ["native"]
    with pytest.raises(InputError, match="codec native: fits planes of nvfp4, iso3, but the tiers in use .int8."):
        choose_codecs([get_codec("native")], [assign(uniform_table("int8"), [0])])


@pytest.mark.parametrize(
    "args,message",
    [
        (["--sample", "--tier", "int9"], "tier: expected one of"),
        (["--sample", "--table", "all-int8", "--tier", "int8"], "expected one of them, found both"),
        (["--sample", "--codec", "zip"], "codec: expected one of e2m1-g16, e2m1-g64, native, rans-e2m1"),
        (["--sample", "--codec", "native"], "codec native: fits planes of nvfp4, iso3"),
        (["--sample", "--layers", "99"], "no layer 99"),
        (["--sample", "--table", "0-3:int8"], "not in the table"),
        (["--sample", "--page-tokens", "4096"], "expected at least one whole page of 4096 tokens, found 672 tokens"),
        (["missing.safetensors"], "missing.safetensors"),
        ([], "no dump given"),
        (["--sample", "x.npz"], "expected no DUMP beside it"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys, args, message):
    done = in_process(capsys, "measure", *args)
    assert done.code == 2 and done.out == ""
    lines = [line for line in done.err.splitlines() if not line.startswith("note:")]
    assert len(lines) == 1 and lines[0].startswith("coldkv: ") and message in lines[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_is_named_and_leaves_no_result(tmp_path, capsys, bad):
    v = np.zeros((70, 2, 64), dtype=np.float32)
    v[33, 1, 7] = bad
    path = npz(tmp_path / "d.npz", layer_1_v=v)
    done = in_process(capsys, "measure", path, "--results", tmp_path / "r.json")
    assert done.code == 2
    assert "layer_1_v" in done.err and "token 33, head 1, channel 7" in done.err and str(path) in done.err
    assert not (tmp_path / "r.json").exists() and [p.name for p in tmp_path.iterdir()] == ["d.npz"]
    assert in_process(capsys, "measure", path, "--nan", "zero", "--results", tmp_path / "r.json").code == 0
    shown = in_process(capsys, "report", tmp_path / "r.json")
    assert "1 NaN or Inf values were read as 0, first in d.npz layer 1 plane v" in shown.out


def test_json_is_one_document_and_results_file_is_the_same(tmp_path, capsys):
    path = npz(tmp_path / "d.npz")
    done = in_process(capsys, "measure", path, "--json", "--results", tmp_path / "r.json", "--codec", "e2m1-g64")
    assert done.code == 0 and done.err == ""
    doc = json.loads(done.out)
    assert doc == json.loads((tmp_path / "r.json").read_text())
    assert doc["schema"] == "coldkv.results/1" and {row["codec"] for row in doc["rows"]} == {"e2m1-g64"}


def test_two_dumps_of_the_same_name_are_told_apart(tmp_path, capsys, monkeypatch):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        npz(tmp_path / folder / "d.npz", layers=1)
    monkeypatch.chdir(tmp_path)
    done = in_process(capsys, "measure", "a/d.npz", "b/d.npz", "--json")
    assert {row["dump"] for row in json.loads(done.out)["rows"]} == {"a/d.npz", "b/d.npz"}


def test_a_destroyed_plane_is_said_in_words(tmp_path, capsys):
    k = np.random.default_rng(1).standard_normal((70, 2, 64)).astype(np.float32) * 1e-4
    path = npz(tmp_path / "d.npz", layers=1, layer_0_k=k)
    shown = in_process(capsys, "measure", path, "--codec", "e2m1-g64").out
    assert "warning: e2m1-g64 on int8 K: nmse_hot above 0.1 in 2 heads" in shown
    assert "little of the plane is left against its hot tier" in shown
    nvfp4 = in_process(capsys, "measure", path, "--tier", "nvfp4", "--codec", "native").out
    assert "warning: native on nvfp4 K: nmse_ref above 0.1" in nvfp4 and "against the dump" in nvfp4
    assert "above 0.1" not in in_process(capsys, "measure", path, "--codec", "e2m1-g16").out
