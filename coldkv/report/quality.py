"""Files of `coldkv eval`, schema `coldkv.eval/1`, in reports and in the gate: tables, notes, comparison."""

import math

from coldkv.errors import InputError
from coldkv.evaluation.results import SETTINGS, describe_row, row_key
from coldkv.report.compare import Comparison, Finding
from coldkv.report.notes import Note

SAME, LOWER, HIGHER = 0, -1, 1
# A model's logits depend on the order of sums in its matrix products, hence on the machine: bytes are compared
# exactly, what was predicted within a tolerance. Gemma 3 270M in fp32, SSE against AVX products: mean KL 0.02%, its
# percentile 0.13%, perplexity 0.008%, one token in 128 with another first choice.
DIRECTIONS = {
    "pages": SAME,
    "elements": SAME,
    "hot_bytes": SAME,
    "needles": SAME,
    "cold_bytes": LOWER,
    "ratio": HIGHER,
    "bits_per_element": LOWER,
    "ppl": LOWER,
    "ppl_base": SAME,
    "kl_mean": LOWER,
    "kl_p99": LOWER,
    "top1": HIGHER,
    "needle": HIGHER,
    "needle_base": SAME,
    "invalid_pages": LOWER,
}
RELATIVE = {"ratio": 1e-6, "bits_per_element": 1e-6, "ppl": 1e-3, "ppl_base": 1e-3, "kl_mean": 0.02, "kl_p99": 0.05}
ABSOLUTE = {"kl_mean": 1e-6, "kl_p99": 1e-5, "top1": 0.01}
DESTROYED_KL = 1.0  # nats per token: the model says something else
LEAST_NEEDLES = 0.5  # a model that finds fewer unquantized cannot tell what going cold costs


def notes(doc: dict) -> list[Note]:
    """All notes on one document, in a fixed order."""
    rows = doc["rows"]
    out = []
    for row in rows:
        where = f"{row['codec']} on {row['text']}"
        if row["left_hot"]:
            text = f"{where} leaves layers {row['left_hot']} hot: they count with their hot bytes on both sides"
            out.append(Note("note", text))
        if row["invalid_pages"]:
            text = f"{where}: {row['invalid_pages']} of {row['pages']} head-pages could not be packed and stay hot"
            out.append(Note("warning", text))
        if row["cold_bytes"] > row["hot_bytes"]:
            text = f"{where} takes {row['cold_bytes']:,} bytes and replaces only {row['hot_bytes']:,} hot bytes"
            out.append(Note("warning", text))
        if row["kl_mean"] > DESTROYED_KL:
            text = f"{where}: mean KL {row['kl_mean']:.3g} nats, perplexity {row['ppl']:.4g} instead of "
            out.append(Note("warning", f"{text}{row['ppl_base']:.4g}: the model is destroyed"))
    for text, base in {row["text"]: row["needle_base"] for row in rows if row["needle_base"] is not None}.items():
        if base < LEAST_NEEDLES:
            words = (
                f"without cold pages the model finds {base:.0%} of the needles in {text}: they say little about codecs"
            )
            out.append(Note("warning", words))
    return out


def compare(docs: list[dict], baseline: dict, path: str) -> Comparison:
    """Rows of `docs` against those of `baseline`, matched by the content of model and text, codec and settings.

    Raises InputError where model, text, compute dtype or settings are other ones: such figures answer another question.
    """
    for doc in docs:
        _check_same_input(doc, baseline, path)
    found: dict[tuple, dict] = {}
    for doc in docs:
        for row in doc["rows"]:
            key = row_key(row, doc["run"])
            if key in found:
                raise InputError(f"{describe_row(row)}: is in two of the result files; compare one at a time")
            found[key] = row
    out = Comparison(path)
    for base in baseline["rows"]:
        row = found.pop(row_key(base, baseline["run"]), None)
        name = describe_row(base)
        if row is None:
            out.worse.append(Finding("row", base["codec"], name, "present", "missing", None))
            continue
        out.compared += 1
        for metric in DIRECTIONS:
            verdict = judge(metric, base[metric], row[metric])
            if verdict:
                change = row[metric] / base[metric] if base[metric] and row[metric] is not None else None
                finding = Finding(metric, base["codec"], name, base[metric], row[metric], change)
                (out.worse if verdict < 0 else out.better).append(finding)
    out.new_rows = [describe_row(row) for row in found.values()]
    return out


def judge(metric: str, before, now) -> int:
    """-1 if `now` is worse than `before`, 1 if better, 0 if equal within the metric's tolerance."""
    if before is None or now is None:
        # A value that is gone is a loss of knowledge; one that is new does no harm.
        return (now is not None) - (before is not None)
    if math.isclose(before, now, rel_tol=RELATIVE.get(metric, 0.0), abs_tol=ABSOLUTE.get(metric, 0.0)):
        return 0
    direction = DIRECTIONS[metric]
    if direction == SAME:
        return -1
    return direction if now > before else -direction


def _check_same_input(doc: dict, baseline: dict, path: str) -> None:
    run, base = doc["run"], baseline["run"]
    for key, what in (("model_sha256", "model"), ("text_sha256", "text")):
        for name, digest in run[key].items():
            expected = base[key].get(name)
            if expected not in (None, digest):
                found = f"expected sha256 {expected[:12]}... as in {path}, found {digest[:12]}..."
                raise InputError(f"{what} {name}: {found}; evaluate the old one, or renew the baseline")
        if not set(run[key].values()) & set(base[key].values()):
            raise InputError(
                f"no {what} in common with {path}: expected {', '.join(base[key])}, found {', '.join(run[key])}"
            )
    for key in ("compute_dtype", "needle_seed"):
        if None not in (run[key], base[key]) and run[key] != base[key]:
            raise InputError(f"{key}: expected {base[key]} as in {path}, found {run[key]}")
    for key in SETTINGS:
        here, there = ({str(row[key]) for row in part["rows"]} for part in (doc, baseline))
        if not here & there:
            raise InputError(
                f"{key}: expected {', '.join(sorted(there))} as in {path}, found {', '.join(sorted(here))}",
                hint="evaluate with the baseline's settings",
            )
