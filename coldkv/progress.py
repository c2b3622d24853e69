"""Progress on stderr for long work, shown on a terminal only; costs nothing elsewhere."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def stderr_is_terminal() -> bool:
    """True if a person may be watching stderr."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def progress(description: str, total: float, *, unit: str = "B") -> Iterator[Callable[..., None]]:
    """Yield `advance(amount, description=None)`; `total` and the amounts are in `unit` ("B" shows sizes and rates).

    Off a terminal `advance` does nothing and rich is not imported.
    """
    if not stderr_is_terminal():
        yield lambda amount=1, description=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = DownloadColumn() if unit == "B" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)

        def advance(amount: float = 1, description: str | None = None) -> None:
            bar.update(task, advance=amount, description=description)

        yield advance
