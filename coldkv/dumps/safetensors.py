"""Dumps in coldkv's own format (safetensors), read with pread so that resident memory does not grow with the file."""

import json
import os
import re

from coldkv.dumps.model import (
    DEFAULT_PAGE_TOKENS,
    Dump,
    LayerDump,
    PlaneSource,
    check_meta,
    check_plane,
    check_queries,
    finish_layers,
    layer_attention,
)
from coldkv.errors import InputError
from coldkv.formats import FORMATS
from coldkv.geometry import Geometry
from coldkv.safetensors_stream import TensorInfo, open_regular, pread_into, read_header

_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,6})\.(k|v|k\.codes|k\.scales|v\.codes|v\.scales|q|q_pos|positions)")
_VALUES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
_TORCH = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "I8": "int8", "U8": "uint8", "F8_E4M3": "uint8",
          "I32": "int32", "I64": "int64"}  # fmt: skip
# How codes and scales of the hot formats may be spelled in a file; the first spelling is the one written.
CODES_SPELLED = {"bf16": ("BF16",), "fp16": ("F16",), "int8": ("I8",), "fp8": ("U8", "F8_E4M3"),
                 "nvfp4": ("U8",), "iso3": ("U8",)}  # fmt: skip
SCALES_SPELLED = {2: ("F16",), 1: ("U8", "F8_E4M3")}


def read_tensor(fd: int, path: str, name: str, info: TensorInfo, start: int = 0, stop: int | None = None, out=None):
    """Rows `[start, stop)` of the first dimension as a torch tensor; FP8 comes as its uint8 bits."""
    import torch

    if info.dtype not in _TORCH:
        raise InputError(f"dump {path}: tensor {name}: dtype {info.dtype} is not read here")
    stop = info.shape[0] if stop is None else stop
    row_bytes = info.nbytes // info.shape[0] if info.shape[0] else 0
    shape = (stop - start, *info.shape[1:])
    dtype = getattr(torch, _TORCH[info.dtype])
    if out is None:
        out = torch.empty(shape, dtype=dtype)
    elif tuple(out.shape) != shape or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(f"out: expected a contiguous {dtype} {list(shape)}, found {out.dtype} {list(out.shape)}")
    if out.numel():
        where = f"dump {path}: tensor {name}"
        pread_into(fd, out.view(torch.uint8).numpy(), info.begin + start * row_bytes, where)
    return out


class SafetensorsPlane(PlaneSource):
    def __init__(self, file, name: str, info: TensorInfo):
        dtype = _VALUES.get(info.dtype, info.dtype)
        super().__init__(file.path, name, dtype, *check_plane(file.path, name, dtype, info.shape), info.nbytes)
        self._file, self._info = file, info

    def read(self, start: int, stop: int, out=None):
        self._check_span(start, stop)
        return read_tensor(self._file.fd, self.path, self.name, self._info, start, stop, out)


class HotPlaneSource(PlaneSource):
    """Codes `[tokens, kv_heads, lead]` and scales `[tokens, kv_heads, groups]` of a hot tier."""

    def __init__(self, file, base: str, codes: TensorInfo, scales: TensorInfo | None, declared: str | None):
        path, name = file.path, f"{base}.codes"
        where = f"dump {path}: tensor {name}"
        if len(codes.shape) != 3 or 0 in codes.shape:
            raise InputError(f"{where}: expected [tokens, kv_heads, lead], none zero, found {list(codes.shape)}")
        hot = declared or self._infer(where, codes, scales)
        if not isinstance(hot, str) or hot not in FORMATS:
            raise InputError(f"{where}: expected a hot format ({', '.join(FORMATS)}), found {str(hot)[:40]!r}")
        form = FORMATS[hot]
        tokens, heads, lead = codes.shape
        head_dim = lead * 2 if form.code_bits == 4 else lead
        try:
            Geometry(head_dim)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        if codes.dtype not in CODES_SPELLED[hot]:
            raise InputError(f"{where}: expected {CODES_SPELLED[hot][0]} codes for {hot}, found {codes.dtype}")
        if (scales is not None) != bool(form.scale_bytes):
            need = "need" if form.scale_bytes else "have no"
            raise InputError(f"dump {path}: tensor {base}.scales: {hot} codes {need} scales")
        if scales is not None:
            spelled, shape = SCALES_SPELLED[form.scale_bytes], (tokens, heads, form.scales_per_row(head_dim))
            if scales.shape != shape or scales.dtype not in spelled:
                raise InputError(
                    f"dump {path}: tensor {base}.scales: expected {spelled[0]} {list(shape)} for {hot}, "
                    f"found {scales.dtype} {list(scales.shape)}"
                )
        nbytes = codes.nbytes + (scales.nbytes if scales else 0)
        super().__init__(path, name, hot, tokens, heads, head_dim, nbytes)
        self._file, self._codes, self._scales, self._base = file, codes, scales, base

    @property
    def hot_format(self) -> str:
        return self.dtype

    @staticmethod
    def _infer(where: str, codes: TensorInfo, scales: TensorInfo | None) -> str:
        # Four-bit planes of nvfp4 and iso3 look alike, so only unmistakable dtypes are inferred.
        if codes.dtype == "I8":
            return "int8"
        if codes.dtype == "F8_E4M3" or (codes.dtype == "U8" and scales is not None and scales.dtype == "F16"):
            return "fp8"
        if codes.dtype in ("BF16", "F16"):
            return _VALUES[codes.dtype]
        raise InputError(
            f"{where}: hot format of {codes.dtype} codes is not stated",
            hint='add "formats": {"<layer>": {"k": "nvfp4", "v": "iso3"}} to the metadata coldkv.dump',
        )

    def read_hot(self, start: int, stop: int):
        self._check_span(start, stop)
        fd = self._file.fd
        codes = read_tensor(fd, self.path, self.name, self._codes, start, stop)
        if self._scales is None:
            return codes, None
        return codes, read_tensor(fd, self.path, f"{self._base}.scales", self._scales, start, stop)

    def read(self, start: int, stop: int, out=None):
        from coldkv.tiers import HotPlane, dequantize

        codes, scales = self.read_hot(start, stop)
        rows = codes.shape[0] * self.kv_heads
        plane = HotPlane(
            self.dtype,
            codes.reshape(rows, 1, -1),
            None if scales is None else scales.reshape(rows, 1, -1),
            self.head_dim,
        )
        values = dequantize(plane).reshape(stop - start, self.kv_heads, self.head_dim)
        return values if out is None else out.copy_(values)


class _File:
    """The descriptor that all planes of one dump share."""

    def __init__(self, path: str, fd: int):
        self.path, self.fd = path, fd

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    __del__ = close


def _metadata(path: str, metadata: dict[str, str]) -> dict:
    if "coldkv.dump" not in metadata:
        if "coldkv.pool" in metadata:
            raise InputError(f"dump {path}: this is a pool, not a dump", hint="coldkv restore makes a dump of it")
        return {}
    try:
        meta = json.loads(metadata["coldkv.dump"])
    except (ValueError, RecursionError) as error:
        raise InputError(f"dump {path}: metadata coldkv.dump is not valid JSON: {str(error)[:120]}") from None
    return check_meta(path, meta)


def open_safetensors(path: str, geometry: Geometry | None = None) -> Dump:
    """Open a dump in coldkv's own format. Reads the header alone, without torch. InputError on anything malformed."""
    fd, _ = open_regular(path)
    file = _File(path, fd)
    try:
        header = read_header(path, fd)
        meta = _metadata(path, header.metadata)
        parts: dict[int, dict[str, TensorInfo]] = {}
        for name, info in header.tensors.items():
            match = _NAME.fullmatch(name)
            if match:
                parts.setdefault(int(match[1]), {})[match[2]] = info
            elif name.startswith("layers."):
                raise InputError(
                    f"dump {path}: tensor {name}: expected layers.<i>.k, .v, .k.codes, .k.scales, .q, .q_pos "
                    "or .positions"
                )
        shared = header.tensors.get("positions")
        layers = [_layer(file, meta, index, found, shared) for index, found in sorted(parts.items())]
        layers = finish_layers(path, layers, geometry)
        page_tokens = geometry.page_tokens if geometry else meta.get("page_tokens", DEFAULT_PAGE_TOKENS)
        return Dump(path, "safetensors", meta, page_tokens, layers, file.close)
    except BaseException:
        file.close()
        raise


def _layer(file: _File, meta: dict, index: int, found: dict[str, TensorInfo], shared: TensorInfo | None) -> LayerDump:
    path, base = file.path, f"layers.{index}"
    formats = (meta.get("formats") or {}).get(str(index)) or {}
    planes: dict[str, PlaneSource] = {}
    for plane in ("k", "v"):
        name = f"{base}.{plane}"
        if plane in found and f"{plane}.codes" in found:
            raise InputError(f"dump {path}: tensor {name}: given twice, as values and as codes")
        if plane in found:
            planes[plane] = SafetensorsPlane(file, name, found[plane])
        elif f"{plane}.codes" in found:
            declared = formats.get(plane) if isinstance(formats, dict) else None
            codes, scales = found[f"{plane}.codes"], found.get(f"{plane}.scales")
            planes[plane] = HotPlaneSource(file, name, codes, scales, declared)
        elif f"{plane}.scales" in found:
            raise InputError(f"dump {path}: tensor {name}.scales: scales without {name}.codes")
    if "k" not in planes:
        raise InputError(f"dump {path}: tensor {base}.k is missing, layer {index} has only {', '.join(sorted(found))}")
    layer = LayerDump(index=index, planes=planes, _path=path, **layer_attention(path, meta, index))
    if "q" in found or "q_pos" in found:
        q, q_pos = found.get("q"), found.get("q_pos")
        check_queries(path, layer, q and q.shape, q_pos and q_pos.shape)
        if q.dtype not in _VALUES or q_pos.dtype not in ("I64", "I32"):
            raise InputError(
                f"dump {path}: tensor {base}.q: expected bf16, fp16 or fp32 with I64 or I32 positions, "
                f"found {q.dtype} with {q_pos.dtype}"
            )
        layer._queries = lambda: (
            read_tensor(file.fd, path, f"{base}.q", q),
            read_tensor(file.fd, path, f"{base}.q_pos", q_pos),
        )
    own = found.get("positions")
    if own is not None or shared is not None:
        layer._positions = _positions(file, layer, own, shared)
    return layer


def _positions(file: _File, layer: LayerDump, own: TensorInfo | None, shared: TensorInfo | None):
    info = own or shared
    name = f"layers.{layer.index}.positions" if own else "positions"
    where = f"dump {file.path}: tensor {name}"
    if info.dtype not in ("I64", "I32") or len(info.shape) != 1:
        raise InputError(f"{where}: expected I64 or I32 [tokens], found {info.dtype} {list(info.shape)}")
    # A sliding layer that kept only its last tokens shares the tail of the common positions.
    tail = own is None and layer.kind == "sliding" and layer.tokens < info.shape[0]
    if layer.tokens != info.shape[0] and not tail:
        raise InputError(f"{where}: expected {layer.tokens} positions for layer {layer.index}, found {info.shape[0]}")

    def read():
        import torch

        first = info.shape[0] - layer.tokens
        return read_tensor(file.fd, file.path, name, info, first, info.shape[0]).to(torch.int64)

    return read
