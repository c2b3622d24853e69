"""The bytes of a live pool on one device: hot planes, slot regions with validity words, host replicas.

Pages go through the backend in batches, one call per layer, plane and chunk; a chunk is small enough on the CPU that
what is gathered for a kernel and what it gives back stay in the cache.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from coldkv.errors import InputError
from coldkv.formats import FORMATS
from coldkv.pool.faults import PoolError
from coldkv.pool.layout import PlaneLayout, SlotLayout, place
from coldkv.pool.payload import NoPayload
from coldkv.tiers import HotPlane, empty_plane

CPU_CHUNK_BYTES = 2 << 20
DEVICE_CHUNK_BYTES = 64 << 20
HOST_SEGMENT_PAGES = 64  # host memory is taken as replicas come, this many pages at a time


class Regions(NoPayload):
    """Hot planes `[pages * heads, T, .]` per layer and plane, slots uint8 `[slots, pitch]` and validity int32
    `[slots, planes, heads]` per layer, on the backend's device.

    A plane without a codec is carried: its slot record holds the hot codes and then the hot scales, exactly. The codecs
    must have their strides. `chunk_bytes`: hot bytes per backend call.
    """

    def __init__(
        self, layers: Sequence[SlotLayout], pages: int, slots: int, backend, *, chunk_bytes: int | None = None
    ):
        self.layers, self.backend, self.device = list(layers), backend, backend.device
        for layer in self.layers:
            for plane in layer.planes.values():
                want = record_bytes(layer, plane)
                if plane.stride != want:
                    where = place(layer.index, plane.name)
                    raise InputError(f"pool: {where}: expected a stride of {want} bytes, found {plane.stride}")
        on_host = self.device.type == "cpu"
        self.chunk_bytes = chunk_bytes or (CPU_CHUNK_BYTES if on_host else DEVICE_CHUNK_BYTES)
        self.hot = [{n: self._zeros(layer, plane, pages) for n, plane in layer.planes.items()} for layer in self.layers]
        self.slots = [torch.zeros((slots, la.pitch), dtype=torch.uint8, device=self.device) for la in self.layers]
        self.valid = [
            torch.zeros((slots, len(la.planes), la.geometry.kv_heads), dtype=torch.int32, device=self.device)
            for la in self.layers
        ]
        self._host: list[list[dict[str, HotPlane]]] = []  # segment -> layer -> plane
        self._scratch: dict[tuple, object] = {}

    def _zeros(self, layer: SlotLayout, plane: PlaneLayout, pages: int, device=None) -> HotPlane:
        made = empty_plane(plane.format, pages * layer.geometry.kv_heads, layer.geometry, device or self.device)
        for tensor in _tensors(made):
            tensor.zero_()  # also touches the memory, so that no later write waits for the system to find it
        return made

    @property
    def device_bytes(self) -> int:
        """Bytes of hot planes, slots and validity words."""
        hot = sum(plane.nbytes for layer in self.hot for plane in layer.values())
        return hot + sum(t.nbytes for t in (*self.slots, *self.valid))

    # -- the payload of a pool

    def pack(self, pages, slots):
        held = np.ones(len(pages), dtype=bool)
        for number, layer, name, plane, part in self._work(len(pages)):
            target = self.slots[number]
            offset, heads = layer.plane_offset(name), layer.geometry.kv_heads
            hot = self._gather(number, name, pages[part])
            if plane.codec is None:
                records, valid = _carried(hot, heads), None
            else:
                records, valid = self._encode(plane, layer, hot)
            columns = target[:, offset : offset + heads * plane.stride]
            _scatter(columns, slots[part], records.reshape(len(hot.codes) // heads, -1))
            words = torch.ones_like(hot.codes[:, 0, 0], dtype=torch.int32) if valid is None else valid
            words = words.reshape(-1, heads)
            planes = list(layer.planes)
            _scatter(self.valid[number][:, planes.index(name)], slots[part], words)
            held[part] &= (words != 0).all(dim=1).cpu().numpy()
        return held

    def unpack(self, slots, pages):
        self.require_valid(slots)
        for number, layer, name, plane, part in self._work(len(pages)):
            records = self._records(number, name, slots[part])
            target, heads = self.hot[number][name], layer.geometry.kv_heads
            direct = _in_a_row(pages[part])  # then no copy is needed after the kernel
            first = int(pages[part][0]) * heads
            into = target[first : first + len(records)] if direct else self._buffer(layer, plane, len(records))
            hot = _uncarried(records, into) if plane.codec is None else self._restore(plane, layer, records, into)
            if hot is not into or not direct:
                self._put(target, hot, pages[part], heads)

    def copy(self, source, target):
        for number, layer, name, _, part in self._work(len(source)):
            hot = self._gather(number, name, source[part])
            self._put(self.hot[number][name], hot, target[part], layer.geometry.kv_heads)

    def to_host(self, pages, replicas):
        self._exchange(pages, replicas, to_host=True)

    def from_host(self, replicas, pages):
        self._exchange(pages, replicas, to_host=False)

    def drop(self, slots):
        for valid in self.valid:
            valid[torch.from_numpy(slots.astype(np.int64)).to(self.device)] = 0

    # -- reading and writing

    def write(self, number: int, name: str, pages: np.ndarray, values: HotPlane) -> None:
        """Put hot head-pages `[n * heads, T, .]` of layer `self.layers[number]`, plane `name` into physical `pages`."""
        self._put(self.hot[number][name], values, pages, self.layers[number].geometry.kv_heads)

    def write_tokens(self, number: int, name: str, page: int, first: int, values: HotPlane) -> None:
        """Put tokens `[first, first + t)` of one page: `values` with codes and scales `[heads, t, .]`."""
        heads = self.layers[number].geometry.kv_heads
        stop = first + values.page_tokens
        for target, source in zip(_tensors(self.hot[number][name]), _tensors(values), strict=True):
            target[page * heads : (page + 1) * heads, first:stop] = source

    def values(self, number: int, name: str, entries: np.ndarray) -> torch.Tensor:
        """What attention reads at block table `entries` (none unmapped): fp32 `[n, heads, T, D]`, hot pages
        dequantized, cold ones decoded. PoolError for an invalid slot."""
        layer = self.layers[number]
        plane, heads = layer.planes[name], layer.geometry.kv_heads
        shape = (heads, layer.geometry.page_tokens, layer.geometry.head_dim)
        found = torch.empty((len(entries), *shape), dtype=torch.float32, device=self.device)
        cold = np.flatnonzero(entries < 0)
        hot = np.flatnonzero(entries >= 0)
        if len(hot):
            values = self.backend.dequantize(self._gather(number, name, entries[hot]))
            found[torch.from_numpy(hot).to(self.device)] = values.reshape(-1, *shape)
        if len(cold):
            slots = -2 - entries[cold]
            self.require_valid(slots)
            records = self._records(number, name, slots)
            if plane.codec is None:
                values = self.backend.dequantize(_uncarried(records, self._buffer(layer, plane, len(records))))
            else:
                values = self.backend.decode(plane.codec, records, layer.geometry, plane.format)
            found[torch.from_numpy(cold).to(self.device)] = values.reshape(-1, *shape)
        return found

    def require_valid(self, slots: np.ndarray) -> None:
        """PoolError unless every validity word of `slots`, in all layers, planes and heads, is 1."""
        index = torch.from_numpy(slots.astype(np.int64)).to(self.device)
        for layer, valid in zip(self.layers, self.valid, strict=True):
            words = valid[index]
            if not bool((words == 1).all()):
                at, plane, head = (words != 1).nonzero()[0].tolist()
                where = place(layer.index, list(layer.planes)[plane], head=head)
                found = int(words[at, plane, head])
                raise PoolError(f"pool: {where}: slot {slots[at]}: expected validity 1, found {found}")

    # -- inside

    def _work(self, n: int) -> Iterator[tuple[int, SlotLayout, str, PlaneLayout, slice]]:
        """Layer by layer and plane by plane, `n` pages in chunks: (number, layer, name, plane, slice of the pages)."""
        for number, layer in enumerate(self.layers):
            for name, plane in layer.planes.items():
                page_bytes = layer.geometry.kv_heads * FORMATS[plane.format].bytes(layer.geometry)
                step = max(1, self.chunk_bytes // page_bytes)
                for start in range(0, n, step):
                    yield number, layer, name, plane, slice(start, min(start + step, n))

    def _buffer(self, layer: SlotLayout, plane: PlaneLayout, head_pages: int) -> HotPlane:
        key = ("plane", layer.geometry, plane.format, head_pages)
        if key not in self._scratch:
            self._scratch[key] = empty_plane(plane.format, head_pages, layer.geometry, self.device)
        return self._scratch[key]

    def _bytes(self, what: str, *shape: int, dtype=torch.uint8) -> torch.Tensor:
        key = (what, shape)
        if key not in self._scratch:
            self._scratch[key] = torch.empty(shape, dtype=dtype, device=self.device)
        return self._scratch[key]

    def _gather(self, number: int, name: str, pages: np.ndarray) -> HotPlane:
        """Head-pages of physical `pages`: a view where they lie together, else copied into a scratch plane."""
        layer = self.layers[number]
        heads, hot = layer.geometry.kv_heads, self.hot[number][name]
        if _in_a_row(pages):
            return hot[int(pages[0]) * heads : (int(pages[-1]) + 1) * heads]
        found = self._buffer(layer, layer.planes[name], len(pages) * heads)
        for target, source in zip(_tensors(found), _tensors(hot), strict=True):
            _collect(target.unflatten(0, (-1, heads)), source.unflatten(0, (-1, heads)), pages)
        return found

    def _put(self, target: HotPlane, values: HotPlane, pages: np.ndarray, heads: int) -> None:
        for into, source in zip(_tensors(target), _tensors(values), strict=True):
            _scatter(into.unflatten(0, (-1, heads)), pages, source.unflatten(0, (-1, heads)))

    def _records(self, number: int, name: str, slots: np.ndarray) -> torch.Tensor:
        """Records of one plane of `slots`, uint8 `[n * heads, stride]`."""
        layer = self.layers[number]
        stride, heads, at = layer.planes[name].stride, layer.geometry.kv_heads, layer.plane_offset(name)
        found = self._bytes("records", len(slots), heads * stride)
        _collect(found, self.slots[number][:, at : at + heads * stride], slots)
        return found.reshape(-1, stride)

    def _encode(self, plane: PlaneLayout, layer: SlotLayout, hot: HotPlane) -> tuple[torch.Tensor, torch.Tensor]:
        if self.backend.name == "torch":
            return self.backend.encode(plane.codec, hot, layer.geometry)
        n = hot.head_pages
        out = self._bytes("slots", n, plane.stride), self._bytes("valid", n, dtype=torch.int32)
        return self.backend.encode(plane.codec, hot, layer.geometry, out=out)

    def _restore(self, plane: PlaneLayout, layer: SlotLayout, records: torch.Tensor, into: HotPlane) -> HotPlane:
        """Hot plane in the layer's own format, `into` if the backend can write there: as the codec restores it, or
        through fp32 and the tier's quantizer where the codec's restored values have another format."""
        backend, codec, geometry = self.backend, plane.codec, layer.geometry
        compiled = backend.name != "torch"
        out = {"out": into} if compiled and codec.native is not None else {}
        if codec.restored_format(plane.format) == plane.format:
            return backend.restore(codec, records, geometry, plane.format, **out)
        shape = (len(records), geometry.page_tokens, geometry.head_dim)
        scratch = {"out": self._bytes("values", *shape, dtype=torch.float32)} if compiled else {}
        values = backend.decode(codec, records, geometry, plane.format, **scratch)
        return backend.quantize(plane.format, values, **({"out": into} if compiled else {}))

    def _exchange(self, pages: np.ndarray, replicas: np.ndarray, *, to_host: bool) -> None:
        segments, within = np.divmod(replicas, HOST_SEGMENT_PAGES)
        while len(self._host) <= int(segments.max(initial=-1)):
            self._host.append(
                [
                    {n: self._zeros(layer, plane, HOST_SEGMENT_PAGES, "cpu") for n, plane in layer.planes.items()}
                    for layer in self.layers
                ]
            )
        for segment in np.unique(segments):
            mine = segments == segment
            for number, layer in enumerate(self.layers):
                for name in layer.planes:
                    self._exchange_plane(
                        number, name, pages[mine], self._host[segment][number][name], within[mine], to_host
                    )

    def _exchange_plane(self, number, name, pages, host: HotPlane, within, to_host: bool) -> None:
        heads = self.layers[number].geometry.kv_heads
        if to_host:
            self._put(host, self._gather(number, name, pages).to("cpu"), within, heads)
            return
        at = torch.from_numpy(within.astype(np.int64))
        parts = [t.unflatten(0, (-1, heads))[at].flatten(0, 1).to(self.device) for t in _tensors(host)]
        scales = parts[1] if len(parts) > 1 else None
        self._put(self.hot[number][name], HotPlane(host.format, parts[0], scales, host.head_dim), pages, heads)


def record_bytes(layer: SlotLayout, plane: PlaneLayout) -> int:
    """Bytes of a slot record: the codec's, or the hot bytes of a head-page that is carried."""
    if plane.codec is None:
        return FORMATS[plane.format].bytes(layer.geometry)
    return plane.codec.slot_bytes(layer.geometry, plane.format)


def _tensors(plane: HotPlane) -> list[torch.Tensor]:
    return [plane.codes] if plane.scales is None else [plane.codes, plane.scales]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Head-pages `[n, T, .]` of any dtype as bytes `[n, .]`."""
    return tensor.contiguous().flatten(1).view(torch.uint8)


def _carried(hot: HotPlane, heads: int) -> torch.Tensor:
    return torch.cat([_raw(tensor) for tensor in _tensors(hot)], dim=1)


def _uncarried(records: torch.Tensor, into: HotPlane) -> HotPlane:
    at = 0
    for tensor in _tensors(into):
        raw = _raw(tensor)  # a view: the scratch plane is contiguous
        raw.copy_(records[:, at : at + raw.shape[1]])
        at += raw.shape[1]
    return into


def _scatter(target: torch.Tensor, places: np.ndarray, source: torch.Tensor) -> None:
    """target[places[i]] = source[i]"""
    if target.device.type != "cpu":
        target[torch.from_numpy(places.astype(np.int64)).to(target.device)] = source
    elif _in_a_row(places):
        target[int(places[0]) : int(places[-1]) + 1] = source
    else:
        _numpy(target)[places] = _numpy(source)  # copies whole rows; torch goes through them element by element


def _collect(target: torch.Tensor, source: torch.Tensor, places: np.ndarray) -> None:
    """target[i] = source[places[i]]"""
    if target.device.type != "cpu":
        target.copy_(source[torch.from_numpy(places.astype(np.int64)).to(target.device)])
    elif _in_a_row(places):
        target[:] = source[int(places[0]) : int(places[-1]) + 1]
    else:
        _numpy(target)[:] = _numpy(source)[places]


def _in_a_row(places: np.ndarray) -> bool:
    return int(places[-1]) - int(places[0]) + 1 == len(places) and bool((np.diff(places) == 1).all())


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
