"""Names and byte sizes of the hot plane formats and of the tiers built from them. Knows no tensor library."""

from dataclasses import dataclass

from coldkv.errors import InputError
from coldkv.geometry import Geometry, ceil_div


@dataclass(frozen=True)
class PlaneFormat:
    """One way to hold a hot plane.

    `code_bits` per element; `group` channels share one scale of `scale_bytes` (group 0: one scale per row;
    scale_bytes 0: no scales).
    """

    name: str
    ident: int  # number of the format in the native interface
    code_bits: int
    group: int = 0
    scale_bytes: int = 0
    alphabet: str | None = None  # nibble alphabet, "e2m1" or "iso3"

    def scales_per_row(self, head_dim: int) -> int:
        if not self.scale_bytes:
            return 0
        return ceil_div(head_dim, self.group) if self.group else 1

    def bytes(self, geometry: Geometry) -> int:
        """Real bytes of one head-page in this format, codes and scales."""
        row = geometry.head_dim * self.code_bits // 8 + self.scales_per_row(geometry.head_dim) * self.scale_bytes
        return row * geometry.page_tokens


FORMATS = {
    f.name: f
    for f in (
        PlaneFormat("bf16", 0, 16),
        PlaneFormat("fp16", 1, 16),
        PlaneFormat("int8", 2, 8, group=64, scale_bytes=2),
        PlaneFormat("fp8", 3, 8, group=0, scale_bytes=2),
        PlaneFormat("nvfp4", 4, 4, group=16, scale_bytes=1, alphabet="e2m1"),
        PlaneFormat("iso3", 5, 4, group=16, scale_bytes=1, alphabet="iso3"),
    )
}

# tier of a layer -> plane -> format; in an nvfp4 layer V is iso3 (cold-pool.md, "Hot tiers")
TIERS = {name: {"k": name, "v": name} for name in ("bf16", "fp16", "int8", "fp8", "iso3")}
TIERS["nvfp4"] = {"k": "nvfp4", "v": "iso3"}


def format_of(name: str) -> PlaneFormat:
    if name not in FORMATS:
        raise InputError(f"plane format: expected one of {', '.join(FORMATS)}, found {name!r}")
    return FORMATS[name]


def tier_formats(tier: str) -> dict[str, str]:
    """Plane name -> format name of a tier; InputError for an unknown tier."""
    if tier not in TIERS:
        raise InputError(f"tier: expected one of {', '.join(sorted(TIERS))}, found {tier!r}")
    return TIERS[tier]
