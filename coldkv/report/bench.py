"""Files of `coldkv bench`, schema `coldkv.bench/1`: rows that name what was timed and give figures for it.

A row's identity is made of its texts and integers, its figures are its floats: throughputs in GB/s and their ratio
to memcpy. Only ratios to memcpy are compared, by a factor: absolute speed belongs to one machine on one day.
"""

from coldkv.errors import InputError
from coldkv.report.compare import Comparison, Finding

SCHEMA = "coldkv.bench/1"
SETTINGS = ("backend", "threads", "head_dim", "page_tokens", "head_pages")
MAX_SLOWDOWN = 0.7  # found / baseline below this is a regression; timings on shared machines scatter by 20-30%


def validate(doc: dict, where: str) -> None:
    """Raises InputError unless `doc` has rows that each name an op and a codec."""
    rows = doc.get("rows")
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{where}: rows: expected a list with at least one timing, found {rows!r:.40}")
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("op", "codec")):
            raise InputError(f"{where}: row {number}: expected an object with the texts 'op' and 'codec'")


def columns(rows: list[dict]) -> list[str]:
    """All columns in order of first appearance."""
    return list(dict.fromkeys(column for row in rows for column in row))


def is_ratio(column: str) -> bool:
    """Columns that hold a throughput as a fraction of memcpy's in the same run."""
    return "memcpy" in column and ("ratio" in column or column.startswith("vs_"))


def describe(row: dict) -> str:
    """A row's name in words: what identifies it, without its figures."""
    return " ".join(f"{key}={value}" if key not in ("op", "codec") else str(value) for key, value in _identity(row))


def compare(rows: list[dict], baseline_rows: list[dict], baseline_path: str) -> Comparison:
    """Timings of the same op, codec and setting in both files; a lost row or ratio, or a slowdown, is a finding."""
    _check_settings(rows, baseline_rows, baseline_path)
    found = {tuple(_identity(row)): row for row in rows}
    out = Comparison(baseline_path)
    for base in baseline_rows:
        row = found.pop(tuple(_identity(base)), None)
        name = describe(base)
        if row is None:
            out.worse.append(Finding("row", base["codec"], name, "present", "missing", None))
            continue
        out.compared += 1
        for column in filter(is_ratio, base):
            before, now = base[column], row.get(column)
            if before is None:
                continue
            if now is None or now < MAX_SLOWDOWN * before:
                change = None if now is None else now / before
                out.worse.append(Finding(column, base["codec"], name, before, now, change))
            elif now * MAX_SLOWDOWN > before:
                out.better.append(Finding(column, base["codec"], name, before, now, now / before))
    out.new_rows = [describe(row) for row in found.values()]
    return out


def _check_settings(rows: list[dict], baseline_rows: list[dict], path: str) -> None:
    """Raises InputError where a setting of the whole run differs: such timings cannot be compared at all."""
    for key in SETTINGS:
        here, there = ({str(row.get(key)) for row in part} for part in (rows, baseline_rows))
        if not here & there:
            raise InputError(
                f"{key}: expected {', '.join(sorted(there))} as in {path}, found {', '.join(sorted(here))}",
                hint="time with the baseline's settings",
            )


def _identity(row: dict) -> list[tuple[str, object]]:
    return [(key, value) for key, value in row.items() if isinstance(value, (str, int)) or key in ("op", "codec")]
