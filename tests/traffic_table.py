"""Bytes that each operation moves per head-page, counted while its kernels run on the CPU, beside the least possible.

`scripts/traffic_table` writes kernels/TRAFFIC.md from this; a test compares and holds the ratios. The counts depend on
the kernels alone, not on the schedule.
"""

import torch
from shim.backend import ShimBackend

from coldkv.backends import fitted
from coldkv.codecs import all_codecs
from coldkv.formats import FORMATS
from coldkv.geometry import Geometry

GEOMETRY = Geometry(256, 64)
HEAD_PAGES = 4
SECTOR = 32
LIMIT = 1.02  # of the least, for the codecs with slots of one size and the tiers

INTRO = """# What the kernels move

Written by `scripts/traffic_table`; a test compares. Counted, not argued: every load and store of the kernels, run on
the CPU by `tests/shim`, for head-pages of {tokens} tokens x {head_dim} channels. Bytes per head-page:

- **least**: what has to be read plus what has to be written, once each (plane, slot, values).
- **accesses**: bytes that the kernels load and store. Lanes of a warp that load the same byte at the same time count it
  once; a thread that comes back to a byte counts it again.
- **sectors**: {sector} bytes for every aligned sector of {sector} bytes that a block touches, once for reading and once
  for writing: what passes between the second-level cache and the multiprocessors. Every second slot begins in the
  middle of a sector.

The larger of the two over **least** is the ratio, at most {limit} for everything with slots of one size. `encode` also
writes its validity word; in `decode` and `restore` every warp reads the slot's header. `rans-e2m1` reads the plane
twice, since the frequencies of the codes come first. `ecq` keeps a page's values and symbols in scratch memory while it
tries steps and comes back to them at every try, for which the second-level cache is meant; a sector is counted once per
block all the same. Its readers leave the integers at the end of the page that they are about to write. Beside these
only `stats` keeps something in device memory: its blocks leave their sums for the last step, which is the more of the
whole the fewer pages there are ({pages} here).
"""


def measure(backend: ShimBackend) -> list[dict]:
    """Rows: op, codec, format, least, accesses, sectors (bytes per head-page), sized."""
    rows = []
    x = torch.randn(HEAD_PAGES, GEOMETRY.page_tokens, GEOMETRY.head_dim, generator=torch.Generator().manual_seed(5))
    fp32 = x[0].nbytes

    def add(op: str, codec: str, fmt: str, least: int, work, sized: bool = False):
        with backend.shim.counting() as found:
            result = work()
        accesses = (found["read_bytes"] + found["written_bytes"]) / HEAD_PAGES
        sectors = SECTOR * (found["read_sectors"] + found["written_sectors"]) / HEAD_PAGES
        rows.append(
            {"op": op, "codec": codec, "format": fmt, "least": least, "accesses": accesses, "sectors": sectors,
             "sized": sized}
        )  # fmt: skip
        return result

    tokens = x.reshape(-1, 1, GEOMETRY.head_dim).to(torch.bfloat16)
    add("load", "-", "bf16", fp32 // 2 + fp32, lambda: backend.load(tokens, GEOMETRY))
    add("stats", "-", "fp32", 2 * fp32, lambda: backend.stats(x, x.flip(0), 1, channels=True))
    for fmt in FORMATS:
        hot = FORMATS[fmt].bytes(GEOMETRY)
        plane = add("quantize", "-", fmt, fp32 + hot, lambda fmt=fmt: backend.quantize(fmt, x))
        add("dequantize", "-", fmt, hot + fp32, lambda plane=plane: backend.dequantize(plane))
        for codec in all_codecs():
            if codec.native is None or not codec.fits(fmt):
                continue
            codec = fitted(codec, plane, GEOMETRY, backend)
            slot, back = codec.slot_bytes(GEOMETRY, fmt), FORMATS[codec.restored_format(fmt)].bytes(GEOMETRY)
            where = (codec.id, fmt)
            slots, valid = add(
                "encode", *where, hot + slot, lambda c=codec, p=plane: backend.encode(c, p, GEOMETRY), codec.sized
            )
            assert valid.all()
            args = (codec, slots, GEOMETRY, fmt)
            add("restore", *where, slot + back, lambda args=args: backend.restore(*args), codec.sized)
            add("decode", *where, slot + fp32, lambda args=args: backend.decode(*args), codec.sized)
    return rows


def ratio(row: dict) -> float:
    return max(row["accesses"], row["sectors"]) / row["least"]


def page(rows: list[dict]) -> str:
    """kernels/TRAFFIC.md: codecs first, int8 planes first among them."""
    text = INTRO.format(
        tokens=GEOMETRY.page_tokens, head_dim=GEOMETRY.head_dim, sector=SECTOR, limit=LIMIT, pages=HEAD_PAGES
    )
    formats = ["int8", *(fmt for fmt in FORMATS if fmt != "int8"), "fp32"]
    ordered = sorted(rows, key=lambda r: (r["codec"] == "-", r["sized"], formats.index(r["format"]), r["codec"]))
    text += "\n| op | codec | plane | least | accesses | sectors | ratio |\n"
    text += "| :-- | :-- | :-- | --: | --: | --: | --: |\n"
    for row in ordered:
        figures = f"{row['least']:,} | {row['accesses']:,.0f} | {row['sectors']:,.0f} | {ratio(row):.4f}"
        text += f"| {row['op']} | {row['codec']} | {row['format']} | {figures} |\n"
    return text
