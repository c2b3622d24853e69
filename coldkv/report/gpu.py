"""Files of `scripts/gpu_check`, schema `coldkv.gpu/1`: shown and compared like those of `coldkv bench`."""

from coldkv.errors import InputError
from coldkv.report import bench
from coldkv.report.notes import Note

SCHEMA = "coldkv.gpu/1"
PARTS = {"run": dict, "golden": dict, "agreement": dict, "sanitizer": dict, "errors": dict, "skipped": list}


def validate(doc: dict, where: str) -> None:
    """Raises InputError unless the parts are there; timings may be missing, since a check may run out of time."""
    for name, kind in PARTS.items():
        if not isinstance(doc.get(name), kind):
            raise InputError(f"{where}: {name}: expected a {kind.__name__}, found {doc.get(name)!r:.40}")
    for part, keys in (("golden", ("rows", "of")), ("agreement", ("cases",))):
        numbers = all(isinstance(doc[part].get(key), int) for key in keys)
        if not numbers or not isinstance(doc[part].get("mismatches"), list):
            raise InputError(f"{where}: {part}: expected {' and '.join(keys)} as numbers and a list of mismatches")
    if not all(isinstance(result, dict) for result in doc["sanitizer"].values()):
        raise InputError(f"{where}: sanitizer: expected an object for each tool")
    if doc.get("rows") != []:
        bench.validate(doc, where)


def facts(doc: dict) -> list[tuple[str, str]]:
    """What was checked, in the words of a report."""
    run, golden, agreement = doc["run"], doc["golden"], doc["agreement"]
    smi = run.get("nvidia_smi_before") or {}
    out = [("device", run.get("device")), ("driver", smi.get("driver_version")), ("cuda", run.get("cuda"))]
    out += [("torch", run.get("torch")), ("version", run.get("version")), ("git", run.get("git"))]
    out.append(("time_utc", run.get("time_utc")))
    out.append(("golden", f"{golden['rows']} of {golden['of']} rows, {len(golden['mismatches'])} mismatches"))
    out.append(("agreement", f"{agreement['cases']} cases, {len(agreement['mismatches'])} mismatches"))
    tools = ", ".join(f"{tool} {result.get('outcome')}" for tool, result in doc["sanitizer"].items())
    out.append(("sanitizer", tools or None))
    copy = doc.get("copy_gbps")
    out.append(("device copy", f"{copy:,.0f} GB/s" if copy else None))
    return [(name, str(value)) for name, value in out if value is not None]


def notes(doc: dict) -> list[Note]:
    """Warnings about what went wrong, notes about what was left out."""
    failed = [Note("warning", f"{step} broke off: {text}") for step, text in doc["errors"].items()]
    if not doc.get("ok") and not failed:
        failed = [Note("warning", "this check did not pass")]
    return failed + [Note("note", f"skipped {text}") for text in doc["skipped"]]
