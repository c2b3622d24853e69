"""The command line: a group that loads commands on demand, and the one place where exceptions become exit codes.

Exit codes: 0 fine; 1 a gate, verification or regression failed; 2 usage, bad input or a tool failure.
Data goes to stdout, everything else to stderr. Importing this module must stay cheap: no torch, pandas or numpy.
"""

import errno
import importlib
import os
import signal
import sys
from contextlib import contextmanager

import click

import coldkv.commands
from coldkv._version import __version__
from coldkv.errors import ColdkvError

EXIT_FAILED = 1
EXIT_TROUBLE = 2

_OS_HINTS = {
    errno.ENOSPC: "free some space or write to another disk",
    errno.EDQUOT: "free some space or write to another disk",
    errno.EACCES: "check the permissions of the file and its folder",
    errno.EPERM: "check the permissions of the file and its folder",
    errno.EROFS: "write to another folder",
    errno.EISDIR: "name a file, not a folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.ENOENT: "check the path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


class LazyGroup(click.Group):
    """Finds commands by file name in `coldkv/commands`: a new file is a new command, without a list to keep."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        # a listing instead of pkgutil, whose import alone takes a tenth of the time --help may take
        names = {name for folder in coldkv.commands.__path__ for name in os.listdir(folder) if name.endswith(".py")}
        return sorted(name[:-3].replace("_", "-") for name in names if not name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        return importlib.import_module(f"coldkv.commands.{cmd_name.replace('-', '_')}").command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="coldkv", message="%(prog)s %(version)s")
def group() -> None:
    """Compress the cold part of an LLM's KV cache, measured in real bytes.

    Point `measure` at a dump of a KV cache, read its result file with `report`, and let CI gate on it.
    """


def main(argv: list[str] | None = None) -> int:
    """Run one command line (default: sys.argv) and return its exit code.

    COLDKV_DEBUG=1 lets exceptions through with their traceback.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if "_COLDKV_COMPLETE" in os.environ:  # shell completion lives in click's own entry point
        return group.main(args=args, prog_name="coldkv", standalone_mode=False) or 0
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a locale without, say, the sign for "times" must not end in an exception
            stream.reconfigure(errors="backslashreplace")
    try:
        with _termination_as_interrupt():
            code = _run(args)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, not at interpreter exit, so that a full disk is still reported
        return code
    except BaseException as error:
        if os.environ.get("COLDKV_DEBUG") == "1" and not isinstance(error, (SystemExit, click.exceptions.Exit)):
            raise
        return _explain(error)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, as CI sends it to cancel a job: unwinds like Ctrl-C, so that no temporary file stays behind."""


@contextmanager
def _termination_as_interrupt():
    def stop(number, frame):
        raise _Terminated

    before = {}
    try:
        for number in (signal.SIGTERM, getattr(signal, "SIGHUP", None)):
            # nohup starts us with SIGHUP ignored, and means it
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, stop)
    except ValueError:  # not in the main thread: whoever embeds us handles signals
        pass
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(args: list[str]) -> int:
    settings = {"color": False} if os.environ.get("NO_COLOR") else {}
    if not args:
        with click.Context(group, info_name="coldkv", **settings) as ctx:
            click.echo(group.get_help(ctx), err=True)
        return EXIT_TROUBLE
    for number, arg in enumerate(args):
        if arg == "" or (arg.startswith("--") and arg.endswith("=")):
            # mostly a variable that is not set in CI; taken as "option not given" it would switch a gate off
            name = args[number - 1] if arg == "" and number and args[number - 1].startswith("-") else arg
            raise click.UsageError(f"{name.rstrip('=') or 'argument'}: expected a value, found an empty text")
    with group.make_context("coldkv", args, **settings) as ctx:
        result = group.invoke(ctx)
    return result if isinstance(result, int) and not isinstance(result, bool) else 0


def _explain(error: BaseException) -> int:
    """Write the one line that goes with `error` to stderr and return its exit code."""
    match error:
        case click.exceptions.Exit():
            return error.exit_code
        case SystemExit():
            return error.code if isinstance(error.code, int) else (EXIT_TROUBLE if error.code else 0)
        case ColdkvError():
            return _say(error.one_line(), error.exit_code)
        case click.UsageError():
            path = error.ctx.command_path if error.ctx else "coldkv"
            where = path.removeprefix("coldkv").strip()
            line = f"{where}: {error.format_message()}" if where else error.format_message()
            return _say(f"{line.rstrip('.')}; see '{path} --help'")
        case click.ClickException():
            return _say(error.format_message())
        case _Terminated():
            return _say("terminated")
        case KeyboardInterrupt() | click.Abort():
            return _say("interrupted")
        case BrokenPipeError():
            # The reader went away before it had everything, and a gate may not have been reached: quiet, not 0.
            # What is still buffered must not be tried again at interpreter exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return EXIT_TROUBLE
        case OSError():
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) and error.filename is None:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # most likely stdout itself: do not fail again at exit
            return _say(_os_error_line(error))
        case RuntimeError() if "can't allocate memory" in str(error):
            return _say("out of memory; measure fewer layers at a time (--layers) or a smaller dump")
        case MemoryError():
            return _say("out of memory; measure fewer layers at a time (--layers) or a smaller dump")
        case _:
            detail = " ".join(str(error).split())
            name = type(error).__name__
            return _say(f"unexpected {name}: {detail or 'no message'}; COLDKV_DEBUG=1 shows the traceback")


def _os_error_line(error: OSError) -> str:
    what = error.strerror or str(error) or type(error).__name__
    line = f"{error.filename}: {what}" if error.filename is not None else what
    hint = _OS_HINTS.get(error.errno)
    return f"{line}; {hint}" if hint else line


def _say(line: str, code: int = EXIT_TROUBLE) -> int:
    try:
        click.echo("coldkv: " + " ".join(line.split()), err=True)
    except OSError:
        pass  # stderr is gone too; the exit code still tells
    return code


if __name__ == "__main__":
    sys.exit(main())
