"""What a pool file holds, from its header and tables; for `inspect`. Torch-free."""

from dataclasses import dataclass

from coldkv.codecs import Codec
from coldkv.errors import InputError
from coldkv.geometry import Geometry
from coldkv.pool.file import PoolFile
from coldkv.pool.layout import UNMAPPED, LayerLayout, cold_entry, entry_slot, place
from coldkv.pool.reader import LayerReader


def read_pool_info(path: str) -> dict:
    """JSON-able description: version, writer, policy, table, dump, pages by reason, bytes by use, and per layer its
    shape, planes with format, codec and slot bytes, and numbers of slots, hot and replica pages.

    InputError for a missing, damaged or foreign file; tensor data is not checked (`verify` does).
    """
    with PoolFile(path) as pool:
        sizes = {"slots": 0, "hot": 0, "replicas": 0, "tables": 0, "queries": 0}
        for name in pool.tensor_names():
            sizes[_use(name)] += pool.nbytes(name)
        sizes["header"] = pool.file_bytes - sum(sizes.values())
        dump = pool.meta["dump"]
        return {
            "kind": "pool",
            "path": path,
            "version": pool.meta["version"],
            "writer": pool.meta.get("writer"),
            "file_bytes": pool.file_bytes,
            "bytes": sizes,
            "hot_bytes_replaced": sum(layout.hot_page_bytes() * layout.slots for layout in pool.layers),
            "policy": pool.meta.get("policy"),
            "table": pool.meta.get("table"),
            "pages": pool.meta.get("pages"),
            "replicas_missed": pool.meta.get("replicas_missed"),
            "nan": pool.meta.get("nan"),
            "page_tokens": pool.meta.get("page_tokens"),
            "dump": dump,
            "layers": [_layer_info(layout) for layout in pool.layers],
        }


def _use(name: str) -> str:
    parts = name.split(".")[2:]
    if parts[0] in ("q", "q_pos", "positions"):
        return "queries"
    if parts[-1] in ("codes", "scales"):
        return "replicas" if parts[0] == "replica" else "hot"
    return "slots" if parts[0] == "slots" else "tables"


def _layer_info(layout: LayerLayout) -> dict:
    return {
        **layout.to_json(),
        "pages": layout.pages,
        "partial_tokens": layout.partial_tokens,
        "hot_pages": layout.hot_pages,
        "pitch_bytes": layout.pitch,
        "hot_page_bytes": layout.hot_page_bytes(),
    }


@dataclass(frozen=True)
class SlotRecord:
    """One slot record as it lies in the file, and what is needed to read it. `problems` are those `verify` names."""

    record: bytes
    geometry: Geometry
    codec: Codec
    plane_format: str
    slot: int
    file_offset: int
    problems: list[str]


def read_slot_record(path: str, layer: int, plane: str, page: int, head: int) -> SlotRecord:
    """The slot record of a cold page. InputError if there is no such layer, plane, page or head, or it is not cold."""
    with PoolFile(path) as pool:
        layout = pool.layer(layer)
        where = f"pool {path}: {place(layer, plane, page, head)}"
        if plane not in layout.planes:
            raise InputError(f"{where}: expected plane {' or '.join(layout.planes)}")
        if not 0 <= page < layout.pages or not 0 <= head < layout.geometry.kv_heads:
            raise InputError(f"{where}: only {layout.pages} pages and {layout.geometry.kv_heads} heads exist")
        reader = LayerReader(pool, layout)
        entry = int(reader.block_table[page])
        slot = entry_slot(entry)
        if slot is None or slot >= layout.slots:
            cold = [p for p, e in enumerate(reader.block_table.tolist()) if e <= cold_entry(0)]
            what = "unmapped" if entry == UNMAPPED else "hot" if entry >= 0 else f"in slot {slot}, which does not exist"
            hint = f"cold pages: {cold[0]} to {cold[-1]}" if cold else "no page of this layer is cold"
            raise InputError(f"{where}: the page is {what}", hint=hint)
        records = reader.slot_rows(slot, slot + 1)[plane]
        problems = reader.slot_problems(plane, slot, records)
        return SlotRecord(
            record=records[head].tobytes(),
            geometry=layout.geometry,
            codec=layout.planes[plane].codec,
            plane_format=layout.planes[plane].format,
            slot=slot,
            file_offset=pool.span(f"{layout.base}.slots")[0] + layout.record_offset(slot, plane, head),
            problems=[problem.text for problem in problems if problem.head == head],
        )
