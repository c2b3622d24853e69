"""Dumps as numpy archives: `layer_{i}_k`, `layer_{i}_v` `[tokens, kv_heads, head_dim]`, torch-free until read.

Also read where present: `layer_{i}_q` `[samples, q_heads, head_dim]`, `layer_{i}_q_pos` `[samples]`, and `positions`
`[tokens]`. Uncompressed members are read in place with pread; compressed ones are inflated as a stream, so neither
needs memory for a whole member. bfloat16 arrays (ml_dtypes) appear in the file as 2-byte void and are read as bf16.
"""

import os
import re
import struct
import tokenize
import zipfile
import zlib
from dataclasses import dataclass

from coldkv.dumps.model import (
    DEFAULT_PAGE_TOKENS,
    Dump,
    LayerDump,
    PlaneSource,
    check_plane,
    check_queries,
    finish_layers,
    torch_dtype,
)
from coldkv.errors import InputError
from coldkv.geometry import Geometry
from coldkv.safetensors_stream import open_regular, pread_into

_NAME = re.compile(r"layer_(0|[1-9][0-9]{0,6})_(k|v|q|q_pos)")
_DTYPES = {"<f2": "fp16", "<f4": "fp32", "|V2": "bf16", "<V2": "bf16"}
_MAX_NPY_HEADER = 65_536
_MAX_DEFLATE_RATIO = 1040  # deflate reaches 1032; more is a forged size, caught before memory is asked for it
_SKIP = 1 << 20
# What zipfile, zlib and numpy's header parser raise on damaged bytes; between them they leave little out.
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, ValueError, TypeError, LookupError,
           SyntaxError, NotImplementedError, RuntimeError, OverflowError, tokenize.TokenError)  # fmt: skip


@dataclass
class _Member:
    """One array: `offset` of its data in the file (None if compressed), `skip` bytes of npy header."""

    entry: zipfile.ZipInfo
    descr: str
    shape: tuple[int, ...]
    offset: int | None
    skip: int

    @property
    def nbytes(self) -> int:
        return self.entry.file_size - self.skip


class _Archive:
    def __init__(self, path: str):
        self.path = path
        self.streams: dict[str, zipfile.ZipExtFile] = {}  # half-read compressed members, by array name
        self.zip = None
        self.fd = -1
        self.fd, self.bytes = open_regular(path)
        try:
            # A descriptor of its own: ZipFile seeks, our own reads are positional.
            self.zip = zipfile.ZipFile(path)
        except _DAMAGE as error:
            self.close()
            raise InputError(f"dump {path}: not a complete .npz archive: {str(error)[:120]}") from None
        names = [entry.filename for entry in self.zip.infolist()]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            self.close()
            raise InputError(f"dump {path}: array {sorted(twice)[0]} is in the archive twice")

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()
        self.streams.clear()
        if self.zip is not None:
            self.zip.close()
            self.zip = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    __del__ = close

    def where(self, entry: zipfile.ZipInfo) -> str:
        return f"dump {self.path}: tensor {entry.filename.removesuffix('.npy')}"

    def open(self, entry: zipfile.ZipInfo):
        try:
            return self.zip.open(entry)
        except _DAMAGE as error:
            raise InputError(f"{self.where(entry)}: cannot be read: {str(error)[:120]}") from None

    def read_exactly(self, stream, entry: zipfile.ZipInfo, view: memoryview) -> None:
        done = 0
        while done < len(view):
            try:
                got = stream.readinto(view[done:])
            except _DAMAGE as error:
                raise InputError(f"{self.where(entry)}: damaged: {str(error)[:120]}") from None
            if not got:
                raise InputError(f"{self.where(entry)}: truncated: expected {len(view)} more bytes, found {done}")
            done += got

    def member(self, entry: zipfile.ZipInfo) -> _Member:
        import numpy as np

        where = self.where(entry)
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise InputError(f"{where}: expected a stored or deflated member, found method {entry.compress_type}")
        if entry.file_size > _MAX_DEFLATE_RATIO * max(1, entry.compress_size):
            raise InputError(f"{where}: {entry.compress_size} bytes cannot inflate to {entry.file_size}")
        with self.open(entry) as stream:
            try:
                version = np.lib.format.read_magic(stream)
                reader = {
                    (1, 0): np.lib.format.read_array_header_1_0,
                    (2, 0): np.lib.format.read_array_header_2_0,
                }[version]
                shape, fortran, dtype = reader(stream, max_header_size=_MAX_NPY_HEADER)
            except _DAMAGE as error:
                raise InputError(f"{where}: not a readable npy array: {' '.join(str(error).split())[:120]}") from None
            skip = stream.tell()
        if dtype.hasobject:
            raise InputError(f"{where}: holds pickled Python objects, which are never loaded", hint="save plain arrays")
        if fortran and len(shape) > 1 and sum(n != 1 for n in shape) > 1:
            raise InputError(f"{where}: stored in Fortran order", hint="save numpy.ascontiguousarray(x)")
        descr = dtype.str if dtype.kind != "V" or dtype.names is None else str(dtype)
        expected = int(np.prod(shape, dtype=object)) * dtype.itemsize if shape else dtype.itemsize
        if entry.file_size - skip != expected:
            raise InputError(
                f"{where}: expected {expected} bytes for {dtype} {list(shape)}, found {entry.file_size - skip}"
            )
        offset = None
        if entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 0x1:
            local = bytearray(30)
            pread_into(self.fd, local, entry.header_offset, where)
            name_bytes, extra_bytes = struct.unpack_from("<HH", local, 26)
            offset = entry.header_offset + 30 + name_bytes + extra_bytes + skip
            if offset + expected > self.bytes:
                end = offset + expected
                raise InputError(f"{where}: truncated: expected data up to byte {end}, found {self.bytes}")
        return _Member(entry, descr, tuple(int(n) for n in shape), offset, skip)


class NpzPlane(PlaneSource):
    """A plane in an archive. A compressed one is read forward; going back inflates it from its start again."""

    def __init__(self, archive: _Archive, member: _Member):
        name = member.entry.filename.removesuffix(".npy")
        dtype = _DTYPES.get(member.descr, member.descr)
        geometry = check_plane(archive.path, name, _plain(dtype), member.shape)
        super().__init__(archive.path, name, dtype, *geometry, member.nbytes)
        self._archive, self._member = archive, member
        self._cursor = 0

    def read(self, start: int, stop: int, out=None):
        import torch

        self._check_span(start, stop)
        shape, dtype = (stop - start, self.kv_heads, self.head_dim), torch_dtype(self.dtype)
        if out is None:
            out = torch.empty(shape, dtype=dtype)
        elif tuple(out.shape) != shape or out.dtype != dtype or not out.is_contiguous():
            raise ValueError(f"out: expected a contiguous {dtype} {list(shape)}, found {out.dtype} {list(out.shape)}")
        if not out.numel():
            return out
        row_bytes = self.nbytes // self.tokens
        view = out.view(torch.uint8).numpy()
        if self._member.offset is not None:
            where = f"dump {self.path}: tensor {self.name}"
            pread_into(self._archive.fd, view, self._member.offset + start * row_bytes, where)
        else:
            self._inflate(memoryview(view).cast("B"), self._member.skip + start * row_bytes)
        return out

    def _inflate(self, view: memoryview, position: int) -> None:
        archive, entry, streams = self._archive, self._member.entry, self._archive.streams
        if self.name not in streams or position < self._cursor:
            self._drop_stream()
            streams[self.name] = archive.open(entry)
        stream = streams[self.name]
        scratch = memoryview(bytearray(min(_SKIP, max(1, position - self._cursor))))
        while self._cursor < position:
            step = min(len(scratch), position - self._cursor)
            archive.read_exactly(stream, entry, scratch[:step])
            self._cursor += step
        # zipfile compares the member's checksum when its last byte is read.
        archive.read_exactly(stream, entry, view)
        self._cursor += len(view)
        if self._cursor == entry.file_size:
            self._drop_stream()

    def _drop_stream(self) -> None:
        stream = self._archive.streams.pop(self.name, None)
        if stream is not None:
            stream.close()
        self._cursor = 0


def _plain(dtype: str) -> str:
    """A numpy type string as check_plane names it: `<u2` -> uint16, `<f8` -> float64."""
    import numpy as np

    if dtype in ("bf16", "fp16", "fp32"):
        return dtype
    try:
        return np.dtype(dtype).name
    except TypeError:
        return dtype


def _read_small(archive: _Archive, member: _Member):
    """A whole small member (queries, positions) as a torch tensor: bf16, fp16, fp32 or int64."""
    import numpy as np
    import torch

    with archive.open(member.entry) as stream:
        raw = bytearray(member.entry.file_size)
        archive.read_exactly(stream, member.entry, memoryview(raw))
    flat = np.frombuffer(raw, dtype=np.uint8, offset=member.skip).copy()
    dtype = _DTYPES.get(member.descr)
    if dtype is not None:
        return torch.from_numpy(flat).view(torch_dtype(dtype)).reshape(member.shape)
    return torch.from_numpy(flat.view(member.descr).astype(np.int64)).reshape(member.shape)


def open_npz(path: str, geometry: Geometry | None = None) -> Dump:
    """Open an `.npz` dump. InputError: missing, truncated or foreign archive, object array, wrong dtype or shape."""
    archive = _Archive(path)
    try:
        return _open(archive, geometry)
    except BaseException:
        archive.close()
        raise


def _open(archive: _Archive, geometry: Geometry | None) -> Dump:
    path = archive.path
    found: dict[int, dict[str, _Member]] = {}
    shared = None
    for entry in archive.zip.infolist():
        name = entry.filename.removesuffix(".npy")
        match = _NAME.fullmatch(name)
        if match:
            found.setdefault(int(match[1]), {})[match[2]] = archive.member(entry)
        elif name.startswith("layer_"):
            raise InputError(f"dump {path}: tensor {name}: expected layer_<i>_k, _v, _q or _q_pos")
        elif name == "positions":
            shared = archive.member(entry)
            _check_whole(archive, shared, name)
    layers = []
    for index, members in sorted(found.items()):
        if "k" not in members:
            raise InputError(f"dump {path}: tensor layer_{index}_k is missing, layer {index} has only "
                             f"{', '.join(sorted(members))}")  # fmt: skip
        planes: dict[str, PlaneSource] = {p: NpzPlane(archive, members[p]) for p in ("k", "v") if p in members}
        layer = LayerDump(index, "full", None, None, None, planes, _path=path)
        if "q" in members or "q_pos" in members:
            q, q_pos = members.get("q"), members.get("q_pos")
            check_queries(path, layer, q and q.shape, q_pos and q_pos.shape)
            if q.descr not in _DTYPES:
                raise InputError(f"dump {path}: tensor layer_{index}_q: expected bf16, fp16 or fp32, found {q.descr}")
            _check_whole(archive, q_pos, f"layer_{index}_q_pos")
            layer._queries = lambda q=q, q_pos=q_pos: (_read_small(archive, q), _read_small(archive, q_pos))
        if shared is not None:
            if shared.shape != (layer.tokens,):
                raise InputError(
                    f"dump {path}: tensor positions: expected [{layer.tokens}] for layer {index}, "
                    f"found {list(shared.shape)}"
                )
            layer._positions = lambda: _read_small(archive, shared)
        layers.append(layer)
    layers = finish_layers(path, layers, geometry)
    page_tokens = geometry.page_tokens if geometry else DEFAULT_PAGE_TOKENS
    return Dump(path, "npz", {}, page_tokens, layers, archive.close)


def _check_whole(archive: _Archive, member: _Member, name: str) -> None:
    if member.descr not in ("<i8", "<i4", "<u4", "<u8"):
        raise InputError(f"dump {archive.path}: tensor {name}: expected whole numbers, found {member.descr}")
