"""The result schema: what is accepted, what is refused with which words, and the arithmetic of the summary."""

import copy
import json
import math

import pytest
import result_docs
from hypothesis import given, settings
from hypothesis import strategies as st
from result_docs import ELEMENTS, HOT, SLOT, layer, row, run

from coldkv import results
from coldkv.errors import InputError


def test_round_trip_is_exact(tmp_path):
    doc = result_docs.seed_doc()
    path = tmp_path / "r.json"
    results.write_results(path, doc)
    assert results.read_results(path) == doc
    lines = path.read_text().splitlines()
    assert sum('"nmse_hot": ' in line and '"backend": ' in line for line in lines) == len(doc["rows"])


@settings(max_examples=50, deadline=None)
@given(st.floats(min_value=0, allow_infinity=False, allow_nan=False))
def test_every_finite_float_survives(value):
    doc = result_docs.uniform_doc(nmse_hot=value)
    assert json.loads(results.dumps(doc))["rows"][0]["nmse_hot"] == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_null(value):
    doc = result_docs.uniform_doc(snr_db=value)
    assert doc["rows"][0]["snr_db"] is None
    assert "NaN" not in results.dumps(doc) and "Infinity" not in results.dumps(doc)


def test_numpy_scalars_become_plain_numbers():
    np = pytest.importorskip("numpy")
    doc = result_docs.uniform_doc(nmse_hot=np.float32(0.5), pages=np.int64(10))
    assert type(doc["rows"][0]["nmse_hot"]) is float and type(doc["rows"][0]["pages"]) is int


def change(path, value):
    def apply(doc):
        *parents, last = path
        for key in parents:
            doc = doc[key]
        if value is KeyError:
            del doc[last]
        else:
            doc[last] = value

    return apply


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (change(["schema"], "coldkv.results/2"), "schema: expected 'coldkv.results/1', found 'coldkv.results/2'"),
        (change(["run"], []), "run: expected an object, found list"),
        (change(["run", "backend"], KeyError), "run: 'backend' is missing"),
        (change(["run", "git"], 3), "run: git: expected a string, found 3"),
        (change(["run", "table", "mode"], "all"), "table.mode: expected one of layers, tiers, uniform, found 'all'"),
        (change(["run", "dump_sha256", "d"], "abc"), "expected 64 hex digits, found 'abc'"),
        (change(["run", "layers", 0, "dump"], "other"), "dump 'other' has no sha256"),
        (change(["rows"], []), "no rows"),
        (change(["rows", 1], 7), "row 1: expected an object, found int"),
        (change(["rows", 1, "nmse_hot"], KeyError), "row 1: 'nmse_hot' is missing"),
        (change(["rows", 1, "nmse_hot"], "0.1"), "row 1: nmse_hot: expected a finite number, found '0.1'"),
        (change(["rows", 1, "nmse_hot"], -0.1), "row 1: nmse_hot: expected 0 or more, found -0.1"),
        (change(["rows", 1, "pages"], 2.5), "row 1: pages: expected an integer, found 2.5"),
        (change(["rows", 1, "pages"], True), "row 1: pages: expected an integer, found True"),
        (change(["rows", 1, "pages"], None), "row 1: pages: expected an integer, found null"),
        (change(["rows", 1, "plane"], "q"), "row 1: plane: expected 'k' or 'v', found 'q'"),
        (change(["rows", 1, "invalid_pages"], 11), "invalid_pages 11 exceeds pages 10"),
        (change(["rows", 1, "cold_bytes"], 1), "row 1: ratio: expected hot_bytes/cold_bytes"),
        (change(["rows", 1, "layer"], 9), "row 1: d layer 9 plane v head 0 int8 e2m1-g64 is not among run.layers"),
        (change(["rows", 1, "nmse"], 1.0), "row 1: unknown key 'nmse'"),
    ],
)
def test_bad_documents_are_refused_in_one_line(tmp_path, edit, words):
    doc = copy.deepcopy(result_docs.uniform_doc())
    edit(doc)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(doc))
    with pytest.raises(InputError) as caught:
        results.read_results(path)
    assert words in caught.value.one_line() and str(path) in caught.value.one_line()
    assert "\n" not in caught.value.one_line()


def test_a_row_twice_is_refused():
    with pytest.raises(InputError, match="row 1: .* appears twice"):
        results.document(run([layer()]), [row(), row()])


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "the file is empty"),
        (b"{", "not valid JSON at line 1 column 2"),
        (b"[1]", "expected a JSON object, found list"),
        (b'{"schema": NaN}', "found NaN, expected finite numbers"),
        (b"\xff\xfe\x00", "not a JSON text file"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_files_that_are_not_json(tmp_path, raw, words):
    path = tmp_path / "r.json"
    path.write_bytes(raw)
    with pytest.raises(InputError) as caught:
        results.read_results(path)
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_a_failing_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("old")
    doc = result_docs.uniform_doc()
    doc["rows"][0]["pages"] = -1
    with pytest.raises(InputError):
        results.write_results(path, doc)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def only_codec(doc):
    (line,) = doc["summary"]["codecs"]
    return line


def test_uniform_summary_counts_every_byte_once():
    line = only_codec(result_docs.uniform_doc())
    assert line["pages"] == 40
    assert (line["hot_bytes"], line["cold_bytes"]) == (40 * HOT["int8"], 40 * SLOT)
    assert line["aggregate_ratio"] == line["page_ratio"] == HOT["int8"] / SLOT
    assert line["bits_per_element"] == pytest.approx(8 * SLOT / ELEMENTS)
    assert line["nmse_hot_k"] == pytest.approx(0.016) and line["nmse_hot_v"] == pytest.approx(0.0125)
    assert line["nmse_hot"] == pytest.approx((0.016 + 0.0125) / 2)
    assert line["left_hot"] == []


def test_seed_table_by_tier_is_the_seeds_arithmetic():
    line = only_codec(result_docs.seed_doc())
    assert line["aggregate_ratio"] == pytest.approx(193_536 / (6 * 9_232 + 10 * 9_216))
    assert line["left_hot"] == ["nvfp4"]
    both = only_codec(result_docs.seed_doc(tiers=("int8", "nvfp4")))
    assert both["aggregate_ratio"] == pytest.approx(193_536 / (16 * 9_232))
    assert both["left_hot"] == []
    assert both["page_ratio"] == pytest.approx((6 * 16_896 + 10 * 9_216) / (16 * 9_232))


def test_tiers_weigh_errors_by_the_tables_counts():
    layers = [layer(0, "k", tier) for tier in ("int8", "nvfp4")]
    rows = [row(0, "k", "int8", nmse_hot=0.01), row(0, "k", "nvfp4", nmse_hot=0.02)]
    table = {"name": "t", "mode": "tiers", "tier_layers": {"int8": 1, "nvfp4": 3}}
    line = only_codec(results.document(run(layers, **table), rows))
    assert line["nmse_hot"] == pytest.approx((0.01 + 3 * 0.02) / 4)
    assert line["nmse_hot_v"] is None


def test_errors_are_weighted_by_elements_and_missing_ones_stay_out():
    layers = [layer(0, "k", pages=1), layer(1, "k", pages=3), layer(2, "k", pages=5)]
    rows = [
        row(0, "k", pages=1, nmse_hot=0.04),
        row(1, "k", pages=3, nmse_hot=0.08),
        row(2, "k", pages=5, nmse_hot=None),
    ]
    assert only_codec(results.document(run(layers), rows))["nmse_hot"] == pytest.approx(0.07)


def test_logit_error_is_a_root_of_mean_squares():
    layers = [layer(0, "k"), layer(1, "k")]
    rows = [row(0, "k", logit_rmse=3.0), row(1, "k", logit_rmse=4.0)]
    assert only_codec(results.document(run(layers), rows))["logit_rmse"] == pytest.approx(math.sqrt(12.5))


def test_a_plane_left_hot_is_named_and_counted_on_both_sides():
    layers = [layer(0, "k"), layer(0, "v")]
    line = only_codec(results.document(run(layers), [row(0, "k")]))
    assert line["left_hot"] == ["int8:v"]
    assert (line["hot_bytes"], line["cold_bytes"]) == (20 * HOT["int8"], 10 * (HOT["int8"] + SLOT))


def test_a_head_left_hot_counts_too():
    line = only_codec(results.document(run([layer(0, "k", heads=2)]), [row(0, "k", head=1)]))
    assert (line["hot_bytes"], line["cold_bytes"]) == (20 * HOT["int8"], 10 * (HOT["int8"] + SLOT))


def holds(doc):
    return {(claim["codec"], claim["claim"]): claim["holds"] for claim in doc["summary"]["claims"]}


def test_claims_stand_beside_the_measured_values():
    doc = result_docs.seed_doc()
    assert list(holds(doc).values()) == [False, True, False, False]
    claims = {claim["claim"]: claim for claim in doc["summary"]["claims"]}
    aggregate = claims["aggregate on the seed-10-6 table"]
    assert aggregate["claimed"] == "~1.66x" and aggregate["measured"] == pytest.approx(1.3116, abs=1e-4)
    assert claims["ratio per head-page, int8 tier"]["measured"] == 16_896 / 9_232


def test_claims_that_cannot_be_judged_say_so():
    doc = result_docs.uniform_doc()
    assert holds(doc)["e2m1-g64", "aggregate on the seed-10-6 table"] is None
    layers = [layer(0, "k", "bf16")]
    doc = results.document(run(layers), [row(0, "k", "bf16")])
    assert set(holds(doc).values()) == {None}


def test_claims_can_be_met():
    smaller = {"cold_page": 8448, "nmse_hot": 0.013}
    layers = [layer(0, "k"), layer(0, "v")]
    doc = results.document(run(layers), [row(0, "k", **smaller), row(0, "v", **smaller)])
    assert list(holds(doc).values()) == [True, True, True, None]


def test_revision_is_none_outside_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "__file__", str(tmp_path / "coldkv" / "results.py"))
    assert results.git_revision() is None
