"""Codec `e2m1-g16`: the seed's slot size, a scale per 16 channels chosen for least squared error, and a page scale."""

import numpy as np

from coldkv.codecs.base import Codec
from coldkv.codecs.rawslot import (
    FLAG_VALID,
    HEADER_BYTES,
    assemble,
    check_raw_slots,
    header_tensor,
    raw_layout,
    take_apart,
)

GROUP = 16
TINY_AMAX = 2.0**-100  # a page below this is stored as zeros
HUGE_AMAX = 2.0**120  # a page above this is refused: its restored values could leave the range of bf16
CHUNK_HEAD_PAGES = 16  # of 64 x 256; bounds the oracle's working set


class E2m1G16(Codec):
    """4-bit E2M1 codes, one E4M3 scale per 16 channels, one power-of-two fp32 scale per head-page (raw slot version 2).

    Scale search: see kernels/FORMAT.md. Restored values are exact in bf16, and encoding them again gives the same
    slot byte for byte wherever the scales are normal E4M3 numbers.
    """

    id = "e2m1-g16"
    version = 2
    formats = ("int8", "bf16", "fp16", "fp8")
    native = "e2m1_g16"
    raw_slot = True

    def slot_bytes(self, geometry, fmt):
        return raw_layout(geometry).stride

    def encode_torch(self, plane, geometry):
        import torch

        self.require_fit(plane.format)
        chunk = max(1, CHUNK_HEAD_PAGES * 64 * 256 // geometry.elements)
        parts = [self._encode_chunk(plane[i : i + chunk], geometry) for i in range(0, plane.head_pages, chunk)]
        if not parts:
            shape = (0, self.slot_bytes(geometry, plane.format))
            return torch.empty(shape, dtype=torch.uint8), torch.empty(0, dtype=torch.int32)
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _encode_chunk(self, plane, geometry):
        import torch

        from coldkv import minifloat as mf
        from coldkv.tiers import dequantize

        v = dequantize(plane)
        page_amax = v.abs().flatten(1).amax(dim=1)
        valid = v.isfinite().flatten(1).all(dim=1) & (page_amax <= HUGE_AMAX)
        # 0 * x keeps -0 and would keep NaN, so dropped pages are replaced, not multiplied
        v = torch.where((valid & (page_amax >= TINY_AMAX))[:, None, None], v, 0.0)

        groups = mf.split_groups(v, GROUP)
        magnitude = groups.abs()
        amax = magnitude.amax(dim=-1)
        in_range = amax >= TINY_AMAX

        free = _canonical(magnitude, _search(magnitude, *_free_window(amax.clamp(min=TINY_AMAX))))
        s_max = torch.where(in_range, free, 0.0).flatten(1).amax(dim=1)
        page_scale = _page_scale(s_max)
        p = page_scale[:, None, None]
        s = torch.where(in_range & (free / p >= 2.0**-6), free, _search(magnitude, *_coded_window(amax, p)))

        bits = torch.where(amax > 0, mf.e4m3_encode(s / p), 1)
        index = mf.magnitude_index(magnitude, s[..., None], mf.E2M1_THRESHOLDS)
        nibbles = index | (((groups < 0) & (index > 0)).to(torch.uint8) << 3)
        nibbles = torch.where(amax[..., None] > 0, nibbles, 0).flatten(-2)[..., : geometry.head_dim]

        header = header_tensor(self.version, FLAG_VALID).to(v.device).repeat(v.shape[0], 1)
        header[:, 8:12] = page_scale[:, None].contiguous().view(torch.uint8)
        return assemble(geometry, header, mf.pack_nibbles(nibbles), bits, valid)

    def decode_torch(self, slots, geometry, fmt):
        import torch

        from coldkv import minifloat as mf

        codes, scales = take_apart(geometry, slots)
        page_scale = slots[:, 8:12].contiguous().view(torch.float32)[:, :, None]
        s = mf.e4m3_decode(scales) * page_scale
        return mf.nibble_values(mf.unpack_nibbles(codes), "e2m1") * mf.spread_groups(s, GROUP, geometry.head_dim)

    def restored_format(self, fmt):
        return "bf16"

    def restore_torch(self, slots, geometry, fmt):
        import torch

        from coldkv.tiers import HotPlane

        values = self.decode_torch(slots, geometry, fmt)
        return HotPlane("bf16", values.to(torch.bfloat16), None, geometry.head_dim)

    def check_slots(self, slots, geometry, fmt):
        problems = check_raw_slots(slots, geometry, version=self.version, flags=FLAG_VALID, check_reserved=False)
        if slots.ndim != 2 or slots.shape[1] < HEADER_BYTES:
            return problems
        word = np.ascontiguousarray(slots[:, 8:12]).view("<u4")[:, 0]
        exponent = (word >> 23).astype(int)
        bad = (word & 0x807FFFFF != 0) | (exponent < 1) | (exponent > 254)
        problems += [
            (int(i), f"page scale: expected a power of two, found {word[i : i + 1].view('<f4')[0]!r}")
            for i in np.flatnonzero(bad)
        ]
        tail = slots[:, 12:HEADER_BYTES].any(axis=1)
        problems += [(int(i), "reserved bytes 12..15: expected zero") for i in np.flatnonzero(tail)]
        return sorted(problems)


def _grid_floor(x):
    """Largest number with three explicit mantissa bits that is <= x (positive normal fp32), as its top 12 bits."""
    import torch

    return x.view(torch.int32) >> 20


def _grid_value(code):
    import torch

    return (code << 20).view(torch.float32)


def _free_window(amax):
    """Scales s on the three-mantissa-bit grid with 3.5 s < amax <= 7 s, always eight: (lo, hi, value of a code)."""
    import torch

    lo = _grid_floor(amax / 7.0)
    lo = torch.where(_grid_value(lo) * 7.0 < amax, lo + 1, lo)
    return lo, lo + 7, _grid_value


def _canonical(magnitude, s):
    """2s/3 instead of s where all codes are 0, 1, 2 or 4 and 2s/3 is on the grid: the same values in their other form.

    Encoding the restored page would find both forms exact and take the smaller scale; taking it at once keeps the slot
    a fixed point.
    """
    import torch

    from coldkv import minifloat as mf

    even = (mf.magnitude_index(magnitude, s[..., None], mf.E2M1_THRESHOLDS) & 1 == 0).all(dim=-1)
    code = _grid_floor(s)
    mantissa = code & 7
    down = torch.where(mantissa == 4, 4, torch.where((mantissa == 1) | (mantissa == 7), 5, 0))
    return torch.where(even, _grid_value((code - down).to(torch.int32)), s)


def _coded_window(amax, page_scale):
    """The same window over E4M3 codes 1..126 times the page scale; at least one code, clipped to the ends."""
    import torch

    from coldkv import minifloat as mf

    table = mf.e4m3_decode(torch.arange(1, 127, dtype=torch.uint8, device=amax.device))
    relative = amax / page_scale  # exact: the page scale is a power of two
    lo = torch.searchsorted(table * 7.0, relative.contiguous()).clamp(max=125) + 1
    hi = torch.maximum(lo, torch.searchsorted(table * 3.5, relative.contiguous()))

    def value(code):
        return table[(code - 1).clamp(max=125).long()] * page_scale

    return lo, hi, value


def _search(magnitude, lo, hi, value):
    """Scale in codes lo..hi with the least sum of (|v| - q s)^2 in fp64, index order; the smallest of equals.

    magnitude fp32 `[..., 16]`, lo and hi integer `[...]` -> fp32 scale `[...]`.
    """
    import torch

    from coldkv import minifloat as mf

    e2m1 = torch.tensor(mf.E2M1_VALUES, dtype=torch.float32, device=magnitude.device)
    best = value(lo)
    best_error = torch.full(lo.shape, float("inf"), dtype=torch.float64, device=lo.device)
    for step in range(int((hi - lo).max()) + 1 if lo.numel() else 0):
        s = value(torch.minimum(lo + step, hi))
        q = e2m1[mf.magnitude_index(magnitude, s[..., None], mf.E2M1_THRESHOLDS).long()]
        square = (magnitude.double() - (q * s[..., None]).double()).square()
        error = square[..., 0]
        for i in range(1, GROUP):
            error = error + square[..., i]
        better = error < best_error
        best = torch.where(better, s, best)
        best_error = torch.where(better, error, best_error)
    return best


def _page_scale(s_max):
    """2^(floor(log2 s_max) - 7), so that s_max / P is in [128, 240]; 1 where s_max is 0."""
    import torch

    power = (s_max.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(s_max > 0, power / 128.0, torch.ones_like(power))


CODEC = E2m1G16
