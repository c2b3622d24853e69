"""Hugging Face caches: objects in memory, and the plain dicts and lists that people save from them.

One place knows the layouts `[batch, kv_heads, tokens, head_dim]`: newer caches with `.layers[i].keys/.values`, older
ones with `key_cache` / `value_cache` lists, and lists or tuples of `(k, v)`. Layers without KV (linear, recurrent, not
yet used) are left out; the others keep their model index.
"""

from typing import Any, NamedTuple

from coldkv.dumps.model import (
    DEFAULT_PAGE_TOKENS,
    KINDS,
    Dump,
    LayerDump,
    PlaneSource,
    check_meta,
    check_plain_tensor,
    check_plane,
    finish_layers,
    layer_attention,
    value_dtype,
)
from coldkv.errors import InputError
from coldkv.geometry import Geometry


class Entry(NamedTuple):
    """k and v `[batch, kv_heads, tokens, head_dim]` of one layer (v None: MLA latent), with what the cache says."""

    index: int
    k: Any
    v: Any
    window: int | None = None
    seen: int | None = None  # tokens that went through a sliding layer, more than it kept
    names: tuple[str, str] = ("keys", "values")


class TensorPlane(PlaneSource):
    """A plane in memory (or in a mapped file): `states` `[batch, kv_heads, tokens, head_dim]`, one batch row of it."""

    def __init__(self, path: str, name: str, states, batch: int, after_read=None):
        states = states.detach()
        tokens_first = (states.shape[2], states.shape[1], states.shape[3])
        dtype = value_dtype(states)
        geometry = check_plane(path, name, dtype, tokens_first)
        super().__init__(path, name, dtype, *geometry, states[batch].numel() * states.element_size())
        self._states, self._batch, self._after_read = states, batch, after_read

    def read(self, start: int, stop: int, out=None):
        import torch

        self._check_span(start, stop)
        part = self._states[self._batch, :, start:stop].transpose(0, 1)
        if out is None:
            out = torch.empty(part.shape, dtype=part.dtype)
        elif out.shape != part.shape or out.dtype != part.dtype:
            raise ValueError(f"out: expected {part.dtype} {list(part.shape)}, found {out.dtype} {list(out.shape)}")
        out.copy_(part)
        if self._after_read is not None:
            self._after_read(self._states)
        return out


def _is_tensor(value) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _empty(value) -> bool:
    return value is None or (isinstance(value, list | tuple) and not value) or (_is_tensor(value) and not value.numel())


def entries_from_pairs(pairs, where: str) -> list[Entry]:
    """`[(k, v), ...]`, one per layer; None or empty entries have no KV. Members after k and v are ignored."""
    found = []
    for index, pair in enumerate(pairs):
        if _empty(pair):
            continue
        if not isinstance(pair, list | tuple) or len(pair) < 2:
            raise InputError(f"{where}: layer {index}: expected (k, v), found {type(pair).__name__}")
        if _empty(pair[0]) and _empty(pair[1]):
            continue
        found.append(Entry(index, pair[0], pair[1], names=(f"[{index}][0]", f"[{index}][1]")))
    return found


def entries_from_lists(keys, values, where: str) -> list[Entry]:
    """`key_cache`, `value_cache`: two lists of equal length."""
    if not isinstance(keys, list | tuple) or not isinstance(values, list | tuple) or len(keys) != len(values):
        raise InputError(f"{where}: expected key_cache and value_cache lists of equal length")
    found = []
    for index, (k, v) in enumerate(zip(keys, values, strict=True)):
        if not (_empty(k) and _empty(v)):
            found.append(Entry(index, k, v, names=(f"key_cache[{index}]", f"value_cache[{index}]")))
    return found


def _entries_from_layers(layers, where: str) -> list[Entry]:
    found = []
    for index, layer in enumerate(layers):
        if hasattr(layer, "_quantized_keys"):
            raise InputError(f"{where}: layer {index}: a quantized cache layer", hint="use an unquantized cache")
        k, v = getattr(layer, "keys", None), getattr(layer, "values", None)
        if _empty(k) and _empty(v):
            continue
        window = getattr(layer, "sliding_window", None) if getattr(layer, "is_sliding", False) else None
        if window is None and getattr(layer, "is_sliding", False):
            window = getattr(layer, "max_cache_len", None)
        seen = int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else None
        if seen is not None and _is_tensor(k) and k.ndim == 4 and seen < k.shape[2]:
            # A static cache is allocated in full; only its first tokens are filled.
            k, v = k[:, :, :seen], v[:, :, :seen]
            if seen == 0:
                continue
        found.append(Entry(index, k, v, window, seen, (f"layers[{index}].keys", f"layers[{index}].values")))
    return found


def build_layers(
    path: str, entries: list[Entry], *, batch: int | None, meta: dict, kinds: dict[int, str] | None = None, after=None
) -> list[LayerDump]:
    """LayerDumps over entries; checks batch, dtypes and shapes. `after(tensor)` is called after every read."""
    layers = []
    for entry in entries:
        attention = layer_attention(path, meta, entry.index)
        if entry.window and attention["window"] is None:
            attention.update(kind="sliding", window=int(entry.window))
        if kinds and entry.index in kinds:
            attention["kind"] = kinds[entry.index]
        states = {"k": entry.k, "v": entry.v}
        if attention["kind"] == "mla" and entry.v is not None:
            states = {"k": _latent(path, entry)}
        elif entry.v is None:
            del states["v"]
        planes: dict[str, PlaneSource] = {}
        for plane, value in states.items():
            name = entry.names[0] if plane == "k" else entry.names[1]
            planes[plane] = TensorPlane(path, name, value, _row(path, name, value, batch), after)
        layer = LayerDump(index=entry.index, planes=planes, _path=path, **attention)
        if entry.seen is not None and entry.seen > layer.tokens:
            layer._positions = _last_positions(entry.seen, layer.tokens)
        layers.append(layer)
    return layers


def _last_positions(seen: int, tokens: int):
    def positions():
        import torch

        return torch.arange(seen - tokens, seen, dtype=torch.int64)

    return positions


def _latent(path: str, entry: Entry):
    """An MLA cache keeps the latent and the rotated key apart; they are one row: `[batch, 1, tokens, a + b]`."""
    import torch

    k, v = entry.k, entry.v
    if not (_is_tensor(k) and _is_tensor(v)) or k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
        raise InputError(f"dump {path}: tensor {entry.names[0]}: expected MLA latents [batch, 1, tokens, width]")
    return torch.cat([k, v], dim=-1)


def _row(path: str, name: str, value, batch: int | None) -> int:
    where = f"dump {path}: tensor {name}"
    if not _is_tensor(value):
        raise InputError(f"{where}: expected a tensor, found {type(value).__name__}")
    check_plain_tensor(path, name, value)
    if value.ndim != 4:
        raise InputError(f"{where}: expected [batch, kv_heads, tokens, head_dim], found shape {list(value.shape)}")
    size = value.shape[0]
    if batch is None and size != 1:
        raise InputError(f"{where}: expected a batch of 1, found {size}", hint="choose one with batch=<index>")
    if batch is not None and not 0 <= batch < size:
        raise InputError(f"{where}: batch index {batch} outside 0..{size - 1}")
    return batch or 0


def from_hf_cache(
    cache,
    *,
    batch: int | None = None,
    page_tokens: int = DEFAULT_PAGE_TOKENS,
    geometry: Geometry | None = None,
    kinds: dict[int, str] | None = None,
    **meta,
) -> Dump:
    """A Dump over a Hugging Face cache in memory; nothing is copied until it is read.

    cache: `DynamicCache` and kin, new (`.layers`) or old (`.key_cache`, `.value_cache`), or a list of `(k, v)`, each
    `[batch, kv_heads, tokens, head_dim]`. `batch` picks a sequence where there are several. `kinds` {layer: "full",
    "sliding" or "mla"} overrides what the cache says; an MLA layer's two latents become one plane. `meta` goes into
    `Dump.meta` (model, rope, attention, ...).
    InputError: no KV, several sequences and no `batch`, quantized layers, K and V that disagree.
    """
    name = type(cache).__name__
    where = f"cache {name}"
    for index, kind in (kinds or {}).items():
        if kind not in KINDS:
            raise InputError(f"{where}: kinds: layer {index}: expected one of {', '.join(KINDS)}, found {kind!r}")
    if hasattr(cache, "layers"):
        entries = _entries_from_layers(cache.layers, where)
    elif hasattr(cache, "key_cache") and hasattr(cache, "value_cache"):
        entries = entries_from_lists(cache.key_cache, cache.value_cache, where)
    elif isinstance(cache, list | tuple):
        entries = entries_from_pairs(cache, where)
    else:
        raise InputError(f"{where}: expected a Hugging Face cache or a list of (k, v)")
    meta = check_meta(where, {"version": 1, "page_tokens": page_tokens, **meta})
    layers = build_layers(f"({name})", entries, batch=batch, meta=meta, kinds=kinds)
    layers = finish_layers(f"({name})", layers, geometry)
    return Dump(f"({name})", "hf-cache", meta, geometry.page_tokens if geometry else page_tokens, layers)
