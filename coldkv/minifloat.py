"""The small number formats of the slots, as torch code: OCP E4M3 scales, E2M1 and iso3 nibbles.

This is the oracle that every other backend must match bit for bit. Everything is plain IEEE fp32; a comparison
`|v| >= t * s` replaces the division `v / s` because `t * s` is exact (cold-pool.md, "Requant int8 -> E2M1 g64").
"""

import torch

E4M3_MIN = 2.0**-9  # smallest positive E4M3 number; the floor of every group scale
E4M3_MAX = 448.0

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
ISO3_VALUES = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
ISO3_THRESHOLDS = (0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5)


def e4m3_encode(x: torch.Tensor) -> torch.Tensor:
    """fp32 -> E4M3 bits (uint8): nearest, ties to even, saturating to +-448, never NaN for finite input."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_decode(bits: torch.Tensor) -> torch.Tensor:
    """E4M3 bits (uint8) -> fp32, exact."""
    return bits.contiguous().view(torch.float8_e4m3fn).to(torch.float32)


def fp16_scale(amax: torch.Tensor, divisor: float) -> torch.Tensor:
    """fp16(amax / divisor), nearest-even, clamped to the largest finite fp16."""
    return (amax / divisor).to(torch.float16).clamp(max=65504.0)


def group_amax(x: torch.Tensor, size: int) -> torch.Tensor:
    """max|x| over groups of `size` along the last axis; a short last group counts only its own channels."""
    return split_groups(x.abs(), size).amax(dim=-1)


def split_groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """[..., D] -> [..., ceil(D/size), size], the end padded with zeros."""
    pad = -x.shape[-1] % size
    if pad:
        x = torch.nn.functional.pad(x, (0, pad))
    return x.unflatten(-1, (-1, size))


def spread_groups(per_group: torch.Tensor, size: int, head_dim: int) -> torch.Tensor:
    """[..., groups] -> [..., head_dim]: every channel gets its group's value."""
    return per_group.repeat_interleave(size, dim=-1)[..., :head_dim]


def magnitude_index(magnitude: torch.Tensor, scale: torch.Tensor, thresholds: tuple[float, ...]) -> torch.Tensor:
    """Number of thresholds t with magnitude >= t * scale (uint8 0..7): a tie goes to the larger magnitude."""
    index = torch.zeros(magnitude.shape, dtype=torch.uint8, device=magnitude.device)
    for t in thresholds:
        index += magnitude >= t * scale
    return index


def e2m1_nibbles(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """E2M1 codes of x / scale; bit 3 is set iff x < 0, also on a zero magnitude (as the seed does)."""
    return magnitude_index(x.abs(), scale, E2M1_THRESHOLDS) | ((x < 0).to(torch.uint8) << 3)


def iso3_nibbles(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """iso3 codes: sign and magnitude 0..7, half away from zero, no negative zero."""
    index = magnitude_index(x.abs(), scale, ISO3_THRESHOLDS)
    return index | (((x < 0) & (index > 0)).to(torch.uint8) << 3)


def nibble_values(nibbles: torch.Tensor, alphabet: str) -> torch.Tensor:
    """Codes 0..15 -> signed fp32 values of the alphabet "e2m1" or "iso3"; code 8 gives -0.0."""
    values = E2M1_VALUES if alphabet == "e2m1" else ISO3_VALUES
    lut = torch.tensor([*values, *(-v for v in values)], dtype=torch.float32, device=nibbles.device)
    return lut[nibbles.to(torch.int64)]


def pack_nibbles(nibbles: torch.Tensor) -> torch.Tensor:
    """[..., D] -> [..., D/2] bytes: even channel in the low nibble, odd channel in the high one."""
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., D/2] bytes -> [..., D] codes 0..15."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
