"""The cold pages inside a model's cache: which they are, their hot planes, and writing restored values back."""

from dataclasses import dataclass, field
from typing import Any

import torch

from coldkv.coldplane import through_codec
from coldkv.errors import InputError
from coldkv.formats import FORMATS, tier_formats
from coldkv.geometry import Geometry
from coldkv.pipeline import to_tokens
from coldkv.pool.policy import LayerPages, Policy, plan_pages
from coldkv.tiers import HotPlane


@dataclass(frozen=True)
class KvLayer:
    """One layer of a cache with K and V `[1, kv_heads, tokens, head_dim]`.

    `latent`: an MLA layer, whose cache holds a latent and a shared rotated key, `[1, 1, tokens, .]` each; side by
    side they are its one plane "k".
    """

    index: int
    tokens: int
    kv_heads: int
    head_dim: int
    latent: bool = False

    def geometry(self, page_tokens: int) -> Geometry:
        return Geometry(self.head_dim, page_tokens, self.kv_heads)

    @property
    def planes(self) -> tuple[str, ...]:
        return ("k",) if self.latent else ("k", "v")

    def read(self, cache: Any, plane: str, tokens: torch.Tensor) -> torch.Tensor:
        """`[len(tokens), kv_heads, head_dim]` in the cache's own dtype."""
        layer = cache.layers[self.index]
        if self.latent:
            states = torch.cat([layer.keys, layer.values], dim=-1)
        else:
            states = layer.keys if plane == "k" else layer.values
        return states[0][:, tokens.to(states.device)].transpose(0, 1)

    def write(self, cache: Any, plane: str, tokens: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the values of `tokens` by fp32 `[len(tokens), kv_heads, head_dim]`."""
        layer = cache.layers[self.index]
        with torch.inference_mode():
            if self.latent:
                split = layer.keys.shape[-1]
                self._put(layer.keys, tokens, values[..., :split])
                self._put(layer.values, tokens, values[..., split:])
            else:
                self._put(layer.keys if plane == "k" else layer.values, tokens, values)

    @staticmethod
    def _put(states: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor) -> None:
        states[0, :, tokens.to(states.device)] = values.to(states.device, states.dtype).transpose(0, 1)


def kv_layers(cache: Any, tokens: int, config) -> list[KvLayer]:
    """The layers with KV of a cache filled with `tokens` tokens; linear-attention layers have none.

    InputError for layers whose K and V are not one plane each, or that do not hold every token.
    """
    found = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor) or not keys.numel():
            continue
        shapes = f"K {list(keys.shape)} and V {list(values.shape)}"
        if keys.dim() != 4 or keys.shape[:3] != values.shape[:3] or keys.shape[0] != 1 or keys.shape[2] != tokens:
            raise InputError(f"cache: layer {index}: expected [1, heads, {tokens}, head_dim], found {shapes}")
        latent = getattr(config, "kv_lora_rank", None) is not None and keys.shape[1] == 1
        head_dim = keys.shape[3] + values.shape[3] if latent else keys.shape[3]
        if not latent and keys.shape[3] != values.shape[3]:
            raise InputError(f"cache: layer {index}: expected K and V of one shape, found {shapes}")
        found.append(KvLayer(index, tokens, keys.shape[1], head_dim, latent))
    if not found:
        raise InputError("the model has no layer with KV in its cache")
    return found


def cold_pages(policy: Policy, tokens: int, page_tokens: int) -> list[int]:
    """The pages of a sequence of `tokens` tokens that the policy retires, as `pack` chooses them."""
    sinks = frozenset(range(-(-min(policy.sink_tokens, tokens) // page_tokens)))
    return plan_pages(policy, [LayerPages(0, tokens, 0, sink_pages=sinks)], page_tokens)[0].cold


def page_tokens_of(pages: list[int], page_tokens: int) -> torch.Tensor:
    """int64: the tokens of whole pages, in order."""
    return (torch.tensor(pages, dtype=torch.int64)[:, None] * page_tokens + torch.arange(page_tokens)).flatten()


@dataclass
class Part:
    """The cold pages of one plane of one layer, in its hot format; n = pages * kv_heads head-pages, page-major."""

    layer: KvLayer
    plane: str
    geometry: Geometry
    hot: HotPlane
    hot_bytes: int


@dataclass
class Bytes:
    """What the cold pages took and take: head-pages, values, real bytes, and layers the codec did not take."""

    pages: int = 0
    elements: int = 0
    hot_bytes: int = 0
    cold_bytes: int = 0
    invalid_pages: int = 0
    left_hot: list[int] = field(default_factory=list)  # layers


class ColdPages:
    """The cold pages of a cache in their hot tiers, taken once, and put through one codec after another."""

    def __init__(self, cache: Any, layers: list[tuple[KvLayer, str]], pages: list[int], page_tokens: int, backend):
        """`layers`: with the tier of each. InputError where K or V is not finite."""
        self.backend = backend
        self.tokens = page_tokens_of(pages, page_tokens)
        self.parts: list[Part] = []
        for layer, tier in layers:
            geometry = layer.geometry(page_tokens)
            for plane in layer.planes:
                fmt = tier_formats(tier)[plane]
                states = layer.read(cache, plane, self.tokens)
                if not bool(torch.isfinite(states).all()):
                    raise InputError(f"layer {layer.index}: {plane}: expected finite values, found NaN or Inf")
                hot = backend.quantize(fmt, backend.load(states, geometry))
                hot_bytes = hot.head_pages * FORMATS[fmt].bytes(geometry)
                self.parts.append(Part(layer, plane, geometry, hot, hot_bytes))

    def through(self, cache: Any, codec=None) -> Bytes:
        """Write into `cache` what its cold pages read after `codec` (None: after the hot tier alone).

        A layer goes cold only if the codec takes all its planes, as in a pool; otherwise its pages keep the hot tier's
        values and count with their hot bytes, as head-pages do that the codec refuses.
        """
        total = Bytes()
        unfit = {part.layer.index for part in self.parts if codec is not None and not codec.fits(part.hot.format)}
        for part in self.parts:
            total.pages += part.hot.head_pages
            total.elements += part.hot.head_pages * part.geometry.elements
            total.hot_bytes += part.hot_bytes
            if codec is None or part.layer.index in unfit:
                values = self.backend.dequantize(part.hot)
                total.cold_bytes += part.hot_bytes
            else:
                cold = through_codec(self.backend, codec, part.hot, part.geometry, part.layer.index, part.plane)
                values = cold.values
                total.cold_bytes += cold.cold_bytes
                total.invalid_pages += cold.invalid_pages
            part.layer.write(cache, part.plane, self.tokens, to_tokens(values, part.geometry))
        total.left_hot = sorted(unfit)
        return total
