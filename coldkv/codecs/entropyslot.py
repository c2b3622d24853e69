"""The byte layout of the seed's entropy slot (kernels/FORMAT.md, section 6): addresses, checks, fields. No torch."""

import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from coldkv.codecs.rawslot import FLAG_VALID, scale_problem
from coldkv.geometry import Geometry, ceil_div

MAGIC = 0x3156524E
HEADER_BYTES = 320
HALVES, STREAMS_PER_HALF, SYMBOLS = 2, 16, 16
STREAMS = HALVES * STREAMS_PER_HALF
HALF_AT, HALF_BYTES = 8, 128  # freq u16 x 16, offset u32 x 17, 28 reserved bytes
OFFSETS_IN_HALF, RESERVED_IN_HALF = 32, 100
RESERVED_AT = HALF_AT + HALVES * HALF_BYTES
TOTAL, LOW, STATE_BYTES = 4096, 1 << 23, 4


@dataclass(frozen=True)
class EntropyLayout:
    """How a head-page of `geometry` is cut into streams: stream g has the rows `[g*rows, (g+1)*rows)` that exist."""

    geometry: Geometry

    @cached_property
    def rows(self) -> int:
        """Rows of a stream; the last stream may have fewer."""
        return ceil_div(self.geometry.page_tokens, STREAMS)

    @cached_property
    def streams(self) -> int:
        """Streams that have rows."""
        return ceil_div(self.geometry.page_tokens, self.rows)

    @cached_property
    def counts(self) -> list[int]:
        """Symbols of each of the 32 streams."""
        rows = (min(self.geometry.page_tokens - g * self.rows, self.rows) for g in range(STREAMS))
        return [max(0, here) * self.geometry.head_dim for here in rows]

    @cached_property
    def tail_bytes(self) -> int:
        """Scale bytes, which end the slot."""
        return self.geometry.page_tokens * self.geometry.groups(16)

    def bytes_for(self, longest):
        """Slot bytes needed where the longest stream has `longest` bytes."""
        return HEADER_BYTES + self.streams * longest + self.tail_bytes

    def budget(self, stride: int) -> int:
        """Bytes that each stream may have in a slot of `stride` bytes."""
        return (stride - HEADER_BYTES - self.tail_bytes) // self.streams


def tables(slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slots uint8 `[n, stride]` -> (freq int64 `[n, 2, 16]`, offsets int64 `[n, 2, 17]`), as they are."""
    halves = slots[:, HALF_AT : HALF_AT + HALVES * HALF_BYTES].reshape(len(slots), HALVES, HALF_BYTES)
    freq = np.ascontiguousarray(halves[..., :OFFSETS_IN_HALF]).view("<u2")
    offsets = np.ascontiguousarray(halves[..., OFFSETS_IN_HALF:RESERVED_IN_HALF]).view("<u4")
    return freq.astype(np.int64), offsets.astype(np.int64)


def check_entropy_slots(slots: np.ndarray, geometry: Geometry, version: int) -> list[tuple[int, str]]:
    """Slots uint8 `[n, stride]` -> (index, the first thing wrong of all that a reader depends on), by index."""
    n, stride = slots.shape
    at = EntropyLayout(geometry)
    tail, counts = stride - at.tail_bytes, np.array(at.counts)
    head = np.ascontiguousarray(slots[:, :HALF_AT])
    magic, found_version = head[:, :4].copy().view("<u4")[:, 0], head[:, 4:6].copy().view("<u2")[:, 0]
    flags = head[:, 6:].copy().view("<u2")[:, 0]
    reserved = [i for half in range(HALVES) for i in range(*_reserved(half))] + [*range(RESERVED_AT, HEADER_BYTES)]

    freq, offsets = tables(slots)
    bad_freq = (freq < 1).any(axis=2) | (freq.sum(axis=2) != TOTAL)
    firsts = np.stack([np.full(n, HEADER_BYTES), offsets[:, 0, -1]], axis=1)
    bad_first = offsets[..., 0] != firsts
    begin, end = (part.reshape(n, STREAMS) for part in (offsets[..., :-1], offsets[..., 1:]))
    bad_end = (end > tail) | np.where(counts > 0, end - begin < STATE_BYTES, end != begin)
    last = np.clip(end[..., None] - np.arange(1, STATE_BYTES + 1), 0, stride - 1)
    state = np.take_along_axis(slots[:, None], last, axis=2).astype(np.int64) @ (256 ** np.arange(3, -1, -1))
    bad_state = (counts > 0) & ((state < LOW) | (state >= LOW << 8))
    gap = (np.arange(HEADER_BYTES, tail) >= offsets[:, 1, -1:]) & (slots[:, HEADER_BYTES:tail] != 0)
    scales = slots[:, tail:]
    bad_scale = (scales == 0) | (scales > 0x7E)

    def freq_text(i: int) -> str:
        half = int(bad_freq[i].argmax())
        return f"half {half}: frequencies: expected at least 1 each, {TOTAL} in all, found {freq[i, half].tolist()}"

    def first_text(i: int) -> str:
        half = int(bad_first[i].argmax())
        return f"half {half}: offset 0: expected {firsts[i, half]}, found {offsets[i, half, 0]}"

    def end_text(i: int) -> str:
        half, stream = divmod(int(bad_end[i].argmax()), STREAMS_PER_HALF)
        first, used = begin[i, half * STREAMS_PER_HALF + stream], counts[half * STREAMS_PER_HALF + stream]
        expected = f"{first + STATE_BYTES}..{tail}" if used else str(first)
        return f"half {half}: offset {stream + 1}: expected {expected}, found {offsets[i, half, stream + 1]}"

    def state_text(i: int) -> str:
        half, stream = divmod(int(bad_state[i].argmax()), STREAMS_PER_HALF)
        found = state[i, half * STREAMS_PER_HALF + stream]
        return f"half {half}: stream {stream}: state: expected 0x{LOW:08x}..0x{(LOW << 8) - 1:08x}, found 0x{found:08x}"

    checks = (
        (magic != MAGIC, lambda i: f"magic: expected 0x{MAGIC:08x}, found 0x{magic[i]:08x}"),
        (found_version != version, lambda i: f"version: expected {version}, found {found_version[i]}"),
        (flags != FLAG_VALID, lambda i: f"flags: expected {FLAG_VALID}, found {flags[i]}"),
        (slots[:, reserved].any(axis=1), lambda i: "reserved bytes of the header: expected zero"),
        (bad_freq.any(axis=1), freq_text),
        (bad_first.any(axis=1), first_text),
        (bad_end.any(axis=1), end_text),
        (bad_state.any(axis=1), state_text),
        (gap.any(axis=1), lambda i: "bytes between streams and scales: expected zero"),
        (bad_scale.any(axis=1), lambda i: scale_problem(scales[i], bad_scale[i], geometry.groups(16))),
    )
    wrong = np.flatnonzero(np.logical_or.reduce([mask for mask, _ in checks]))
    return [(int(i), next(text(int(i)) for mask, text in checks if mask[i])) for i in wrong]


def _reserved(half: int) -> tuple[int, int]:
    begin = HALF_AT + half * HALF_BYTES
    return begin + RESERVED_IN_HALF, begin + HALF_BYTES


def slot_fields(record: bytes, geometry: Geometry) -> list[tuple[int, int, str, str]]:
    """(first byte, bytes, name, meaning) of each field of one slot, for `inspect`."""
    at = EntropyLayout(geometry)
    magic, version, flags = struct.unpack_from("<IHH", record)
    freq, offsets = (part[0] for part in tables(np.frombuffer(record, np.uint8)[None]))
    found = [
        (0, 4, "magic", "entropy slot" if magic == MAGIC else f"expected {MAGIC:#010x}, found {magic:#010x}"),
        (4, 2, "version", str(version)),
        (6, 2, "flags", "valid" if flags == FLAG_VALID else f"expected {FLAG_VALID}, found {flags}"),
    ]
    for half in range(HALVES):
        begin = HALF_AT + half * HALF_BYTES
        shares = " ".join(map(str, freq[half].tolist()))
        found.append((begin, OFFSETS_IN_HALF, f"half {half} freq", f"codes 0..15 in 4096ths: {shares}"))
        sizes = " ".join(map(str, np.diff(offsets[half]).tolist()))
        text = f"{offsets[half][0]}..{offsets[half][-1]}, bytes of each stream: {sizes}"
        found.append((begin + OFFSETS_IN_HALF, RESERVED_IN_HALF - OFFSETS_IN_HALF, f"half {half} offsets", text))
        found.append((begin + RESERVED_IN_HALF, HALF_BYTES - RESERVED_IN_HALF, "reserved", ""))
    found.append((RESERVED_AT, HEADER_BYTES - RESERVED_AT, "reserved", ""))
    tail = len(record) - at.tail_bytes
    used = int(np.clip(offsets[1][-1], HEADER_BYTES, tail))
    share, budget = 8 * (used - HEADER_BYTES) / geometry.elements, at.budget(len(record))
    found.append(
        (HEADER_BYTES, used - HEADER_BYTES, "streams", f"{share:.3f} bits per code, at most {budget} bytes each")
    )
    if tail > used:
        found.append((used, tail - used, "unused", "zero"))
    text = f"{geometry.page_tokens} rows of {geometry.groups(16)} E4M3 bytes, one per 16 channels"
    return [*found, (tail, at.tail_bytes, "scales", text)]
