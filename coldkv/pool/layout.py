"""Shapes, names and byte addresses inside a pool file (docs/pool-format.md). Imports neither torch nor numpy."""

import math
from dataclasses import dataclass, field
from typing import Any

from coldkv.codecs import Codec, get_codec
from coldkv.errors import InputError
from coldkv.formats import FORMATS, TIERS
from coldkv.geometry import Geometry, ceil_div

POOL_VERSION = 1
POOL_SUFFIX = ".ckv"
METADATA_KEY = "coldkv.pool"
CRC_KEY = "coldkv.pool.crc32"

UNMAPPED = -1
NO_REPLICA = -1
KINDS = ("full", "sliding", "mla")
CODES_DTYPE = {"bf16": "BF16", "fp16": "F16", "int8": "I8", "fp8": "U8", "nvfp4": "U8", "iso3": "U8"}
SCALES_DTYPE = {"int8": "F16", "fp8": "F16", "nvfp4": "U8", "iso3": "U8"}
QUERY_DTYPE = {"bf16": "BF16", "fp32": "F32"}


def cold_entry(slot: int) -> int:
    """Block table entry of a page that lives in `slot`."""
    return -2 - slot


def entry_slot(entry: int) -> int | None:
    """Slot of a block table entry, None for a page that is hot (>= 0) or unmapped (-1)."""
    return -2 - entry if entry <= -2 else None


def place(layer: int, plane: str | None = None, page: int | None = None, head: int | None = None) -> str:
    """`layer 3, plane k, page 17, head 0`, as far as known."""
    named = (("plane", plane), ("page", page), ("head", head))
    return f"layer {layer}" + "".join(f", {what} {value}" for what, value in named if value is not None)


@dataclass(frozen=True)
class PlaneLayout:
    """One plane (K or V) of a layer: its hot `format`, and the codec of its slots (None: the layer stays hot)."""

    name: str
    format: str
    source_dtype: str  # of the plane in the packed dump: bf16, fp16, fp32 or a hot format
    codec: Codec | None = None
    stride: int = 0  # bytes of one slot record; 0 also until it is chosen

    def to_json(self) -> dict:
        codec = self.codec
        return {
            "format": self.format,
            "source_dtype": self.source_dtype,
            "codec": None if codec is None else {"id": codec.id, "version": codec.version, "config": codec.config},
            "slot_bytes": self.stride,
        }


@dataclass(frozen=True)
class SlotLayout:
    """Planes of one layer (K before V; MLA has K only) and the byte addresses of their slots.

    A slot holds one page of all KV heads and planes: `pitch` bytes, K of head 0, K of head 1, ..., V of head 0, ...
    """

    index: int  # the model's layer number
    geometry: Geometry
    planes: dict[str, PlaneLayout]

    @property
    def has_slots(self) -> bool:
        """Whether every plane has a codec."""
        return all(plane.codec is not None for plane in self.planes.values())

    @property
    def pitch(self) -> int:
        """Bytes of one slot, all planes and heads."""
        return self.geometry.kv_heads * sum(plane.stride for plane in self.planes.values())

    def plane_offset(self, plane: str) -> int:
        """Byte of head 0 of `plane` inside a slot."""
        names = list(self.planes)
        before = names[: names.index(plane)]
        return self.geometry.kv_heads * sum(self.planes[name].stride for name in before)

    def record_offset(self, slot: int, plane: str, head: int) -> int:
        """Byte of a slot record inside the layer's slot region.

        With equal strides this is slot*2*H*stride + plane*H*stride + head*stride; slot*stride + head*stride, which
        looks right with one head, makes head h + 1 of slot s and head h of slot s + 1 share bytes.
        """
        return slot * self.pitch + self.plane_offset(plane) + head * self.planes[plane].stride

    def word_index(self, slot: int, plane: str, head: int) -> int:
        """Index of a record in the flattened validity (and CRC32) table `[slots, planes, heads]`."""
        heads = self.geometry.kv_heads
        return (slot * len(self.planes) + list(self.planes).index(plane)) * heads + head

    def hot_page_bytes(self) -> int:
        """Bytes of one whole page of all planes and heads in the layer's tier."""
        return self.geometry.kv_heads * sum(FORMATS[p.format].bytes(self.geometry) for p in self.planes.values())


@dataclass(frozen=True)
class LayerLayout(SlotLayout):
    """One layer in a pool file: `SlotLayout`, and how many slots, hot tokens and replicas it has.

    Hot tokens are those of all hot pages in the order of their indices; only the last page may be partial.
    """

    tier: str
    tokens: int
    kind: str = "full"
    window: int | None = None
    scaling: float | None = None
    softcap: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    slots: int = 0
    hot_tokens: int = 0
    replica_pages: int = 0
    queries: tuple[int, int, str] | None = None  # samples, query heads, "bf16" or "fp32"
    positions: bool = False

    @property
    def base(self) -> str:
        return f"layers.{self.index}"

    @property
    def pages(self) -> int:
        """Logical pages, a partial last one included."""
        return ceil_div(self.tokens, self.geometry.page_tokens)

    @property
    def partial_tokens(self) -> int:
        return self.tokens % self.geometry.page_tokens

    @property
    def hot_pages(self) -> int:
        return ceil_div(self.hot_tokens, self.geometry.page_tokens)

    def tensors(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, safetensors dtype, shape) of every tensor that the layer has in the file."""
        base, heads, planes = self.base, self.geometry.kv_heads, len(self.planes)
        found: list[tuple[str, str, tuple[int, ...]]] = [(f"{base}.block_table", "I32", (self.pages,))]
        if self.has_slots:
            words = (self.slots, planes, heads)
            found += [
                (f"{base}.slots", "U8", (self.slots, self.pitch)),
                (f"{base}.valid", "I32", words),
                (f"{base}.slot_crc", "U32", words),
            ]
        found += self._hot_tensors("", self.hot_tokens)
        found.append((f"{base}.hot_crc", "U32", (self.hot_pages, planes, heads)))
        if self.replica_pages:
            found.append((f"{base}.replica_table", "I32", (self.slots,)))
            found += self._hot_tensors("replica.", self.replica_pages * self.geometry.page_tokens)
            found.append((f"{base}.replica_crc", "U32", (self.replica_pages, planes, heads)))
        if self.queries is not None:
            samples, q_heads, dtype = self.queries
            found.append((f"{base}.q", QUERY_DTYPE[dtype], (samples, q_heads, self.geometry.head_dim)))
            found.append((f"{base}.q_pos", "I64", (samples,)))
        if self.positions:
            found.append((f"{base}.positions", "I64", (self.tokens,)))
        return found

    def _hot_tensors(self, prefix: str, tokens: int) -> list[tuple[str, str, tuple[int, ...]]]:
        found: list[tuple[str, str, tuple[int, ...]]] = []
        for name, plane in self.planes.items():
            spec = FORMATS[plane.format]
            rows = (tokens, self.geometry.kv_heads)
            lead = self.geometry.head_dim // 2 if spec.code_bits == 4 else self.geometry.head_dim
            where = f"{self.base}.{prefix}{name}"
            found.append((f"{where}.codes", CODES_DTYPE[plane.format], (*rows, lead)))
            if spec.scale_bytes:
                scales = (*rows, spec.scales_per_row(self.geometry.head_dim))
                found.append((f"{where}.scales", SCALES_DTYPE[plane.format], scales))
        return found

    def to_json(self) -> dict:
        queries = self.queries
        return {
            "layer": self.index,
            "tier": self.tier,
            "kind": self.kind,
            "window": self.window,
            "scaling": self.scaling,
            "softcap": self.softcap,
            "extra": self.extra,
            "tokens": self.tokens,
            "page_tokens": self.geometry.page_tokens,
            "kv_heads": self.geometry.kv_heads,
            "head_dim": self.geometry.head_dim,
            "planes": {name: plane.to_json() for name, plane in self.planes.items()},
            "slots": self.slots,
            "hot_tokens": self.hot_tokens,
            "replica_pages": self.replica_pages,
            "queries": None if queries is None else dict(zip(("samples", "heads", "dtype"), queries, strict=True)),
            "positions": self.positions,
        }


class _Entry:
    """Typed access to one JSON object of the metadata; every complaint names the key."""

    def __init__(self, value, where: str):
        if not isinstance(value, dict):
            raise InputError(f"{where}: expected an object, found {str(value)[:40]}")
        self.value, self.where = value, where

    def get(self, key: str, kind, what: str):
        found = self.value.get(key)
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise InputError(f"{self.where}: {key}: expected {what}, found {str(found)[:40]}")
        return found

    def count(self, key: str, least: int = 0) -> int:
        number = self.get(key, int, "a whole number")
        if not least <= number < 1 << 48:
            raise InputError(f"{self.where}: {key}: expected a whole number from {least}, found {number}")
        return number

    def choice(self, key: str, allowed) -> str:
        found = self.get(key, str, "a string")
        if found not in allowed:
            raise InputError(f"{self.where}: {key}: expected one of {', '.join(allowed)}, found {found[:40]!r}")
        return found

    def positive(self, key: str) -> float | None:
        found = self.get(key, (int, float, type(None)), "a positive number or null")
        if found is not None and not (math.isfinite(found) and found > 0):
            raise InputError(f"{self.where}: {key}: expected a positive number, found {found}")
        return found


def layer_from_json(value, where: str) -> LayerLayout:
    """The inverse of `LayerLayout.to_json`. InputError on a missing key, a wrong type, an unknown codec or version,
    or a slot size that the codec does not have."""
    entry = _Entry(value, where)
    index = entry.count("layer")
    entry.where = where = f"{where}: layer {index}"
    geometry = Geometry(entry.count("head_dim"), entry.count("page_tokens"), entry.count("kv_heads", 1))
    named = entry.get("planes", dict, "an object")
    kind = entry.choice("kind", KINDS)
    expected = ["k"] if kind == "mla" else ["k", "v"]
    if list(named) != expected:
        raise InputError(f"{where}: planes: expected {', '.join(expected)}, found {', '.join(map(str, named))[:40]}")
    planes = {n: _plane(index, n, found, geometry, f"{where}, plane {n}") for n, found in named.items()}
    if len({plane.codec is None for plane in planes.values()}) > 1:
        raise InputError(f"{where}: expected a codec for all planes or for none")
    window = entry.get("window", (int, type(None)), "a whole number or null")
    queries = entry.get("queries", (dict, type(None)), "an object or null")
    if queries is not None:
        q = _Entry(queries, f"{where}: queries")
        queries = (q.count("samples"), q.count("heads", 1), q.choice("dtype", QUERY_DTYPE))
    return LayerLayout(
        index=index,
        tier=entry.choice("tier", TIERS),
        geometry=geometry,
        tokens=entry.count("tokens", 1),
        planes=planes,
        kind=kind,
        window=window,
        scaling=entry.positive("scaling"),
        softcap=entry.positive("softcap"),
        extra=entry.get("extra", dict, "an object"),
        slots=entry.count("slots"),
        hot_tokens=entry.count("hot_tokens"),
        replica_pages=entry.count("replica_pages"),
        queries=queries,
        positions=entry.get("positions", bool, "true or false"),
    )


def _plane(layer: int, name: str, value, geometry: Geometry, where: str) -> PlaneLayout:
    entry = _Entry(value, where)
    fmt = entry.choice("format", FORMATS)
    dtype = entry.get("source_dtype", str, "a string")
    stride = entry.count("slot_bytes")
    chosen = entry.get("codec", (dict, type(None)), "an object or null")
    if chosen is None:
        if stride:
            raise InputError(f"{where}: slot_bytes: expected 0 without a codec, found {stride}")
        return PlaneLayout(name, fmt, dtype)
    codec_entry = _Entry(chosen, f"{where}: codec")
    codec = get_codec(codec_entry.get("id", str, "a string"), codec_entry.get("config", dict, "an object"))
    version = codec_entry.count("version")
    if version != codec.version:
        raise InputError(
            f"{where}: codec {codec.id}: expected version {codec.version}, found {version}",
            hint="a newer coldkv may have written it",
        )
    codec.require_fit(fmt)
    codec = codec.bind(layer, name, fmt, geometry)
    if codec.needs_stride:
        raise InputError(f"{where}: codec {codec.id}: config: expected the slot bytes that were chosen, found none")
    if stride != codec.slot_bytes(geometry, fmt):
        raise InputError(f"{where}: slot_bytes: expected {codec.slot_bytes(geometry, fmt)}, found {stride}")
    return PlaneLayout(name, fmt, dtype, codec, stride)
