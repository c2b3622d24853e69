"""The regression gate: what fails, what is named, what is refused instead of silently passed."""

import copy
import json

import pytest
import result_docs
from clirun import ROOT, coldkv, in_process
from result_docs import layer, row, run

from coldkv import minifloat, results
from coldkv.report import compare
from coldkv.report.compare import DIRECTIONS

HIGHER_IS_BETTER = {"ratio", "snr_db", "cosine"}
LOWER_IS_BETTER = {
    "cold_bytes",
    "bits_per_element",
    "nmse_hot",
    "nmse_ref",
    "nmse_centered",
    "max_abs_err",
    "invalid_pages",
    "logit_rmse",
    "attn_out_nmse",
}
FIXED = {"pages", "tokens", "elements", "hot_bytes"}


@pytest.fixture
def gate(tmp_path, capsys):
    """Write two documents and run the gate on them."""

    def gate(found, baseline, *args):
        results.write_results(tmp_path / "found.json", found)
        results.write_results(tmp_path / "base.json", baseline)
        return in_process(capsys, "report", tmp_path / "found.json", "--baseline", tmp_path / "base.json", *args)

    return gate


def findings(found, baseline):
    return compare.compare([found], baseline, "base.json")


def with_row(**changes):
    doc = copy.deepcopy(result_docs.uniform_doc(attn_out_nmse=0.1, logit_rmse=0.2, invalid_pages=2))
    doc["rows"][1].update(changes)
    return doc


def test_every_measured_column_has_a_direction():
    names = {"dump", "layer", "plane", "head", "tier", "codec", "backend"}
    assert set(DIRECTIONS) == set(results.ROW_COLUMNS) - names
    assert set(DIRECTIONS) == HIGHER_IS_BETTER | LOWER_IS_BETTER | FIXED


@pytest.mark.parametrize("metric", sorted(DIRECTIONS))
@pytest.mark.parametrize("factor", [0.5, 2])
def test_each_metric_alone(metric, factor):
    base = with_row()
    found = with_row(**{metric: type(base["rows"][1][metric])(base["rows"][1][metric] * factor)})
    result = findings(found, base)
    worse = metric in FIXED or (metric in LOWER_IS_BETTER) == (factor > 1)
    (finding,) = result.worse if worse else result.better
    assert finding.metric == metric and finding.row == "d layer 0 plane v head 0 int8 e2m1-g64"
    assert result.ok is not worse


@pytest.mark.parametrize("metric", sorted(LOWER_IS_BETTER - {"cold_bytes", "invalid_pages"}))
def test_floats_may_scatter_within_a_millionth(metric):
    value = with_row()["rows"][1][metric]
    assert findings(with_row(**{metric: value * (1 + 9e-7)}), with_row()).lines() == [
        "baseline base.json: 4 rows compared, none differs"
    ]
    assert not findings(with_row(**{metric: value * (1 + 1.1e-6)}), with_row()).ok


@pytest.mark.parametrize("metric", ["cold_bytes", "hot_bytes", "elements"])
def test_bytes_and_counts_are_exact(metric):
    large = 10**9
    assert not findings(with_row(**{metric: large + 1}), with_row(**{metric: large})).ok


def test_a_value_that_is_gone_fails_and_a_new_one_does_not():
    assert not findings(with_row(logit_rmse=None), with_row()).ok
    assert findings(with_row(), with_row(logit_rmse=None)).ok


def test_an_exact_codec_has_no_noise_at_all():
    exact = {"nmse_hot": 0.0, "snr_db": None}
    assert findings(with_row(**exact), with_row()).ok
    worse = {finding.metric for finding in findings(with_row(), with_row(**exact)).worse}
    assert worse == {"nmse_hot", "snr_db"}


def test_equal_files_pass_and_say_so(gate):
    doc = result_docs.seed_doc()
    done = gate(doc, doc)
    assert done.code == 0 and "6 rows compared, none differs" in done.err


def test_a_worse_metric_exits_1_and_names_metric_row_and_values(gate):
    done = gate(with_row(nmse_hot=0.05), with_row())
    assert done.code == 1
    summary, failure = done.err.splitlines()
    assert summary.startswith("worse: nmse_hot of e2m1-g64 int8 plane v: d layer 0 plane v head 0 int8 e2m1-g64")
    assert "baseline 0.0125, found 0.05 (+300%)" in summary
    assert failure.startswith("coldkv: 1 values worse than ") and "baseline 0.0125, found 0.05" in failure
    assert "Error (NMSE" in done.out, "the report is still there"


def test_an_improvement_exits_0_and_tells_how_to_renew_the_baseline(gate):
    done = gate(with_row(nmse_hot=0.001), with_row())
    assert done.code == 0
    assert "better: nmse_hot" in done.err and "to renew it, copy the result file over" in done.err


def test_a_lost_row_exits_1(gate):
    layers = [layer(0, "k"), layer(0, "v")]
    base = results.document(run(layers), [row(0, "k"), row(0, "v")])
    found = results.document(run(layers), [row(0, "k")])
    done = gate(found, base)
    assert done.code == 1 and "first row of d layer 0 plane v head 0 int8 e2m1-g64" in done.err
    done = gate(base, found)
    assert done.code == 0 and "new: 1 rows are not in the baseline" in done.err


def test_the_same_dump_under_another_name_matches():
    doc = result_docs.uniform_doc()
    renamed = json.loads(json.dumps(doc).replace('"dump": "d"', '"dump": "e"').replace('{"d": ', '{"e": '))
    assert findings(renamed, doc).compared == 4 and findings(renamed, doc).ok


@pytest.mark.parametrize("name", ["d", "e"])
def test_another_dump_is_refused_not_passed(gate, name):
    doc = result_docs.uniform_doc()
    other = json.loads(json.dumps(doc).replace("ab" * 32, "cd" * 32).replace('"d"', f'"{name}"'))
    done = gate(other, doc)
    assert done.code == 2 and done.out == ""
    assert ("expected sha256 abababababab" if name == "d" else "no dump in common") in done.err


def test_another_table_is_refused(gate):
    layers = [layer(0, "k")]
    base = results.document(run(layers, name="a", tier_layers={"int8": 1}), [row(0, "k")])
    found = results.document(run(layers, name="b", tier_layers={"int8": 1}), [row(0, "k")])
    done = gate(found, base)
    assert done.code == 2 and "table: expected 'a' (uniform: int8 x1)" in done.err and "found 'b'" in done.err


def test_the_same_rows_twice_are_refused(tmp_path, capsys):
    results.write_results(tmp_path / "a.json", result_docs.uniform_doc())
    path = tmp_path / "a.json"
    done = in_process(capsys, "report", path, path, "--baseline", path)
    assert done.code == 2 and "is in two of the result files" in done.err


def test_a_missing_baseline_is_an_error(tmp_path):
    results.write_results(tmp_path / "a.json", result_docs.uniform_doc())
    done = coldkv("report", tmp_path / "a.json", "--baseline", tmp_path / "none.json")
    assert done.code == 2 and done.out == "" and "none.json: No such file" in done.err


def test_json_carries_the_verdict(gate):
    done = gate(with_row(nmse_hot=0.05), with_row(), "--json")
    out = json.loads(done.out)
    assert done.code == 1 and out["ok"] is False
    (finding,) = out["baseline"]["worse"]
    assert (finding["metric"], finding["baseline"], finding["found"]) == ("nmse_hot", 0.0125, 0.05)


def test_a_changed_constant_in_a_codec_is_caught_on_the_sample(tmp_path, capsys, monkeypatch):
    def measure(name):
        options = "--sample --layers 5 --tier int8 --codec e2m1-g64 --backend torch".split()
        assert in_process(capsys, "measure", *options, "--results", tmp_path / name).code == 0

    measure("base")
    measure("same")
    done = in_process(capsys, "report", tmp_path / "same", "--baseline", tmp_path / "base")
    assert done.code == 0 and "2 rows compared, none differs" in done.err
    thresholds = [2.25 if threshold == 2.5 else threshold for threshold in minifloat.E2M1_THRESHOLDS]
    monkeypatch.setattr(minifloat, "E2M1_THRESHOLDS", tuple(thresholds))
    measure("changed")
    done = in_process(capsys, "report", tmp_path / "changed", "--baseline", tmp_path / "base")
    assert done.code == 1 and "worse: nmse_hot of e2m1-g64 int8 plane k: sample layer 5 plane k head 0" in done.err


@pytest.fixture
def fail_on(tmp_path, capsys):
    results.write_results(tmp_path / "r.json", result_docs.seed_doc())

    def fail_on(*expressions):
        args = [arg for expression in expressions for arg in ("--fail-on", expression)]
        return in_process(capsys, "report", tmp_path / "r.json", *args)

    return fail_on


@pytest.mark.parametrize(
    ("expression", "code"),
    [
        ("codec == 'e2m1-g64' and nmse_hot > 0.02", 0),
        ("codec == 'e2m1-g64' and nmse_hot > 0.015", 1),
        ("rows:plane == 'v' and nmse_hot > 0.012", 1),
        ("logit_rmse > 1", 0),
        ("summary:aggregate_ratio < 1.31", 0),
        ("summary:aggregate_ratio < 1.32", 1),
        ("invalid_pages > 0 or not pages > 0", 0),
    ],
)
def test_fail_on(fail_on, expression, code):
    done = fail_on(expression)
    assert done.code == code
    assert (expression in done.err) == (code == 1)


def test_fail_on_names_the_row(fail_on):
    done = fail_on("nmse_hot > 0.015")
    assert "3 rows match, first file " in done.err
    assert "dump d, layer 0, plane k, head 0, tier int8, codec e2m1-g64, nmse_hot 0.016" in done.err


def test_every_failing_expression_is_named(fail_on):
    done = fail_on("nmse_hot > 0.015", "summary:aggregate_ratio < 9", "layer > 99")
    assert done.code == 1
    assert "nmse_hot > 0.015" in done.err and "aggregate_ratio < 9" in done.err and "layer > 99" not in done.err


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("nmse_hott > 1", "nmse_hott"),
        ("summary:nmse_centred > 1", "columns: codec, hot_bytes"),
        ("nmse_hot >", "not a condition"),
        ("nmse_hot * 2", "expected a condition"),
        ("x = 3", "expected a condition"),
        ("@pd.compat", "'@' is not allowed"),
        ("codec > 3", "not a condition"),
        ("", "found an empty text"),
    ],
)
def test_a_bad_expression_is_an_error_before_anything_is_printed(fail_on, expression, words):
    done = fail_on(expression)
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1
    assert words in done.err


def test_a_gate_that_cannot_fail_is_warned_about(fail_on):
    done = fail_on("codec == 'e2m1-g65' and nmse_hot > 0")
    assert done.code == 0 and "no row has codec 'e2m1-g65'" in done.err


BENCH = {
    "schema": "coldkv.bench/1",
    "run": {},
    "rows": [{"op": "pack", "codec": "e2m1-g64", "threads": 1, "gb_s": 2.5, "memcpy_ratio": 0.5}],
}


@pytest.mark.parametrize(("ratio", "code"), [(0.5, 0), (0.36, 0), (0.3, 1), (1.0, 0), (None, 1)])
def test_bench_files_are_compared_by_a_factor(tmp_path, capsys, ratio, code):
    found = copy.deepcopy(BENCH)
    found["rows"][0] |= {"memcpy_ratio": ratio, "gb_s": 0.001}
    for name, doc in (("base", BENCH), ("found", found)):
        (tmp_path / name).write_text(json.dumps(doc))
    done = in_process(capsys, "report", tmp_path / "found", "--baseline", tmp_path / "base")
    assert done.code == code and "pack" in done.out
    assert ("memcpy_ratio of pack e2m1-g64 threads=1: baseline 0.5" in done.err) == (code == 1)


def test_a_lost_timing_fails_and_kinds_do_not_mix(tmp_path, capsys):
    other = copy.deepcopy(BENCH)
    other["rows"][0]["op"] = "restore"
    for name, doc in (("base", BENCH), ("other", other)):
        (tmp_path / name).write_text(json.dumps(doc))
    done = in_process(capsys, "report", tmp_path / "other", "--baseline", tmp_path / "base")
    assert done.code == 1 and "row of pack e2m1-g64 threads=1" in done.err
    results.write_results(tmp_path / "r.json", result_docs.uniform_doc())
    done = in_process(capsys, "report", tmp_path / "r.json", "--baseline", tmp_path / "base")
    assert done.code == 2 and "is a results file, the baseline" in done.err


def test_a_gate_on_a_column_without_values_is_an_error_not_a_pass(capsys):

    done = in_process(capsys, "report", ROOT / "results" / "baseline.json", "--fail-on", "attn_out_nmse > 0.1")
    assert done.code == 2 and "column attn_out_nmse has no value in any row" in done.err


def test_the_documented_gates_pass_on_the_committed_baseline(capsys):
    """Every --fail-on of README and docs/results.md holds for the project's own measurement."""
    import re

    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "results.md").read_text()
    found = re.findall(r'--fail-on "([^"]+)"', text)
    assert len(found) >= 3
    for expression in found:
        done = in_process(capsys, "report", ROOT / "results" / "baseline.json", "--fail-on", expression)
        assert done.code == 0, (expression, done.err)


def test_timings_with_other_settings_are_not_a_regression_but_no_comparison(tmp_path, capsys):
    committed = ROOT / "results" / "bench-cpu.json"
    other = tmp_path / "b.json"
    other.write_text(committed.read_text().replace('"head_pages": 4096', '"head_pages": 256'))
    done = in_process(capsys, "report", other, "--baseline", committed)
    assert done.code == 2 and "head_pages: expected 4096" in done.err and "found 256" in done.err


@pytest.mark.parametrize(
    "expression",
    [
        "nmse_hot.__class__.__init__.__globals__['sys'].modules['os'].system('echo x > {path}')",
        "nmse_hot.to_csv('{path}').isna()",
        "nmse_hot.to_pickle('{path}')",
        "nmse_hot > 9**9**9**9",
        "nmse_hot > [0][0]",
        "(lambda: nmse_hot)()",
        "'a' * 999999999999 == codec",
        "@__import__('os').system('echo x > {path}')",
    ],
)
def test_a_gate_is_a_condition_and_runs_nothing(tmp_path, capsys, expression):
    path = tmp_path / "written"
    baseline = ROOT / "results" / "baseline.json"
    done = in_process(capsys, "report", baseline, "--fail-on", expression.format(path=path))
    assert done.code == 2 and done.out == "" and len(done.err.splitlines()) == 1
    assert not path.exists()


@pytest.mark.parametrize("args", [("--baseline", ""), ("--baseline=",), ("--fail-on", ""), ("--format", "")])
def test_an_empty_value_is_an_error_and_never_switches_a_gate_off(capsys, args):
    done = in_process(capsys, "report", ROOT / "results" / "baseline.json", *args)
    assert done.code == 2 and args[0].rstrip("=") in done.err and "found an empty text" in done.err
