"""Codec `e2m1-g64`: the seed's requantization, one E4M3 scale per 64 channels (cold-pool.md)."""

from coldkv.codecs.base import Codec
from coldkv.codecs.rawslot import FLAG_VALID, assemble, check_raw_slots, header_tensor, raw_layout, take_apart

GROUP = 64


class E2m1G64(Codec):
    """4-bit codes with one scale per 64 channels, stored once for each of its g16 positions (raw slot version 1).

    An iso3 plane stays iso3 (scale amax/7); every other plane becomes E2M1 (scale amax/6). The slot does not say
    which: it follows from the plane's format.
    """

    id = "e2m1-g64"
    version = 1
    formats = ("int8", "nvfp4", "iso3", "bf16", "fp16", "fp8")
    native = "e2m1_g64"
    raw_slot = True

    def slot_bytes(self, geometry, fmt):
        return raw_layout(geometry).stride

    def encode_torch(self, plane, geometry):
        from coldkv import minifloat as mf
        from coldkv.tiers import dequantize

        self.require_fit(plane.format)
        v = dequantize(plane)
        valid = v.isfinite().flatten(1).all(dim=1)
        divisor, nibbles = (7.0, mf.iso3_nibbles) if plane.format == "iso3" else (6.0, mf.e2m1_nibbles)
        bits = mf.e4m3_encode((mf.group_amax(v, GROUP) / divisor).clamp(min=mf.E4M3_MIN))
        s = mf.spread_groups(mf.e4m3_decode(bits), GROUP, geometry.head_dim)
        scales = mf.spread_groups(bits, GROUP // 16, geometry.groups(16))
        header = header_tensor(self.version, FLAG_VALID).to(v.device)
        return assemble(geometry, header, mf.pack_nibbles(nibbles(v, s)), scales, valid)

    def decode_torch(self, slots, geometry, fmt):
        from coldkv import minifloat as mf

        codes, scales = take_apart(geometry, slots)
        values = mf.nibble_values(mf.unpack_nibbles(codes), "iso3" if fmt == "iso3" else "e2m1")
        return values * mf.spread_groups(mf.e4m3_decode(scales), 16, geometry.head_dim)

    def restored_format(self, fmt):
        return fmt if fmt in ("int8", "nvfp4", "iso3") else "bf16"

    def restore_torch(self, slots, geometry, fmt):
        """int8: codes 2 x E2M1 (an exact integer) with scale s/2, which fp16 holds exactly."""
        import torch

        from coldkv import minifloat as mf
        from coldkv.tiers import HotPlane

        codes, scales = take_apart(geometry, slots)
        restored = self.restored_format(fmt)
        if restored == "bf16":
            values = self.decode_torch(slots, geometry, fmt)
            return HotPlane(restored, values.to(torch.bfloat16), None, geometry.head_dim)
        if restored == "int8":
            doubled = (2 * mf.nibble_values(mf.unpack_nibbles(codes), "e2m1")).to(torch.int8)
            half = (mf.e4m3_decode(scales[..., :: GROUP // 16]) / 2).to(torch.float16)
            return HotPlane(restored, doubled, half, geometry.head_dim)
        return HotPlane(restored, codes.contiguous(), scales.contiguous(), geometry.head_dim)

    def check_slots(self, slots, geometry, fmt):
        return check_raw_slots(slots, geometry, version=self.version, flags=FLAG_VALID)


CODEC = E2m1G64
