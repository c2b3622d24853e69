"""Files that are written whole or not at all."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is fsynced and renamed over `path`, else removed.

    Whatever was at `path` before stays readable until the rename, also across a crash or Ctrl-C.
    Raises OSError as the file system gives it, IsADirectoryError if `path` is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    except OSError as error:
        error.filename = str(target)  # the caller knows this name, not the temporary one
        raise
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, _mode_for(target))
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError:
        pass  # some file systems cannot sync a folder; the file itself is safe
    finally:
        os.close(folder)


def _mode_for(target: Path) -> int:
    """The mode an ordinary open() would leave: mkstemp's 0600 would lock out colleagues."""
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
