"""Layout of a slot of codec `ecq`: header, coder states, row bytes, stream (kernels/FORMAT.md, section 7)."""

import numpy as np

from coldkv.geometry import round_up

MAGIC = 0x31514345
HEADER = np.dtype([("magic", "<u4"), ("version", "<u2"), ("flags", "u1"), ("head", "u1"), ("step", "<i2"),
                   ("prior", "<i2"), ("words", "<u4")])  # fmt: skip
VALID, ROWS, COARSER, WIDE = 1, 2, 4, 8
LANES = 32
STATES_AT, STREAM_AT = 16, 16 + 4 * LANES
MOST_WORDS = (1 << 24) - 1
MOST_STEP = 1680  # of a header: beyond what any encoder writes, and small enough that restored values stay finite


def headers(slots: np.ndarray) -> np.ndarray:
    """Structured array of HEADER, one per slot of uint8 `[n, stride]`."""
    return np.ascontiguousarray(slots[:, : HEADER.itemsize]).view(HEADER)[:, 0]


def extra_rows(page_tokens: int, rows: bool) -> int:
    """Row bytes that the states have no room for; they lie between states and stream."""
    return max(0, page_tokens - 2 * LANES) if rows else 0


def stream_at(page_tokens: int, rows: bool) -> int:
    """Byte of a slot where its stream begins. `rows`: whether it has row bytes."""
    return STREAM_AT + round_up(extra_rows(page_tokens, rows), 2)
