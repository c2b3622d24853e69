"""Real regions behind the pool model: every token value is a pair of K and V rows, known before and after a slot."""

import numpy as np
import torch
from poolmodel import Injected

from coldkv import tiers
from coldkv.codecs import get_codec
from coldkv.formats import FORMATS
from coldkv.geometry import Geometry
from coldkv.pool.layout import PlaneLayout, SlotLayout
from coldkv.pool.regions import Regions

VALUES = 20  # token values 0, 2, ..., 18; odd ones have been through a slot


def slot_layout(index, geometry, formats, codec=None):
    """A layer whose planes `formats` (name -> format) all have `codec`, or are carried where there is none."""
    planes = {}
    for name, fmt in formats.items():
        stride = FORMATS[fmt].bytes(geometry) if codec is None else codec.slot_bytes(geometry, fmt)
        planes[name] = PlaneLayout(name, fmt, fmt, codec, stride)
    return SlotLayout(index, geometry, planes)


class RegionBytes(Regions):
    """Two layers: int8 through e2m1-g64, whose restored pages are a fixed point, and fp8, which is carried."""

    def __init__(self, size, backend):
        geometry = Geometry(64, size.page_tokens, 2)
        codec = get_codec("e2m1-g64")
        layers = [
            slot_layout(3, geometry, {"k": "int8", "v": "int8"}, codec),
            slot_layout(7, geometry, {"k": "fp8", "v": "fp8"}),
        ]
        super().__init__(layers, size.pages, size.slots, backend, chunk_bytes=5000)  # chunks of one or two pages
        self.fail_in = 0
        generator = torch.Generator().manual_seed(5)
        self.rows = {}  # (layer number, plane) -> hot plane [2 heads, VALUES, .] of all values
        self.read_as = {}  # the same -> fp32 [2, VALUES, D]
        for number, layer in enumerate(layers):
            for name, plane in layer.planes.items():
                exact = torch.randn((2, VALUES, 64), generator=generator)
                hot = tiers.quantize(plane.format, exact)
                values = tiers.dequantize(hot)
                if plane.codec is not None:
                    # rows are coded one by one, so all even values fit in one head-page of VALUES rows
                    wide = Geometry(64, VALUES, 2)
                    slots, valid = codec.encode_torch(hot, wide)
                    assert valid.all()
                    values[:, 1::2] = codec.decode_torch(slots, wide, plane.format)[:, 0::2]
                else:
                    values[:, 1::2] = values[:, 0::2]
                self.rows[number, name], self.read_as[number, name] = hot, values

    def _may_fail(self):
        self.fail_in -= 1
        if self.fail_in == 0:
            raise Injected

    def pack(self, pages, slots):
        held = super().pack(pages, slots)
        self._may_fail()
        return held

    def unpack(self, slots, pages):
        super().unpack(slots, pages)
        self._may_fail()

    def copy(self, source, target):
        super().copy(source, target)
        self._may_fail()

    def to_host(self, pages, replicas):
        super().to_host(pages, replicas)
        self._may_fail()

    def from_host(self, replicas, pages):
        super().from_host(replicas, pages)
        self._may_fail()

    def write(self, page, first, values):
        index = torch.tensor(values)
        for (number, name), rows in self.rows.items():
            scales = None if rows.scales is None else rows.scales[:, index]
            part = tiers.HotPlane(rows.format, rows.codes[:, index], scales, rows.head_dim)
            self.write_tokens(number, name, int(page), first, part)

    def read(self, entries):
        """The token value whose rows attention would read, int64 `[n, T]`; -1 where it is none of them."""
        found = None
        for (number, name), table in self.read_as.items():
            values = self.values(number, name, entries)  # [n, heads, T, D]
            same = (values[:, :, :, None] == table[None, :, None]).all(dim=-1).all(dim=1)  # [n, T, VALUES]
            if self.layers[number].planes[name].codec is None:
                same[..., 0::2] |= same[..., 1::2]
                same = same[..., 0::2].repeat_interleave(2, dim=-1)
            found = same if found is None else found & same
        index = torch.where(found.any(dim=-1), found.int().argmax(dim=-1), -1)
        return index.numpy().astype(np.int64)
