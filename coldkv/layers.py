"""Layer selections such as `0,3-7`."""

import re
from collections.abc import Iterable, Sequence

from coldkv.errors import InputError

_MAX_LAYER = 1_000_000


def parse_layers(text: str) -> list[int]:
    """`"0,3-7"` -> `[0, 3, 4, 5, 6, 7]`: ascending, inclusive ranges, no layer twice. InputError if malformed."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part, re.ASCII)
        if not match:
            raise InputError(f"layers {text!r}: expected numbers and ranges such as 0,3-7, found {part.strip()[:40]!r}")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first or last > _MAX_LAYER:
            raise InputError(f"layers {text!r}: range {part.strip()!r} runs backwards or past {_MAX_LAYER}")
        span = range(first, last + 1)
        twice = found.intersection(span)
        if twice:
            raise InputError(f"layers {text!r}: layer {min(twice)} is named twice")
        found.update(span)
    return sorted(found)


def format_layers(layers: Iterable[int]) -> str:
    """The inverse of `parse_layers`: `[0, 3, 4, 5]` -> `"0,3-5"`."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def select_layers(text: str | None, existing: Sequence[int], where: str) -> list[int]:
    """The layers of `existing` that `text` names, all of them if `text` is None; an unknown one is an InputError."""
    if text is None:
        return list(existing)
    wanted = parse_layers(text)
    unknown = sorted(set(wanted) - set(existing))
    if unknown:
        raise InputError(
            f"layers {text!r}: {where} has no layer {format_layers(unknown)}; layers with KV: {format_layers(existing)}"
        )
    return wanted
