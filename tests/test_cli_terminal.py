"""Colours and progress bars appear on a terminal only."""

import os
import pty
import subprocess
import sys

import pytest
import result_docs
from clirun import environment

from coldkv import results

PROGRESS = (
    "from coldkv.progress import progress\n"
    "with progress('measure', 10) as advance:\n    advance(4)\n    advance(6, 'layer 1')\n"
    "import sys; print('rich' in sys.modules)"
)


def on_terminal(command: list[str], **env) -> str:
    """Output of a command whose stdout and stderr are a pseudo terminal."""
    master, slave = pty.openpty()
    child = subprocess.Popen(command, stdout=slave, stderr=slave, env=environment(TERM="xterm-256color", **env))
    os.close(slave)
    chunks = []
    try:
        while chunk := os.read(master, 65536):
            chunks.append(chunk)
    except OSError:
        pass  # Linux reports the closed terminal as EIO
    os.close(master)
    assert child.wait(timeout=60) == 0
    return b"".join(chunks).decode()


@pytest.fixture
def report(tmp_path):
    path = tmp_path / "r.json"
    results.write_results(path, result_docs.seed_doc())
    return [sys.executable, "-m", "coldkv", "report", str(path)]


def test_report_on_a_terminal_is_styled_and_fits(report):
    text = on_terminal(report)
    assert "\x1b[1m" in text and "e2m1-g64" in text


def test_no_color_is_obeyed(report):
    text = on_terminal(report, NO_COLOR="1")
    assert "\x1b[3" not in text and "1.312x" in text


def test_report_in_a_pipe_has_no_escapes(report):
    done = subprocess.run(report, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "\x1b" not in done.stdout and done.stderr == ""


def test_progress_on_a_terminal():
    text = on_terminal([sys.executable, "-c", PROGRESS])
    assert "measure" in text and "True" in text


@pytest.mark.parametrize("env", [{}, {"TERM": "dumb"}])
def test_progress_elsewhere_is_silent_and_cheap(env):
    done = subprocess.run([sys.executable, "-c", PROGRESS], env=environment(**env), capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")
