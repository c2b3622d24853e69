"""One raw slot taken apart: header fields, codes and scales with their statistics, and what a reader would refuse.

The layout is `kernels/FORMAT.md`: 16 header bytes, codes (two per byte, even channel in the low nibble), one E4M3
scale byte per 16 channels and token, zero padding to a multiple of 16.
"""

import os

import numpy as np

from coldkv.codecs import Codec, all_codecs
from coldkv.codecs.ecqslot import MAGIC as ECQ_MAGIC
from coldkv.codecs.entropyslot import MAGIC as ENTROPY_MAGIC
from coldkv.codecs.rawslot import FLAG_ISO3, FLAG_VALID, MAGIC, raw_layout
from coldkv.errors import InputError
from coldkv.formats import format_of
from coldkv.geometry import Geometry

MAGNITUDES = {"e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), "iso3": tuple(map(float, range(8)))}
FIRST_NORMAL = 0x08  # E4M3: smaller codes are subnormal and hold fewer than 4 significant bits
PAGE_SCALE_VERSION = 2  # the raw slot version with an fp32 page scale at byte 8
BYTES_PER_LINE = 16
MAX_SLOT_BYTES = 1 << 27  # of any geometry
SIZED_MAGICS = (ENTROPY_MAGIC, ECQ_MAGIC)  # of slots sized by their data


def e4m3_value(code: int) -> float:
    """Value of an E4M3 (e4m3fn) byte; NaN for 0x7F and 0xFF."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -value if code & 0x80 else value


def begins_slot(start: bytes) -> bool:
    """Whether a file whose first four bytes are `start` begins like a slot of any layout."""
    return int.from_bytes(start, "little") in (MAGIC, *SIZED_MAGICS)


def read_slot_file(path: str, geometry: Geometry) -> bytes:
    """The one slot a file holds. Raises InputError if it is not as long as a raw slot of this geometry; an entropy slot
    may have any size."""
    stride = raw_layout(geometry).stride
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        entropy_coded = int.from_bytes(file.read(4), "little") in SIZED_MAGICS
    if size != stride and not (entropy_coded and size <= MAX_SLOT_BYTES):
        raise InputError(
            f"{path}: expected a slot of {stride} bytes ({geometry.page_tokens} tokens x {geometry.head_dim}), "
            f"found {size}; give --page-tokens and --head-dim as they were packed"
        )
    with open(path, "rb") as file:
        return file.read()


def describe(record: bytes, geometry: Geometry, *, codec: Codec | None = None, fmt: str | None = None) -> dict:
    """Everything about one slot as JSON types. `codec` and `fmt` (hot plane format) are guessed if not given.

    Raises InputError if no codec packs this geometry into as many bytes.
    """
    at = raw_layout(geometry)
    raw = np.frombuffer(record, np.uint8)
    codec, fmt, problems = _identify(raw, geometry, codec, fmt)
    version = int.from_bytes(record[4:6], "little")
    alphabet = format_of(fmt).alphabet or "e2m1"
    page_scale = float(np.frombuffer(record, "<f4", 1, 8)[0]) if version == PAGE_SCALE_VERSION else 1.0
    if not codec.raw_slot:
        fields = codec.slot_fields(record, geometry, fmt) if raw.any() else None
        return {
            "bytes": len(record),
            "page_tokens": geometry.page_tokens,
            "head_dim": geometry.head_dim,
            "codec": codec.id,
            "plane_format": fmt,
            "empty": not raw.any(),
            "bytes_head": record[:BYTES_PER_LINE].hex(),
            "fields": None if fields is None else [_field(record, *field) for field in fields],
            "problems": problems,
        }
    return {
        "bytes": len(record),
        "page_tokens": geometry.page_tokens,
        "head_dim": geometry.head_dim,
        "codec": codec.id,
        "plane_format": fmt,
        "alphabet": alphabet,
        "empty": not raw.any(),
        "fields": _fields(record, version, page_scale) + _regions(geometry),
        "codes": _codes(raw[at.codes_at : at.scales_at], alphabet),
        "scales": _scales(raw[at.scales_at : at.end], page_scale),
        "problems": problems,
    }


def render(slot: dict) -> str:
    """`describe`'s result as text."""
    if "codes" not in slot:
        return _render_own_layout(slot)
    lines = [
        f"slot of {slot['bytes']:,} bytes: {slot['page_tokens']} tokens x {slot['head_dim']} channels, "
        f"codec {slot['codec']}, {slot['alphabet']} alphabet"
    ]
    if slot["empty"]:
        return lines[0] + "\n  all bytes are zero: this head-page could not be packed and stays hot"
    lines += ["", "  offset   bytes  field        raw          meaning"]
    for field in slot["fields"]:
        row = f"  {field['at']:>6}  {field['bytes']:>6}  {field['name']:<11}  {field['hex']:<11}  {field['meaning']}"
        lines.append(row.rstrip())
    lines += ["", "codes (value before its scale: count)"]
    total = sum(entry["count"] for entry in slot["codes"])
    widest = max(entry["count"] for entry in slot["codes"])
    for entry in slot["codes"]:
        bar = "#" * round(40 * entry["count"] / widest)
        share = entry["count"] / total
        lines.append(
            f"  {entry['code']:#03x}  {entry['value']:+5.1f}  {entry['count']:>7}  {share:6.1%}  {bar}".rstrip()
        )
    scales = slot["scales"]
    lines += ["", f"scales: {scales['count']:,} bytes, {scales['distinct']} different"]
    lines.append(
        f"  smallest {scales['min_hex']} = {scales['min']:.6g}, largest {scales['max_hex']} = {scales['max']:.6g}"
    )
    lines.append(f"  subnormal {scales['subnormal']}, NaN {scales['nan']}, zero {scales['zero']}")
    common = ", ".join(f"{entry['hex']} = {entry['value']:.6g} ({entry['count']})" for entry in scales["most_common"])
    lines.append(f"  most common: {common}")
    lines += ["", *(f"problem: {problem}" for problem in slot["problems"])] if slot["problems"] else []
    return "\n".join(lines)


def _render_own_layout(slot: dict) -> str:
    """A codec that is not a raw slot: the fields that it names itself, else only how the slot starts."""
    lines = [
        f"slot of {slot['bytes']:,} bytes: {slot['page_tokens']} tokens x {slot['head_dim']} channels, "
        f"codec {slot['codec']}, which has its own layout (--hex shows every byte)"
    ]
    if slot["empty"]:
        lines.append("  all bytes are zero: this head-page could not be packed and stays hot")
    elif slot["fields"] is None:
        lines.append(f"  starts with {slot['bytes_head']}")
    else:
        lines += ["", "  offset   bytes  field           meaning"]
        lines += [
            f"  {field['at']:>6}  {field['bytes']:>6}  {field['name']:<14}  {field['meaning']}".rstrip()
            for field in slot["fields"]
        ]
    return "\n".join(lines + [f"problem: {problem}" for problem in slot["problems"]])


def hex_dump(record: bytes, geometry: Geometry, *, places: bool = True) -> str:
    """Every byte, 16 to a line; with `places` (raw layout only) each line with the tokens and channels it holds."""
    at = raw_layout(geometry)
    lines = []
    for start in range(0, len(record), BYTES_PER_LINE):
        part = record[start : start + BYTES_PER_LINE]
        where = _where(start, start + len(part) - 1, at, geometry) if places else ""
        lines.append(f"{start:08x}  {part.hex(' '):<47}  {where}".rstrip())
    return "\n".join(lines)


def _identify(raw, geometry: Geometry, codec: Codec | None, fmt: str | None) -> tuple[Codec, str, list[str]]:
    """The codec and plane format with the fewest objections to these bytes, and the objections. Any size can be one of
    a sized codec, so such a codec comes first only where its magic is there."""
    tried = []
    for maybe in [codec] if codec else all_codecs():
        known = maybe.with_stride(raw.size) if maybe.needs_stride else maybe
        for candidate in [fmt] if fmt else known.formats:
            if known.fits(candidate) and _bytes_of(known, geometry, candidate) == raw.size:
                found = [problem for _, problem in known.check_slots(raw[None], geometry, candidate)]
                foreign = known.sized and any(problem.startswith("magic") for problem in found)
                tried.append(((foreign, len(found)), known, candidate, found))
    if not tried:
        raise InputError(
            f"slot: no codec packs {fmt or 'this'} planes into {raw.size} bytes; check --codec and --format"
        )
    _, best, candidate, problems = min(tried, key=lambda entry: entry[0])
    return best, candidate, problems


def _bytes_of(codec: Codec, geometry: Geometry, fmt: str) -> int | None:
    """Slot bytes, None where the codec's layout does not fit into the size it was given."""
    try:
        return codec.slot_bytes(geometry, fmt)
    except InputError:
        return None


def _fields(record: bytes, version: int, page_scale: float) -> list[dict]:
    flags = int.from_bytes(record[6:8], "little")
    names = [name for bit, name in ((FLAG_VALID, "valid"), (FLAG_ISO3, "iso3")) if flags & bit]
    unknown = flags & ~(FLAG_VALID | FLAG_ISO3)
    names += [f"unknown bits {unknown:#x}"] if unknown else []
    magic = int.from_bytes(record[:4], "little")
    out = [
        _field(record, 0, 4, "magic", "raw slot" if magic == MAGIC else f"expected {MAGIC:#010x}, found {magic:#010x}"),
        _field(record, 4, 2, "version", str(version)),
        _field(record, 6, 2, "flags", ", ".join(names) or "not valid"),
    ]
    if version == PAGE_SCALE_VERSION:
        out.append(_field(record, 8, 4, "page scale", f"{page_scale!r}: every group scale is a multiple of it"))
        out.append(_field(record, 12, 4, "reserved", ""))
    else:
        out.append(_field(record, 8, 8, "reserved", ""))
    return out


def _field(record: bytes, at: int, size: int, name: str, meaning: str) -> dict:
    raw = record[at : at + size]
    if name in ("reserved", "unused"):
        meaning = "zero" if not any(raw) else "expected zero"
    return {
        "at": at,
        "bytes": size,
        "name": name,
        "hex": raw.hex() if size <= BYTES_PER_LINE else "",
        "meaning": meaning,
    }


def _regions(geometry: Geometry) -> list[dict]:
    at = raw_layout(geometry)
    tokens, channels = geometry.page_tokens, geometry.head_dim
    parts = [
        ("codes", at.codes_at, at.scales_at, f"{tokens} rows of {channels // 2} bytes, even channel in the low nibble"),
        ("scales", at.scales_at, at.end, f"{tokens} rows of {at.scales_per_row} E4M3 bytes, one per 16 channels"),
        ("padding", at.end, at.stride, "zero"),
    ]
    return [
        {"at": start, "bytes": end - start, "name": name, "hex": "", "meaning": meaning}
        for name, start, end, meaning in parts
        if end > start
    ]


def _codes(codes: np.ndarray, alphabet: str) -> list[dict]:
    counts = np.bincount(codes & 15, minlength=16) + np.bincount(codes >> 4, minlength=16)
    values = [*MAGNITUDES[alphabet], *(-value for value in MAGNITUDES[alphabet])]
    return [{"code": code, "value": values[code], "count": int(counts[code])} for code in range(16)]


def _scales(scales: np.ndarray, page_scale: float) -> dict:
    counts = np.bincount(scales, minlength=256)
    present = np.flatnonzero(counts)
    finite = [int(code) for code in present if code & 0x7F != 0x7F]
    low, high = (min(finite, key=e4m3_value), max(finite, key=e4m3_value)) if finite else (0, 0)
    magnitude = scales & 0x7F
    common = sorted((int(code) for code in present), key=lambda code: (-counts[code], code))[:5]

    def value(code: int) -> float | None:
        found = e4m3_value(code)
        return found * page_scale if found == found else None

    return {
        "count": int(scales.size),
        "distinct": int(present.size),
        "min": value(low),
        "min_hex": f"0x{low:02x}",
        "max": value(high),
        "max_hex": f"0x{high:02x}",
        "zero": int((magnitude == 0).sum()),
        "subnormal": int(((magnitude > 0) & (magnitude < FIRST_NORMAL)).sum()),
        "nan": int((magnitude == 0x7F).sum()),
        "most_common": [{"hex": f"0x{code:02x}", "value": value(code), "count": int(counts[code])} for code in common],
    }


def _where(first: int, last: int, at, geometry: Geometry) -> str:
    """What the bytes first..last hold, in tokens and channels; a line may touch two regions."""
    row_bytes = geometry.head_dim // 2
    parts = []
    if first < at.codes_at:
        parts.append("header")
    if last >= at.codes_at and first < at.scales_at:
        a, b = max(first, at.codes_at) - at.codes_at, min(last, at.scales_at - 1) - at.codes_at
        a_name = f"token {a // row_bytes} channel {a % row_bytes * 2}"
        parts.append(f"codes {a_name} .. token {b // row_bytes} channel {b % row_bytes * 2 + 1}")
    if last >= at.scales_at and first < at.end:
        a, b = max(first, at.scales_at) - at.scales_at, min(last, at.end - 1) - at.scales_at
        per_row = at.scales_per_row
        parts.append(f"scales token {a // per_row} group {a % per_row} .. token {b // per_row} group {b % per_row}")
    if last >= at.end:
        parts.append("padding")
    return ", ".join(parts)
