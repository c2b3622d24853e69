"""What `coldkv report` shows, in every format, and the sentences it adds."""

import csv
import html.parser
import io
import json

import pytest
import result_docs
from clirun import in_process
from result_docs import HOT, layer, row, run

from coldkv import results
from coldkv.report.notes import notes
from coldkv.report.sections import number


@pytest.fixture
def coldkv(capsys):
    """The command line in this process; its contract as a process is tested elsewhere."""
    return lambda *args: in_process(capsys, *args)


@pytest.fixture
def write(tmp_path):
    def write(doc, name="r.json"):
        path = tmp_path / name
        results.write_results(path, doc)
        return path

    return write


def test_table_shows_aggregate_claims_and_notes(coldkv, write):
    done = coldkv("report", write(result_docs.seed_doc()))
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    (sizes,) = [line for line in lines if line.split()[:1] == ["e2m1-g64"] and "nvfp4" in line]
    assert sizes.split() == ["e2m1-g64", "60", "3,870,720", "2,951,040", "1.312x", "1.830x", "4.508", "nvfp4"]
    (claim,) = [line for line in lines if "~1.66x" in line]
    assert "1.312x" in claim and claim.rstrip().endswith("no")
    (claim,) = [line for line in lines if "1.85-1.99x" in line]
    assert "1.830x" in claim and "16,896 / 9,232" in claim
    assert "note: table seed-10-6 is for 16 layers, measured were 3" in done.out
    assert "note: 7 tokens of a partial last page were not measured in 3 layers" in done.out


def test_rows_on_request(coldkv, write):
    path = write(result_docs.uniform_doc())
    assert "max_abs_err" not in coldkv("report", path).out
    assert "max_abs_err" in coldkv("report", path, "--rows").out


def test_csv_holds_the_rows_with_the_schemas_columns(coldkv, write):
    doc = result_docs.seed_doc()
    done = coldkv("report", write(doc), "--format", "csv")
    table = list(csv.DictReader(io.StringIO(done.out)))
    assert list(table[0]) == [*results.ROW_COLUMNS, "file"]
    assert [float(line["nmse_hot"]) for line in table] == [row["nmse_hot"] for row in doc["rows"]]
    assert table[1]["logit_rmse"] == "", "a missing value is empty, not a number"


def test_csv_of_the_summary(coldkv, write):
    done = coldkv("report", write(result_docs.seed_doc()), "--format", "csv", "--summary")
    (line,) = csv.DictReader(io.StringIO(done.out))
    assert float(line["aggregate_ratio"]) == pytest.approx(1.3116, abs=1e-4) and line["left_hot"] == "nvfp4"


@pytest.mark.parametrize("args", [["--json"], ["--format", "json"]])
def test_json_is_one_document(coldkv, write, args):
    doc = result_docs.seed_doc()
    done = coldkv("report", write(doc), *args)
    out = json.loads(done.out)
    assert done.err == "" and out["ok"] is True and out["baseline"] is None and out["fail_on"] == []
    assert out["files"][0]["rows"] == doc["rows"] and out["files"][0]["summary"] == doc["summary"]
    assert {note["level"] for note in out["files"][0]["notes"]} == {"note"}


def test_markdown_tables_have_one_width(coldkv, write):
    done = coldkv("report", write(result_docs.seed_doc()), "--format", "md", "--rows")
    tables = [block.splitlines() for block in done.out.split("\n\n") if block.startswith("| ")]
    assert len(tables) == 4  # rows, bytes, errors, claims
    for table in tables:
        assert len({line.count("|") for line in table}) == 1


def test_html_is_balanced_and_escaped(coldkv, write):
    name = "<b>&"
    doc = results.document(run([layer(0, "k", dump=name)]), [row(0, "k", dump=name)])
    page = coldkv("report", write(doc), "--format", "html").out
    assert "<b>" not in page and "&lt;b&gt;&amp;" in page
    open_tags = []

    class Balance(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag != "meta":
                open_tags.append(tag)

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag

    Balance().feed(page)
    assert open_tags == [] and page.count("<table>") == 3


def test_a_stored_summary_is_not_trusted(coldkv, write):
    doc = result_docs.uniform_doc()
    doc["summary"] = {"codecs": [], "claims": []}
    assert "1.830x" in coldkv("report", write(doc)).out


def test_two_files_side_by_side(coldkv, write):
    one, two = write(result_docs.uniform_doc(), "one.json"), write(result_docs.seed_doc(), "two.json")
    done = coldkv("report", one, two, "--format", "csv")
    table = list(csv.DictReader(io.StringIO(done.out)))
    assert {line["file"] for line in table} == {str(one), str(two)} and len(table) == 4 + 6


def texts(doc, level):
    return [note.text for note in notes(doc) if note.level == level]


def test_biased_k_is_explained_beyond_a_factor_of_four():
    assert texts(result_docs.uniform_doc(nmse_hot=0.01, nmse_centered=0.04), "warning") == []
    k, v = texts(result_docs.uniform_doc(nmse_hot=0.01, nmse_centered=0.3), "warning")
    assert k.startswith("biased K in 2 of 2 heads (most in layer 0 head 0: nmse_centered is 30x nmse_hot)")
    assert "logit_rmse" in k and v.startswith("biased V")


def test_a_slot_larger_than_what_it_replaces_is_a_warning():
    doc = results.document(run([layer(0, "k", "nvfp4")]), [row(0, "k", "nvfp4")])
    (text,) = texts(doc, "warning")
    assert "9,232 bytes per head-page" in text and f"{HOT['nvfp4']:,} hot bytes" in text


def test_pages_that_could_not_be_packed_are_named():
    doc = results.document(run([layer(0, "k")]), [row(0, "k", invalid_pages=3)])
    assert texts(doc, "warning") == [
        "e2m1-g64 on int8: 3 of 10 head-pages could not be packed and stay hot, first in d layer 0 plane k head 0 int8 "
        "e2m1-g64"
    ]


def test_a_plain_run_has_no_notes():
    assert notes(result_docs.uniform_doc()) == []


def test_a_range_of_partial_tokens():
    layers = [layer(0, "k", partial_tokens=3), layer(1, "k", partial_tokens=9), layer(2, "k")]
    doc = results.document(run(layers), [row(i, "k") for i in range(3)])
    assert texts(doc, "note") == [
        "3 to 9 tokens of a partial last page were not measured in 2 layers: only whole pages go cold"
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.0125, "0.01250"),
        (1234.5, "1234."),
        (9.9e-5, "9.900e-05"),
        (2e9, "2.000e+09"),
        (-0.5, "-0.5000"),
    ],
)
def test_numbers(value, text):
    assert number(value).rstrip(".") == text.rstrip(".")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "the file is empty"),
        ('{"schema": "other/1"}', "expected coldkv.results/1, coldkv.eval/1 or coldkv.bench/1, found 'other/1'"),
        ('{"schema": "coldkv.bench/1", "rows": []}', "expected a list with at least one timing"),
        ('{"schema": "coldkv.bench/1", "rows": [{"op": "pack"}]}', "row 0: expected an object with the texts"),
    ],
)
def test_other_files_are_refused(coldkv, tmp_path, content, words):
    path = tmp_path / "r.json"
    path.write_text(content)
    done = coldkv("report", path)
    assert done.code == 2 and done.out == "" and words in done.err and done.err.count("\n") == 1
