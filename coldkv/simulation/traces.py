"""Request traces, read line by line: Mooncake JSONL, Azure CSV, and our own JSONL (docs/simulate.md). Torch-free."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from coldkv.errors import InputError

MOONCAKE_BLOCK_TOKENS = 512
MOST_TOKENS = 1 << 24
AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
OWN_KEYS = {"arrival_s", "input_tokens", "output_tokens", "prefix", "block_tokens"}


@dataclass(frozen=True)
class Request:
    """One request. `arrival` in seconds from the trace's start; `prefix`: ids of the blocks of `block_tokens` tokens
    that the prompt starts with. An id stands for its block and all before it: equal ids, equal tokens so far."""

    arrival: float
    input_tokens: int
    output_tokens: int
    prefix: tuple[int | str, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


def read_trace(path: str, *, limit: int | None = None) -> Iterator[Request]:
    """The requests of a trace in the order of the file, at most `limit`. InputError naming the line that is wrong, an
    arrival before the one above it included."""
    try:
        # newline="" leaves line ends to the csv reader; utf-8-sig drops a byte order mark
        file = open(path, encoding="utf-8-sig", newline="")
    except IsADirectoryError:
        raise InputError(f"trace {path}: expected a file, found a folder") from None
    with file:
        last, count = 0.0, 0
        try:
            for line, request in _rows(file, path):
                if limit is not None and count >= limit:
                    return
                if request.arrival < last:
                    raise InputError(
                        f"trace {path}: line {line}: arrival: expected at least {last:g} s, found {request.arrival:g}"
                    )
                last, count = request.arrival, count + 1
                yield request
        except UnicodeDecodeError:
            raise InputError(f"trace {path}: expected UTF-8 text") from None
        if not count:
            raise InputError(f"trace {path}: expected requests, found none")


def _rows(file, path: str) -> Iterator[tuple[int, Request]]:
    first = file.readline(1 << 20)
    file.seek(0)
    if first.lstrip().startswith("{"):
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _from_json(line, f"trace {path}: line {number}")
    elif first.strip().split(",") == AZURE_COLUMNS:
        yield from _azure(file, path)
    else:
        raise InputError(
            f"trace {path}: expected JSON lines or a CSV file with {','.join(AZURE_COLUMNS)}, "
            f"found {first.strip()[:60]!r}"
        )


def _azure(file, path: str) -> Iterator[tuple[int, Request]]:
    rows, start = csv.reader(file), None
    next(rows)
    for row in rows:
        if not row:
            continue
        where = f"trace {path}: line {rows.line_num}"
        if len(row) != len(AZURE_COLUMNS):
            raise InputError(f"{where}: expected {len(AZURE_COLUMNS)} columns, found {len(row)}")
        try:
            # seven digits of a second, of which datetime takes six
            whole, _, fraction = row[0].partition(".")
            at = datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}")
        except ValueError:
            raise InputError(f"{where}: TIMESTAMP: expected a date and time, found {row[0][:40]!r}") from None
        start = start or at
        counts = [_whole(value, name, where) for value, name in zip(row[1:], AZURE_COLUMNS[1:], strict=True)]
        yield rows.line_num, _request((at - start).total_seconds(), *counts, where=where)


def _whole(text: str, name: str, where: str) -> int:
    if not (text.isascii() and text.strip().isdigit() and len(text) < 12):
        raise InputError(f"{where}: {name}: expected a whole number, found {text[:40]!r}")
    return int(text)


def _from_json(line: str, where: str) -> Request:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON: {str(error)[:100]}") from None
    if not isinstance(entry, dict):
        raise InputError(f"{where}: expected an object, found {str(entry)[:40]}")
    if "hash_ids" in entry:
        found = [entry.get(key) for key in ("timestamp", "input_length", "output_length", "hash_ids")]
        arrival = found[0] / 1000 if _number(found[0]) else None
        return _request(arrival, *found[1:3], prefix=found[3], where=where)
    unknown = sorted(set(entry) - OWN_KEYS)
    if unknown:
        raise InputError(f"{where}: unknown key {unknown[0]!r}; expected {', '.join(sorted(OWN_KEYS))}")
    return _request(
        entry.get("arrival_s"), entry.get("input_tokens"), entry.get("output_tokens"), prefix=entry.get("prefix", []),
        block_tokens=entry.get("block_tokens", MOONCAKE_BLOCK_TOKENS), where=where,
    )  # fmt: skip


def _number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e12


def _request(arrival, input_tokens, output_tokens, *, where, prefix=(), block_tokens=MOONCAKE_BLOCK_TOKENS) -> Request:
    if not _number(arrival):
        raise InputError(f"{where}: arrival: expected a number from 0, found {str(arrival)[:40]}")
    for name, value, least in (
        ("input tokens", input_tokens, 1),
        ("output tokens", output_tokens, 0),
        ("block tokens", block_tokens, 1),
    ):
        if type(value) is not int or not least <= value <= MOST_TOKENS:
            raise InputError(f"{where}: {name}: expected {least} to {MOST_TOKENS:,}, found {str(value)[:40]}")
    if not isinstance(prefix, list | tuple) or not all(type(block) in (int, str) for block in prefix):
        raise InputError(f"{where}: prefix: expected a list of block ids, found {str(prefix)[:40]}")
    return Request(float(arrival), input_tokens, output_tokens, tuple(prefix), block_tokens)
