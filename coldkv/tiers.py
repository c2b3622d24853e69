"""Reference quantizers of the hot tiers (cold-pool.md, "Hot tiers"): values -> hot plane -> values."""

from dataclasses import dataclass

import torch

from coldkv import minifloat as mf
from coldkv.errors import InputError
from coldkv.formats import FORMATS, PlaneFormat, format_of
from coldkv.geometry import Geometry


@dataclass
class HotPlane:
    """Head-pages of one plane in a hot format.

    codes: `[n, page_tokens, lead]`; bf16/fp16 in that dtype, int8 as int8, fp8 as uint8 (E4M3 bits) with lead =
    head_dim; nvfp4/iso3 as uint8 nibble pairs with lead = head_dim/2.
    scales: int8 `[n, T, ceil(D/64)]` fp16; fp8 `[n, T, 1]` fp16; nvfp4/iso3 `[n, T, ceil(D/16)]` uint8 (E4M3
    bits); None for bf16/fp16.
    """

    format: str
    codes: torch.Tensor
    scales: torch.Tensor | None
    head_dim: int

    @property
    def spec(self) -> PlaneFormat:
        return FORMATS[self.format]

    @property
    def head_pages(self) -> int:
        return self.codes.shape[0]

    @property
    def page_tokens(self) -> int:
        return self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + (self.scales.nbytes if self.scales is not None else 0)

    def __getitem__(self, index: slice) -> "HotPlane":
        """Head-pages `index` as a view."""
        return HotPlane(
            self.format, self.codes[index], None if self.scales is None else self.scales[index], self.head_dim
        )

    def to(self, device) -> "HotPlane":
        return HotPlane(
            self.format, self.codes.to(device), None if self.scales is None else self.scales.to(device), self.head_dim
        )


CODE_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.uint8,
    "nvfp4": torch.uint8,
    "iso3": torch.uint8,
}
SCALE_DTYPES = {"int8": torch.float16, "fp8": torch.float16, "nvfp4": torch.uint8, "iso3": torch.uint8}


def empty_plane(fmt: str, head_pages: int, geometry: Geometry, device="cpu") -> HotPlane:
    """An uninitialised plane of `head_pages` head-pages in format `fmt`."""
    spec = format_of(fmt)
    rows = (head_pages, geometry.page_tokens)
    lead = geometry.head_dim // 2 if spec.code_bits == 4 else geometry.head_dim
    codes = torch.empty((*rows, lead), dtype=CODE_DTYPES[fmt], device=device)
    scales = None
    if spec.scale_bytes:
        scales = torch.empty((*rows, spec.scales_per_row(geometry.head_dim)), dtype=SCALE_DTYPES[fmt], device=device)
    return HotPlane(fmt, codes, scales, geometry.head_dim)


def quantize(fmt: str, values: torch.Tensor) -> HotPlane:
    """fp32 values `[n, page_tokens, head_dim]` -> hot plane, as the engine's append kernels write it.

    Raises InputError for an odd head_dim in a nibble format or a wrong dtype; values must be finite.
    """
    spec = format_of(fmt)
    if values.dtype != torch.float32 or values.dim() != 3:
        raise InputError(f"quantize: expected fp32 [n, tokens, head_dim], found {values.dtype} {tuple(values.shape)}")
    head_dim = values.shape[-1]
    if spec.code_bits == 4 and head_dim % 2:
        raise InputError(f"quantize: expected an even head_dim for {fmt}, found {head_dim}")
    if fmt == "bf16":
        return HotPlane(fmt, values.to(torch.bfloat16), None, head_dim)
    if fmt == "fp16":
        return HotPlane(fmt, values.clamp(-65504.0, 65504.0).to(torch.float16), None, head_dim)
    if fmt == "int8":
        scales = mf.fp16_scale(mf.group_amax(values, 64), 127.0)
        h = mf.spread_groups(scales.float(), 64, head_dim)
        codes = torch.where(h > 0, values / h, 0.0).round().clamp(-127, 127).to(torch.int8)
        return HotPlane(fmt, codes, scales, head_dim)
    if fmt == "fp8":
        scales = mf.fp16_scale(values.abs().amax(dim=-1, keepdim=True), 448.0)
        h = scales.float()
        codes = mf.e4m3_encode(torch.where(h > 0, values / h, 0.0))
        return HotPlane(fmt, codes, scales, head_dim)
    divisor, nibbles = (6.0, mf.e2m1_nibbles) if fmt == "nvfp4" else (7.0, mf.iso3_nibbles)
    scales = mf.e4m3_encode((mf.group_amax(values, 16) / divisor).clamp(min=mf.E4M3_MIN))
    s = mf.spread_groups(mf.e4m3_decode(scales), 16, head_dim)
    return HotPlane(fmt, mf.pack_nibbles(nibbles(values, s)), scales, head_dim)


def dequantize(plane: HotPlane) -> torch.Tensor:
    """Hot plane -> fp32 values `[n, page_tokens, head_dim]`; exact, since every format's code * scale fits fp32."""
    if plane.format in ("bf16", "fp16"):
        return plane.codes.float()
    if plane.format == "int8":
        return plane.codes.float() * mf.spread_groups(plane.scales.float(), 64, plane.head_dim)
    if plane.format == "fp8":
        return mf.e4m3_decode(plane.codes) * plane.scales.float()
    values = mf.nibble_values(mf.unpack_nibbles(plane.codes), plane.spec.alphabet)
    return values * mf.spread_groups(mf.e4m3_decode(plane.scales), 16, plane.head_dim)
