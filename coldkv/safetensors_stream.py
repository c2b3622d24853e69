"""Safetensors without loading them: a validating header reader and a writer that streams tensors of known shape.

Torch-free. The layout on disk is the public one: u64 header length, JSON header, tensor bytes without gaps. The writer
sorts tensors by item size (largest first), so that every tensor starts at a multiple of its item size whatever sizes
come before it: readers that view the bytes in place need this. Writes are positional: chunks of several tensors may
be interleaved.
"""

import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coldkv.errors import InputError

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the limit of the public readers
_ALIGN = 64
_MAX_IO = 1 << 30  # one pread or pwrite moves at most 2^31 - 4096 bytes on Linux


class TensorInfo(NamedTuple):
    """dtype as safetensors spells it, shape, and the byte range `[begin, end)` counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """`tensors` in file order, `metadata` (string to string), `data_start` and `file_bytes` in bytes."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int
    file_bytes: int


def open_regular(path: str | os.PathLike, what: str = "dump") -> tuple[int, int]:
    """Open a regular, non-empty file for reading: (descriptor, bytes). InputError says what is wrong with it."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise InputError(f"{what} {path}: no such file") from None
    except OSError as error:
        raise InputError(f"{what} {path}: cannot be opened: {error.strerror}") from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise InputError(f"{what} {path}: expected a file, found a folder or device")
        size = info.st_size
        if size == 0:
            raise InputError(f"{what} {path}: the file is empty")
    except BaseException:
        os.close(fd)
        raise
    return fd, size


def _bytes_view(data) -> memoryview:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty array cannot be cast


def pread_into(fd: int, buffer, offset: int, where: str) -> None:
    """Fill the writable, contiguous `buffer` from `offset`; InputError if the file ends before it is full."""
    view = _bytes_view(buffer)
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done : done + _MAX_IO]], offset + done)
        if got == 0:
            raise InputError(f"{where}: truncated: expected {len(view)} bytes at {offset}, found {done}")
        done += got


def pwrite_all(fd: int, data, offset: int) -> None:
    """Write all of `data` (any contiguous buffer) at `offset`; OSError (for example disk full) passes through."""
    view = _bytes_view(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + _MAX_IO], offset + done)


def _no_duplicates(pairs):
    result = dict(pairs)
    if len(result) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate name {key!r}")
            seen.add(key)
    return result


def _tensor_info(file, name, entry, data_start, data_bytes) -> TensorInfo:
    where = f"{file}: tensor {name}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise InputError(f"{where}: expected dtype, shape and data_offsets in the header, found {str(entry)[:80]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise InputError(f"{where}: unknown dtype {str(dtype)[:40]!r}")

    def sizes(x):
        return isinstance(x, list) and all(type(n) is int and n >= 0 for n in x)

    if not sizes(shape) or not sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise InputError(f"{where}: malformed shape {str(shape)[:60]} or data_offsets {str(offsets)[:60]}")
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if expected != offsets[1] - offsets[0]:
        raise InputError(f"{where}: expected {expected} bytes for {dtype} {shape}, found {offsets[1] - offsets[0]}")
    if offsets[1] > data_bytes:
        raise InputError(
            f"{where}: truncated or wrong offsets: expected data up to byte {offsets[1]}, found {data_bytes} bytes"
        )
    return TensorInfo(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def read_header(path: str | os.PathLike, fd: int | None = None, what: str = "dump") -> Header:
    """Read and validate the header of `path` (through `fd` if given). InputError on anything malformed or truncated;
    it calls the file `what`."""
    if fd is None:
        fd, _ = open_regular(path, what)
        try:
            return read_header(path, fd, what)
        finally:
            os.close(fd)
    file = f"{what} {path}"
    size = os.fstat(fd).st_size
    if size < 8:
        raise InputError(f"{file}: expected a safetensors file, found only {size} bytes")
    header_bytes = int.from_bytes(os.pread(fd, 8, 0), "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise InputError(
            f"{file}: not a safetensors file: header of {header_bytes} bytes, at most {MAX_HEADER_BYTES} allowed"
        )
    if 8 + header_bytes > size:
        raise InputError(f"{file}: truncated: expected a header of {header_bytes} bytes, found {size - 8}")
    raw = bytearray(header_bytes)
    pread_into(fd, raw, 8, file)
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
        if not isinstance(entries, dict):
            raise ValueError("expected an object")
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not a safetensors file: header is not valid JSON: {str(error)[:120]}") from None
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise InputError(f"{file}: __metadata__: expected strings only")
    data_start = 8 + header_bytes
    tensors = {n: _tensor_info(file, n, e, data_start, size - data_start) for n, e in entries.items()}
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)))
    cursor = data_start
    for name, info in tensors.items():
        if info.begin != cursor:
            raise InputError(
                f"{file}: tensor {name}: expected data at byte {cursor - data_start}, "
                f"found {info.begin - data_start} (tensors overlap or leave a gap)"
            )
        cursor = info.end
    if cursor != size:
        raise InputError(f"{file}: expected {cursor} bytes, found {size}")
    return Header(tensors, metadata, data_start, size)


class StreamWriter:
    """Write a safetensors file whose names, dtypes and shapes are known, chunk by chunk.

    `specs`: `(name, dtype as safetensors spells it, shape)`; `metadata`: string to string. The header is written at
    once; `write` appends to one tensor; `set_metadata` may replace the metadata at any time (for example checksums
    known only after the data) if it fits: give it placeholders of final width, or `reserve` spare header bytes.
    Use as a context manager on the path that `atomic_path` yields; a clean exit checks that every tensor is complete.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        specs: Sequence[tuple[str, str, Sequence[int]]],
        metadata: Mapping[str, str],
        *,
        reserve: int = 0,
    ):
        self._entries: dict[str, dict] = {}
        offset = 0
        for name, dtype, shape in sorted(specs, key=lambda spec: -ITEM_BYTES[spec[1]]):
            if name in self._entries or name == "__metadata__":
                raise ValueError(f"tensor {name!r} named twice or reserved")
            end = offset + math.prod(shape) * ITEM_BYTES[dtype]
            self._entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        self._data_bytes = offset
        self._written = dict.fromkeys(self._entries, 0)
        text = self._header_text(metadata)
        self._data_start = -(-(8 + len(text) + reserve) // _ALIGN) * _ALIGN
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            os.ftruncate(self._fd, 0)
            self._put_header(text)
        except BaseException:
            self.close()
            raise

    def _header_text(self, metadata: Mapping[str, str]) -> bytes:
        if not all(isinstance(k, str) and isinstance(v, str) for k, v in metadata.items()):
            raise ValueError("safetensors metadata maps strings to strings")
        document = {"__metadata__": dict(metadata), **self._entries} if metadata else self._entries
        return json.dumps(document, separators=(",", ":")).encode("utf-8")

    def _put_header(self, text: bytes) -> None:
        room = self._data_start - 8
        if len(text) > room or room > MAX_HEADER_BYTES:
            raise ValueError(f"header of {len(text)} bytes does not fit in {min(room, MAX_HEADER_BYTES)}")
        pwrite_all(self._fd, room.to_bytes(8, "little") + text.ljust(room, b" "), 0)

    def set_metadata(self, metadata: Mapping[str, str]) -> None:
        """Replace all metadata; ValueError if it needs more room than the header has."""
        self._put_header(self._header_text(metadata))

    def write(self, name: str, data) -> None:
        """Append a contiguous buffer (numpy array, memoryview, bytes) to tensor `name`; ValueError past its end."""
        view = _bytes_view(data)
        begin, end = self._entries[name]["data_offsets"]
        position = begin + self._written[name]
        if position + len(view) > end:
            raise ValueError(f"tensor {name}: expected {end - position} more bytes, found {len(view)}")
        pwrite_all(self._fd, view, self._data_start + position)
        self._written[name] += len(view)

    def finish(self) -> None:
        """Check that every tensor is complete (ValueError otherwise) and close the file."""
        for name, entry in self._entries.items():
            begin, end = entry["data_offsets"]
            if self._written[name] != end - begin:
                raise ValueError(f"tensor {name}: expected {end - begin} bytes, wrote {self._written[name]}")
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "StreamWriter":
        return self

    def __exit__(self, kind, value, traceback) -> None:
        if kind is None:
            try:
                self.finish()
            finally:
                self.close()
        else:
            self.close()
