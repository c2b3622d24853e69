"""Dump -> pool file: hot tier, codec and policy, one layer at a time."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from coldkv._version import __version__
from coldkv.codecs import Codec
from coldkv.dumps import Dump, LayerDump
from coldkv.errors import InputError, ToolError
from coldkv.formats import FORMATS
from coldkv.geometry import Geometry
from coldkv.pipeline import layer_geometry, plane_chunks, plane_format, read_pages
from coldkv.pool.file import PoolWriter, head_page_crcs, record_crcs
from coldkv.pool.layout import NO_REPLICA, LayerLayout, PlaneLayout, cold_entry, place
from coldkv.pool.policy import COLD, LayerPages, LayerPlan, Policy, plan_pages
from coldkv.table import Assignment
from coldkv.tiers import HotPlane

NO_DIGEST = "0" * 64


class _Refused(Exception):
    """A codec refused pages that the plan had sent to slots; everything has been looked at, nothing is kept."""


@dataclass
class PackReport:
    """What a pack did. `counts`: pages of single layers by reason; bytes count all heads and planes; `cold_hot_bytes`
    is what the cold pages took in the hot tier."""

    layers: list[LayerLayout]
    plans: dict[int, LayerPlan]
    counts: dict[str, int]
    hot_bytes: int = 0
    cold_hot_bytes: int = 0
    slot_bytes: int = 0
    replica_bytes: int = 0
    file_bytes: int = 0
    replicas_missed: int = 0
    warnings: list[str] = field(default_factory=list)


def choose_layouts(dump: Dump, assignment: Assignment, codecs: Sequence[Codec], explicit: bool):
    """Layouts with codecs but no counts yet, and notes about layers that stay hot.

    Each plane takes the first of `codecs` that accepts its format; a layer goes cold only if all its planes have one.
    The stride of a codec that needs one is 0 until `choose_strides`.
    Raises InputError for a codec the user named (`explicit`) that fits no plane, and for a table meant for another
    number of layers, which says nothing about single layers.
    """
    if assignment.mode == "tiers":
        raise InputError(
            f"table {assignment.name}: is for another number of layers than dump {dump.path} has "
            f"({len(dump.layers)} with KV), so no layer of it has a tier",
            hint="use --tier, or a table that names the dump's layers",
        )
    layouts, stay_hot = [], {}
    formats = set()
    for index, tier in assignment.pairs:
        layer = dump.layer(index)
        geometry = layer_geometry(layer, dump.page_tokens)
        planes = {}
        for name in sorted(layer.planes):
            source = layer.planes[name]
            fmt = plane_format(source, name, tier)
            formats.add(fmt)
            codec = next((codec for codec in codecs if codec.fits(fmt)), None)
            codec = codec and codec.bind(index, name, fmt, geometry)
            stride = 0 if codec is None or codec.needs_stride else codec.slot_bytes(geometry, fmt)
            planes[name] = PlaneLayout(name, fmt, source.dtype, codec, stride)
        unfit = sorted({plane.format for plane in planes.values() if plane.codec is None})
        if unfit:
            planes = {n: dataclasses.replace(plane, codec=None, stride=0) for n, plane in planes.items()}
            stay_hot.setdefault((tier, ", ".join(unfit)), []).append(index)
        layouts.append(_bare_layout(layer, tier, geometry, planes))
    for codec in codecs if explicit else ():
        if not formats & set(codec.formats):
            raise InputError(
                f"codec {codec.id}: fits planes of {', '.join(codec.formats)}, but the layers have "
                f"{', '.join(sorted(formats))}"
            )
    names = ", ".join(codec.id for codec in codecs)
    return layouts, [
        f"layers {_some(found)} stay hot: tier {tier} has planes of {fmt}, which {names} does not take"
        for (tier, fmt), found in stay_hot.items()
    ]


def choose_strides(layouts, layers, plans: dict[int, LayerPlan], backend, nan: str, advance) -> list[LayerLayout]:
    """The layouts with every stride chosen, from the lengths of the pages that the plan sends to slots.

    One page that does not fit stays hot in all layers of its length, so that is what it costs.
    """
    page_bytes: Counter = Counter()
    for layout in layouts:
        page_bytes[layout.tokens] += layout.hot_page_bytes() if layout.has_slots else 0
    found = []
    for layout in layouts:
        planes = {}
        for name, plane in layout.planes.items():
            if plane.codec is not None and plane.codec.needs_stride:
                source, geometry = layers[layout.index].planes[name], layout.geometry
                lengths = _lengths(source, plane, geometry, plans[layout.index].cold, backend, nan, advance)
                stride = plane.codec.choose_stride(
                    lengths, geometry, plane.format, overflow_bytes=page_bytes[layout.tokens]
                )
                codec = plane.codec.with_stride(stride)
                plane = dataclasses.replace(plane, codec=codec, stride=codec.slot_bytes(geometry, plane.format))
            planes[name] = plane
        found.append(dataclasses.replace(layout, planes=planes))
    return found


def _lengths(source, plane: PlaneLayout, geometry: Geometry, cold: list[int], backend, nan, advance) -> np.ndarray:
    """Slot bytes that the head-pages of the pages `cold` need, int32 `[len(cold) * heads]`."""
    wanted, found = set(cold), [np.empty(0, dtype=np.int32)]
    for chunk in plane_chunks(source, plane.format, geometry, backend, nan=nan):
        pages = [page for page in range(chunk.first_page, chunk.first_page + chunk.pages) if page in wanted]
        if pages:
            taken = _take(chunk.hot, chunk.first_page, pages, geometry.kv_heads)
            found.append(numpy_view(backend.lengths(plane.codec, taken, geometry)))
        advance(source.nbytes * chunk.pages * geometry.page_tokens // source.tokens)
    return np.concatenate(found)


def _size_notes(layouts: Sequence[LayerLayout]) -> list[str]:
    """Planes whose slots are not smaller than what they replace."""
    found: dict[str, list[int]] = {}
    for layout in layouts:
        for plane in layout.planes.values():
            hot = FORMATS[plane.format].bytes(layout.geometry)
            if plane.codec is not None and plane.stride >= hot:
                size = "larger than" if plane.stride > hot else "as large as"
                slot = f"a {plane.codec.id} slot of {plane.stride} bytes"
                text = f"{slot} is {size} the {hot} bytes in {plane.format} it replaces"
                found.setdefault(text, []).append(layout.index)
    return [f"layers {_some(indices)}: {text}" for text, indices in found.items()]


def _some(layers: list[int]) -> str:
    from coldkv.layers import format_layers

    return format_layers(set(layers))


def _bare_layout(layer: LayerDump, tier: str, geometry: Geometry, planes) -> LayerLayout:
    return LayerLayout(
        index=layer.index,
        tier=tier,
        geometry=geometry,
        tokens=layer.tokens,
        planes=planes,
        kind=layer.kind,
        window=layer.window,
        scaling=layer.scaling,
        softcap=layer.softcap,
        extra=layer.extra,
    )


def pack(
    dump: Dump,
    path: str,
    assignment: Assignment,
    codecs: Sequence[Codec],
    policy: Policy,
    backend,
    *,
    explicit: bool = True,
    nan: str = "reject",
    advance: Callable[[int], None] = lambda nbytes: None,
) -> PackReport:
    """Write `dump` as the pool file `path`; the same input gives the same bytes on every backend.

    Peak memory is a few page chunks and one layer's tables. Raises InputError (bad values, nothing fits), OSError
    (disk full); then `path` is untouched.
    """
    layouts, warnings = choose_layouts(dump, assignment, codecs, explicit)
    longest = max(layout.tokens for layout in layouts)
    layers = {layout.index: dump.layer(layout.index) for layout in layouts}
    layouts = [_with_extras(layout, layers[layout.index], longest) for layout in layouts]
    pages = [
        LayerPages(
            layout.index, layout.tokens, layout.hot_page_bytes(), layout.has_slots,
            _sink_pages(layers[layout.index], policy.sink_tokens, dump.page_tokens),
        )
        for layout in layouts
    ]  # fmt: skip
    plans = plan_pages(policy, pages, dump.page_tokens)
    layouts = choose_strides(layouts, layers, plans, backend, nan, advance)
    warnings += _size_notes(layouts)
    refused: dict[int, set[int]] = {}
    first_refusal: dict[int, str] = {}
    with ThreadPoolExecutor(1) as hashing:
        digest = hashing.submit(dump.sha256)
        for _ in range(2):
            plans = plan_pages(policy, pages, dump.page_tokens, refused)
            sized = [_sized(layout, plans[layout.index]) for layout in layouts]
            meta = _metadata(dump, assignment, policy, plans, nan)
            found: dict[int, set[int]] = {}
            try:
                with PoolWriter(path, sized, meta) as writer:
                    for layout in sized:
                        work = _LayerPack(writer, layout, layers[layout.index], plans[layout.index], backend, nan)
                        work.dry = bool(found)
                        for page, where in work.run(advance).items():
                            found.setdefault(layout.tokens, set()).add(page)
                            first_refusal.setdefault(layout.tokens, where)
                    if found:
                        raise _Refused
                    meta["dump"]["sha256"] = digest.result()
                break
            except _Refused:
                # The file's tables were sized for pages that turned out not to fit: start over without them.
                for tokens, bad in found.items():
                    refused.setdefault(tokens, set()).update(bad)
        else:
            raise ToolError(f"pack {dump.path}: the backend {backend.name} refused other pages in a second pass")
    for tokens, bad in refused.items():
        warnings.append(
            f"{len(bad)} pages of the layers with {tokens} tokens stay hot: the codec cannot hold "
            f"{first_refusal[tokens]}" + (" and others" if len(bad) > 1 else "")
        )
    return _report(sized, plans, warnings, Path(path).stat().st_size)


def _with_extras(layout: LayerLayout, layer: LayerDump, longest: int) -> LayerLayout:
    """Add what the pool carries beside K and V: queries, and positions unless they are 0, 1, 2, ..."""
    positions = layer.positions()
    plain = layer.tokens == longest and torch.equal(positions, torch.arange(layer.tokens))
    queries = layer.queries()
    if queries is not None:
        q = queries[0]
        queries = (q.shape[0], q.shape[1], "bf16" if torch.equal(q.to(torch.bfloat16).float(), q) else "fp32")
    return dataclasses.replace(layout, queries=queries, positions=not plain)


def _sink_pages(layer: LayerDump, sink_tokens: int, page_tokens: int) -> frozenset[int]:
    """Pages with a token whose position in the text is below `sink_tokens`: the first ceil(sink_tokens / page_tokens)
    ones where positions are 0, 1, 2, ..., none where a sliding layer has dropped its first tokens."""
    tokens = (layer.positions() < min(sink_tokens, 2**62)).nonzero()[:, 0]
    return frozenset((tokens // page_tokens).unique().tolist())


def _sized(layout: LayerLayout, plan: LayerPlan) -> LayerLayout:
    return dataclasses.replace(
        layout,
        slots=len(plan.cold),
        hot_tokens=layout.tokens - len(plan.cold) * layout.geometry.page_tokens,
        replica_pages=len(plan.replicas),
    )


def _metadata(dump: Dump, assignment: Assignment, policy: Policy, plans: dict[int, LayerPlan], nan: str) -> dict:
    counts = sum((Counter(plan.counts) for plan in plans.values()), Counter())
    try:
        json.dumps(dump.meta, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"dump {dump.path}: metadata: expected plain JSON without NaN: {error}") from None
    return {
        "writer": f"coldkv {__version__}",
        "table": {"name": assignment.name, "mode": assignment.mode, "tier_layers": assignment.tier_layers},
        "policy": policy.to_json(),
        "pages": dict(counts),
        "replicas_missed": sum(plan.replicas_missed for plan in plans.values()),
        "nan": nan,
        "page_tokens": dump.page_tokens,
        "dump": {
            "name": Path(dump.path).name if dump.path else "",
            "format": dump.format,
            "sha256": NO_DIGEST,
            "meta": dump.meta,
        },
    }


def numpy_view(tensor: torch.Tensor) -> np.ndarray:
    """A torch tensor as numpy, bf16 as its u16 words."""
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _take(plane: HotPlane, first: int, pages: list[int], heads: int) -> HotPlane:
    """Head-pages of some pages of a chunk that starts with page `first`; a view where they lie together."""
    if pages[-1] - pages[0] + 1 == len(pages):
        return plane[(pages[0] - first) * heads : (pages[-1] + 1 - first) * heads]
    keep = torch.tensor(pages, device=plane.codes.device) - first
    keep = (keep[:, None] * heads + torch.arange(heads, device=keep.device)).flatten()
    scales = None if plane.scales is None else plane.scales[keep]
    return HotPlane(plane.format, plane.codes[keep], scales, plane.head_dim)


class _LayerPack:
    """Streams one layer into the writer. `dry`: encode only, to learn what the codec refuses."""

    def __init__(self, writer: PoolWriter, layout: LayerLayout, layer: LayerDump, plan: LayerPlan, backend, nan: str):
        self.writer, self.layout, self.layer, self.plan = writer, layout, layer, plan
        self.backend, self.nan = backend, nan
        self.heads = layout.geometry.kv_heads
        self.cold, self.replicas = set(plan.cold), set(plan.replicas)
        self.slot_crc: list[np.ndarray] = []
        self.hot_crc: list[np.ndarray] = []
        self.replica_crc: list[np.ndarray] = []
        self.dry = False

    def run(self, advance) -> dict[int, str]:
        """Write the layer; the pages that the codec refused (then nothing after them was written) and where."""
        layout, geometry = self.layout, self.layout.geometry
        streams = {
            name: plane_chunks(self.layer.planes[name], plane.format, geometry, self.backend, nan=self.nan)
            for name, plane in layout.planes.items()
        }
        refused: dict[int, str] = {}
        # All planes of a layer have the same pages, so their chunks are the same pages too.
        for chunks in zip(*streams.values(), strict=True):
            first, count = chunks[0].first_page, chunks[0].pages
            refused |= self._chunk(first, count, {n: c.hot for n, c in zip(streams, chunks, strict=True)})
            self.dry = self.dry or bool(refused)
            tokens = count * geometry.page_tokens
            advance(sum(source.nbytes * tokens // source.tokens for source in self.layer.planes.values()))
        if not self.dry:
            self._partial_page()
            self._tables()
        return refused

    def _chunk(self, first: int, count: int, planes: dict[str, HotPlane]) -> dict[int, str]:
        pages = range(first, first + count)
        cold = [page for page in pages if page in self.cold]
        refused: dict[int, str] = {}
        records = []
        for name, plane in planes.items() if cold else ():
            codec, geometry = self.layout.planes[name].codec, self.layout.geometry
            slots, valid = self.backend.encode(codec, _take(plane, first, cold, self.heads), geometry)
            for bad in (valid == 0).nonzero()[:, 0].tolist():
                page = cold[bad // self.heads]
                refused.setdefault(page, place(self.layout.index, name, page, bad % self.heads))
            records.append(numpy_view(slots))
        if refused or self.dry:
            return refused
        if cold:
            rows = [r.reshape(len(cold), -1) for r in records]
            self.writer.write(f"{self.layout.base}.slots", np.concatenate(rows, axis=1))
            crcs = [record_crcs(r).reshape(len(cold), self.heads) for r in records]
            self.slot_crc.append(np.stack(crcs, axis=1))
        self._write_pages("", first, [page for page in pages if page not in self.cold], planes, self.hot_crc)
        self._write_pages("replica.", first, [p for p in cold if p in self.replicas], planes, self.replica_crc)
        return {}

    def _write_pages(self, prefix: str, first: int, pages: list[int], planes: dict[str, HotPlane], crcs: list) -> None:
        """Append hot pages `[pages * heads, T, lead]` token-major, `[pages * T, heads, lead]`, and note their CRCs."""
        if not pages:
            return
        words = []
        for name, plane in planes.items():
            taken = _take(plane, first, pages, self.heads)
            codes = numpy_view(taken.codes)
            scales = None if taken.scales is None else numpy_view(taken.scales)
            words.append(head_page_crcs(codes, scales).reshape(len(pages), self.heads))
            for what, values in (("codes", codes), ("scales", scales)):
                if values is not None:
                    paged = values.reshape(len(pages), self.heads, *values.shape[1:]).swapaxes(1, 2)
                    self.writer.write(f"{self.layout.base}.{prefix}{name}.{what}", paged)
        crcs.append(np.stack(words, axis=1))

    def _partial_page(self) -> None:
        rest = self.layout.partial_tokens
        if not rest:
            return
        # Rows are quantized one by one, so a short page is a page of fewer tokens.
        geometry = Geometry(self.layout.geometry.head_dim, rest, self.heads)
        planes = {}
        for name, plane in self.layout.planes.items():
            source = self.layer.planes[name]
            start = self.layout.tokens - rest
            _, planes[name] = read_pages(
                source, plane.format, geometry, self.backend, start, start + rest, nan=self.nan
            )
        self._write_pages("", 0, [0], planes, self.hot_crc)

    def _tables(self) -> None:
        layout, base, writer = self.layout, self.layout.base, self.writer
        slot_of = {page: slot for slot, page in enumerate(self.plan.cold)}
        hot = iter(range(layout.pages))
        table = [cold_entry(slot_of[page]) if page in slot_of else next(hot) for page in range(layout.pages)]
        writer.write(f"{base}.block_table", np.array(table, dtype="<i4"))
        words = (-1, len(layout.planes), self.heads)
        empty = np.empty((0, *words[1:]), dtype=np.uint32)
        if layout.has_slots:
            # only pages whose every word is valid keep a slot
            writer.write(f"{base}.valid", np.ones((layout.slots, *words[1:]), dtype="<i4"))
            writer.write(f"{base}.slot_crc", np.concatenate([empty, *self.slot_crc]).astype("<u4"))
        writer.write(f"{base}.hot_crc", np.concatenate([empty, *self.hot_crc]).astype("<u4"))
        if layout.replica_pages:
            index = {page: i for i, page in enumerate(self.plan.replicas)}
            replicas = [index.get(page, NO_REPLICA) for page in self.plan.cold]
            writer.write(f"{base}.replica_table", np.array(replicas, dtype="<i4"))
            writer.write(f"{base}.replica_crc", np.concatenate([empty, *self.replica_crc]).astype("<u4"))
        if layout.queries is not None:
            q, q_pos = self.layer.queries()
            writer.write(f"{base}.q", numpy_view(q.to(torch.bfloat16) if layout.queries[2] == "bf16" else q))
            writer.write(f"{base}.q_pos", numpy_view(q_pos))
        if layout.positions:
            writer.write(f"{base}.positions", numpy_view(self.layer.positions()))


def _report(layouts, plans: dict[int, LayerPlan], warnings: list[str], file_bytes: int) -> PackReport:
    report = PackReport(layouts, plans, {}, warnings=warnings, file_bytes=file_bytes)
    counts: Counter = Counter()
    for layout in layouts:
        plan, page_bytes = plans[layout.index], layout.hot_page_bytes()
        counts.update(plan.counts)
        row_bytes = page_bytes // layout.geometry.page_tokens
        report.hot_bytes += row_bytes * layout.tokens
        report.cold_hot_bytes += page_bytes * layout.slots
        report.slot_bytes += layout.pitch * layout.slots
        report.replica_bytes += page_bytes * layout.replica_pages
        report.replicas_missed += plan.replicas_missed
    report.counts = {reason: counts[reason] for reason in sorted(counts)}
    report.counts.setdefault(COLD, 0)
    return report
