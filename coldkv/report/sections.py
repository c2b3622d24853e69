"""What a report shows, as plain tables of text: the renderers only lay it out."""

from dataclasses import dataclass, field

from coldkv.report import bench, quality
from coldkv.report.load import ResultFile
from coldkv.report.notes import Note, notes


@dataclass
class Section:
    """A table of texts; `left` names the columns that hold words and align left."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    left: set[str] = field(default_factory=set)


@dataclass
class Page:
    """All there is to show of one file."""

    title: str
    facts: list[tuple[str, str]]
    sections: list[Section]
    notes: list[Note]


def page(file: ResultFile, *, with_rows: bool) -> Page:
    """The page of one file; `with_rows` adds one line per measured plane."""
    if file.kind == "bench":
        return Page(file.path, _bench_facts(file.doc.get("run")), [_bench(file.rows)], [])
    if file.kind == "eval":
        return Page(file.path, _eval_facts(file.doc), _eval_sections(file.doc, with_rows), notes_of(file))
    summary, run = file.doc["summary"], file.doc["run"]
    sections = [_rows(file.rows)] if with_rows else []
    sections += [_sizes(summary), _errors(summary)]
    if len({line["tier"] for line in summary["tiers"]}) > 1:
        sections.append(_tiers(summary))
    claims = _claims(summary)
    if claims.rows:
        sections.append(claims)
    return Page(file.path, _facts(run), sections, notes_of(file))


def notes_of(file: ResultFile) -> list[Note]:
    """The notes on a file of any kind."""
    return {"results": notes, "eval": quality.notes}.get(file.kind, lambda doc: [])(file.doc)


def number(value: float | None, digits: int = 4) -> str:
    """`digits` significant digits, a dash for a value that does not exist."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:#.{digits}g}" if 1e-4 <= abs(value) < 1e6 else f"{value:.{digits - 1}e}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}x"


def _facts(run: dict) -> list[tuple[str, str]]:
    table = run["table"]
    counts = ", ".join(f"{tier} x{count}" for tier, count in table["tier_layers"].items())
    dumps = ", ".join(f"{name} (sha256 {digest[:12]})" for name, digest in run["dump_sha256"].items())
    layers = {(entry["dump"], entry["layer"]) for entry in run["layers"]}
    git = f" ({run['git']})" if run["git"] else ""
    return [
        ("dump", dumps),
        ("table", f"{table['name']} ({counts})" if counts else table["name"]),
        ("layers", str(len(layers))),
        ("backend", f"{run['backend']} on {run['device']}"),
        ("coldkv", f"{run['version']}{git}, {run['time_utc']}"),
    ]


def _bench_facts(run) -> list[tuple[str, str]]:
    wanted = ("device", "torch", "version", "time_utc")
    return [(name, str(run[name])) for name in wanted if run.get(name)] if isinstance(run, dict) else []


def _sizes(summary: dict) -> Section:
    columns = ["codec", "head-pages", "hot bytes", "cold bytes", "aggregate", "per page", "bits/element", "left hot"]
    rows = [
        [
            line["codec"],
            f"{line['pages']:,}",
            f"{line['hot_bytes']:,}",
            f"{line['cold_bytes']:,}",
            times(line["aggregate_ratio"]),
            times(line["page_ratio"]),
            number(line["bits_per_element"]),
            ", ".join(line["left_hot"]) or "-",
        ]
        for line in summary["codecs"]
    ]
    return Section("Bytes", columns, rows, {"codec", "left hot"})


def _errors(summary: dict) -> Section:
    shown = {
        "K": "nmse_hot_k",
        "V": "nmse_hot_v",
        "K+V": "nmse_hot",
        "K+V to dump": "nmse_ref",
        "K centered": "nmse_centered_k",
        "V centered": "nmse_centered_v",
        "logit RMSE": "logit_rmse",
        "attention out": "attn_out_nmse",
    }
    rows = [[line["codec"], *(number(line[key]) for key in shown.values())] for line in summary["codecs"]]
    return Section("Error (NMSE to the hot tier; logit RMSE in nats)", ["codec", *shown], rows, {"codec"})


def _tiers(summary: dict) -> Section:
    shown = {
        "bits/element": "bits_per_element",
        "K": "nmse_hot_k",
        "V": "nmse_hot_v",
        "K centered": "nmse_centered_k",
        "V centered": "nmse_centered_v",
        "logit RMSE": "logit_rmse",
    }
    rows = [
        [line["codec"], line["tier"], times(line["page_ratio"]), *(number(line[key]) for key in shown.values())]
        for line in summary["tiers"]
    ]
    return Section("By tier", ["codec", "tier", "per page", *shown], rows, {"codec", "tier"})


def _claims(summary: dict) -> Section:
    columns = ["claim of the seed", "claimed", "its arithmetic", "codec", "measured", "holds"]
    rows = []
    for claim in summary["claims"]:
        if claim["measured"] is None:
            continue
        measured = times(claim["measured"]) if "x" in claim["claimed"] else number(claim["measured"])
        holds = {True: "yes", False: "no", None: "-"}[claim["holds"]]
        rows.append([claim["claim"], claim["claimed"], claim["arithmetic"] or "-", claim["codec"], measured, holds])
    return Section("The seed's claims beside what was measured", columns, rows, set(columns) - {"measured"})


def _rows(rows: list[dict]) -> Section:
    words = ["dump", "plane", "tier", "codec"]
    columns = ["dump", "layer", "plane", "head", "tier", "codec", "pages", "ratio"]
    figures = ["nmse_hot", "nmse_ref", "nmse_centered", "snr_db", "cosine", "max_abs_err"]
    figures += ["logit_rmse", "attn_out_nmse"]
    if len({row["dump"] for row in rows}) == 1:
        columns.remove("dump")
    lines = []
    for row in rows:
        fixed = [times(row[column]) if column == "ratio" else str(row[column]) for column in columns]
        lines.append(fixed + [number(row[column]) for column in figures] + [str(row["invalid_pages"])])
    return Section("Rows", columns + figures + ["invalid_pages"], lines, set(words))


def _bench(rows: list[dict]) -> Section:
    columns = bench.columns(rows)
    words = {column for column in columns if any(isinstance(row.get(column), str) for row in rows)}
    lines = [[_cell(row.get(column)) for column in columns] for row in rows]
    return Section("Speed", columns, lines, words)


def _cell(value) -> str:
    if value is None or isinstance(value, float):
        return number(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _eval_facts(doc: dict) -> list[tuple[str, str]]:
    run, rows = doc["run"], doc["rows"]

    def all_of(column: str) -> str:
        return ", ".join(dict.fromkeys(str(row[column]) for row in rows))

    git = f" ({run['git']})" if run["git"] else ""
    names = {"model": run["model_sha256"], "text": run["text_sha256"]}
    facts = [
        (what, ", ".join(f"{name} (sha256 {digest[:12]})" for name, digest in known.items()))
        for what, known in names.items()
    ]
    return [
        *facts,
        ("prefix", f"{all_of('prefix')} tokens, of them cold {all_of('cold_tokens')}; window {all_of('tokens')}"),
        ("policy", f"{all_of('policy')}, keep {all_of('keep_tokens')}, sink {all_of('sink_tokens')} tokens, pages of "
         f"{all_of('page_tokens')}"),
        ("tier", f"{all_of('tier')}, layers {all_of('layers')}"),
        ("backend", f"{run['backend']} on {run['device']}; the model in {run['compute_dtype']}"),
        ("coldkv", f"{run['version']}{git}, {run['time_utc']}"),
    ]  # fmt: skip


def _eval_sections(doc: dict, with_rows: bool) -> list[Section]:
    """One line per codec over all texts; with rows also one per text, if there are several."""
    several = len(doc["run"]["text_sha256"]) > 1
    sections = []
    if with_rows or not several:
        rows = [[row["text"], *_eval_cells(row)] for row in doc["rows"]]
        sections.append(Section("By text", ["text", *EVAL_COLUMNS], rows, {"text", "codec"}))
    if several:
        rows = [_eval_cells(line) for line in doc["summary"]["codecs"]]
        sections.append(Section("All texts (p99: the worst text)", EVAL_COLUMNS, rows, {"codec"}))
    return sections


EVAL_COLUMNS = ["codec", "head-pages", "hot bytes", "cold bytes", "ratio", "bits/element", "perplexity", "base"]
EVAL_COLUMNS += ["KL", "KL p99", "top-1", "needles / base"]


def _eval_cells(row: dict) -> list[str]:
    found = row["needle"]
    needles = "-" if found is None else f"{found:.0%} / {row['needle_base']:.0%}"
    counts = [f"{row[column]:,}" for column in ("pages", "hot_bytes", "cold_bytes")]
    figures = [number(row[column]) for column in ("bits_per_element", "ppl", "ppl_base", "kl_mean", "kl_p99")]
    return [row["codec"], *counts, times(row["ratio"]), *figures, f"{row['top1']:.1%}", needles]
