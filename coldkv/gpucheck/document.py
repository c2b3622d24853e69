"""The file of one GPU check, schema `coldkv.gpu/1` (docs/results.md), and what in it is a failure. Torch-free."""

import json
import re
import time
from pathlib import Path

from coldkv.atomic import atomic_path
from coldkv.report.gpu import SCHEMA


def failures(document: dict) -> list[str]:
    """One line per thing that must not be: mismatches, sanitizer findings, steps that broke off with an error, and
    goldens that were not all replayed."""
    out, golden = [], document["golden"]
    if golden["rows"] < golden["of"] or not golden["of"]:
        out.append(f"golden: expected all rows to be replayed, found {golden['rows']} of {golden['of'] or 'unknown'}")
    for wrong in golden["mismatches"]:
        shape = "x".join(map(str, wrong["shape"]))
        what = wrong.get("refused") or f"{', '.join(wrong['fields'])} differ"
        out.append(f"golden {wrong['codec']} {wrong['format']} {shape}: {what}")
    for wrong in document["agreement"]["mismatches"]:
        where = f"{wrong['bytes']} bytes differ, first {wrong['first']}" if wrong["bytes"] else "sums differ"
        out.append(f"{wrong['case']}: {where}")
    for tool, result in document["sanitizer"].items():
        if result["outcome"] == "found":
            out.append(f"compute-sanitizer {tool}: {result['detail']}")
    out += [f"{step}: {text}" for step, text in document["errors"].items()]
    return out


def empty(run: dict) -> dict:
    """A document in which nothing has been done yet."""
    return {
        "schema": SCHEMA,
        "run": run,
        "golden": {"rows": 0, "of": 0, "mismatches": []},
        "agreement": {"cases": 0, "mismatches": []},
        "sanitizer": {},
        "copy_gbps": None,
        "rows": [],
        "skipped": [],
        "errors": {},
        "finished": False,
        "ok": False,
    }


def default_path(folder: Path, card: str, when: time.struct_time) -> Path:
    """`<card>-<date>.json` in `folder`; a second file of the day gets `-2` and so on."""
    stem = f"{re.sub(r'[^a-z0-9]+', '-', card.lower()).strip('-')}-{time.strftime('%Y-%m-%d', when)}"
    names = (f"{stem}.json", *(f"{stem}-{i}.json" for i in range(2, 1000)))
    return next(folder / name for name in names if not (folder / name).exists())


def write(path: Path, document: dict) -> None:
    """Whole or not at all; one timing per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n  ".join(json.dumps(row) for row in document["rows"])
    text = json.dumps({**document, "rows": []}, indent=1)
    text = text.replace('\n "rows": []', f'\n "rows": [\n  {rows}\n ]' if rows else '\n "rows": []', 1)
    with atomic_path(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
