"""The contract of the command line: exit codes, one line on stderr, a cheap start."""

import errno
import os

import click
import pytest
import result_docs
from clirun import coldkv, python

from coldkv import cli, results
from coldkv._version import __version__
from coldkv.errors import GateFailure, InputError

HEAVY = ("torch", "numpy", "pandas", "rich", "transformers", "safetensors")


@pytest.fixture
def results_file(tmp_path):
    path = tmp_path / "r.json"
    results.write_results(path, result_docs.uniform_doc())
    return path


def one_line(text: str) -> str:
    assert text.endswith("\n") and text.count("\n") == 1, f"expected one line, found {text!r}"
    assert text.startswith("coldkv: ")
    return text


def test_version():
    done = coldkv("--version")
    assert (done.code, done.out, done.err) == (0, f"coldkv {__version__}\n", "")


def test_help_lists_every_command_file():
    done = coldkv("--help")
    assert done.code == 0 and done.err == ""
    files = {name[:-3].replace("_", "-") for name in os.listdir(cli.coldkv.commands.__path__[0]) if name[0] != "_"}
    listed = {line.split()[0] for line in done.out.partition("Commands:\n")[2].splitlines() if line.startswith("  ")}
    assert listed >= {name for name in files if name} - {"__pycache__"}
    assert "report" in listed


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["report", "--help"]])
def test_cheap_start_without_heavy_modules(args):
    code = f"import sys; from coldkv.cli import main; rc = main({args!r})\n"
    code += f"print(rc, [m for m in {HEAVY!r} if m in sys.modules])"
    assert python(code).out.splitlines()[-1] == "0 []"


def test_no_command_module_is_heavy():
    code = (
        "import sys; from coldkv.cli import group; import click; c = click.Context(group)\n"
        "names = group.list_commands(c)\n"
        f"print(len([group.get_command(c, n) for n in names]), [m for m in {HEAVY!r} if m in sys.modules])"
    )
    count, _, heavy = python(code).out.strip().partition(" ")
    assert int(count) >= 1 and heavy == "[]"


def test_help_in_a_fifth_of_a_second():
    def cpu_seconds():
        # processor time, not wall time: other work on the machine must not decide this test
        start = os.times()
        assert coldkv("--help").code == 0
        end = os.times()
        return end.children_user + end.children_system - start.children_user - start.children_system

    assert min(cpu_seconds() for _ in range(5)) < 0.2


def test_report_imports_no_torch(results_file):
    code = "import sys; from coldkv.cli import main; rc = main(['report', sys.argv[1], '--fail-on', 'layer < 0']);"
    done = python(code + "print(rc, 'torch' in sys.modules)", results_file)
    assert done.out.splitlines()[-1] == "0 False"


def test_nothing_given_shows_help_on_stderr():
    done = coldkv()
    assert done.code == 2 and done.out == "" and "Commands:" in done.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["frobnicate"], "frobnicate"),
        (["--frobnicate"], "--frobnicate"),
        (["report"], "report: Missing argument 'RESULTS"),
        (["report", "x.json", "--format", "xml"], "'xml'"),
        (["report", "/no/such/file.json"], "/no/such/file.json: No such file or directory"),
        (["report", "/"], "name a file, not a folder"),
    ],
)
def test_usage_and_path_errors_are_one_line_and_exit_2(args, words):
    done = coldkv(*args)
    assert done.code == 2 and done.out == ""
    assert words in one_line(done.err)


def test_full_disk(results_file):
    with open("/dev/full", "w") as full:
        done = coldkv("report", results_file, stdout=full)
    assert done.code == 2
    assert "No space left on device" in one_line(done.err)


def test_unreadable_file_is_named(monkeypatch, capsys):
    @click.command()
    def deny():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "secret.json")

    assert run_command(monkeypatch, deny) == 2
    line = one_line(capsys.readouterr().err)
    assert "secret.json: Permission denied; check the permissions" in line


def test_reader_that_goes_away_is_quiet_but_not_success(results_file):
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = coldkv("report", results_file, stdout=write_end)
    finally:
        os.close(write_end)
    assert (done.code, done.err) == (2, "")


def run_command(monkeypatch, command) -> int:
    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda self, ctx, name: command)
    return cli.main(["anything"])


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("x: expected 3\n heads", hint="fix it"), 2, "x: expected 3 heads; fix it"),
        (GateFailure("nmse_hot is worse"), 1, "nmse_hot is worse"),
        (KeyboardInterrupt(), 2, "interrupted"),
        (MemoryError(), 2, "out of memory; measure fewer layers at a time (--layers) or a smaller dump"),
        (
            ZeroDivisionError("division by\nzero"),
            2,
            "unexpected ZeroDivisionError: division by zero; COLDKV_DEBUG=1 shows the traceback",
        ),
        (OSError(errno.ENOSPC, "No space left on device", "out.ckv"), 2, "out.ckv: No space left on device; free some"),
    ],
)
def test_exceptions_become_one_line_and_a_code(monkeypatch, capsys, error, code, line):
    @click.command()
    def fail():
        raise error

    monkeypatch.delenv("COLDKV_DEBUG", raising=False)
    assert run_command(monkeypatch, fail) == code
    captured = capsys.readouterr()
    assert captured.out == "" and one_line(captured.err).startswith(f"coldkv: {line}")


def test_debug_shows_the_traceback(monkeypatch):
    @click.command()
    def fail():
        raise ZeroDivisionError("boom")

    monkeypatch.setenv("COLDKV_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        run_command(monkeypatch, fail)


@pytest.mark.parametrize(("result", "code"), [(None, 0), (1, 1), ("text", 0), (True, 0)])
def test_a_commands_result_is_an_exit_code_only_if_it_is_an_int(monkeypatch, result, code):
    @click.command()
    def give():
        return result

    assert run_command(monkeypatch, give) == code


def test_ctx_exit_keeps_its_code(monkeypatch):
    @click.command()
    @click.pass_context
    def leave(ctx):
        ctx.exit(1)

    assert run_command(monkeypatch, leave) == 1
