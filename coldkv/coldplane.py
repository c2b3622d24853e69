"""One hot plane through a codec and back: the values attention reads once pages are cold, and what they cost."""

from dataclasses import dataclass

import torch

from coldkv.codecs import Codec
from coldkv.formats import FORMATS
from coldkv.geometry import Geometry
from coldkv.tiers import HotPlane


@dataclass
class ColdPlane:
    """`values` fp32 `[n, T, D]`; `valid` bool `[n]`; `codec` the one that wrote the slots, bound and sized.

    Head-pages with valid False were refused by the codec: they stay hot and hold their hot values.
    """

    values: torch.Tensor
    valid: torch.Tensor
    codec: Codec
    slot_bytes: int
    hot_page_bytes: int

    @property
    def invalid_pages(self) -> int:
        return int((~self.valid).sum())

    @property
    def cold_bytes(self) -> int:
        """Real bytes: whole slots, and the hot bytes of refused head-pages."""
        invalid = self.invalid_pages
        return (self.valid.numel() - invalid) * self.slot_bytes + invalid * self.hot_page_bytes


def prepare_codec(backend, codec: Codec, hot: HotPlane, geometry: Geometry, layer: int, plane: str) -> Codec:
    """The codec as it will write this plane: bound to layer and plane, and with a stride that its pages need."""
    codec = codec.bind(layer, plane, hot.format, geometry)
    if codec.needs_stride:
        lengths = backend.lengths(codec, hot, geometry)
        codec = codec.with_stride(codec.choose_stride(lengths.cpu().numpy(), geometry, hot.format))
    return codec


def through_codec(backend, codec: Codec, hot: HotPlane, geometry: Geometry, layer: int, plane: str) -> ColdPlane:
    """Encode `hot` (n head-pages of one layer's `plane`) into real slots and decode them again."""
    fmt = hot.format
    codec = prepare_codec(backend, codec, hot, geometry, layer, plane)
    slots, valid = backend.encode(codec, hot, geometry)
    held = valid != 0
    values = decode_held(backend, codec, slots, valid, hot, geometry)
    return ColdPlane(values, held, codec, slots.shape[1], FORMATS[fmt].bytes(geometry))


def decode_held(backend, codec: Codec, slots: torch.Tensor, valid: torch.Tensor, hot: HotPlane, geometry: Geometry):
    """fp32 `[n, T, D]` that attention reads: decoded slots, and the hot values of head-pages that stay hot.

    All head-pages are decoded in their places, since a codec may treat the heads of a plane differently.
    """
    held = valid != 0
    if bool(held.all()):
        return backend.decode(codec, slots, geometry, hot.format)
    values = backend.dequantize(hot)
    if bool(held.any()):
        filled = slots.clone()
        filled[~held] = slots[held][0]
        values[held] = backend.decode(codec, filled, geometry, hot.format)[held]
    return values
