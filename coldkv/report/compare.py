"""A result file against a baseline: every metric with a direction, row by row. Pure Python.

Bytes and counts must be equal, floats agree within 1e-6 of the baseline. Anything worse, missing or lost is a
failure; anything better is reported, because a baseline that is too kind hides the next regression.
"""

import math
from collections import defaultdict
from dataclasses import asdict, dataclass, field

from coldkv.errors import InputError
from coldkv.results import describe_row

RELATIVE_TOLERANCE = 1e-6

SAME = 0  # what was measured, not how well: any difference is a failure
LOWER = -1
HIGHER = 1
DIRECTIONS = {
    "pages": SAME,
    "tokens": SAME,
    "elements": SAME,
    "hot_bytes": SAME,
    "cold_bytes": LOWER,
    "ratio": HIGHER,
    "bits_per_element": LOWER,
    "nmse_hot": LOWER,
    "nmse_ref": LOWER,
    "nmse_centered": LOWER,
    "snr_db": HIGHER,
    "max_abs_err": LOWER,
    "cosine": HIGHER,
    "invalid_pages": LOWER,
    "logit_rmse": LOWER,
    "attn_out_nmse": LOWER,
}
EXACT = {"pages", "tokens", "elements", "hot_bytes", "cold_bytes", "invalid_pages"}


@dataclass(frozen=True)
class Finding:
    """One metric of one row that differs; `change` is found / baseline where that means something."""

    metric: str
    group: str
    row: str
    baseline: object
    found: object
    change: float | None


@dataclass
class Comparison:
    """All differences to one baseline file."""

    baseline_path: str
    compared: int = 0
    worse: list[Finding] = field(default_factory=list)
    better: list[Finding] = field(default_factory=list)
    new_rows: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.worse

    def to_dict(self) -> dict:
        return asdict(self) | {"ok": self.ok}

    def lines(self) -> list[str]:
        """The findings in words: one line per metric and group, with the worst row of each."""
        lines = _group_lines("worse", self.worse) + _group_lines("better", self.better)
        if self.new_rows:
            lines.append(f"new: {len(self.new_rows)} rows are not in the baseline, first {self.new_rows[0]}")
        if not lines:
            lines.append(f"baseline {self.baseline_path}: {self.compared} rows compared, none differs")
        elif self.ok:
            lines.append(
                f"baseline {self.baseline_path}: {self.compared} rows compared, none is worse; "
                f"to renew it, copy the result file over {self.baseline_path} and commit it"
            )
        return lines

    def failure(self) -> str:
        """One sentence for the exit message."""
        first = self.worse[0]
        return (
            f"{len(self.worse)} values worse than {self.baseline_path}: first {first.metric} of {first.row}: "
            f"baseline {show(first.baseline)}, found {show(first.found)}"
        )


def compare(docs: list[dict], baseline: dict, baseline_path: str) -> Comparison:
    """Compare the rows of `docs` with those of `baseline`, matched by dump sha256, layer, plane, head, tier, codec.

    Raises InputError if a dump's content or the table is another one, or if two documents hold the same row: then
    there is nothing to compare, and saying "equal" would be wrong.
    """
    for doc in docs:
        _check_same_input(doc["run"], baseline["run"], baseline_path)
    found: dict[tuple, dict] = {}
    for doc in docs:
        for row in doc["rows"]:
            key = _key(row, doc["run"])
            if key in found:
                raise InputError(f"{describe_row(row)}: is in two of the result files; compare one at a time")
            found[key] = row

    out = Comparison(baseline_path)
    for base in baseline["rows"]:
        row = found.pop(_key(base, baseline["run"]), None)
        group = f"{base['codec']} {base['tier']} plane {base['plane']}"
        if row is None:
            out.worse.append(Finding("row", group, describe_row(base), "present", "missing", None))
            continue
        out.compared += 1
        for metric in DIRECTIONS:
            verdict = judge(metric, base, row)
            if verdict:
                change = _change(base[metric], row[metric])
                finding = Finding(metric, group, describe_row(base), base[metric], row[metric], change)
                (out.worse if verdict < 0 else out.better).append(finding)
    out.new_rows = [describe_row(row) for row in found.values()]
    return out


def judge(metric: str, base: dict, row: dict) -> int:
    """-1 if `row` is worse than `base` in `metric`, 1 if better, 0 if equal within tolerance."""
    before, now = _value(metric, base), _value(metric, row)
    if before is None or now is None:
        # A value that is gone is a loss of knowledge; one that is new does no harm.
        return (now is not None) - (before is not None)
    if before == now or (metric not in EXACT and math.isclose(before, now, rel_tol=RELATIVE_TOLERANCE)):
        return 0
    direction = DIRECTIONS[metric]
    if direction == SAME:
        return -1
    return direction if now > before else -direction


def show(value) -> str:
    """A value in a message: 7 significant digits for floats, so that a change beyond the tolerance is visible."""
    if value is None:
        return "none"
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _value(metric: str, row: dict):
    if metric == "snr_db" and row["snr_db"] is None and row["nmse_hot"] == 0:
        return math.inf  # exact: no noise at all, stored as null
    return row[metric]


def _change(before, now) -> float | None:
    if isinstance(before, (int, float)) and isinstance(now, (int, float)) and before:
        return now / before
    return None


def _key(row: dict, run: dict) -> tuple:
    # By content, not by name: the same dump under another path is the same input.
    return (run["dump_sha256"][row["dump"]], *(row[column] for column in ("layer", "plane", "head", "tier", "codec")))


def _check_same_input(run: dict, base: dict, path: str) -> None:
    if run["table"] != base["table"]:
        raise InputError(
            f"table: expected {_table(base['table'])} as in {path}, found {_table(run['table'])}; "
            "measure with the baseline's table, or compare with another baseline"
        )
    for name, digest in run["dump_sha256"].items():
        expected = base["dump_sha256"].get(name)
        if expected not in (None, digest):
            raise InputError(
                f"dump {name}: expected sha256 {expected[:12]}... as in {path}, found {digest[:12]}...; "
                "the dump changed: measure the old one, or renew the baseline"
            )
    if not set(run["dump_sha256"].values()) & set(base["dump_sha256"].values()):
        names = ", ".join(base["dump_sha256"])
        raise InputError(f"no dump in common with {path}: expected {names}, found {', '.join(run['dump_sha256'])}")


def _table(table: dict) -> str:
    counts = ", ".join(f"{tier} x{count}" for tier, count in table["tier_layers"].items())
    return f"{table['name']!r} ({table['mode']}: {counts})"


def _group_lines(word: str, findings: list[Finding]) -> list[str]:
    groups: dict[tuple, list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[finding.group, finding.metric].append(finding)
    lines = []
    for (group, metric), members in groups.items():
        worst = max(members, key=lambda f: abs(math.log(f.change)) if f.change and f.change > 0 else math.inf)
        percent = f" ({100 * (worst.change - 1):+.3g}%)" if worst.change else ""
        rows = f"{len(members)} rows, most {worst.row}" if len(members) > 1 else worst.row
        values = f"baseline {show(worst.baseline)}, found {show(worst.found)}{percent}"
        lines.append(f"{word}: {metric} of {group}: {rows}: {values}")
    return lines
