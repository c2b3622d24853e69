"""The exceptions that coldkv raises on purpose; `coldkv.cli` alone turns them into exit codes."""


class ColdkvError(Exception):
    """One line: what went wrong, where, expected and found; `hint` says what to do next."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None):
        super().__init__(message)
        self.hint = hint

    def one_line(self) -> str:
        text = " ".join(str(self).split())
        return f"{text}; {self.hint}" if self.hint else text


class InputError(ColdkvError):
    """The caller's file, option or tensor does not fit."""


class ToolError(ColdkvError):
    """Something outside coldkv failed: compiler, disk, a missing optional package."""


class GateFailure(ColdkvError):
    """A regression gate, a verification or a comparison did not hold."""

    exit_code = 1
