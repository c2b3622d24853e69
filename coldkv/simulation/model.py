"""From options to the model that is simulated: shape, notes, and real bytes if they are wanted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coldkv.codecs import Codec, get_codec
from coldkv.errors import InputError
from coldkv.geometry import Geometry
from coldkv.simulation.shape import SampleStrides, Shape, build_shape, layer_tiers
from coldkv.table import LayerTable, assign


@dataclass(frozen=True)
class Model:
    """`make_content(size)` -> `contents.Contents`, None without payload; `strides`: tier, plane -> slot bytes."""

    shape: Shape
    codecs: list[Codec]
    notes: list[str]
    strides: dict[str, int]
    backend: str | None
    make_content: Callable | None


def build_model(
    *, payload: str, table: LayerTable, codecs: Sequence[Codec] | None, default: str, backend: str,
    attention_layers: int | None, kv_heads: int, head_dim: int, page_tokens: int,
) -> Model:  # fmt: skip
    """Raises InputError for codecs that take nothing, a dump that does not suit, ToolError for a missing backend."""
    codecs = list(codecs or [get_codec(default)])
    geometry = Geometry(head_dim, page_tokens, kv_heads)
    if payload == "none":
        engine = None
        if any(codec.needs_stride for codec in codecs):
            from coldkv.backends import get_backend

            engine = get_backend(backend)
        measured = SampleStrides(engine, geometry)
        shape = build_shape(layer_tiers(table, attention_layers), geometry, codecs, measured)
        notes = shape.notes + measured.notes
        return Model(shape, codecs, notes, _strides(shape), engine and engine.name, None)

    from coldkv.backends import get_backend
    from coldkv.simulation.contents import Contents, from_dump, synthetic

    engine = get_backend(backend)
    if payload == "synthetic":
        tiers = layer_tiers(table, attention_layers)
        source = synthetic(engine, tiers, geometry)
    else:
        from coldkv.dumps import open_dump

        with open_dump(payload) as dump:
            assignment = assign(table, [layer.index for layer in dump.layers])
            if assignment.mode == "tiers":
                raise InputError(
                    f"table {table.name}: is for another number of layers than dump {payload} has",
                    hint="use --tier, or a table that names the dump's layers",
                )
            if any(layer.kind == "mla" for layer in dump.layers):
                raise InputError(f"dump {payload}: expected K and V, found MLA latents", hint="use --payload synthetic")
            tiers = [tier for _, tier in assignment.pairs]
            source, geometry = from_dump(engine, dump, assignment.pairs)
    shape = build_shape(tiers, geometry, codecs, source.strides(geometry))

    def make_content(size):
        return Contents(shape, source, size.pages, size.slots)

    return Model(shape, codecs, shape.notes, _strides(shape), engine.name, make_content)


def _strides(shape: Shape) -> dict[str, int]:
    return {
        f"{tier} {name}": plane.stride
        for layer, tier in zip(shape.layers, shape.tiers, strict=True)
        for name, plane in layer.planes.items()
    }
