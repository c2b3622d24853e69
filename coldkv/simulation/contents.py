"""Real bytes for a simulated pool: a few distinct page contents, written through the tier and verified at the end."""

import numpy as np
import torch

from coldkv.coldplane import prepare_codec
from coldkv.errors import GateFailure, InputError
from coldkv.geometry import Geometry
from coldkv.pool.kvpool import KvPool
from coldkv.pool.layout import place
from coldkv.pool.regions import Regions
from coldkv.simulation.shape import Shape
from coldkv.simulation.traces import Request
from coldkv.tiers import HotPlane

DISTINCT = 8  # contents of a page; neighbours differ, so that a page taken for another is noticed


class PageSource:
    """Hot head-pages of `DISTINCT` pages for every layer and plane of a model."""

    def __init__(self, backend):
        self.backend = backend
        self.planes: dict[tuple[int, str], HotPlane] = {}

    def strides(self, geometry: Geometry):
        """`stride_of` for `build_shape`: what these very pages need."""

        def stride_of(codec, layer, plane, fmt):
            return prepare_codec(self.backend, codec, self.planes[layer, plane], geometry, layer, plane)

        return stride_of


def synthetic(backend, tiers, geometry: Geometry) -> PageSource:
    """Pages of `bench`'s values: normal, channels and token norms of unequal size."""
    from coldkv.bench import sample_values
    from coldkv.formats import tier_formats

    source = PageSource(backend)
    n = DISTINCT * geometry.kv_heads
    single = Geometry(geometry.head_dim, geometry.page_tokens)
    for layer, tier in enumerate(tiers):
        for number, (name, fmt) in enumerate(tier_formats(tier).items()):
            values = backend.load(sample_values(n, single, backend.device), single)
            # another order of the pages for each layer and plane, so that one taken for another is noticed
            turned = torch.roll(values, 2 * layer + number, dims=0).contiguous()
            source.planes[layer, name] = backend.quantize(fmt, turned)
    return source


def from_dump(backend, dump, pairs) -> tuple[PageSource, Geometry]:
    """The first whole pages of the dump's layers in the tiers of `pairs`, and their common geometry. InputError where
    the layers' geometries differ, or there are fewer than two whole pages."""
    from coldkv.pipeline import layer_geometry, plane_format, read_pages

    source = PageSource(backend)
    geometries = {layer_geometry(dump.layer(index), dump.page_tokens) for index, _ in pairs}
    if len(geometries) != 1:
        raise InputError(f"dump {dump.path}: expected layers of one geometry, found {len(geometries)}")
    (geometry,) = geometries
    for number, (index, tier) in enumerate(pairs):
        layer = dump.layer(index)
        pages = min(DISTINCT, layer.tokens // dump.page_tokens)
        if pages < 2:
            raise InputError(f"dump {dump.path}: layer {index}: expected two whole pages at least, found {pages}")
        for name in sorted(layer.planes):
            plane = layer.planes[name]
            fmt = plane_format(plane, name, tier)
            _, hot = read_pages(plane, fmt, geometry, backend, 0, pages * dump.page_tokens)
            source.planes[number, name] = hot
    return source, geometry


class Contents:
    """Writes a page's content when it is mapped, and compares what attention reads when a sequence ends."""

    def __init__(self, shape: Shape, source: PageSource, pages: int, slots: int):
        self.shape, self.source = shape, source
        self.payload = Regions(shape.layers, pages, slots, source.backend)
        self.distinct = min(plane.head_pages for plane in source.planes.values()) // shape.layers[0].geometry.kv_heads
        self._keys = np.zeros(0, dtype=np.int64)  # logical page -> its content
        self._expected: dict[tuple, torch.Tensor] = {}
        self._offset: dict[int, int] = {}
        self._rows = 0

    def attach(self, pool: KvPool) -> None:
        self.pool = pool
        self._keys = np.zeros(pool.store.ids.capacity, dtype=np.int64)

    def started(self, row: int, request: Request) -> None:
        self._rows += 1
        self._offset[row] = self._rows

    def mapped(self, row: int, pages: np.ndarray) -> None:
        """Write the pages just mapped: the last of the row."""
        if not len(pages):
            return
        stop = self.pool.mapped(row)
        first = stop - len(pages)
        keys = (np.arange(first, stop) + self._offset[row]) % self.distinct
        self._keys[self.pool.ids[row, first:stop]] = keys
        for number, layer in enumerate(self.shape.layers):
            heads = layer.geometry.kv_heads
            for name in layer.planes:
                for key in np.unique(keys).tolist():
                    mine = pages[keys == key]
                    content = self.source.planes[number, name][key * heads : (key + 1) * heads]
                    for page in mine:
                        self.payload.write(number, name, np.array([page]), content)

    def verify(self, row: int) -> int:
        """Compare all pages of a row, in all layers, with what the tier and the codec promise -> pages compared.

        GateFailure naming the first that differs.
        """
        pool = self.pool
        ids = pool.ids[row, pool.start[row] : pool.mapped(row)]
        entries, keys = pool.store.entry[ids], self._keys[ids]
        for number, layer in enumerate(self.shape.layers):
            for name in layer.planes:
                found = self.payload.values(number, name, entries)
                for at, (entry, key) in enumerate(zip(entries.tolist(), keys.tolist(), strict=True)):
                    if not torch.equal(found[at], self._wanted(number, name, key, entry < 0)):
                        where = place(layer.index, name)
                        raise GateFailure(f"simulate: sequence row {row}, page {at}, {where}: wrong content")
        return len(ids)

    def _wanted(self, number: int, name: str, key: int, cold: bool) -> torch.Tensor:
        """fp32 `[heads, T, D]` of one content, by another way than the pool's: alone, and never through a region."""
        layer, backend = self.shape.layers[number], self.source.backend
        plane, heads = layer.planes[name], layer.geometry.kv_heads
        place = (number, name, key, cold and plane.codec is not None)
        if place not in self._expected:
            hot = self.source.planes[number, name][key * heads : (key + 1) * heads]
            if place[3]:
                slots, valid = backend.encode(plane.codec, hot, layer.geometry)
                assert bool((valid != 0).all()), f"{plane.codec.id} refused a content of layer {number}"
                self._expected[place] = backend.decode(plane.codec, slots, layer.geometry, plane.format)
            else:
                self._expected[place] = backend.dequantize(hot)
        return self._expected[place]
