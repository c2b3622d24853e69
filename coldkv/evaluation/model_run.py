"""Running a model on a prefix and from there on, with a cache whose every layer keeps every token."""

import copy
import inspect
from contextlib import contextmanager
from typing import Any

import torch

from coldkv.capture import INSTALL_HINT, _base_implementation, import_transformers
from coldkv.errors import ToolError


def full_cache(config) -> Any:
    """A DynamicCache in which sliding layers keep all tokens too; the masks alone do the sliding.

    The same predictions as with a cache that drops old tokens, but the old pages are there to go cold.
    """
    import_transformers()
    from transformers import cache_utils

    cache = cache_utils.DynamicCache(config=config)
    hybrid = getattr(cache_utils, "LinearAttentionAndSlidingWindowAttentionLayer", ())
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, cache_utils.DynamicSlidingWindowLayer):
            whole = _whole_sliding_layer()
            if isinstance(layer, hybrid):
                whole = _whole_sliding_layer(cache_utils.LinearAttentionAndFullAttentionLayer)
            cache.layers[index] = whole(**_states(layer))
    return cache


def _states(layer) -> dict:
    count = getattr(layer, "number_of_states", None)
    return {} if count is None else {"number_of_states": count}


def _whole_sliding_layer(base=None) -> type:
    from transformers.cache_utils import DynamicLayer

    # Still "sliding" to whoever asks, so that each kind of mask is made from a layer of its kind.
    return type("WholeSlidingLayer", (base or DynamicLayer,), {"is_sliding": True})


class ModelRun:
    """A causal model from its logits' point of view. All calls are without gradients."""

    def __init__(self, model, name: str):
        self.model, self.name = model.eval(), name
        self.config = model.config.get_text_config()
        model.set_attn_implementation(_base_implementation(model, self.config))
        parameters = inspect.signature(type(model).forward).parameters
        # transformers renamed the argument; the old name still works but warns
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters

    @property
    def device(self) -> torch.device:
        return self.model.device

    def prefill(self, input_ids: torch.Tensor) -> Any:
        """The cache after `input_ids` int64 `[1, tokens]`. ToolError where the model does not take such a cache."""
        cache = full_cache(self.config)
        with self._explained():
            self._forward(input_ids, cache, keep=1)
        return cache

    def logits(self, cache: Any, input_ids: torch.Tensor, *, keep: int = 0) -> torch.Tensor:
        """Logits `[batch, tokens, vocabulary]` of `input_ids` after what `cache` holds; the cache grows by them.

        `keep`: only those of the last so many tokens, 0 for all.
        """
        with self._explained():
            return self._forward(input_ids, cache, keep=keep)[:, -keep:]

    def _forward(self, input_ids, cache, *, keep: int):
        options = {self._cache_name: cache, "use_cache": True}
        if self._keeps_logits:
            options["logits_to_keep"] = keep
        with torch.inference_mode():
            return self.model(input_ids=input_ids.to(self.device), **options).logits

    @contextmanager
    def _explained(self):
        try:
            yield
        except (AttributeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            line = " ".join(str(error).split())[:200]
            raise ToolError(
                f"model {self.name}: does not run with a standard cache: {type(error).__name__}: {line}",
                hint=INSTALL_HINT,
            ) from error


def copy_cache(cache: Any) -> Any:
    """A cache of its own, recurrent states of linear-attention layers included: a run changes them in place."""
    with torch.inference_mode():
        return copy.deepcopy(cache)
