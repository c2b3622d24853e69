"""Files that appear whole or not at all."""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from coldkv.errors import InputError


def _fsync_folder(folder: Path) -> None:
    # Without this a power cut can lose the rename although the data is on the disk.
    fd = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(fd)
    except OSError:
        pass  # some network file systems refuse fsync on a folder; the rename itself is still atomic there
    finally:
        os.close(fd)


def check_output(path: str | os.PathLike, *inputs: str | os.PathLike | None) -> int | None:
    """Permission bits of the file that writing to `path` would replace, None if there is none.

    Commands call it before they work. Raises InputError if the folder does not exist or cannot be written, if `path` is
    not a regular file, or if it is one of `inputs` (also through a link), which would destroy what was read.
    """
    for source in inputs:
        with contextlib.suppress(OSError, ValueError):
            if source and os.path.samefile(path, source):
                raise InputError(f"output {path}: is the input {source}", hint="write to another file")
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise InputError(f"output {path}: folder {target.parent} does not exist", hint="create it first")
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"output {path}: folder {target.parent} cannot be written", hint="write to another folder")
    try:
        info = target.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(info.st_mode):
        kind = "a folder" if stat.S_ISDIR(info.st_mode) else "not a regular file"
        raise InputError(f"output {path}: expected a file name, found {kind}")
    return stat.S_IMODE(info.st_mode)


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """Yield the path of an empty temporary file beside `path`; on a clean exit it becomes `path`.

    The temporary file lies in the same folder, so the rename is atomic; it is fsynced before and the folder after.
    Any exception, KeyboardInterrupt and SystemExit included, removes it and leaves an older `path` untouched. A
    process killed outright leaves at most a hidden `.<name>.<random>.tmp`, never a partial `path`. A symbolic link
    is followed; the permissions of a replaced file are kept.

    Raises InputError like `check_output`; OSError (disk full, no permission) with `filename` set.
    """
    mode = check_output(path)
    target = Path(os.path.realpath(path))
    folder = target.parent
    temporary = folder / f".{target.name[:200]}.{secrets.token_hex(6)}.tmp"
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            if mode is not None:
                os.fchmod(fd, mode)
            yield temporary
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise
    _fsync_folder(folder)
