"""The main job: every plane of a dump through its hot tier, each codec and back, into result rows."""

import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from coldkv.codecs import Codec, all_codecs
from coldkv.coldplane import decode_held
from coldkv.dumps import Dump, LayerDump
from coldkv.errors import InputError
from coldkv.formats import FORMATS, tier_formats
from coldkv.metrics import LogitError, PairSums
from coldkv.pipeline import layer_geometry, plane_chunks, plane_format
from coldkv.table import Assignment


class Stopped(Exception):
    """Another worker failed or the user interrupted; this one gave up between two chunks."""


@dataclass
class PlaneTask:
    """One plane of one layer in one tier, with the codecs that take its format."""

    dump_name: str
    layer: LayerDump
    tier: str
    plane: str
    fmt: str
    codecs: list[Codec]
    page_tokens: int
    queries: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that will be read: the plane, twice where a stride is chosen first."""
        return self.layer.planes[self.plane].nbytes * (2 if any(codec.needs_stride for codec in self.codecs) else 1)


@dataclass
class CodecSums:
    """What one codec did to one plane, per head. `label` names it in the rows, whatever it was bound to."""

    label: str
    codec: Codec
    hot: PairSums
    ref: PairSums
    logits: LogitError | None
    invalid: torch.Tensor = field(default_factory=lambda: torch.zeros(0))


def choose_codecs(wanted: list[Codec] | None, assignments: list[Assignment]) -> list[Codec]:
    """The codecs to run: `wanted`, or every codec that takes some plane of the tiers in use.

    Raises InputError if a wanted codec fits none of them; one that fits some leaves the others hot.
    """
    tiers = sorted({tier for assignment in assignments for _, tier in assignment.pairs})
    formats = {fmt for tier in tiers for fmt in tier_formats(tier).values()}
    if wanted is None:
        return [codec for codec in all_codecs() if formats & set(codec.formats)]
    for codec in wanted:
        if not formats & set(codec.formats):
            raise InputError(
                f"codec {codec.id}: fits planes of {', '.join(codec.formats)}, but the tiers in use "
                f"({', '.join(tiers)}) have {', '.join(sorted(formats))}"
            )
    return wanted


def plan(dump: Dump, name: str, assignment: Assignment, codecs: list[Codec]) -> list[PlaneTask]:
    """Tasks in the order of the result rows. Raises InputError for planes that cannot be in their tier."""
    tasks = []
    for index, tier in assignment.pairs:
        layer = dump.layer(index)
        queries = layer.queries()
        for plane, source in layer.planes.items():
            fmt = plane_format(source, plane, tier)
            fitting = [codec for codec in codecs if codec.fits(fmt)]
            wants_logits = queries if plane == "k" else None
            tasks.append(PlaneTask(name, layer, tier, plane, fmt, fitting, dump.page_tokens, wants_logits))
    if not any(layer.tokens >= dump.page_tokens for layer in {id(t.layer): t.layer for t in tasks}.values()):
        longest = max(task.layer.tokens for task in tasks)
        raise InputError(
            f"dump {dump.path}: expected at least one whole page of {dump.page_tokens} tokens, found {longest} tokens",
            hint="set a smaller page size with --page-tokens",
        )
    return tasks


def measure(tasks: list[PlaneTask], backend, *, nan: str = "reject", advance=lambda nbytes: None) -> tuple[list, list]:
    """Run the tasks -> (rows, run.layers entries), in the order of the tasks.

    `advance(bytes)` is called as planes are read. Raises InputError for bad values in the dump; no partial result.
    """
    stop = threading.Event()

    def run(task: PlaneTask):
        return _measure_plane(task, backend, nan, advance, stop)

    workers = backend.parallel_planes
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(run, task) for task in tasks]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            results = [future.result() for future in _failed_first(futures)]
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return [row for rows, _ in results for row in rows], [entry for _, entry in results]


def _failed_first(futures: list) -> Iterator:
    """All futures in order, after any that failed, so that the first real error is the one raised."""
    for future in futures:
        if future.done() and not future.cancelled() and future.exception() is not None:
            yield future
    yield from futures


def _measure_plane(task: PlaneTask, backend, nan: str, advance, stop: threading.Event):
    geometry = layer_geometry(task.layer, task.page_tokens)
    heads = geometry.kv_heads
    source = task.layer.planes[task.plane]
    bound = [codec.bind(task.layer.index, task.plane, task.fmt, geometry) for codec in task.codecs]
    bound = _with_strides(bound, task, geometry, backend, nan, advance, stop)
    sums = [
        CodecSums(
            asked.label,
            codec,
            PairSums(heads, geometry.head_dim),
            PairSums(heads),
            LogitError(task.layer, task.queries) if task.queries is not None else None,
            torch.zeros(heads, dtype=torch.int64),
        )
        for asked, codec in zip(task.codecs, bound, strict=True)
    ]
    zeroed = 0
    for chunk in plane_chunks(source, task.fmt, geometry, backend, nan=nan):
        if stop.is_set():
            raise Stopped
        zeroed += chunk.zeroed
        hot = backend.dequantize(chunk.hot) if sums else None
        for entry in sums:
            slots, valid = backend.encode(entry.codec, chunk.hot, geometry)
            restored = decode_held(backend, entry.codec, slots, valid, chunk.hot, geometry)
            entry.invalid += (valid == 0).reshape(-1, heads).sum(dim=0).cpu()
            entry.hot.add(backend, hot, restored)
            entry.ref.add(backend, chunk.ref, restored)
            if entry.logits is not None:
                entry.logits.add(chunk.first_page * geometry.page_tokens, chunk.ref.cpu(), restored.cpu())
        advance(_chunk_bytes(source, chunk, geometry))
    pages = source.tokens // geometry.page_tokens
    page_bytes = FORMATS[task.fmt].bytes(geometry)
    rows = [_row(task, entry, head, geometry, pages, page_bytes, backend) for entry in sums for head in range(heads)]
    entry = {
        "dump": task.dump_name,
        "layer": task.layer.index,
        "tier": task.tier,
        "plane": task.plane,
        "heads": heads,
        "pages": pages,
        "tokens": pages * geometry.page_tokens,
        "partial_tokens": source.tokens % geometry.page_tokens,
        "hot_bytes": pages * heads * page_bytes,
    }
    if zeroed:
        entry["zeroed_values"] = zeroed
    return rows if pages else [], entry


def _with_strides(codecs: list[Codec], task: PlaneTask, geometry, backend, nan, advance, stop) -> list[Codec]:
    """The codecs with their slot bytes chosen; a pass over the plane of its own, only if some codec needs it."""
    lengths: dict[int, list] = {i: [] for i, codec in enumerate(codecs) if codec.needs_stride}
    if not lengths:
        return codecs
    source = task.layer.planes[task.plane]
    for chunk in plane_chunks(source, task.fmt, geometry, backend, nan=nan):
        if stop.is_set():
            raise Stopped
        for i, found in lengths.items():
            found.append(backend.lengths(codecs[i], chunk.hot, geometry).cpu())
        advance(_chunk_bytes(source, chunk, geometry))
    chosen = list(codecs)
    for i, found in lengths.items():
        needed = torch.cat([torch.zeros(0, dtype=torch.int32), *found]).numpy()
        chosen[i] = codecs[i].with_stride(codecs[i].choose_stride(needed, geometry, task.fmt))
    return chosen


def _chunk_bytes(source, chunk, geometry) -> int:
    return source.nbytes * chunk.pages * geometry.page_tokens // source.tokens


def _row(task, entry: CodecSums, head: int, geometry, pages: int, page_bytes: int, backend) -> dict:
    invalid = int(entry.invalid[head])
    elements = pages * geometry.elements
    hot_bytes = pages * page_bytes
    cold_bytes = (pages - invalid) * entry.codec.slot_bytes(geometry, task.fmt) + invalid * page_bytes
    return {
        "dump": task.dump_name,
        "layer": task.layer.index,
        "plane": task.plane,
        "head": head,
        "tier": task.tier,
        "codec": entry.label,
        "backend": backend.runs(entry.codec),
        "pages": pages,
        "tokens": pages * geometry.page_tokens,
        "elements": elements,
        "hot_bytes": hot_bytes,
        "cold_bytes": cold_bytes,
        "ratio": hot_bytes / cold_bytes if cold_bytes else None,
        "bits_per_element": 8 * cold_bytes / elements if elements else None,
        "nmse_hot": entry.hot.nmse(head),
        "nmse_ref": entry.ref.nmse(head),
        "nmse_centered": entry.hot.nmse_centered(head),
        "snr_db": entry.hot.snr_db(head),
        "max_abs_err": entry.hot.max_abs_err(head),
        "cosine": entry.hot.cosine(head),
        "invalid_pages": invalid,
        "logit_rmse": entry.logits.rmse(head) if entry.logits is not None else None,
        "attn_out_nmse": None,
    }
