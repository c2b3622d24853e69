"""Finding damage in a pool file, named down to layer, plane, page and head. Torch-free."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from coldkv.errors import InputError
from coldkv.pool.file import PoolFile, looks_like_pool
from coldkv.pool.layout import entry_slot
from coldkv.pool.reader import LayerReader, Problem

SLICE_BYTES = 8 << 20


@dataclass
class VerifyReport:
    """What was looked at and what is wrong. `crc_bytes`: tensor bytes under a CRC32 that were read."""

    path: str
    file_bytes: int = 0
    tensors: int = 0
    crc_bytes: int = 0
    slot_records: int = 0
    hot_records: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(path: str, *, advance: Callable[[int], None] = lambda nbytes: None) -> VerifyReport:
    """Check the header, the CRC32 of every tensor, slot record and hot head-page, every slot header, and the block
    and replica tables. All problems are reported, not only the first.

    InputError for a file that is missing, empty or no pool at all; a pool too damaged to open is a problem of its
    "header".
    """
    report = VerifyReport(path)
    try:
        pool = PoolFile(path)
    except InputError as error:
        if not os.path.isfile(path) or not looks_like_pool(path):
            raise
        report.file_bytes = os.path.getsize(path)
        report.problems.append(_opening_problem(path, error))
        return report
    with pool:
        report.file_bytes = pool.file_bytes
        for name in pool.tensor_names():
            problem = pool.crc_problem(name)
            if problem:
                report.problems.append(_tensor_problem(name, problem))
            report.tensors += 1
            report.crc_bytes += pool.nbytes(name)
            advance(pool.nbytes(name))
        cold: dict[int, tuple[int, list[int]]] = {}
        for layout in pool.layers:
            reader = LayerReader(pool, layout)
            report.problems += reader.table_problems()
            _check_records(reader, report, advance)
            if layout.has_slots:
                table = reader.block_table.tolist()
                pages = [page for page, entry in enumerate(table) if entry_slot(entry) is not None]
                other, expected = cold.setdefault(layout.tokens, (layout.index, pages))
                if pages != expected:
                    page = min(set(pages) ^ set(expected))
                    text = f"cold in only one of layers {other} and {layout.index}, which have the same length"
                    report.problems.append(Problem(f"{layout.base}.block_table", text, layout.index, page=page))
    return report


def _check_records(reader: LayerReader, report: VerifyReport, advance) -> None:
    layout = reader.layout
    records = layout.geometry.kv_heads * len(layout.planes)
    step = max(1, SLICE_BYTES // max(1, layout.pitch))
    for start in range(0, layout.slots, step):
        stop = min(start + step, layout.slots)
        for name, found in reader.slot_rows(start, stop).items():
            report.problems += reader.slot_problems(name, start, found)
        report.slot_records += (stop - start) * records
        advance((stop - start) * layout.pitch)
    step = max(1, SLICE_BYTES // layout.hot_page_bytes())
    whole = layout.hot_tokens // layout.geometry.page_tokens
    spans = [(start, min(start + step, whole), False) for start in range(0, whole, step)]
    if layout.hot_pages > whole:
        spans.append((whole, whole + 1, False))
    spans += [(s, min(s + step, layout.replica_pages), True) for s in range(0, layout.replica_pages, step)]
    for start, stop, replica in spans:
        for name in layout.planes:
            codes, scales = reader.hot_rows(name, start, stop, replica=replica)
            report.problems += reader.hot_problems(name, start, codes, scales, replica=replica)
        report.hot_records += (stop - start) * records


def _tensor_problem(name: str, text: str) -> Problem:
    match = re.match(r"layers\.(\d+)\.(?:replica\.)?(?:([kv])\.)?", name)
    return Problem(name, text, int(match[1]) if match else None, match[2] if match else None)


def _opening_problem(path: str, error: InputError) -> Problem:
    text = str(error).removeprefix(f"pool {path}: ").removeprefix("header: ")
    match = re.match(r"tensor (layers\.\d+\.\S+): (.*)", text)
    return _tensor_problem(match[1], match[2]) if match else Problem("header", text)
