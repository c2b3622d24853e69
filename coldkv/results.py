"""Result files, schema `coldkv.results/1`: what a row holds, how it is checked, written and summed up.

Imports neither torch nor numpy. Bytes are real bytes; NMSE and cosine are plain ratios, snr_db is in dB, logit_rmse in
nats, max_abs_err in the dump's own units. A value that does not exist (the SNR of an exact codec, logits without
queries) is None, in JSON null; NaN and Infinity never appear.
"""

import json
import math
import os
import subprocess
import time
from pathlib import Path

from coldkv._version import __version__
from coldkv.atomic import atomic_path
from coldkv.errors import InputError
from coldkv.schema import check_keys, is_kind, json_lines, plain, read_json
from coldkv.summary import build_summary

SCHEMA = "coldkv.results/1"

# column -> (type, may be None). The order is the order in files and frames.
ROW_TYPES: dict[str, tuple[type, bool]] = {
    "dump": (str, False),
    "layer": (int, False),
    "plane": (str, False),
    "head": (int, False),
    "tier": (str, False),
    "codec": (str, False),
    "backend": (str, False),
    "pages": (int, False),
    "tokens": (int, False),
    "elements": (int, False),
    "hot_bytes": (int, False),
    "cold_bytes": (int, False),
    "ratio": (float, True),
    "bits_per_element": (float, True),
    "nmse_hot": (float, True),
    "nmse_ref": (float, True),
    "nmse_centered": (float, True),
    "snr_db": (float, True),
    "max_abs_err": (float, True),
    "cosine": (float, True),
    "invalid_pages": (int, False),
    "logit_rmse": (float, True),
    "attn_out_nmse": (float, True),
}
ROW_COLUMNS = tuple(ROW_TYPES)
ROW_KEY = ("dump", "layer", "plane", "head", "tier", "codec")

RUN_TYPES: dict[str, tuple[type, bool]] = {
    "version": (str, False),
    "git": (str, True),
    "backend": (str, False),
    "device": (str, False),
    "torch": (str, True),
    "time_utc": (str, False),
    "argv": (list, False),
    "dump_sha256": (dict, False),
    "table": (dict, False),
    "layers": (list, False),
}
LAYER_TYPES: dict[str, tuple[type, bool]] = {
    "dump": (str, False),
    "layer": (int, False),
    "tier": (str, False),
    "plane": (str, False),
    "heads": (int, False),
    "pages": (int, False),
    "tokens": (int, False),
    "partial_tokens": (int, False),
    "hot_bytes": (int, False),
    "zeroed_values": (int, False),  # NaN and Inf read as 0 (--nan zero); absent where there were none
}
DOCUMENT_TYPES: dict[str, tuple[type, bool]] = {
    "schema": (str, False),
    "run": (dict, False),
    "rows": (list, False),
    "summary": (dict, False),
}
TABLE_MODES = ("layers", "tiers", "uniform")


def run_header(
    *,
    backend: str,
    device: str,
    torch_version: str | None,
    argv: list[str],
    dump_sha256: dict[str, str],
    table: dict,
    layers: list[dict],
) -> dict:
    """The `run` part of a result document, with version, git revision and UTC time filled in.

    `dump_sha256` maps a dump's name (the `dump` column) to its hex digest; `table` is {name, mode, tier_layers};
    `layers` has one entry per dump, layer, tier and plane looked at, also where no codec fits (LAYER_TYPES).
    `tokens` and `partial_tokens` of a layer: tokens in whole pages, and tokens left over in the last page.
    """
    return {
        "version": __version__,
        "git": git_revision(),
        "backend": backend,
        "device": device,
        "torch": torch_version,
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "argv": list(argv),
        "dump_sha256": dict(dump_sha256),
        "table": table,
        "layers": layers,
    }


def git_revision() -> str | None:
    """Short revision of the checkout this package runs from, with "-dirty"; None for an installed package."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def document(run: dict, rows: list[dict]) -> dict:
    """A whole result document, validated, with its summary. Raises InputError as `validate` does."""
    rows = [{column: plain(row.get(column)) for column in ROW_COLUMNS} | _unknown(row) for row in rows]
    doc = {"schema": SCHEMA, "run": plain(run), "rows": rows, "summary": {}}
    validate(doc, "results")
    doc["summary"] = summarize(doc["rows"], doc["run"])
    return doc


def summarize(rows: list[dict], run: dict) -> dict:
    """{"codecs": [one dict per codec], "claims": [...]}; pure. `coldkv.summary` explains the arithmetic."""
    return plain(build_summary(rows, run))


def write_results(path: str | os.PathLike, doc: dict) -> None:
    """Validate `doc` and write it atomically, one row per line so that two files diff well.

    Raises InputError if the document is not valid, OSError if it cannot be written.
    """
    validate(doc, str(path))
    with atomic_path(path) as temporary:
        temporary.write_text(dumps(doc), encoding="utf-8")


def dumps(doc: dict) -> str:
    """`doc` as JSON text with a final newline; one line per row and per layer."""
    run = {key: value for key, value in doc["run"].items() if key != "layers"}
    head = json.dumps({"schema": doc["schema"], "run": run}, indent=1, allow_nan=False)
    head = head.removesuffix("\n }\n}")
    layers = json_lines(doc["run"]["layers"])
    rows = json_lines(doc["rows"])
    summary = json.dumps(doc["summary"], indent=1, allow_nan=False)
    return f'{head},\n  "layers": {layers}\n }},\n "rows": {rows},\n "summary": {summary}\n}}\n'


def read_results(path: str | os.PathLike) -> dict:
    """Read and validate one result file. Raises InputError (one line) or OSError."""
    doc = read_json(path)
    validate(doc, str(path))
    return doc


def validate(doc: dict, where: str) -> None:
    """Check a document against the schema; InputError names the row or key, what was expected and what was found."""
    if doc.get("schema") != SCHEMA:
        raise InputError(f"{where}: schema: expected {SCHEMA!r}, found {doc.get('schema')!r}")
    check_keys(doc, DOCUMENT_TYPES, where)
    _check_run(doc["run"], where)
    if not doc["rows"]:
        raise InputError(f"{where}: no rows, expected at least one measured plane")
    tier_of = {(e["dump"], e["layer"], e["tier"], e["plane"]) for e in doc["run"]["layers"]}
    seen: set[tuple] = set()
    for number, row in enumerate(doc["rows"]):
        at = f"{where}: row {number}"
        if not isinstance(row, dict):
            raise InputError(f"{at}: expected an object, found {type(row).__name__}")
        check_keys(row, ROW_TYPES, at)
        _check_row(row, at)
        if (row["dump"], row["layer"], row["tier"], row["plane"]) not in tier_of:
            raise InputError(f"{at}: {describe_row(row)} is not among run.layers")
        key = row_key(row)
        if key in seen:
            raise InputError(f"{at}: {describe_row(row)} appears twice")
        seen.add(key)


def row_key(row: dict) -> tuple:
    """What identifies a row within one document."""
    return tuple(row[column] for column in ROW_KEY)


def describe_row(row: dict) -> str:
    """A row's name in words, for messages."""
    return f"{row['dump']} layer {row['layer']} plane {row['plane']} head {row['head']} {row['tier']} {row['codec']}"


def _check_run(run: dict, where: str) -> None:
    at = f"{where}: run"
    check_keys(run, RUN_TYPES, at)
    for name, digest in run["dump_sha256"].items():
        if not isinstance(digest, str) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise InputError(f"{at}.dump_sha256: {name}: expected 64 hex digits, found {digest!r}")
    table = run["table"]
    check_keys(table, {"name": (str, False), "mode": (str, False), "tier_layers": (dict, False)}, f"{at}.table")
    if table["mode"] not in TABLE_MODES:
        raise InputError(f"{at}.table.mode: expected one of {', '.join(TABLE_MODES)}, found {table['mode']!r}")
    for tier, count in table["tier_layers"].items():
        if not is_kind(count, int) or count < 0:
            raise InputError(f"{at}.table.tier_layers: {tier}: expected a count, found {count!r}")
    for number, layer in enumerate(run["layers"]):
        here = f"{at}.layers[{number}]"
        if not isinstance(layer, dict):
            raise InputError(f"{here}: expected an object, found {type(layer).__name__}")
        check_keys({"zeroed_values": 0} | layer, LAYER_TYPES, here)
        if layer["dump"] not in run["dump_sha256"]:
            raise InputError(f"{here}: dump {layer['dump']!r} has no sha256 in run.dump_sha256")
        if table["mode"] == "tiers" and layer["tier"] not in table["tier_layers"]:
            raise InputError(f"{here}: tier {layer['tier']!r} is not among the table's tiers")


def _check_row(row: dict, at: str) -> None:
    if row["plane"] not in ("k", "v"):
        raise InputError(f"{at}: plane: expected 'k' or 'v', found {row['plane']!r}")
    for column, (kind, _) in ROW_TYPES.items():
        value = row[column]
        if kind is int and value < 0:
            raise InputError(f"{at}: {column}: expected 0 or more, found {value}")
        if column.startswith("nmse") and value is not None and value < 0:
            raise InputError(f"{at}: {column}: expected 0 or more, found {value}")
    if row["invalid_pages"] > row["pages"]:
        raise InputError(f"{at}: invalid_pages {row['invalid_pages']} exceeds pages {row['pages']}")
    expected = row["hot_bytes"] / row["cold_bytes"] if row["cold_bytes"] else None
    found = row["ratio"]
    if (expected is None) != (found is None) or (found is not None and not math.isclose(expected, found, rel_tol=1e-9)):
        raise InputError(f"{at}: ratio: expected hot_bytes/cold_bytes = {expected}, found {found}")


def _unknown(row: dict) -> dict:
    """Keys outside the schema stay in, so that validation names them instead of dropping them silently."""
    return {key: value for key, value in row.items() if key not in ROW_TYPES}
