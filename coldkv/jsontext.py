"""Small JSON files that people write by hand: read strictly, with one line for whatever is wrong."""

import json
import os

from coldkv.errors import InputError
from coldkv.safetensors_stream import open_regular


def read_small_file(path: str | os.PathLike, what: str, limit: int = 1 << 24) -> str:
    """The UTF-8 text of a regular file of at most `limit` bytes. Raises InputError naming `what` and the path."""
    fd, size = open_regular(path, what)
    with open(fd, "rb") as file:
        if size > limit:
            raise InputError(f"{what} {path}: expected at most {limit:,} bytes, found {size:,}")
        try:
            return file.read().decode("utf-8")
        except UnicodeDecodeError as error:
            found = f"byte 0x{error.object[error.start]:02x}"
            raise InputError(f"{what} {path}: expected UTF-8 text, found {found}") from None


def parse_json(text: str, where: str):
    """JSON without duplicate keys: of two entries with one name, nobody can say which was meant."""

    def unique(pairs):
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"{where}: {twice[:60]!r} is there twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON: {str(error)[:120]}") from None
