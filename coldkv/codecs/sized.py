"""Slots whose size is chosen per layer and plane from what the head-pages need: the part common to such codecs."""

import copy

import numpy as np

from coldkv.codecs.base import Codec
from coldkv.errors import InputError, ToolError
from coldkv.formats import FORMATS
from coldkv.geometry import Geometry, round_up

ALIGNMENT = 16
NEVER = 2**31 - 1  # length of a head-page that no slot can hold


class SizedCodec(Codec):
    """A codec with the option `slot_bytes`: one size for all planes, or by default a size chosen for each plane.

    Subclasses set `lengths_torch`; their `__init__` passes `slot_bytes` on. `choose_stride` below is for codecs that
    refuse a page that does not fit; override it where such a page is coded coarser instead.
    """

    sized = True

    def __init__(self, slot_bytes: int | None = None):
        if slot_bytes is not None and (type(slot_bytes) is not int or slot_bytes <= 0 or slot_bytes % ALIGNMENT):
            raise InputError(
                f"codec {self.id}: slot_bytes: expected a positive multiple of {ALIGNMENT}, found {slot_bytes!r}"
            )
        self._stride, self._asked = slot_bytes, slot_bytes

    @property
    def config(self):
        return {} if self._stride is None else {"slot_bytes": self._stride}

    @property
    def label(self):
        asked = copy.copy(self)
        asked._stride = self._asked
        return super(SizedCodec, asked).label

    @property
    def needs_stride(self):
        return self._stride is None

    def slot_bytes(self, geometry, fmt):
        if self._stride is None:
            raise ToolError(f"codec {self.id}: its slot size is not chosen yet; call choose_stride and with_stride")
        least = self.least_stride(geometry, fmt)
        if self._stride < least:
            raise InputError(
                f"codec {self.id}: slot_bytes: expected at least {least} for {geometry.page_tokens} tokens x "
                f"{geometry.head_dim} channels in {fmt}, found {self._stride}"
            )
        return self._stride

    def least_stride(self, geometry: Geometry, fmt: str) -> int:
        """The smallest slot that the layout allows, whatever the data."""
        return ALIGNMENT

    def with_stride(self, stride):
        chosen = copy.copy(self)
        chosen._stride = int(stride)
        return chosen

    def choose_stride(self, lengths, geometry, fmt, *, overflow_bytes=None):
        """The size with the fewest bytes in all: slots of head-pages that fit, `overflow_bytes` for each other one.

        Where no size saves anything it is the smallest slot there can be, which refuses every page.
        """
        hot = FORMATS[fmt].bytes(geometry)
        cost = hot if overflow_bytes is None else max(hot, overflow_bytes)
        least = self.least_stride(geometry, fmt)
        lengths = np.sort(lengths[lengths != NEVER].astype(np.int64))
        if not len(lengths):
            return least
        # a stride is worth looking at only where it just holds some page
        strides = np.maximum(round_up(lengths, ALIGNMENT), least)
        fits = np.searchsorted(lengths, strides, side="right")
        total = fits * strides + (len(lengths) - fits) * cost
        best = int(np.argmin(total))
        return int(strides[best]) if total[best] < len(lengths) * cost else least
