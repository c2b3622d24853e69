"""The `.ckv` container (docs/pool-format.md): written once in a stream, read by row ranges. Torch-free.

Every byte of the file is under a checksum: tensor data under one CRC32 per tensor, everything before it under the
header's own, which is taken with its eight digits read as zeros.
"""

import json
import mmap
import os
import zlib
from contextlib import ExitStack

import numpy as np

from coldkv.atomic import atomic_path
from coldkv.errors import InputError
from coldkv.pool.layout import (
    CRC_KEY,
    METADATA_KEY,
    POOL_SUFFIX,
    POOL_VERSION,
    LayerLayout,
    layer_from_json,
)
from coldkv.safetensors_stream import StreamWriter, open_regular, pread_into, read_header

# bf16 has no numpy dtype: its words are read as u16
NUMPY_DTYPE = {
    "U8": np.dtype("u1"), "I8": np.dtype("i1"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
    "I32": np.dtype("<i4"), "U32": np.dtype("<u4"), "F32": np.dtype("<f4"), "I64": np.dtype("<i8"),
}  # fmt: skip
CRC_CHUNK_BYTES = 4 << 20
_NO_CRC = "0" * 8
_CRC_FIELD = f'"{CRC_KEY}":"'.encode()


def as_bytes(array: np.ndarray) -> memoryview:
    """The bytes of a numpy array in C order."""
    array = np.ascontiguousarray(array)
    return memoryview(array).cast("B") if array.nbytes else memoryview(b"")


def record_crcs(records: np.ndarray) -> np.ndarray:
    """CRC32 of each row of uint8 `[n, bytes]` -> uint32 `[n]`."""
    records = np.ascontiguousarray(records)
    return np.fromiter((zlib.crc32(row) for row in records), dtype=np.uint32, count=len(records))


def head_page_crcs(codes: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    """CRC32 of each head-page, codes `[n, T, lead]` and then scales `[n, T, groups]` -> uint32 `[n]`."""
    found = np.empty(len(codes), dtype=np.uint32)
    codes = np.ascontiguousarray(codes)
    scales = None if scales is None else np.ascontiguousarray(scales)
    for i in range(len(codes)):
        crc = zlib.crc32(as_bytes(codes[i]))
        found[i] = crc if scales is None else zlib.crc32(as_bytes(scales[i]), crc)
    return found


def header_crc(header: bytes) -> str | None:
    """CRC32 as 8 hex digits of all bytes before the data (length word included), the CRC field read as zeros;
    None if that field is not there."""
    # quotes inside a JSON string are escaped, so this byte sequence can only be the key itself
    at = header.find(_CRC_FIELD)
    if at < 0:
        return None
    at += len(_CRC_FIELD)
    return f"{zlib.crc32(header[:at] + _NO_CRC.encode() + header[at + 8 :]):08x}"


class PoolWriter:
    """Write a pool file atomically, tensor data in chunks and in any order of tensors.

    `layers`: final layouts; `meta`: JSON-able keys beside "version", "layers" and "crc32" (table, policy, dump, ...).
    `meta` may change until the writer is left, as long as its JSON keeps its length. Use as a context manager; an
    exception leaves no file (or the older one). ValueError on missing or surplus data, OSError on a full disk.
    """

    def __init__(self, path: str | os.PathLike, layers: list[LayerLayout], meta: dict):
        self.path, self.layers, self.meta = os.fspath(path), layers, meta
        if not self.path.endswith(POOL_SUFFIX):
            raise InputError(f"output {self.path}: expected a name ending in {POOL_SUFFIX}")
        self._specs = [spec for layer in layers for spec in layer.tensors()]
        self._crc = {name: 0 for name, _, _ in self._specs}
        self._stack = ExitStack()

    def _metadata(self, crc: str, crcs: dict[str, str]) -> dict[str, str]:
        document = {
            "version": POOL_VERSION,
            **self.meta,
            "layers": [layer.to_json() for layer in self.layers],
            "crc32": crcs,
        }
        return {CRC_KEY: crc, METADATA_KEY: json.dumps(document, separators=(",", ":"), allow_nan=False)}

    def __enter__(self) -> "PoolWriter":
        with ExitStack() as stack:
            self._temporary = stack.enter_context(atomic_path(self.path))
            placeholder = self._metadata(_NO_CRC, dict.fromkeys(self._crc, _NO_CRC))
            self._writer = stack.enter_context(StreamWriter(self._temporary, self._specs, placeholder))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind, value, traceback):
        with self._stack:
            if kind is None:
                self._seal()
                return None
            return self._stack.__exit__(kind, value, traceback)

    def _seal(self) -> None:
        crcs = {name: f"{crc:08x}" for name, crc in self._crc.items()}
        self._writer.set_metadata(self._metadata(_NO_CRC, crcs))
        with open(self._temporary, "rb") as file:
            length = file.read(8)
            header = length + file.read(int.from_bytes(length, "little"))
        self._writer.set_metadata(self._metadata(header_crc(header), crcs))

    def write(self, name: str, values: np.ndarray) -> None:
        """Append a numpy array of the tensor's dtype to tensor `name`."""
        data = as_bytes(values)
        self._writer.write(name, data)
        self._crc[name] = zlib.crc32(data, self._crc[name])


def looks_like_pool(path: str | os.PathLike) -> bool:
    """Whether a file starts as a pool does, damaged or not: one of the metadata keys is near its start."""
    with open(path, "rb") as file:
        return METADATA_KEY.encode() in file.read(4096)


class PoolFile:
    """An open pool: `meta` (the JSON document), `layers`, and reads of tensors by rows.

    Opening checks the container, the header's CRC, the version, every layer's metadata, and that the file has
    exactly the tensors, dtypes, shapes and bytes that the metadata asks for; InputError otherwise. Tensor data is
    checked where it is read. Use as a context manager.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = os.fspath(path)
        self._fd, self.file_bytes = open_regular(self.path, "pool")
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        where = f"pool {self.path}"
        header = read_header(self.path, self._fd, "pool")
        if METADATA_KEY not in header.metadata:
            if CRC_KEY in header.metadata:
                raise InputError(f"{where}: header: {METADATA_KEY} is missing: damaged")
            if "coldkv.dump" in header.metadata or any(name.endswith(".k") for name in header.tensors):
                raise InputError(f"{where}: this is a dump, not a pool", hint="coldkv pack makes a pool of it")
            raise InputError(f"{where}: header: expected metadata {METADATA_KEY}, found none")
        try:
            self.meta = json.loads(header.metadata[METADATA_KEY])
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: header: {METADATA_KEY} is not valid JSON: {str(error)[:120]}") from None
        if not isinstance(self.meta, dict):
            raise InputError(f"{where}: header: {METADATA_KEY}: expected an object")
        version = self.meta.get("version")
        if type(version) is not int or version != POOL_VERSION:
            raise InputError(
                f"{where}: header: expected version {POOL_VERSION}, found {str(version)[:40]}",
                hint="a newer coldkv may have written it, or its header is damaged",
            )
        raw = bytearray(header.data_start)
        pread_into(self._fd, raw, 0, where)
        expected, found = header_crc(bytes(raw)), header.metadata.get(CRC_KEY)
        if expected is None or found != expected:
            raise InputError(f"{where}: header: CRC32: expected {expected}, found {str(found)[:40]}")
        self._tensors = header.tensors
        self._check_layers(where)

    def _check_layers(self, where: str) -> None:
        entries, crcs = self.meta.get("layers"), self.meta.get("crc32")
        if not isinstance(entries, list) or not entries or not isinstance(crcs, dict):
            raise InputError(f"{where}: header: expected a list of layers and an object crc32")
        if not isinstance(self.meta.get("dump"), dict) or not isinstance(self.meta["dump"].get("meta"), dict):
            raise InputError(f"{where}: header: expected an object dump with an object meta")
        self.layers = [layer_from_json(entry, f"{where}: header") for entry in entries]
        numbers = [layer.index for layer in self.layers]
        if numbers != sorted(set(numbers)):
            raise InputError(f"{where}: header: expected layers in ascending order, each once, found {numbers}")
        expected = {name: (dtype, shape) for layer in self.layers for name, dtype, shape in layer.tensors()}
        for name in sorted(expected.keys() | self._tensors.keys()):
            want = "none" if name not in expected else f"{expected[name][0]} {list(expected[name][1])}"
            info = self._tensors.get(name)
            have = "none" if info is None else f"{info.dtype} {list(info.shape)}"
            if want != have:
                raise InputError(f"{where}: tensor {name}: expected {want}, found {have}")
            if not isinstance(crcs.get(name), str):
                raise InputError(f"{where}: tensor {name}: expected a CRC32 in the header, found none")

    def layer(self, index: int) -> LayerLayout:
        for layer in self.layers:
            if layer.index == index:
                return layer
        raise InputError(f"pool {self.path}: no layer {index}; layers: {[x.index for x in self.layers]}")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor_names(self) -> list[str]:
        """Names of all tensors in file order."""
        return list(self._tensors)

    def nbytes(self, name: str) -> int:
        return self._tensors[name].nbytes

    def span(self, name: str) -> tuple[int, int]:
        """Byte range `[begin, end)` of a tensor, from the start of the file."""
        info = self._tensors[name]
        return info.begin, info.end

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows `[start, stop)` of the first dimension, copied out of the file so that no pages of it stay resident."""
        info = self._tensors[name]
        if not 0 <= start <= stop <= info.shape[0]:
            raise IndexError(f"{name}: rows {start}:{stop} outside 0:{info.shape[0]}")
        out = np.empty((stop - start, *info.shape[1:]), dtype=NUMPY_DTYPE[info.dtype])
        if out.nbytes:
            row_bytes = info.nbytes // info.shape[0]
            pread_into(self._fd, out, info.begin + start * row_bytes, f"pool {self.path}: tensor {name}")
        return out

    def array(self, name: str) -> np.ndarray:
        """A whole tensor as a read-only view of the file (memory-mapped, unchecked)."""
        info = self._tensors[name]
        dtype = NUMPY_DTYPE[info.dtype]
        if not info.nbytes:
            return np.empty(info.shape, dtype=dtype)
        first = info.begin - info.begin % mmap.ALLOCATIONGRANULARITY
        view = mmap.mmap(self._fd, info.end - first, access=mmap.ACCESS_READ, offset=first)
        return np.frombuffer(view, np.uint8)[info.begin - first :].view(dtype).reshape(info.shape)

    def crc_problem(self, name: str) -> str | None:
        """Read a whole tensor in chunks; None, or what is wrong with its CRC32."""
        begin, end = self.span(name)
        buffer = bytearray(min(CRC_CHUNK_BYTES, end - begin))
        crc = 0
        for at in range(begin, end, CRC_CHUNK_BYTES):
            part = memoryview(buffer)[: min(CRC_CHUNK_BYTES, end - at)]
            pread_into(self._fd, part, at, f"pool {self.path}: tensor {name}")
            crc = zlib.crc32(part, crc)
        expected = self.meta["crc32"][name]
        return None if f"{crc:08x}" == expected else f"CRC32: expected {expected[:40]}, found {crc:08x}"

    def checked(self, name: str) -> np.ndarray:
        """A whole (small) tensor whose CRC32 holds; InputError otherwise."""
        found = self.rows(name, 0, self._tensors[name].shape[0])
        crc, expected = f"{zlib.crc32(as_bytes(found)):08x}", self.meta["crc32"][name]
        if crc != expected:
            raise InputError(
                f"pool {self.path}: tensor {name}: CRC32: expected {expected[:40]}, found {crc}",
                hint="coldkv verify lists all damage",
            )
        return found

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "PoolFile":
        return self

    def __exit__(self, *exc) -> None:
        self.close()
