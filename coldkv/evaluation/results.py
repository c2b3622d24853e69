"""Result files of `coldkv eval`, schema `coldkv.eval/1`: rows, checks, and the summary over texts. Torch-free.

A row is one model, one text, one way of keeping the cold pages. Bytes are real bytes, KL is in nats; needle figures
are fractions of the needles found, None where none were asked for.
"""

import json
import math
import os

from coldkv.atomic import atomic_path
from coldkv.errors import InputError
from coldkv.schema import check_keys, is_kind, json_lines, plain

SCHEMA = "coldkv.eval/1"
HOT = "hot"  # the "codec" of the rows that show the hot tier alone

# column -> (type, may be None). The order is the order in files and frames.
ROW_TYPES: dict[str, tuple[type, bool]] = {
    "model": (str, False),
    "text": (str, False),
    "codec": (str, False),
    "policy": (str, False),
    "keep_tokens": (int, False),
    "sink_tokens": (int, False),
    "tokens": (int, False),
    "bits_per_element": (float, True),
    "ratio": (float, True),
    "ppl": (float, False),
    "ppl_base": (float, False),
    "kl_mean": (float, False),
    "kl_p99": (float, False),
    "top1": (float, False),
    "needle": (float, True),
    "needle_base": (float, True),
    "needles": (int, False),
    "tier": (str, False),  # or the name of a layer table
    "layers": (str, False),
    "left_hot": (str, False),
    "page_tokens": (int, False),
    "prefix": (int, False),
    "cold_tokens": (int, False),
    "pages": (int, False),
    "elements": (int, False),
    "hot_bytes": (int, False),
    "cold_bytes": (int, False),
    "invalid_pages": (int, False),
    "backend": (str, False),
    "calib": (str, True),
}
ROW_COLUMNS = tuple(ROW_TYPES)
# What makes two rows answers to the same question; compared by content, see `row_key`.
SETTINGS = ("policy", "keep_tokens", "sink_tokens", "tokens", "tier", "layers", "page_tokens", "prefix")

RUN_TYPES: dict[str, tuple[type, bool]] = {
    "version": (str, False),
    "git": (str, True),
    "backend": (str, False),
    "device": (str, False),
    "torch": (str, True),
    "transformers": (str, True),
    "compute_dtype": (str, False),
    "time_utc": (str, False),
    "argv": (list, False),
    "model_sha256": (dict, False),
    "text_sha256": (dict, False),
    "needle_seed": (int, True),
}
DOCUMENT_TYPES: dict[str, tuple[type, bool]] = {
    "schema": (str, False),
    "run": (dict, False),
    "rows": (list, False),
    "summary": (dict, False),
}
_FRACTIONS = ("top1", "needle", "needle_base")


def document(run: dict, rows: list[dict]) -> dict:
    """A whole document, validated, with its summary. Raises InputError as `validate` does."""
    doc = {"schema": SCHEMA, "run": plain(run), "rows": [plain(row) for row in rows], "summary": {}}
    validate(doc, "results")
    doc["summary"] = summarize(doc["rows"])
    return doc


def summarize(rows: list[dict]) -> dict:
    """{"codecs": [one line per codec]} over all texts, in order of first appearance; pure.

    ppl, ppl_base: geometric means over all tokens; kl_mean, top1: means over all tokens; kl_p99: the worst text's,
    since a percentile cannot be put together from others; needle: over all needles; the rest: sums.
    """
    return {"codecs": [_codec(codec, rows) for codec in dict.fromkeys(row["codec"] for row in rows)]}


def _codec(codec: str, rows: list[dict]) -> dict:
    own = [row for row in rows if row["codec"] == codec]
    tokens = sum(row["tokens"] for row in own)
    needles = sum(row["needles"] for row in own)
    sums = {name: sum(row[name] for row in own) for name in ("pages", "elements", "hot_bytes", "cold_bytes")}

    def mean(column: str) -> float:
        return sum(row["tokens"] * row[column] for row in own) / tokens

    def geometric(column: str) -> float:
        return math.exp(sum(row["tokens"] * math.log(row[column]) for row in own) / tokens)

    def found(column: str) -> float | None:
        return sum(row["needles"] * (row[column] or 0) for row in own) / needles if needles else None

    return {
        "codec": codec,
        "texts": len(own),
        "tokens": tokens,
        "bits_per_element": 8 * sums["cold_bytes"] / sums["elements"] if sums["elements"] else None,
        "ratio": sums["hot_bytes"] / sums["cold_bytes"] if sums["cold_bytes"] else None,
        "ppl": geometric("ppl"),
        "ppl_base": geometric("ppl_base"),
        "kl_mean": mean("kl_mean"),
        "kl_p99": max(row["kl_p99"] for row in own),
        "top1": mean("top1"),
        "needle": found("needle"),
        "needle_base": found("needle_base"),
        "needles": needles,
        "left_hot": ",".join(dict.fromkeys(row["left_hot"] for row in own if row["left_hot"])),
        **sums,
        "invalid_pages": sum(row["invalid_pages"] for row in own),
    }


def write_results(path: str | os.PathLike, doc: dict) -> None:
    """Validate `doc` and write it atomically. Raises InputError if it is not valid, OSError if it cannot be written."""
    validate(doc, str(path))
    with atomic_path(path) as temporary:
        temporary.write_text(dumps(doc), encoding="utf-8")


def dumps(doc: dict) -> str:
    """`doc` as JSON text with a final newline; one line per row."""
    head = json.dumps({"schema": doc["schema"], "run": doc["run"]}, indent=1, allow_nan=False).removesuffix("\n}")
    summary = json.dumps(doc["summary"], indent=1, allow_nan=False)
    return f'{head},\n "rows": {json_lines(doc["rows"])},\n "summary": {summary}\n}}\n'


def validate(doc: dict, where: str) -> None:
    """Check a document against the schema; InputError names the row or key, what was expected and what was found."""
    if doc.get("schema") != SCHEMA:
        raise InputError(f"{where}: schema: expected {SCHEMA!r}, found {doc.get('schema')!r}")
    check_keys(doc, DOCUMENT_TYPES, where)
    run = doc["run"]
    check_keys(run, RUN_TYPES, f"{where}: run")
    for key in ("model_sha256", "text_sha256"):
        for name, digest in run[key].items():
            if not isinstance(digest, str) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
                raise InputError(f"{where}: run.{key}: {name}: expected 64 hex digits, found {digest!r}")
    if not doc["rows"]:
        raise InputError(f"{where}: no rows, expected at least one evaluated codec")
    seen: set[tuple] = set()
    for number, row in enumerate(doc["rows"]):
        at = f"{where}: row {number}"
        if not isinstance(row, dict):
            raise InputError(f"{at}: expected an object, found {type(row).__name__}")
        check_keys(row, ROW_TYPES, at)
        _check_row(row, run, at)
        key = row_key(row, run)
        if key in seen:
            raise InputError(f"{at}: {describe_row(row)} appears twice")
        seen.add(key)


def row_key(row: dict, run: dict) -> tuple:
    """What identifies a row: model and text by content, codec, settings."""
    model, text = run["model_sha256"][row["model"]], run["text_sha256"][row["text"]]
    return (model, text, row["codec"], *(row[column] for column in SETTINGS))


def describe_row(row: dict) -> str:
    """A row's name in words, for messages."""
    return f"{row['model']} {row['text']} {row['codec']}"


def _check_row(row: dict, run: dict, at: str) -> None:
    for column, known in (("model", run["model_sha256"]), ("text", run["text_sha256"])):
        if row[column] not in known:
            raise InputError(f"{at}: {column}: {row[column]!r} has no digest in run.{column}_sha256")
    for column in ROW_TYPES:
        value = row[column]
        if is_kind(value, float) and value < 0:
            raise InputError(f"{at}: {column}: expected 0 or more, found {value}")
        if column in _FRACTIONS and value is not None and value > 1:
            raise InputError(f"{at}: {column}: expected a fraction of at most 1, found {value}")
        if column.startswith("ppl") and value <= 0:
            raise InputError(f"{at}: {column}: expected more than 0, found {value}")
    if row["tokens"] < 1:
        raise InputError(f"{at}: tokens: expected at least 1, found {row['tokens']}")
    if (row["needles"] > 0) != (row["needle"] is not None) or (row["needle"] is None) != (row["needle_base"] is None):
        raise InputError(f"{at}: needles: expected needle and needle_base where needles were asked for, and only there")
    if row["invalid_pages"] > row["pages"]:
        raise InputError(f"{at}: invalid_pages {row['invalid_pages']} exceeds pages {row['pages']}")
    _check_quotient(row, "ratio", row["hot_bytes"], row["cold_bytes"], at)
    _check_quotient(row, "bits_per_element", 8 * row["cold_bytes"], row["elements"], at)


def _check_quotient(row: dict, column: str, a: int, b: int, at: str) -> None:
    expected, found = a / b if b else None, row[column]
    if (expected is None) != (found is None) or (found is not None and not math.isclose(expected, found, rel_tol=1e-9)):
        raise InputError(f"{at}: {column}: expected {a}/{b} = {expected}, found {found}")
