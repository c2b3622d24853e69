"""Pool file -> dump: cold pages decoded from their slots (or their replicas), hot pages dequantized."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from coldkv.dumps import DumpWriter, LayerSpec
from coldkv.errors import InputError
from coldkv.pipeline import CHUNK_ELEMENTS, to_tokens
from coldkv.pool.file import PoolFile
from coldkv.pool.layout import NO_REPLICA, UNMAPPED, LayerLayout, entry_slot, place
from coldkv.pool.reader import LayerReader, runs
from coldkv.tiers import HotPlane

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class RestoreReport:
    """Pages of single layers by where their values came from, and values that `--dtype` could not hold exactly."""

    layers: int = 0
    from_slots: int = 0
    from_replicas: int = 0
    from_hot: int = 0
    inexact: int = 0
    warnings: list[str] = field(default_factory=list)


def restore(
    pool: PoolFile, path: str, backend, *, dtype: str = "fp32", advance: Callable[[int], None] = lambda nbytes: None
) -> RestoreReport:
    """Write all layers of `pool` as the dump `path`, streaming and atomic; fp32 is exact.

    InputError naming layer, plane, page and head where a slot, hot page or table is damaged, or where a value is past
    the range of `dtype`; then nothing is written.
    """
    readers = [LayerReader(pool, layout) for layout in pool.layers]
    for reader in readers:
        reader.check_tables()
        unmapped = np.flatnonzero(reader.block_table == UNMAPPED)
        if len(unmapped):
            where = place(reader.layout.index, page=int(unmapped[0]))
            raise InputError(f"pool {pool.path}: {where}: the page is unmapped, so there is nothing to restore")
    report = RestoreReport(layers=len(readers))
    meta = {**pool.meta["dump"]["meta"], "page_tokens": pool.layers[0].geometry.page_tokens}
    meta["restored"] = {
        "writer": pool.meta.get("writer"),
        "dump_sha256": pool.meta["dump"].get("sha256"),
        "policy": pool.meta.get("policy"),
        "codecs": sorted({p.codec.id for layout in pool.layers for p in layout.planes.values() if p.codec}),
    }
    with DumpWriter(path, [_spec(reader.layout, dtype) for reader in readers], meta) as writer:
        for reader in readers:
            _restore_layer(reader, writer, backend, dtype, report, advance)
    if report.inexact:
        text = f"{report.inexact} values are not exact in {dtype} and were rounded; --dtype fp32 is exact"
        report.warnings.append(text)
    return report


def _spec(layout: LayerLayout, dtype: str) -> LayerSpec:
    samples, q_heads, q_dtype = layout.queries or (0, 0, "fp32")
    return LayerSpec(
        index=layout.index,
        tokens=layout.tokens,
        kv_heads=layout.geometry.kv_heads,
        head_dim=layout.geometry.head_dim,
        dtype=dtype,
        dtypes={"q": q_dtype},
        kind=layout.kind,
        window=layout.window,
        scaling=layout.scaling,
        softcap=layout.softcap,
        planes=tuple(layout.planes),
        q_samples=samples,
        q_heads=q_heads,
        positions=layout.positions,
        extra=layout.extra,
    )


def _restore_layer(reader: LayerReader, writer: DumpWriter, backend, dtype, report: RestoreReport, advance) -> None:
    layout = reader.layout
    for first, pages, values in layer_values(reader, backend, report):
        for name, plane in values.items():
            exact = plane.cpu()
            converted = exact.to(DTYPES[dtype])
            if dtype != "fp32":
                report.inexact += int((converted.float() != exact).sum())
                _refuse_overflow(reader, name, first, converted, dtype)
            writer.write(f"{layout.base}.{name}", converted)
        advance(pages * layout.hot_page_bytes())
    for name in ("q", "q_pos", "positions"):
        tensor = f"{layout.base}.{name}"
        if tensor in reader.pool:
            writer.write(tensor, reader.pool.checked(tensor))


def _refuse_overflow(reader: LayerReader, name: str, first: int, converted: torch.Tensor, dtype: str) -> None:
    """A dump may hold no Inf: say where one would appear. `converted`: `[tokens, heads, D]` from page `first` on."""
    # isfinite() is many times slower on 16-bit floats than one pass for the extremes
    if all(math.isfinite(extreme) for extreme in torch.aminmax(converted)):
        return
    token, head, _ = (~converted.isfinite()).nonzero()[0].tolist()
    where = place(reader.layout.index, name, first + token // reader.layout.geometry.page_tokens, head)
    raise InputError(
        f"pool {reader.pool.path}: {where}: a value is too large for {dtype}", hint="use --dtype fp32 or bf16"
    )


def layer_values(
    reader: LayerReader, backend, report: RestoreReport | None = None
) -> Iterator[tuple[int, int, dict[str, torch.Tensor]]]:
    """All pages of a layer in order: (first page, pages, plane -> fp32 `[tokens, heads, D]`).

    What attention reads: decoded slots for cold pages, the replica where there is one, dequantized hot pages
    otherwise. Every record is checked before it is decoded.
    """
    report = RestoreReport() if report is None else report
    layout, geometry = reader.layout, reader.layout.geometry
    whole = layout.pages - bool(layout.partial_tokens)
    step = max(1, CHUNK_ELEMENTS // (geometry.elements * geometry.kv_heads))
    for first in range(0, whole, step):
        entries = reader.block_table[first : min(first + step, whole)].tolist()
        shape = (len(entries), geometry.kv_heads, geometry.page_tokens, geometry.head_dim)
        values = {name: torch.empty(shape, dtype=torch.float32, device=backend.device) for name in layout.planes}
        _fill(reader, backend, entries, values, report)
        yield first, len(entries), {n: to_tokens(v.flatten(0, 1), geometry) for n, v in values.items()}
    if layout.partial_tokens:
        report.from_hot += 1
        last = layout.hot_pages - 1
        values = {}
        for name in layout.planes:
            page = backend.dequantize(_hot_plane(reader, name, last, last + 1))  # [heads, partial_tokens, D]
            values[name] = page.transpose(0, 1)
        yield whole, 1, values


def _fill(reader: LayerReader, backend, entries: list[int], values: dict, report: RestoreReport) -> None:
    """Put the pages that `entries` of the block table point to into `values`, plane -> `[pages, heads, T, D]`."""
    sources: dict[str, list[tuple[int, int]]] = {"slot": [], "replica": [], "hot": []}
    for i, entry in enumerate(entries):
        slot = entry_slot(entry)
        replica = NO_REPLICA if slot is None or reader.replica_table is None else int(reader.replica_table[slot])
        if slot is None:
            sources["hot"].append((i, entry))
        elif replica != NO_REPLICA:
            sources["replica"].append((i, replica))
        else:
            sources["slot"].append((i, slot))
    report.from_hot += len(sources["hot"])
    report.from_replicas += len(sources["replica"])
    report.from_slots += len(sources["slot"])
    for kind, found in sources.items():
        for at, start, stop in runs(index for _, index in found):
            pages = torch.tensor([i for i, _ in found[at : at + stop - start]])
            records = reader.read_slots(start, stop) if kind == "slot" else {}
            for name, out in values.items():
                plane = reader.layout.planes[name]
                if kind == "slot":
                    slots = torch.from_numpy(records[name]).to(backend.device)
                    page_values = backend.decode(plane.codec, slots, reader.layout.geometry, plane.format)
                else:
                    hot = _hot_plane(reader, name, start, stop, replica=kind == "replica")
                    page_values = backend.dequantize(hot)
                out[pages.to(out.device)] = page_values.reshape(stop - start, *out.shape[1:])


def _hot_plane(reader: LayerReader, name: str, start: int, stop: int, *, replica: bool = False) -> HotPlane:
    codes, scales = reader.read_hot(name, start, stop, replica=replica)
    fmt = reader.layout.planes[name].format
    words = torch.from_numpy(np.ascontiguousarray(codes).view(np.int16 if fmt == "bf16" else codes.dtype))
    return HotPlane(
        fmt,
        words.view(torch.bfloat16) if fmt == "bf16" else words,
        None if scales is None else torch.from_numpy(np.ascontiguousarray(scales)),
        reader.layout.geometry.head_dim,
    )
