"""Streams one plane of a dump through its hot tier, a few pages at a time, for `measure` and `pack` alike."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from coldkv.dumps import LayerDump, PlaneSource, check_finite
from coldkv.errors import InputError
from coldkv.formats import tier_formats
from coldkv.geometry import Geometry
from coldkv.tiers import HotPlane, empty_plane

BF16_OVERFLOW = 2.0**128 * (1 - 2.0**-9)  # from here on rounding to bf16 gives infinity
CHUNK_ELEMENTS = 1 << 21  # per chunk, 8 MiB as fp32: past the caches' point of diminishing returns, small against RAM


@dataclass
class Chunk:
    """Whole pages of one plane: `ref` are the dump's values fp32 `[pages * kv_heads, T, D]`, `hot` the same pages
    in the tier's format, head-page order page-major (head-page = page * kv_heads + head)."""

    first_page: int
    pages: int
    ref: torch.Tensor
    hot: HotPlane
    zeroed: int = 0  # NaN and Inf of the dump that were read as 0


def layer_geometry(layer: LayerDump, page_tokens: int) -> Geometry:
    return Geometry(layer.head_dim, page_tokens, layer.kv_heads)


def plane_format(source: PlaneSource, plane: str, tier: str) -> str:
    """Hot format of a plane in a tier; a dump of hot planes must already be in it."""
    fmt = tier_formats(tier)[plane]
    if source.hot_format not in (None, fmt):
        raise InputError(
            f"dump {source.path}: tensor {source.name}: expected values or a plane in format {fmt} for tier {tier}, "
            f"found {source.hot_format}",
            hint=f"measure this dump with --tier {source.hot_format}",
        )
    return fmt


def plane_chunks(
    source: PlaneSource, fmt: str, geometry: Geometry, backend, *, nan: str = "reject", chunk_elements=CHUNK_ELEMENTS
) -> Iterator[Chunk]:
    """Yield the whole pages of a plane in order; the tokens of a partial last page are left out.

    Raises InputError for NaN and Inf with `nan="reject"`; "zero" replaces them by 0.
    """
    pages = source.tokens // geometry.page_tokens
    per_chunk = max(1, chunk_elements // (geometry.elements * geometry.kv_heads))
    for first in range(0, pages, per_chunk):
        count = min(per_chunk, pages - first)
        start, stop = first * geometry.page_tokens, (first + count) * geometry.page_tokens
        ref, hot, zeroed = read_counted(source, fmt, geometry, backend, start, stop, nan=nan)
        yield Chunk(first, count, ref, hot, zeroed)


def read_pages(source: PlaneSource, fmt: str, geometry: Geometry, backend, start: int, stop: int, *, nan="reject"):
    """Tokens [start, stop), a multiple of the page size -> (values fp32 `[pages * heads, T, D]`, HotPlane)."""
    return read_counted(source, fmt, geometry, backend, start, stop, nan=nan)[:2]


def read_counted(source: PlaneSource, fmt: str, geometry: Geometry, backend, start: int, stop: int, *, nan="reject"):
    """`read_pages` and the number of NaN and Inf that `nan="zero"` replaced."""
    if source.hot_format is None:
        values = source.read(start, stop)
        finite = check_finite(values, source, start, nan)
        zeroed = 0 if finite is values else int((~torch.isfinite(values)).sum())
        ref = backend.load(finite, geometry)
        hot = backend.quantize(fmt, ref)
        worst = max(map(abs, torch.aminmax(ref))) if fmt == "bf16" and values.dtype == torch.float32 else 0.0
        if worst >= BF16_OVERFLOW:
            raise InputError(
                f"dump {source.path}: tensor {source.name}: {float(worst):g} in tokens {start} to {stop - 1} "
                "is beyond bf16",
                hint="use another tier",
            )
        return ref, hot, zeroed
    codes, scales = source.read_hot(start, stop)
    hot = empty_plane(fmt, (stop - start) // geometry.page_tokens * geometry.kv_heads, geometry)
    hot.codes.copy_(to_head_pages(codes, geometry))
    if scales is not None:
        hot.scales.copy_(to_head_pages(scales, geometry))
    ref = backend.dequantize(hot)
    bad = ~ref.isfinite()
    if bad.any():
        page_head, token, channel = (int(i) for i in bad.nonzero()[0])
        page, head = divmod(page_head, geometry.kv_heads)
        where = f"token {start + page * geometry.page_tokens + token}, head {head}, channel {channel}"
        raise InputError(
            f"dump {source.path}: tensor {source.name}: {where}: expected finite codes and scales, "
            f"found {float(ref[bad][0])}"
        )
    return ref, hot, 0


def to_head_pages(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """`[pages * T, heads, lead]` -> `[pages * heads, T, lead]`."""
    heads, lead = tensor.shape[1:]
    paged = tensor.reshape(-1, geometry.page_tokens, heads, lead)
    return paged.transpose(1, 2).reshape(-1, geometry.page_tokens, lead)


def to_tokens(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """`[pages * heads, T, lead]` -> `[pages * T, heads, lead]`: the inverse of `to_head_pages`."""
    paged = tensor.reshape(-1, geometry.kv_heads, geometry.page_tokens, tensor.shape[-1])
    return paged.transpose(1, 2).reshape(-1, geometry.kv_heads, tensor.shape[-1])
