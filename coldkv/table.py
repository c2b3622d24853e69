"""Layer dtype tables: which hot tier each attention layer has, and how a table meets the layers of a dump."""

import os
import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from coldkv.errors import InputError
from coldkv.formats import tier_formats
from coldkv.jsontext import parse_json, read_small_file
from coldkv.layers import format_layers, parse_layers

# index among the attention layers -> tier; the production table of the seed's 16 attention layers (cold-pool.md)
_SEED_NVFP4 = (0, 1, 3, 4, 6, 7, 8, 9, 13, 14)
PRESETS = {"seed-10-6": tuple("nvfp4" if i in _SEED_NVFP4 else "int8" for i in range(16))}
UNIFORM_PRESETS = {"all-int8": "int8"}


@dataclass(frozen=True)
class LayerTable:
    """`uniform`: one tier everywhere. Otherwise `tiers`: index -> tier, where the index counts attention layers
    (`by_position`) or is the model's own layer number."""

    name: str
    uniform: str | None = None
    tiers: dict[int, str] = field(default_factory=dict)
    by_position: bool = False
    preset: bool = False


@dataclass(frozen=True)
class Assignment:
    """A table over a dump's layers.

    mode "uniform" and "layers": every layer once in `pairs`; "tiers": every layer once per tier of the table, and
    `tier_layers` (tier -> number of layers in the table) are the weights of the aggregate. `notes` are for people.
    """

    name: str
    mode: str
    pairs: list[tuple[int, str]]
    tier_layers: dict[str, int]
    notes: list[str] = field(default_factory=list)


def preset_names() -> list[str]:
    return sorted([*PRESETS, *UNIFORM_PRESETS])


def uniform_table(tier: str) -> LayerTable:
    """One tier for every layer (`--tier`)."""
    tier_formats(tier)
    return LayerTable(name=tier, uniform=tier)


def parse_table(text: str) -> LayerTable:
    """A preset's name, a string such as `0-3:fp8,4-35:nvfp4`, or a `.toml` / `.json` file.

    Files: `{"name": ..., "index": "model" | "attention", "layers": {"0-3": "fp8", "4-35": "nvfp4"}}`.
    Raises InputError for an unknown preset or tier, a malformed range, or a layer named twice.
    """
    text = text.strip()
    if text in UNIFORM_PRESETS:
        return LayerTable(name=text, uniform=UNIFORM_PRESETS[text], preset=True)
    if text in PRESETS:
        return LayerTable(name=text, tiers=dict(enumerate(PRESETS[text])), by_position=True, preset=True)
    if text.lower().endswith((".toml", ".json")):
        return _read_table(text)
    if ":" not in text:
        raise InputError(
            f"table {text!r}: expected a preset ({', '.join(preset_names())}), layers such as 0-3:fp8,4-35:nvfp4, "
            "or a .toml or .json file"
        )
    return LayerTable(name=text, tiers=_collect(_split_entries(text), f"table {text!r}"))


def _split_entries(text: str) -> list[tuple[str, str]]:
    # a comma may also separate ranges of one entry: "0,2-3:fp8,4:nvfp4"
    entries, ranges = [], []
    for part in text.split(","):
        layers, colon, tier = part.partition(":")
        ranges.append(layers.strip())
        if colon:
            entries.append((",".join(ranges), tier.strip()))
            ranges = []
    if ranges:
        raise InputError(f"table {text!r}: expected :tier after {ranges[0]!r}")
    return entries


def _collect(entries: Sequence[tuple[str, str]], where: str) -> dict[int, str]:
    tiers: dict[int, str] = {}
    for ranges, tier in entries:
        try:
            tier_formats(tier)
            layers = parse_layers(ranges)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        for layer in layers:
            if layer in tiers:
                raise InputError(f"{where}: layer {layer} is named twice, as {tiers[layer]} and as {tier}")
            tiers[layer] = tier
    return tiers


def _read_table(path: str) -> LayerTable:
    where = f"table {path}"
    text = read_small_file(path, "table")
    if path.lower().endswith(".toml"):
        try:
            content = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not valid TOML: {error}") from error
    else:
        content = parse_json(text, where)
    if not isinstance(content, dict) or not isinstance(content.get("layers"), dict) or not content["layers"]:
        raise InputError(f'{where}: expected an object "layers" such as {{"0-3": "fp8"}}')
    unknown = sorted(set(content) - {"name", "index", "layers"})
    if unknown:
        raise InputError(f"{where}: unknown key {unknown[0]!r}; expected name, index, layers")
    index = content.get("index", "model")
    if index not in ("model", "attention"):
        raise InputError(f"{where}: index: expected 'model' or 'attention', found {index!r}")
    for key, tier in content["layers"].items():
        if not isinstance(tier, str):
            raise InputError(f"{where}: layers {key!r}: expected the name of a tier, found {tier!r}")
    name = content.get("name", os.path.splitext(os.path.basename(path))[0])
    if not isinstance(name, str) or not re.fullmatch(r"[^\x00-\x1f]{1,100}", name):
        raise InputError(f"{where}: name: expected a short string, found {name!r}")
    tiers = _collect(list(content["layers"].items()), where)
    return LayerTable(name=name, tiers=tiers, by_position=index == "attention")


def assign(
    table: LayerTable, layers: Sequence[int], *, selected: Sequence[int] | None = None, of: str = "dump"
) -> Assignment:
    """Give every layer with KV of a dump, or of what `of` names (`layers`, the model's numbers, ascending), its tier.

    `selected` (default all) are the layers that will be looked at; the others still count for positions. A preset
    made for another number of layers is applied by tier (mode "tiers"). Raises InputError where the table misses a
    layer that is looked at.
    """
    chosen = list(layers if selected is None else selected)
    if table.uniform:
        pairs = [(layer, table.uniform) for layer in chosen]
        return Assignment(table.name, "uniform", pairs, {table.uniform: len(chosen)})
    if table.preset and len(layers) != len(table.tiers):
        counts = dict(sorted(Counter(table.tiers.values()).items()))
        pairs = [(layer, tier) for layer in chosen for tier in counts]
        weights = ", ".join(f"{tier} x {count}" for tier, count in counts.items())
        note = (
            f"table {table.name} is for {len(table.tiers)} attention layers and the {of} has {len(layers)}: "
            f"every tier is measured over all of them and weighted {weights}"
        )
        return Assignment(table.name, "tiers", pairs, counts, [note])
    keys = {layer: position if table.by_position else layer for position, layer in enumerate(layers)}
    missing = [layer for layer in chosen if keys[layer] not in table.tiers]
    if missing:
        what = "by its place among the attention layers" if table.by_position else "by its number"
        raise InputError(
            f"table {table.name}: layer {format_layers(missing)} of the {of} is not in the table (looked up {what}), "
            f"which has {format_layers(table.tiers)}"
        )
    pairs = [(layer, table.tiers[keys[layer]]) for layer in chosen]
    extra = sorted(set(table.tiers) - set(keys.values()))
    notes = [f"table {table.name} also names {format_layers(extra)}, which the {of} does not have"] if extra else []
    return Assignment(table.name, "layers", pairs, dict(sorted(Counter(t for _, t in pairs).items())), notes)
