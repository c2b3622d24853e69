"""The model that is simulated: its layers, what a page takes hot and what it takes in a slot."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from coldkv.codecs import Codec
from coldkv.errors import InputError
from coldkv.formats import FORMATS, tier_formats
from coldkv.geometry import Geometry, round_up
from coldkv.layers import format_layers
from coldkv.pool.layout import PlaneLayout, SlotLayout
from coldkv.table import LayerTable


@dataclass(frozen=True)
class Shape:
    """`layers` with tiers, codecs and strides; bytes of one page of all layers, hot and in a slot."""

    layers: list[SlotLayout]
    tiers: list[str]
    notes: list[str] = field(default_factory=list)

    @property
    def page_bytes(self) -> int:
        return sum(layer.hot_page_bytes() for layer in self.layers)

    @property
    def slot_bytes(self) -> int:
        """Slot records, and four bytes of validity for each."""
        return sum(la.pitch + 4 * la.geometry.kv_heads * len(la.planes) for la in self.layers)

    @property
    def tokens_per_page(self) -> int:
        return self.layers[0].geometry.page_tokens


def layer_tiers(table: LayerTable, attention_layers: int | None) -> list[str]:
    """Tier of every attention layer: those that the table names, or `attention_layers` of a uniform one's."""
    if table.uniform:
        return [table.uniform] * (attention_layers or 16)
    if attention_layers not in (None, len(table.tiers)):
        raise InputError(
            f"--attention-layers {attention_layers}: table {table.name} names {len(table.tiers)} layers",
            hint="leave the option out",
        )
    return [table.tiers[index] for index in sorted(table.tiers)]


def build_shape(tiers: Sequence[str], geometry: Geometry, codecs: Sequence[Codec], stride_of) -> Shape:
    """A shape of layers 0, 1, ...; `stride_of(codec, layer, plane, fmt)` -> the codec with its stride.

    Each plane takes the first codec that fits. A layer with a plane that none fits is carried: its slots hold the hot
    bytes, for a page goes cold in all layers or in none. InputError if that is so for all layers.
    """
    layers, carried, larger = [], {}, {}
    for index, tier in enumerate(tiers):
        formats = tier_formats(tier)
        chosen = {name: next((c for c in codecs if c.fits(fmt)), None) for name, fmt in formats.items()}
        planes = {}
        for name, fmt in formats.items():
            codec, hot = chosen[name], FORMATS[fmt].bytes(geometry)
            if None in chosen.values():
                planes[name] = PlaneLayout(name, fmt, fmt, None, hot)
                carried.setdefault(tier, []).append(index)
                continue
            codec = codec.bind(index, name, fmt, geometry)
            if codec.needs_stride:
                codec = stride_of(codec, index, name, fmt)
            planes[name] = PlaneLayout(name, fmt, fmt, codec, codec.slot_bytes(geometry, fmt))
            if planes[name].stride >= hot:
                larger.setdefault((codec.id, fmt, planes[name].stride, hot), []).append(index)
        layers.append(SlotLayout(index, geometry, planes))
    if len({i for found in carried.values() for i in found}) == len(layers):
        names = ", ".join(codec.id for codec in codecs)
        raise InputError(f"codec {names}: takes no layer of tier {', '.join(sorted(carried))}")
    notes = [
        f"layers {format_layers(set(found))} ({tier}) are carried: no codec takes them, their slots hold the hot bytes"
        for tier, found in carried.items()
    ]
    notes += [
        f"layers {format_layers(set(found))}: a {codec} slot of {stride:,} bytes is not smaller than {hot:,} in {fmt}"
        for (codec, fmt, stride, hot), found in larger.items()
    ]
    return Shape(layers, list(tiers), notes)


class SampleStrides:
    """Strides of sized codecs for bookkeeping without bytes: measured on the bundled sample, never guessed.

    Per hot format and plane: the mean over the sample's layers of the bits per element of the stride that each layer
    needs, and the share of head-pages that did not fit; both measured once per codec and format.
    """

    def __init__(self, backend, geometry: Geometry):
        self.backend, self.geometry = backend, geometry
        self.notes: list[str] = []
        self._bits: dict[tuple, float] = {}

    def __call__(self, codec: Codec, layer: int, plane: str, fmt: str) -> Codec:
        key = (codec.label, plane, fmt)
        if key not in self._bits:
            self._bits[key] = self._measure(codec, plane, fmt)
        stride = round_up(-(-int(self._bits[key] * self.geometry.elements) // 8), 16)
        return codec.with_stride(stride)

    def _measure(self, codec: Codec, plane: str, fmt: str) -> float:
        from coldkv.coldplane import prepare_codec
        from coldkv.dumps import open_dump
        from coldkv.dumps.sample import sample_path
        from coldkv.pipeline import layer_geometry, read_pages

        bits, pages, refused = [], 0, 0
        with open_dump(sample_path()) as dump:
            for layer in dump.layers:
                geometry = layer_geometry(layer, dump.page_tokens)
                tokens = layer.tokens // dump.page_tokens * dump.page_tokens
                _, hot = read_pages(layer.planes[plane], fmt, geometry, self.backend, 0, tokens)
                sized = prepare_codec(self.backend, codec, hot, geometry, layer.index, plane)
                stride = sized.slot_bytes(geometry, fmt)
                _, valid = self.backend.encode(sized, hot, geometry)
                bits.append(8 * stride / geometry.elements)
                pages, refused = pages + len(valid), refused + int((valid == 0).sum())
        mean = sum(bits) / len(bits)
        text = f"{codec.label} on {plane} in {fmt}: {mean:.3f} bits per element, measured on the bundled sample"
        if refused:
            text += f"; {refused} of {pages} head-pages did not fit, which this simulation leaves out"
        self.notes.append(text)
        return mean
