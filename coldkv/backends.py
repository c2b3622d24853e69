"""Where the arithmetic runs: `torch` (the oracle), `cpu` (host kernels), `cuda` (device kernels). Same bits on all.

Every backend takes and gives torch tensors. A codec without kernels (`codec.native is None`) runs its torch code on
the backend's device, so third-party codecs work everywhere.
"""

import ctypes
import os
import sys

import torch

from coldkv import tiers
from coldkv.codecs import Codec
from coldkv.errors import InputError, ToolError
from coldkv.formats import FORMATS, format_of
from coldkv.geometry import Geometry
from coldkv.tiers import HotPlane, empty_plane

BACKENDS = ("auto", "cuda", "cpu", "torch")
SUMS = ("sum_xx", "sum_yy", "sum_xy", "sum_dd", "max_abs", "count")
LOAD_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class TorchBackend:
    """The oracle: plain torch code. `device` is where its tensors live."""

    name = "torch"
    parallel_planes = 1  # torch spreads every operation over the cores by itself

    def __init__(self, device: str = "cpu"):
        self.device = torch.device(device)

    def runs(self, codec: Codec) -> str:
        """Name of the backend whose code really runs for this codec."""
        return self.name if codec.native is not None else TorchBackend.name

    def load(self, values: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """bf16/fp16/fp32 `[pages * T, heads, D]` -> fp32 head-pages `[pages * heads, T, D]`; whole pages only."""
        pages = _whole_pages(values, geometry)
        shape = (pages, geometry.page_tokens, geometry.kv_heads, geometry.head_dim)
        return values.to(self.device).reshape(shape).transpose(1, 2).float().reshape(-1, *shape[1::2])

    def quantize(self, fmt: str, values: torch.Tensor) -> HotPlane:
        """fp32 `[n, T, D]`, finite -> plane in hot format `fmt`."""
        return tiers.quantize(fmt, values)

    def dequantize(self, plane: HotPlane) -> torch.Tensor:
        """Hot plane -> fp32 `[n, T, D]`."""
        return tiers.dequantize(plane)

    def encode(self, codec: Codec, plane: HotPlane, geometry: Geometry) -> tuple[torch.Tensor, torch.Tensor]:
        """Hot plane -> (slots uint8 `[n, slot_bytes]`, valid int32 `[n]`); valid 0 = the page stays hot.

        Raises InputError when the codec does not take the plane's format.
        """
        codec.require_fit(plane.format)
        return codec.encode_torch(plane, geometry)

    def decode(self, codec: Codec, slots: torch.Tensor, geometry: Geometry, fmt: str) -> torch.Tensor:
        """Slots -> fp32 `[n, T, D]`. Raises InputError naming the first slot a reader must refuse."""
        _refuse_bad_slots(codec, slots, geometry, fmt)
        return codec.decode_torch(slots, geometry, fmt)

    def restore(self, codec: Codec, slots: torch.Tensor, geometry: Geometry, fmt: str) -> HotPlane:
        """Slots -> hot plane in `codec.restored_format(fmt)`. Raises InputError like `decode`."""
        _refuse_bad_slots(codec, slots, geometry, fmt)
        return codec.restore_torch(slots, geometry, fmt)

    def lengths(self, codec: Codec, plane: HotPlane, geometry: Geometry) -> torch.Tensor:
        """Slot bytes that each head-page needs in a sized codec, int32 `[n]`; INT32_MAX: no size would do."""
        codec.require_fit(plane.format)
        return codec.lengths_torch(plane, geometry)

    def stats(self, x: torch.Tensor, y: torch.Tensor, kv_heads: int, *, channels: bool = False):
        """Errors of y against x, both fp32 `[pages * kv_heads, T, D]`.

        Returns (fp64 `[kv_heads, 6]` in the order SUMS, fp64 `[kv_heads, D]` sums of x or None).
        """
        a = x.reshape(-1, kv_heads, *x.shape[1:]).double()
        b = y.reshape(-1, kv_heads, *y.shape[1:]).double()
        diff = a - b
        over = (0, 2, 3)
        top = diff.abs().amax(dim=over) if a.numel() else torch.zeros(kv_heads, dtype=torch.float64, device=a.device)
        count = torch.full_like(top, a.numel() / kv_heads)
        sums = [(a * a).sum(over), (b * b).sum(over), (a * b).sum(over), (diff * diff).sum(over), top, count]
        return torch.stack(sums, dim=1), a.sum((0, 2)) if channels else None


class _NativeBackend(TorchBackend):
    """Calls kernels through their C interface; subclasses say which library and what the last argument is.

    `out`: where to write, contiguous and of the shape that would be returned; a new tensor, plane or pair by default.
    """

    _library = None

    def _tail(self):
        raise NotImplementedError

    def _call(self, stem: str, *args) -> None:
        pointers = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in args]
        self._library.call(stem, *pointers, self._tail())

    def _empty(self, shape, dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _mine(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device).contiguous()

    def _desc(self, fmt: str, n: int, geometry: Geometry):
        from coldkv.native import PlaneDesc

        desc = PlaneDesc(FORMATS[fmt].ident, geometry.page_tokens, geometry.head_dim, 0, n)
        return ctypes.byref(desc)

    def load(self, values, geometry, *, out=None):
        pages = _whole_pages(values, geometry)
        if values.dtype not in LOAD_DTYPES:
            raise InputError(f"load: expected bf16, fp16 or fp32 values, found {values.dtype}")
        values = values.to(self.device)
        if values.stride(-1) != 1:
            values = values.contiguous()
        shape = (pages * geometry.kv_heads, geometry.page_tokens, geometry.head_dim)
        out = self._empty(shape, torch.float32) if out is None else out
        self._call(
            "load", ctypes.c_int32(LOAD_DTYPES[values.dtype]), values, ctypes.c_int64(values.stride(0)),
            ctypes.c_int64(values.stride(1)), ctypes.c_int64(pages), ctypes.c_int32(geometry.kv_heads),
            ctypes.c_int32(geometry.page_tokens), ctypes.c_int32(geometry.head_dim), out,
        )  # fmt: skip
        return out

    def quantize(self, fmt, values, *, out=None):
        format_of(fmt)
        if values.dtype != torch.float32 or values.dim() != 3:
            found = f"{values.dtype} {tuple(values.shape)}"
            raise InputError(f"quantize: expected fp32 [n, tokens, head_dim], found {found}")
        n, page_tokens, head_dim = values.shape
        geometry = Geometry(head_dim, page_tokens)
        plane = empty_plane(fmt, n, geometry, self.device) if out is None else out
        self._call("quantize", self._desc(fmt, n, geometry), self._mine(values), plane.codes, _or_null(plane.scales))
        return plane

    def dequantize(self, plane, *, out=None):
        plane = self._own_plane(plane)
        shape = (plane.head_pages, plane.page_tokens, plane.head_dim)
        out = self._empty(shape, torch.float32) if out is None else out
        desc = self._desc(plane.format, plane.head_pages, Geometry(plane.head_dim, plane.page_tokens))
        self._call("dequantize", desc, plane.codes, _or_null(plane.scales), out)
        return out

    def encode(self, codec, plane, geometry, *, out=None):
        codec.require_fit(plane.format)
        plane = self._own_plane(plane)
        if codec.inner is not None:
            return self.encode(codec.inner, codec.centered(self.dequantize(plane)), geometry, out=out)
        if codec.native is None:
            return codec.encode_torch(plane, geometry)
        stride = codec.slot_bytes(geometry, plane.format)
        n = plane.head_pages
        slots, valid = (self._empty((n, stride), torch.uint8), self._empty(n, torch.int32)) if out is None else out
        desc = self._desc(plane.format, n, geometry)
        stem, params = f"{codec.native}_encode", codec.native_params(geometry, plane.format, self.device)
        self._call(stem, desc, plane.codes, _or_null(plane.scales), slots, ctypes.c_int64(stride), valid, *params)
        return slots, valid

    def decode(self, codec, slots, geometry, fmt, *, out=None):
        codec.require_fit(fmt)
        slots = self._slots(codec, slots, geometry, fmt)
        if codec.inner is not None:
            values = codec.uncentered(self.decode(codec.inner, slots, geometry, "bf16"))
            return values if out is None else out.copy_(values)
        if codec.native is None:
            return super().decode(codec, slots, geometry, fmt)
        shape = (slots.shape[0], geometry.page_tokens, geometry.head_dim)
        out = self._empty(shape, torch.float32) if out is None else out
        self._read(codec, "decode", slots, geometry, fmt, out)
        return out

    def restore(self, codec, slots, geometry, fmt, *, out=None):
        codec.require_fit(fmt)
        slots = self._slots(codec, slots, geometry, fmt)
        if codec.inner is not None:
            values = self.decode(codec, slots, geometry, fmt).to(torch.bfloat16)
            if out is None:
                return HotPlane("bf16", values, None, geometry.head_dim)
            out.codes.copy_(values)
            return out
        if codec.native is None:
            return super().restore(codec, slots, geometry, fmt)
        restored = codec.restored_format(fmt)
        plane = empty_plane(restored, slots.shape[0], geometry, self.device) if out is None else out
        self._read(codec, "restore", slots, geometry, fmt, plane.codes, _or_null(plane.scales))
        return plane

    def lengths(self, codec, plane, geometry, *, out=None):
        codec.require_fit(plane.format)
        plane = self._own_plane(plane)
        if codec.inner is not None:
            return self.lengths(codec.inner, codec.centered(self.dequantize(plane)), geometry, out=out)
        if codec.native is None:
            return codec.lengths_torch(plane, geometry)
        found = self._empty(plane.head_pages, torch.int32) if out is None else out
        desc = self._desc(plane.format, plane.head_pages, geometry)
        params = codec.native_params(geometry, plane.format, self.device)
        self._call(f"{codec.native}_lengths", desc, plane.codes, _or_null(plane.scales), found, *params)
        return found

    def stats(self, x, y, kv_heads, *, channels=False):
        if x.shape != y.shape or x.dim() != 3 or x.shape[0] % kv_heads:
            found = f"{tuple(x.shape)}, {tuple(y.shape)}"
            raise InputError(f"stats: expected two [pages * {kv_heads}, T, D], found {found}")
        n, rows, head_dim = x.shape
        out = torch.zeros((kv_heads, len(SUMS)), dtype=torch.float64, device=self.device)
        sums = torch.zeros((kv_heads, head_dim), dtype=torch.float64, device=self.device) if channels else None
        self._call(
            "stats", ctypes.c_int64(n), ctypes.c_int32(kv_heads), ctypes.c_int32(rows), ctypes.c_int32(head_dim),
            self._mine(x), self._mine(y), out, _or_null(sums),
        )  # fmt: skip
        return out, sums

    def _own_plane(self, plane: HotPlane) -> HotPlane:
        scales = None if plane.scales is None else self._mine(plane.scales)
        return HotPlane(plane.format, self._mine(plane.codes), scales, plane.head_dim)

    def _slots(self, codec: Codec, slots: torch.Tensor, geometry: Geometry, fmt: str) -> torch.Tensor:
        want = codec.slot_bytes(geometry, fmt)
        if slots.dtype != torch.uint8 or slots.dim() != 2 or slots.shape[1] != want:
            found = f"{slots.dtype} {tuple(slots.shape)}"
            raise InputError(f"codec {codec.id}: expected slots uint8 [n, {want}], found {found}")
        return self._mine(slots)

    def _read(self, codec: Codec, what: str, slots: torch.Tensor, geometry: Geometry, fmt: str, *out) -> None:
        from coldkv.native import SLOT_ERROR, KernelError

        desc = self._desc(fmt, slots.shape[0], geometry)
        params = codec.native_params(geometry, fmt, self.device)
        try:
            self._call(f"{codec.native}_{what}", desc, slots, ctypes.c_int64(slots.shape[1]), *out, *params)
        except KernelError as error:
            if error.code == SLOT_ERROR:
                _refuse_bad_slots(codec, slots, geometry, fmt)
                codec.decode_torch(slots.cpu(), geometry, fmt)  # no header is bad: the oracle names the stream
            raise


class CpuBackend(_NativeBackend):
    """Host kernels. `threads` 0 means all; results do not depend on it. Raises ToolError without a C++ compiler."""

    name = "cpu"

    @property
    def parallel_planes(self) -> int:
        """Planes worth working on side by side: as many as cores where one call uses one thread."""
        return available_cores() if self.threads == 1 else 1

    def __init__(self, threads: int = 0):
        super().__init__("cpu")
        from coldkv.native import host_library

        self.threads = threads
        self._library = host_library()

    def _tail(self):
        return ctypes.c_int(self.threads)


class CudaBackend(_NativeBackend):
    """Device kernels on torch's current CUDA stream. Raises ToolError without nvcc or a GPU.

    Kernels only launch. `decode` and `restore` copy the slots' headers to the host first, which waits for the stream;
    with `check_headers` False they do not, and a slot that cannot be read turns into NaN without an error.
    """

    name = "cuda"
    check_headers = True

    def __init__(self):
        if not torch.cuda.is_available():
            raise ToolError("backend cuda: no CUDA device is available to torch", hint="use --backend cpu")
        super().__init__("cuda")
        from coldkv.native_cuda import cuda_library

        self._library = cuda_library()

    def _tail(self):
        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def _mine(self, tensor):
        """Kernels need buffers at multiples of 16 bytes: a slice that begins elsewhere is copied."""
        tensor = super()._mine(tensor)
        return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()

    def _read(self, codec, what, slots, geometry, fmt, *out):
        # Kernels cannot report a bad slot without synchronising; they write NaN. Look at the headers first.
        if self.check_headers and len(slots):
            heads = slots[:, : codec.head_bytes].cpu().numpy()
            if codec.odd_heads(heads, geometry, slots.shape[1]):
                _refuse_bad_slots(codec, slots, geometry, fmt)
        super()._read(codec, what, slots, geometry, fmt, *out)


def get_backend(name: str = "auto", *, threads: int = 0):
    """The backend `name`; "auto" = cuda if usable, else cpu, else torch with a line on stderr.

    Raises InputError for an unknown name, ToolError when a named backend cannot run here.
    """
    if name == "torch":
        return TorchBackend()
    if name == "cpu":
        return CpuBackend(threads)
    if name == "cuda":
        return CudaBackend()
    if name != "auto":
        raise InputError(f"backend: expected one of {', '.join(BACKENDS)}, found {name!r}")
    if torch.cuda.is_available():
        try:
            return CudaBackend()
        except ToolError as error:
            print(f"coldkv: cuda backend not usable ({error.one_line()}); trying cpu", file=sys.stderr)
    try:
        return CpuBackend(threads)
    except ToolError as error:
        print(f"coldkv: no compiled kernels ({error.one_line()}); using the slower torch backend", file=sys.stderr)
        return TorchBackend()


def fitted(codec: Codec, plane: HotPlane, geometry: Geometry, backend) -> Codec:
    """`codec`; one that needs a stride with a stride for these head-pages alone, all of which it then holds."""
    if not codec.needs_stride:
        return codec
    lengths = backend.lengths(codec, plane, geometry).cpu().numpy()
    any_price = 1 << 40
    return codec.with_stride(codec.choose_stride(lengths, geometry, plane.format, overflow_bytes=any_price))


def available_cores() -> int:
    """Cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _whole_pages(values: torch.Tensor, geometry: Geometry) -> int:
    if values.dim() != 3 or values.shape[1:] != (geometry.kv_heads, geometry.head_dim):
        want = f"[tokens, {geometry.kv_heads}, {geometry.head_dim}]"
        raise InputError(f"load: expected {want}, found {list(values.shape)}")
    pages, rest = divmod(values.shape[0], geometry.page_tokens)
    if rest:
        raise InputError(f"load: expected whole pages of {geometry.page_tokens} tokens, found {values.shape[0]} tokens")
    return pages


def _or_null(tensor: torch.Tensor | None):
    return ctypes.c_void_p(None) if tensor is None else tensor


def _refuse_bad_slots(codec: Codec, slots: torch.Tensor, geometry: Geometry, fmt: str) -> None:
    problems = codec.check_slots(slots.cpu().numpy(), geometry, fmt)
    if problems:
        index, text = problems[0]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InputError(f"codec {codec.id}: slot {index}: {text}{more}")
