"""Any codec over K without its channel means, which a calibration holds: the option `center_k` of every codec.

A bias in K's projection gives all keys of a head the same large part. Softmax does not see it, but a codec spends its
steps on it. The means are subtracted before the slots are written and added back when they are read.
"""

import copy

from coldkv.codecs.base import Codec
from coldkv.errors import InputError


class Centered(Codec):
    """`codec` with the means of the calibration `center_k`; planes other than K pass as they are.

    The inner codec gets a bf16 plane of the differences, and values are restored in bf16: slots have the inner
    codec's format and size.
    """

    def __init__(self, codec: Codec, center_k: str, center_k_sha256: str | None = None):
        from coldkv.calibration import open_calibration

        if not isinstance(center_k, str):
            raise InputError(f"codec {codec.id}: center_k: expected the name of a calibration file, found {center_k!r}")
        if not codec.fits("bf16"):
            raise InputError(f"codec {codec.id}: center_k: expected a codec that takes bf16 planes")
        self.inner, self.center_k = codec, center_k
        self.center_k_sha256 = open_calibration(center_k, center_k_sha256).sha256
        self.id, self.version, self.formats = codec.id, codec.version, codec.formats
        self.native, self.raw_slot, self.sized = codec.native, codec.raw_slot, codec.sized
        self._mean = None  # fp32 [heads, 1, D] once bound

    @property
    def config(self):
        return {**self.inner.config, "center_k": self.center_k, "center_k_sha256": self.center_k_sha256}

    @property
    def label(self):
        head, sep, options = self.inner.label.partition(":")
        return f"{head}:{options}{',' if sep else ''}center_k={self.center_k}"

    @property
    def needs_stride(self):
        return self.inner.needs_stride

    def bind(self, layer, plane, fmt, geometry):
        import torch

        from coldkv.calibration import open_calibration

        inner = self.inner.bind(layer, plane, fmt, geometry)
        if plane != "k":
            return inner
        bound = copy.copy(self)
        bound.inner = inner
        mean = open_calibration(self.center_k, self.center_k_sha256).plane(layer, plane, geometry).mean
        bound._mean = torch.from_numpy(mean)[:, None]
        return bound

    def _means(self, n: int, like):
        if self._mean is None:
            raise InputError(f"codec {self.id}: center_k needs planes of a known layer; call bind first")
        heads = self._mean.shape[0]
        return self._mean.to(like.device).repeat(n // heads, 1, 1)

    def centered(self, values):
        """fp32 `[n, T, D]` of whole pages -> the bf16 plane that the inner codec sees."""
        import torch

        from coldkv.tiers import HotPlane

        return HotPlane("bf16", (values - self._means(len(values), values)).to(torch.bfloat16), None, values.shape[2])

    def uncentered(self, values):
        """What attention reads: the inner codec's values plus the means, rounded to bf16; fp32 `[n, T, D]`."""
        import torch

        return (values + self._means(len(values), values)).to(torch.bfloat16).float()

    def slot_bytes(self, geometry, fmt):
        return self.inner.slot_bytes(geometry, "bf16")

    def with_stride(self, stride):
        sized = copy.copy(self)
        sized.inner = self.inner.with_stride(stride)
        return sized

    def choose_stride(self, lengths, geometry, fmt, *, overflow_bytes=None):
        return self.inner.choose_stride(lengths, geometry, fmt, overflow_bytes=overflow_bytes)

    def lengths_torch(self, plane, geometry):
        from coldkv.tiers import dequantize

        return self.inner.lengths_torch(self.centered(dequantize(plane)), geometry)

    def encode_torch(self, plane, geometry):
        from coldkv.tiers import dequantize

        return self.inner.encode_torch(self.centered(dequantize(plane)), geometry)

    def decode_torch(self, slots, geometry, fmt):
        return self.uncentered(self.inner.decode_torch(slots, geometry, "bf16"))

    def restored_format(self, fmt):
        return "bf16"

    def restore_torch(self, slots, geometry, fmt):
        import torch

        from coldkv.tiers import HotPlane

        return HotPlane("bf16", self.decode_torch(slots, geometry, fmt).to(torch.bfloat16), None, geometry.head_dim)

    def check_slots(self, slots, geometry, fmt):
        return self.inner.check_slots(slots, geometry, "bf16")
