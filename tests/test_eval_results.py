"""Files of `coldkv eval`: what is refused, what the gate fails on, sums over texts, notes, and the picture."""

import copy
import json
import sys
import xml.etree.ElementTree as tree

import pytest
import result_docs
from clirun import in_process

from coldkv.errors import InputError
from coldkv.evaluation import results
from coldkv.report import plot, quality
from coldkv.report.load import load
from coldkv.results import write_results as write_measured

SHA = {"m": "ab" * 32, "a": "cd" * 32, "b": "ef" * 32}
HOT, SLOT, PAGES = 16896, 9232, 100
HIGHER = {"ratio", "top1", "needle"}
FIXED = {"pages", "elements", "hot_bytes", "needles", "ppl_base", "needle_base"}


def row(text="a", codec="e2m1-g64", *, page=SLOT, **changes):
    """One row of 100 head-pages of 64 x 256 int8 values; keyword arguments replace columns."""
    hot, cold, elements = HOT * PAGES, page * PAGES, 64 * 256 * PAGES
    base = {
        "model": "m", "text": text, "codec": codec, "policy": "window", "keep_tokens": 128, "sink_tokens": 64,
        "tokens": 512, "bits_per_element": 8 * cold / elements, "ratio": hot / cold, "ppl": 12.5, "ppl_base": 12.0,
        "kl_mean": 0.04, "kl_p99": 0.4, "top1": 0.9, "needle": 0.75, "needle_base": 1.0, "needles": 8, "tier": "int8",
        "layers": "0-4", "left_hot": "", "page_tokens": 64, "prefix": 2048, "cold_tokens": 640, "pages": PAGES,
        "elements": elements, "hot_bytes": hot, "cold_bytes": cold, "invalid_pages": 0, "backend": "cpu", "calib": None,
    }  # fmt: skip
    assert set(changes) <= set(base)
    return base | changes


def header(texts=("a", "b"), **changes):
    return {
        "version": "0.1", "git": None, "backend": "cpu", "device": "cpu", "torch": "2", "transformers": "5",
        "compute_dtype": "fp32", "time_utc": "2026-01-01T00:00:00Z", "argv": ["eval"],
        "model_sha256": {"m": SHA["m"]}, "text_sha256": {text: SHA[text] for text in texts}, "needle_seed": 0,
    } | changes  # fmt: skip


def doc(*rows, texts=("a", "b"), **changes):
    rows = rows or (row(codec="hot", page=HOT, kl_mean=1e-4), row(), row("b", kl_mean=0.02))
    return results.document(header(texts, **changes), list(rows))


def test_rows_survive_a_file(tmp_path):
    written = doc()
    results.write_results(tmp_path / "r.json", written)
    found = load(tmp_path / "r.json")
    assert found.kind == "eval" and found.doc == written
    assert len([line for line in (tmp_path / "r.json").read_text().splitlines() if '"kl_mean": ' in line]) == 5


@pytest.mark.parametrize(
    "change,words",
    [
        ({"ratio": 2.0}, "ratio: expected 1689600/923200 = "),
        ({"bits_per_element": 4.0}, "bits_per_element: expected 7385600/1638400 = "),
        ({"kl_mean": -1e-9}, "kl_mean: expected 0 or more, found -1e-09"),
        ({"kl_mean": None}, "kl_mean: expected a finite number, found null"),
        ({"top1": 1.5}, "top1: expected a fraction of at most 1, found 1.5"),
        ({"ppl": 0.0}, "ppl: expected more than 0, found 0.0"),
        ({"tokens": 0}, "tokens: expected at least 1, found 0"),
        ({"invalid_pages": 101}, "invalid_pages 101 exceeds pages 100"),
        ({"needle": None}, "needles: expected needle and needle_base where needles were asked for"),
        ({"needles": 0}, "needles: expected needle and needle_base where needles were asked for"),
        ({"text": "c"}, "text: 'c' has no digest in run.text_sha256"),
        ({"model": "x"}, "model: 'x' has no digest in run.model_sha256"),
        ({"codec": 3}, "codec: expected a string, found 3"),
        ({"pages": 1.5}, "pages: expected an integer, found 1.5"),
    ],
)
def test_rows_that_cannot_be_are_refused(change, words):
    with pytest.raises(InputError) as error:
        doc(row(**change))
    assert f"results: row 0: {words}" in error.value.one_line()


def test_documents_that_cannot_be_are_refused(tmp_path, capsys):
    with pytest.raises(InputError, match="row 1: m a e2m1-g64 appears twice"):
        doc(row(), row())
    with pytest.raises(InputError, match="run.text_sha256: a: expected 64 hex digits, found 'x'"):
        doc(row(), text_sha256={"a": "x"})
    with pytest.raises(InputError, match="no rows"):
        results.document(header(), [])
    good = doc()
    for change, words in (
        ({"extra": 1}, "unknown key 'extra'"),
        ({"rows": [{"model": "m"}]}, "row 0: 'text' is missing"),
        ({"run": {}}, "run: 'version' is missing"),
    ):
        (tmp_path / "r.json").write_text(json.dumps(good | change))
        done = in_process(capsys, "report", tmp_path / "r.json")
        assert done.code == 2 and words in done.err and done.err.count("\n") == 1


def test_the_summary_of_several_texts():
    rows = (row(ppl=8.0, ppl_base=2.0, tokens=100, top1=1.0), row("b", ppl=2.0, kl_mean=0.01, kl_p99=0.9, tokens=300))
    (line,) = results.summarize(list(rows))["codecs"]
    assert line["ppl"] == pytest.approx((8.0 * 2.0**3) ** 0.25)
    assert line["ppl_base"] == pytest.approx((2.0 * 12.0**3) ** 0.25)
    assert line["kl_mean"] == pytest.approx((0.04 + 3 * 0.01) / 4) and line["kl_p99"] == 0.9
    assert line["top1"] == pytest.approx((1.0 + 3 * 0.9) / 4)
    assert (line["texts"], line["tokens"], line["pages"], line["needles"]) == (2, 400, 200, 16)
    assert line["ratio"] == HOT / SLOT and line["bits_per_element"] == 8 * SLOT / (64 * 256)
    assert line["needle"] == 0.75
    none = {"needle": None, "needle_base": None, "needles": 0}
    (line,) = results.summarize([row(**none), row("b", needle=0.5)])["codecs"]
    assert line["needle"] == 0.5, "a text without needles does not count"


def test_a_stored_summary_is_not_trusted(tmp_path):
    written = doc()
    results.write_results(tmp_path / "r.json", written | {"summary": {}})
    assert load(tmp_path / "r.json").doc["summary"] == written["summary"]


def findings(found, base):
    return quality.compare([found], base, "base.json")


def test_every_figure_has_a_direction():
    words = {column for column, (kind, _) in results.ROW_TYPES.items() if kind is str}
    settings = set(results.SETTINGS) | {"cold_tokens"}
    assert set(quality.DIRECTIONS) == set(results.ROW_COLUMNS) - words - settings


@pytest.mark.parametrize("metric", sorted(quality.DIRECTIONS))
@pytest.mark.parametrize("factor", [0.5, 2])
def test_each_metric_alone(metric, factor):
    start = {"top1": 0.4, "needle": 0.25, "needle_base": 0.5, "invalid_pages": 10}
    base = doc(row(**start))
    found = copy.deepcopy(base)
    value = base["rows"][0][metric]
    found["rows"][0][metric] = type(value)(value * factor)
    result = findings(found, base)
    worse = metric in FIXED or (metric in HIGHER) == (factor < 1)
    (finding,) = result.worse if worse else result.better
    assert finding.metric == metric and finding.row == "m a e2m1-g64" and result.ok is not worse


def test_another_machine_is_no_regression_but_another_byte_is():
    base = doc(row())
    assert findings(doc(row(kl_mean=0.0405, kl_p99=0.41, ppl=12.51, ppl_base=12.01, top1=0.899)), base).ok
    assert not findings(doc(row(kl_mean=0.05)), base).ok
    tiny = doc(row(kl_mean=1e-7))
    assert findings(doc(row(kl_mean=5e-7)), tiny).ok, "far below what a codec costs"
    more = row(cold_bytes=SLOT * PAGES + 16, bits_per_element=8 * (SLOT * PAGES + 16) / (64 * 256 * PAGES))
    more["ratio"] = HOT * PAGES / more["cold_bytes"]
    assert {finding.metric for finding in findings(doc(more), base).worse} >= {"cold_bytes", "ratio"}


def test_lost_and_new_rows():
    base = doc(row(), row("b"))
    lost = findings(doc(row()), base)
    assert [finding.row for finding in lost.worse] == ["m b e2m1-g64"] and not lost.ok
    new = findings(doc(row(), row("b"), row("b", "x")), base)
    assert new.ok and new.new_rows == ["m b x"]
    none = {"needle": None, "needle_base": None, "needles": 0}
    assert "needle" in {finding.metric for finding in findings(doc(row(**none), row("b")), base).worse}
    with pytest.raises(InputError, match="is in two of the result files"):
        quality.compare([base, base], base, "base.json")


@pytest.mark.parametrize(
    "found,words",
    [
        (doc(row(), model_sha256={"m": "00" * 32}), "model m: expected sha256 abababababab... as in base.json"),
        (doc(row(), model_sha256={"m": "00" * 32, "n": SHA["m"]}), "model m: expected sha256 abababababab"),
        (doc(row("c"), text_sha256={"c": "00" * 32}), "no text in common with base.json: expected a, found c"),
        (doc(row(), compute_dtype="bf16"), "compute_dtype: expected fp32 as in base.json, found bf16"),
        (doc(row(), needle_seed=1), "needle_seed: expected 0 as in base.json, found 1"),
        (doc(row(keep_tokens=64)), "keep_tokens: expected 128 as in base.json, found 64"),
        (doc(row(prefix=1024)), "prefix: expected 2048 as in base.json, found 1024"),
        (doc(row(layers="3")), "layers: expected 0-4 as in base.json, found 3"),
    ],
)
def test_another_question_is_an_error_not_a_pass(found, words):
    with pytest.raises(InputError) as error:
        findings(found, doc(row(), texts=("a",)))
    assert words in error.value.one_line()


@pytest.fixture
def write(tmp_path):
    def write(document, name="r.json"):
        (results.write_results if document["schema"] == results.SCHEMA else write_measured)(tmp_path / name, document)
        return tmp_path / name

    return write


def test_the_gate_on_the_command_line(write, capsys):
    base, worse = write(doc(), "base.json"), write(doc(row(), row("b", kl_mean=0.5)), "worse.json")
    done = in_process(capsys, "report", worse, "--baseline", base)
    assert done.code == 1 and "worse: kl_mean of e2m1-g64: m b e2m1-g64: baseline 0.02, found 0.5" in done.err
    assert "row of hot" in done.err
    done = in_process(capsys, "report", base, "--fail-on", "kl_mean > 0.03")
    assert done.code == 1 and "model m, text a, tier int8, codec e2m1-g64, kl_mean 0.04" in done.err
    assert in_process(capsys, "report", base, "--fail-on", "kl_mean > 0.04").code == 0
    done = in_process(capsys, "report", base, "--fail-on", "summary:codec == 'e2m1-g64' and ratio < 1.9")
    assert done.code == 1 and "codec e2m1-g64, ratio 1.83" in done.err
    measured = write(result_docs.uniform_doc(), "measured.json")
    done = in_process(capsys, "report", measured, "--baseline", base)
    assert done.code == 2 and "is a results file, the baseline" in done.err
    mixed = in_process(capsys, "report", measured, base, "--format", "csv").out.splitlines()
    assert len(mixed) == 1 + 4 + 3 and {"kl_mean", "nmse_hot"} <= set(mixed[0].split(","))


@pytest.mark.parametrize("fmt", ["table", "md", "html"])
def test_what_is_shown(write, capsys, fmt):
    done = in_process(capsys, "report", write(doc()), "--format", fmt)
    assert done.code == 0 and done.err == ""
    for text in ("2048 tokens, of them cold 640; window 512", "keep 128, sink 64", "1.830x", "75% / 100%", "90.0%"):
        assert text in done.out
    assert ("By text" in done.out) is False, "several texts: only the lines over all of them"
    assert "By text" in in_process(capsys, "report", write(doc()), "--format", fmt, "--rows").out


def test_notes_say_what_figures_do_not():
    found = quality.notes(doc(row(kl_mean=2.5, ppl=600.0, left_hot="0-2", invalid_pages=3)))
    assert [(note.level, note.text) for note in found] == [
        ("note", "e2m1-g64 on a leaves layers 0-2 hot: they count with their hot bytes on both sides"),
        ("warning", "e2m1-g64 on a: 3 of 100 head-pages could not be packed and stay hot"),
        ("warning", "e2m1-g64 on a: mean KL 2.5 nats, perplexity 600 instead of 12: the model is destroyed"),
    ]
    (note,) = quality.notes(doc(row(page=HOT + 16)))
    assert note.text == "e2m1-g64 on a takes 1,691,200 bytes and replaces only 1,689,600 hot bytes"
    (note,) = quality.notes(doc(row(needle=0.0, needle_base=0.25), row(codec="x", needle=0.0, needle_base=0.25)))
    assert note.text.startswith("without cold pages the model finds 25% of the needles in a")
    assert quality.notes(doc(row())) == []


def words_of(path):
    texts = [node.text for node in tree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    return set(texts)


def curve_doc():
    pages = {"ecq:rate=1.5": 3000, "ecq:rate=2": 4000, "ecq:rate=3": 6000}
    rows = [row(codec=codec, page=page, kl_mean=100 / page) for codec, page in pages.items()]
    return doc(*rows, row(), row(codec="hot", page=HOT, kl_mean=0.0))


def test_the_picture_has_every_codec_of_every_file(write, capsys, tmp_path):
    paths = [write(curve_doc(), "e.json"), write(result_docs.seed_doc(codecs=("e2m1-g64", "e2m1-g16")), "m.json")]
    done = in_process(capsys, "report", *paths, "--plot", tmp_path / "p.svg")
    assert done.code == 0 and done.err == "" and "Bytes" in done.out
    found = words_of(tmp_path / "p.svg")
    assert {"ecq:rate=1.5", "ecq:rate=2", "ecq:rate=3", "e2m1-g64", "e2m1-g16", "hot (exact: 0)"} <= found
    assert "mean KL to the run without cold pages (nats)" in found and "NMSE to the hot tier" in found
    assert in_process(capsys, "report", paths[0], "--plot", tmp_path / "p.png").code == 0
    assert (tmp_path / "p.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    again = tmp_path / "again.svg"
    assert in_process(capsys, "report", *paths, "--plot", again).code == 0
    assert again.read_bytes() == (tmp_path / "p.svg").read_bytes(), "the same figures give the same file"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.svg", "e.json", "m.json", "p.png", "p.svg"]


def test_options_of_one_codec_are_one_curve_and_texts_are_apart(write, tmp_path):
    from matplotlib.figure import Figure

    files = [load(write(curve_doc()))]
    points = plot.kl_points(files)
    axes = Figure().add_subplot()
    plot._panel(axes, points, "KL", list(dict.fromkeys(point.curve for point in points)))
    curves = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert list(curves) == ["ecq", "e2m1-g64", "hot"] and len(curves["ecq"]) == 3
    assert curves["ecq"] == sorted(curves["ecq"]) and curves["ecq"][0] == [8 * 3000 / 16384, 100 / 3000]
    assert axes.get_yscale() == "log" and 0 < curves["hot"][0][1] < 100 / 6000

    two = [load(write(doc(row(), row("b")), "two.json"))]
    assert {point.place for point in plot.kl_points(two)} == {"a", "b"}
    again = [*two, load(write(doc(row()), "three.json"))]
    assert {point.place for point in plot.kl_points(again)} == {"b", *(f"{file.path}: a" for file in again)}


def test_pictures_that_cannot_be(write, capsys, tmp_path, monkeypatch):
    path, target = write(doc()), tmp_path / "p.svg"
    done = in_process(capsys, "report", path, "--plot", tmp_path / "p.pdf")
    assert done.code == 2 and "expected a name ending in .png or .svg" in done.err and done.out == ""
    done = in_process(capsys, "report", path, "--plot", path)
    assert done.code == 2 and "is the input" in done.err
    bench = tmp_path / "b.json"
    bench.write_text('{"schema": "coldkv.bench/1", "rows": [{"op": "pack", "codec": "x"}]}')
    done = in_process(capsys, "report", bench, "--plot", target)
    assert done.code == 2 and "--plot: expected files of eval or measure" in done.err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = in_process(capsys, "report", path, "--plot", target)
    assert done.code == 2 and done.err.endswith("; pip install 'coldkv[plot]'\n") and done.err.count("\n") == 1
    assert not target.exists() and in_process(capsys, "report", path).code == 0
