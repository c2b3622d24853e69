"""Run the command line as users do: a process with its own stdout, stderr and exit code."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from coldkv import cli

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Done:
    code: int
    out: str
    err: str


def environment(**changes) -> dict:
    """This process's environment without what would change the output; a value of None removes a variable."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"} | changes
    drop = {"COLDKV_DEBUG", "NO_COLOR", "FORCE_COLOR"} - set(changes)
    return {key: value for key, value in env.items() if key not in drop and value is not None}


def heed_interrupts() -> None:
    """For `preexec_fn`: a process started in the background of a shell script inherits an ignored SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def coldkv(*args, env=None, **options) -> Done:
    """`coldkv ARGS...` in a subprocess."""
    command = [sys.executable, "-m", "coldkv", *map(str, args)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 600} | options
    done = subprocess.run(command, env=environment(**(env or {})), text=True, **options)
    return Done(done.returncode, done.stdout or "", done.stderr or "")


def in_process(capsys, *args) -> Done:
    """The same without a process, for tests that only look at what a command says."""
    capsys.readouterr()
    code = cli.main([str(arg) for arg in args])
    said = capsys.readouterr()
    return Done(code, said.out, said.err)


def python(code: str, *args) -> Done:
    """A Python snippet in a fresh interpreter that sees this checkout."""
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(command, env=environment(), text=True, capture_output=True, timeout=600)
    return Done(done.returncode, done.stdout, done.stderr)
