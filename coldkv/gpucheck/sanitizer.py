"""compute-sanitizer on the small case: accesses out of bounds (memcheck) and races in shared memory (racecheck)."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from coldkv.gpucheck.clock import Deadline

TOOLS = ("memcheck", "racecheck")
FOUND = 99  # exit code that we ask for when the tool finds something
SMALL_CASE = (sys.executable, "-m", "coldkv.gpucheck.small_case")
BROKEN = re.compile(r"device not supported|internal sanitizer error|failed to initiali[sz]e|unable to", re.IGNORECASE)
SUMMARY = re.compile(r"^=+ (?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards?)", re.MULTILINE)


def find(home: Path | None) -> str | None:
    """The tool on PATH or in the toolkit at `home`, or None."""
    if found := shutil.which("compute-sanitizer"):
        return found
    places = ("bin/compute-sanitizer", "compute-sanitizer/compute-sanitizer")
    return next((str(home / place) for place in places if home and (home / place).is_file()), None)


def run(program: str | None, deadline: Deadline, *, command=SMALL_CASE) -> dict:
    """Tool -> {"outcome", "detail"}. Outcomes: "clean"; "found" (errors or races); "absent" (no sanitizer here);
    "unusable" (it does not work on this machine); "no time" (not begun, or not finished)."""
    package = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))
    return {tool: _one(program, tool, deadline, command, {**os.environ, "PYTHONPATH": path}) for tool in TOOLS}


def _one(program, tool: str, deadline: Deadline, command, env) -> dict:
    if program is None:
        return {"outcome": "absent", "detail": "compute-sanitizer not found"}
    if deadline.left() < 10:
        return {"outcome": "no time", "detail": f"{max(0, deadline.left()):.0f} s left"}
    line = [program, "--tool", tool, "--error-exitcode", str(FOUND), *command]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=deadline.left(), env=env)
    except subprocess.TimeoutExpired:
        return {"outcome": "no time", "detail": "did not end in time"}
    except OSError as error:
        return {"outcome": "unusable", "detail": f"{program}: {error.strerror}"}
    return verdict(done.returncode, done.stdout + done.stderr)


def verdict(code: int, output: str) -> dict:
    """What a run of the tool came to. Only its own summary counts: a clean exit without one proves nothing."""
    lines = [line.strip("= ") for line in output.splitlines() if line.strip("= ")]
    summary = SUMMARY.search(output)
    count = int(next(group for group in summary.groups() if group)) if summary else None
    if summary and not count and code == 0:
        return {"outcome": "clean", "detail": summary[0].strip("= ")}
    if broken := [line for line in lines if BROKEN.search(line)]:
        return {"outcome": "unusable", "detail": broken[0]}
    if count or code == FOUND:
        return {"outcome": "found", "detail": _first_finding(output) or lines[-1]}
    return {"outcome": "unusable", "detail": lines[-1] if lines else f"exit {code}, no output"}


def _first_finding(output: str) -> str | None:
    """The first line in which the tool says something else than its own name or a summary."""
    said = [line.strip("= ") for line in output.splitlines() if line.startswith("=========")]
    return next((line for line in said if line and not line.startswith(("COMPUTE-SANITIZER", "ERROR SUMMARY"))), None)
