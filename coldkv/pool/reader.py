"""Checked reads of one layer of a pool: nothing leaves here before checksum and slot header hold. Torch-free."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from coldkv.errors import InputError
from coldkv.pool.file import PoolFile, head_page_crcs, record_crcs
from coldkv.pool.layout import NO_REPLICA, UNMAPPED, LayerLayout, entry_slot, place

VERIFY_HINT = "coldkv verify lists all damage"


@dataclass(frozen=True)
class Problem:
    """Something wrong in a pool: where (as far as it can be told) and what. `tensor` is the file's tensor, or
    "header"."""

    tensor: str
    text: str
    layer: int | None = None
    plane: str | None = None
    page: int | None = None
    head: int | None = None

    def __str__(self) -> str:
        where = "" if self.layer is None else place(self.layer, self.plane, self.page, self.head) + ": "
        return f"{where}{self.tensor}: {self.text}"

    def to_json(self) -> dict:
        return {key: getattr(self, key) for key in ("layer", "plane", "page", "head", "tensor", "text")}


def raise_first(path: str, problems: list[Problem]) -> None:
    """InputError for the first of `problems`, if there is any."""
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InputError(f"pool {path}: {problems[0]}{more}", hint=VERIFY_HINT)


def runs(indices: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    """Maximal ascending runs of consecutive numbers: (position in `indices`, first, past the last)."""
    at, first, stop = 0, None, None
    for position, index in enumerate(indices):
        if first is not None and index == stop:
            stop += 1
            continue
        if first is not None:
            yield at, first, stop
        at, first, stop = position, index, index + 1
    if first is not None:
        yield at, first, stop


class LayerReader:
    """One layer of an open pool. The tables are read at once and not yet trusted: see `table_problems`.

    `block_table` int32 `[pages]`; `valid`, `slot_crc` `[slots, planes, heads]` and `replica_table` `[slots]` or None
    where the layer has none; `slot_page`, `hot_page`, `replica_page`: the logical page of a slot, hot index or
    replica, -1 where no entry names it.
    """

    def __init__(self, pool: PoolFile, layout: LayerLayout):
        self.pool, self.layout = pool, layout
        self.plane_names = list(layout.planes)
        self.block_table = self._table("block_table", layout.pages)
        self.hot_crc = self._table("hot_crc", layout.hot_pages)
        self.valid = self.slot_crc = self.replica_table = self.replica_crc = None
        if layout.has_slots:
            self.valid = self._table("valid", layout.slots)
            self.slot_crc = self._table("slot_crc", layout.slots)
        if layout.replica_pages:
            self.replica_table = self._table("replica_table", layout.slots)
            self.replica_crc = self._table("replica_crc", layout.replica_pages)
        self.slot_page = np.full(layout.slots, -1, dtype=np.int64)
        self.hot_page = np.full(layout.hot_pages, -1, dtype=np.int64)
        for page, entry in enumerate(self.block_table.tolist()):
            slot = entry_slot(entry)
            if slot is not None and slot < layout.slots:
                self.slot_page[slot] = page
            elif 0 <= entry < layout.hot_pages:
                self.hot_page[entry] = page
        self.replica_page = np.full(layout.replica_pages, -1, dtype=np.int64)
        for slot, replica in enumerate([] if self.replica_table is None else self.replica_table.tolist()):
            if 0 <= replica < layout.replica_pages:
                self.replica_page[replica] = self.slot_page[slot]

    def _table(self, name: str, rows: int) -> np.ndarray:
        return self.pool.rows(f"{self.layout.base}.{name}", 0, rows)

    def table_names(self) -> list[str]:
        """Tensors whose whole content must be sound before a single page can be trusted."""
        names = ["block_table", "hot_crc"]
        names += ["valid", "slot_crc"] if self.layout.has_slots else []
        names += ["replica_table", "replica_crc"] if self.layout.replica_pages else []
        return [f"{self.layout.base}.{name}" for name in names]

    def _problem(self, tensor: str, text: str, plane=None, page=None, head=None) -> Problem:
        page = None if page is None or page < 0 else int(page)
        return Problem(f"{self.layout.base}.{tensor}", text, self.layout.index, plane, page, head)

    def table_problems(self) -> list[Problem]:
        """Block table and replica table: entries in range, no slot or hot page owned twice, none leaked, the partial
        page in its place, validity 1 for every cold page."""
        layout = self.layout
        found: list[Problem] = []
        owners: dict[tuple[str, int], int] = {}
        for page, entry in enumerate(self.block_table.tolist()):
            if entry == UNMAPPED:
                continue
            slot = entry_slot(entry)
            kind, index, limit = "hot page", entry, layout.hot_pages
            if slot is not None:
                kind, index, limit = "slot", slot, layout.slots
            if index >= limit:
                found.append(self._problem("block_table", f"{kind} {index}: only {limit} exist", page=page))
            elif (kind, index) in owners:
                text = f"{kind} {index} is owned twice, also by page {owners[kind, index]}"
                found.append(self._problem("block_table", text, page=page))
            else:
                owners[kind, index] = page
        for kind, total in (("slot", layout.slots), ("hot page", layout.hot_pages)):
            for index in range(total):
                if (kind, index) not in owners:
                    found.append(self._problem("block_table", f"{kind} {index} is leaked: no page owns it"))
        if layout.partial_tokens:
            last = layout.pages - 1
            if int(self.block_table[last]) != layout.hot_pages - 1:
                found_entry = self.block_table[last]
                text = f"the partial page: expected hot page {layout.hot_pages - 1}, found entry {found_entry}"
                found.append(self._problem("block_table", text, page=last))
        if self.valid is not None:
            for slot, plane, head in np.argwhere(self.valid != 1).tolist():
                text = f"slot {slot}: expected validity 1, found {self.valid[slot, plane, head]}"
                found.append(self._problem("valid", text, self.plane_names[plane], self.slot_page[slot], head))
        return found + self._replica_problems()

    def _replica_problems(self) -> list[Problem]:
        found: list[Problem] = []
        owners: dict[int, int] = {}
        for slot, replica in enumerate([] if self.replica_table is None else self.replica_table.tolist()):
            page = self.slot_page[slot]
            if replica == NO_REPLICA:
                continue
            if not 0 <= replica < self.layout.replica_pages:
                text = f"slot {slot}: replica {replica}: only {self.layout.replica_pages} exist"
                found.append(self._problem("replica_table", text, page=page))
            elif replica in owners:
                text = f"slot {slot}: replica {replica} is owned twice, also by slot {owners[replica]}"
                found.append(self._problem("replica_table", text, page=page))
            owners.setdefault(replica, slot)
        for replica in range(self.layout.replica_pages):
            if replica not in owners:
                found.append(self._problem("replica_table", f"replica {replica} is leaked: no slot owns it"))
        return found

    def check_tables(self) -> None:
        """InputError unless every table's CRC32 and all of `table_problems` are fine."""
        for name in self.table_names():
            self.pool.checked(name)
        raise_first(self.pool.path, self.table_problems())

    def slot_rows(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Slots `[start, stop)` unchecked: plane -> records uint8 `[(stop - start) * heads, stride]`."""
        rows = self.pool.rows(f"{self.layout.base}.slots", start, stop)
        found = {}
        for name, plane in self.layout.planes.items():
            at = self.layout.plane_offset(name)
            part = rows[:, at : at + self.layout.geometry.kv_heads * plane.stride]
            found[name] = np.ascontiguousarray(part.reshape(-1, plane.stride))
        return found

    def slot_problems(self, name: str, start: int, records: np.ndarray) -> list[Problem]:
        """What is wrong with the records of one plane of slots from `start` on: CRC32, then length, magic, version,
        flags and whatever else the codec checks."""
        plane, heads = self.layout.planes[name], self.layout.geometry.kv_heads
        number = self.plane_names.index(name)

        def problem(i: int, text: str) -> Problem:
            slot = start + i // heads
            return self._problem("slots", f"slot {slot}: {text}", name, self.slot_page[slot], i % heads)

        expected = self.slot_crc[start : start + len(records) // heads, number].reshape(-1)
        actual = record_crcs(records)
        found = [
            (int(i), f"CRC32: expected {expected[i]:08x}, found {actual[i]:08x}")
            for i in np.flatnonzero(expected != actual)
        ]
        found += plane.codec.check_slots(records, self.layout.geometry, plane.format)
        return [problem(i, text) for i, text in sorted(found, key=lambda item: item[0])]

    def hot_rows(self, name: str, start: int, stop: int, *, replica: bool = False):
        """Hot pages (or replicas) `[start, stop)` of a plane unchecked -> (codes `[pages * heads, T, lead]`, scales or
        None). A partial page can only be read alone; then T is its own number of tokens."""
        layout, heads = self.layout, self.layout.geometry.kv_heads
        page_tokens = layout.geometry.page_tokens
        total = layout.replica_pages * page_tokens if replica else layout.hot_tokens
        first, last = start * page_tokens, min(stop * page_tokens, total)
        rows = last - first if stop - start == 1 else page_tokens
        where = f"{layout.base}.{'replica.' if replica else ''}{name}"

        def head_pages(tensor: str) -> np.ndarray:
            values = self.pool.rows(tensor, first, last)
            return values.reshape(-1, rows, heads, values.shape[-1]).swapaxes(1, 2).reshape(-1, rows, values.shape[-1])

        has_scales = f"{where}.scales" in self.pool
        return head_pages(f"{where}.codes"), head_pages(f"{where}.scales") if has_scales else None

    def hot_problems(self, name: str, start: int, codes, scales, *, replica: bool = False) -> list[Problem]:
        """CRC32 of hot pages (or replicas) from `start` on against their table."""
        heads = self.layout.geometry.kv_heads
        table, owner = (self.replica_crc, self.replica_page) if replica else (self.hot_crc, self.hot_page)
        pages = len(codes) // heads
        expected = table[start : start + pages, self.plane_names.index(name)].reshape(-1)
        actual = head_page_crcs(codes, scales)
        return [
            self._problem(
                f"{'replica.' if replica else ''}{name}.codes",
                f"{'replica' if replica else 'hot page'} {start + i // heads}: CRC32 of codes and scales: "
                f"expected {expected[i]:08x}, found {actual[i]:08x}",
                name,
                owner[start + i // heads],
                int(i % heads),
            )
            for i in np.flatnonzero(expected != actual)
        ]

    def read_slots(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Like `slot_rows`, checked; InputError naming layer, plane, page and head of the first bad record."""
        records = self.slot_rows(start, stop)
        raise_first(self.pool.path, [p for n, r in records.items() for p in self.slot_problems(n, start, r)])
        return records

    def read_hot(self, name: str, start: int, stop: int, *, replica: bool = False):
        """Like `hot_rows`, checked."""
        codes, scales = self.hot_rows(name, start, stop, replica=replica)
        raise_first(self.pool.path, self.hot_problems(name, start, codes, scales, replica=replica))
        return codes, scales
