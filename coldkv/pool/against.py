"""A pool against the dump it was packed from: every slot and hot page encoded again and compared bit by bit."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from coldkv.dumps import Dump, LayerDump
from coldkv.errors import InputError
from coldkv.geometry import Geometry
from coldkv.pipeline import plane_chunks, plane_format, read_pages
from coldkv.pool.file import PoolFile
from coldkv.pool.layout import LayerLayout, entry_slot
from coldkv.pool.pack import numpy_view
from coldkv.pool.reader import LayerReader, Problem, runs
from coldkv.tiers import HotPlane


@dataclass
class PlaneErrors:
    """Sums over the cold pages of one plane: the slots' values against the hot plane and against the dump."""

    error_hot: float = 0.0
    energy_hot: float = 0.0
    error_ref: float = 0.0
    energy_ref: float = 0.0

    def add(self, restored: torch.Tensor, hot: torch.Tensor, ref: torch.Tensor) -> None:
        restored, hot, ref = (x.double() for x in (restored, hot, ref))
        self.error_hot += float((restored - hot).square().sum())
        self.energy_hot += float(hot.square().sum())
        self.error_ref += float((restored - ref).square().sum())
        self.energy_ref += float(ref.square().sum())

    def to_json(self) -> dict:
        return {"nmse_hot": _nmse(self.error_hot, self.energy_hot), "nmse_ref": _nmse(self.error_ref, self.energy_ref)}


def _nmse(error: float, energy: float) -> float | None:
    if energy > 0:
        return error / energy
    return 0.0 if error == 0 else None


@dataclass
class AgainstReport:
    """`layers`: one dict per layer (layer, tier, codecs, cold_pages, planes: {plane: {nmse_hot, nmse_ref}});
    `problems`: what differs from a fresh encoding; `warnings`: for example another sha256."""

    layers: list[dict] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    slot_records: int = 0
    hot_records: int = 0


def compare(
    pool: PoolFile, dump: Dump, backend, *, advance: Callable[[int], None] = lambda nbytes: None
) -> AgainstReport:
    """Encode the layers of `dump` as `pool` says and compare every slot, hot page and replica.

    The pool must be sound (see `verify`). InputError where the dump has other layers or shapes than the pool.
    """
    report = AgainstReport()
    if dump.sha256() != pool.meta["dump"].get("sha256"):
        report.warnings.append(f"dump {dump.path} is not the file that the pool was packed from (sha256 differs)")
    for layout in pool.layers:
        layer = dump.layer(layout.index)
        _require_same_shape(pool, layout, layer)
        work = _LayerCompare(LayerReader(pool, layout), layer, backend, pool.meta.get("nan", "reject"), report)
        report.layers.append(work.run())
        advance(sum(source.nbytes for source in layer.planes.values()))
    return report


def _require_same_shape(pool: PoolFile, layout: LayerLayout, layer: LayerDump) -> None:
    expected = (layout.tokens, layout.geometry.kv_heads, layout.geometry.head_dim, sorted(layout.planes))
    found = (layer.tokens, layer.kv_heads, layer.head_dim, sorted(layer.planes))
    if expected != found:
        names = ("tokens", "KV heads", "head_dim", "planes")
        what, want, have = next(x for x in zip(names, expected, found, strict=True) if x[1] != x[2])
        where = f"dump {layer.planes['k'].path}: layer {layer.index}"
        raise InputError(f"{where}: expected {want} {what} as {pool.path} has, found {have}")
    for name in layout.planes:
        plane_format(layer.planes[name], name, layout.tier)


class _LayerCompare:
    def __init__(self, reader: LayerReader, layer: LayerDump, backend, nan: str, report: AgainstReport):
        self.reader, self.layout, self.layer = reader, reader.layout, layer
        self.backend, self.nan, self.report = backend, nan, report
        self.heads = self.layout.geometry.kv_heads

    def run(self) -> dict:
        layout = self.layout
        planes = {}
        for name, plane in layout.planes.items():
            errors = PlaneErrors()
            source = self.layer.planes[name]
            for chunk in plane_chunks(source, plane.format, layout.geometry, self.backend, nan=self.nan):
                self._chunk(name, chunk, errors)
            self._partial_page(name)
            planes[name] = {"codec": plane.codec.id if plane.codec else None, **errors.to_json()}
        return {"layer": layout.index, "tier": layout.tier, "cold_pages": layout.slots, "planes": planes}

    def _chunk(self, name: str, chunk, errors: PlaneErrors) -> None:
        table = self.reader.block_table[chunk.first_page : chunk.first_page + chunk.pages].tolist()
        # (kind, index in the pool, page within the chunk); a replica is compared beside its slot
        slots = [(entry_slot(entry), i) for i, entry in enumerate(table) if entry_slot(entry) is not None]
        hot = [(entry, i) for i, entry in enumerate(table) if entry >= 0]
        replica_of = [] if self.reader.replica_table is None else self.reader.replica_table.tolist()
        replicas = [(replica_of[slot], i) for slot, i in slots if replica_of and replica_of[slot] >= 0]
        for at, start, stop in runs(slot for slot, _ in slots):
            self._slots(name, chunk, start, stop, [i for _, i in slots[at : at + stop - start]], errors)
        for found, replica in ((hot, False), (replicas, True)):
            for at, start, stop in runs(index for index, _ in found):
                taken = _take(chunk.hot, [i for _, i in found[at : at + stop - start]], self.heads)
                self._hot_pages(name, start, stop, taken, replica)

    def _slots(self, name: str, chunk, start: int, stop: int, pages: list[int], errors: PlaneErrors) -> None:
        plane, geometry = self.layout.planes[name], self.layout.geometry
        hot = _take(chunk.hot, pages, self.heads)
        stored = self.reader.read_slots(start, stop)[name]
        slots, valid = self.backend.encode(plane.codec, hot, geometry)
        fresh = numpy_view(slots)
        for i in np.flatnonzero((fresh != stored).any(axis=1) | (numpy_view(valid) == 0)).tolist():
            differing = np.flatnonzero(fresh[i] != stored[i])
            text = "the codec refuses this page of the dump"
            if len(differing) and int(valid[i]):
                first = differing[0]
                text = (
                    f"differs from the dump's encoding in {len(differing)} of {plane.stride} bytes, first at byte "
                    f"{first}: expected 0x{fresh[i, first]:02x}, found 0x{stored[i, first]:02x}"
                )
            slot = start + i // self.heads
            self._note("slots", f"slot {slot}: {text}", name, self.reader.slot_page[slot], i)
        self.report.slot_records += len(stored)
        records = torch.from_numpy(stored).to(self.backend.device)
        restored = self.backend.decode(plane.codec, records, geometry, plane.format)
        rows = _head_pages(pages, self.heads).to(chunk.ref.device)
        errors.add(restored, self.backend.dequantize(hot), chunk.ref[rows])

    def _hot_pages(self, name: str, start: int, stop: int, plane: HotPlane, replica: bool) -> None:
        codes, scales = self.reader.read_hot(name, start, stop, replica=replica)
        fresh = (numpy_view(plane.codes), None if plane.scales is None else numpy_view(plane.scales))
        bad = np.zeros(len(codes), dtype=bool)
        for expected, found in zip(fresh, (codes, scales), strict=True):
            if expected is not None:
                # bit by bit: -0 and NaN are told apart
                same = _words(expected) == _words(np.ascontiguousarray(found))
                bad |= ~same.reshape(len(codes), -1).all(axis=1)
        owner = self.reader.replica_page if replica else self.reader.hot_page
        for i in np.flatnonzero(bad).tolist():
            text = f"{'replica' if replica else 'hot page'} differs from the dump's page in its tier"
            self._note(f"{'replica.' if replica else ''}{name}.codes", text, name, owner[start + i // self.heads], i)
        self.report.hot_records += len(codes)

    def _partial_page(self, name: str) -> None:
        rest = self.layout.partial_tokens
        if not rest:
            return
        geometry = Geometry(self.layout.geometry.head_dim, rest, self.heads)
        source, start = self.layer.planes[name], self.layout.tokens - rest
        fmt = self.layout.planes[name].format
        hot = read_pages(source, fmt, geometry, self.backend, start, start + rest, nan=self.nan)[1]
        self._hot_pages(name, self.layout.hot_pages - 1, self.layout.hot_pages, hot, False)

    def _note(self, tensor: str, text: str, plane: str, page: int, record: int) -> None:
        where = f"{self.layout.base}.{tensor}"
        self.report.problems.append(Problem(where, text, self.layout.index, plane, int(page), record % self.heads))


def _words(array: np.ndarray) -> np.ndarray:
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _head_pages(pages: list[int], heads: int) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * heads + torch.arange(heads)).flatten()


def _take(plane: HotPlane, pages: list[int], heads: int) -> HotPlane:
    rows = _head_pages(pages, heads).to(plane.codes.device)
    scales = None if plane.scales is None else plane.scales[rows]
    return HotPlane(plane.format, plane.codes[rows], scales, plane.head_dim)
