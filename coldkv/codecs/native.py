"""Codec `native`: the nvfp4 tier's own nibbles and scales, unchanged, in a slot."""

from coldkv.codecs.base import Codec
from coldkv.codecs.rawslot import (
    FLAG_ISO3,
    FLAG_VALID,
    assemble,
    check_raw_slots,
    header_tensor,
    raw_layout,
    take_apart,
)


class Native(Codec):
    """Codes and g16 scale bytes copied (raw slot version 3); flag bit 1 says that the nibbles are iso3. Exact."""

    id = "native"
    version = 3
    formats = ("nvfp4", "iso3")
    exact = True
    native = "native"
    raw_slot = True

    def slot_bytes(self, geometry, fmt):
        return raw_layout(geometry).stride

    @staticmethod
    def _flags(fmt: str) -> int:
        return FLAG_VALID | (FLAG_ISO3 if fmt == "iso3" else 0)

    def encode_torch(self, plane, geometry):
        self.require_fit(plane.format)
        # 0x7F and 0xFF are NaN, a set sign bit is not a scale: such a page is not a plane of this tier
        valid = ((plane.scales > 0) & (plane.scales < 0x7F)).flatten(1).all(dim=1)
        header = header_tensor(self.version, self._flags(plane.format)).to(plane.codes.device)
        return assemble(geometry, header, plane.codes, plane.scales, valid)

    def decode_torch(self, slots, geometry, fmt):
        from coldkv.tiers import dequantize

        return dequantize(self.restore_torch(slots, geometry, fmt))

    def restored_format(self, fmt):
        return fmt

    def restore_torch(self, slots, geometry, fmt):
        from coldkv.tiers import HotPlane

        codes, scales = take_apart(geometry, slots)
        return HotPlane(fmt, codes.contiguous(), scales.contiguous(), geometry.head_dim)

    def check_slots(self, slots, geometry, fmt):
        return check_raw_slots(slots, geometry, version=self.version, flags=self._flags(fmt))


CODEC = Native
