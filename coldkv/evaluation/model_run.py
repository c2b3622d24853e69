"""Running a model on a prefix and from there on, with a cache whose every layer keeps every token."""

import copy
import inspect
from contextlib import contextmanager
from typing import Any

import torch

from coldkv.capture import _base_implementation, import_transformers
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


CHECK_TOKENS = 4
CHECK_KL = {torch.float32: 1e-3, torch.bfloat16: 0.05}  # nats; what another order of sums may cost, and no more


class ModelRun:
    """A causal model from its logits' point of view. All calls are without gradients.

    `stepwise`: several tokens after a cached prefix go in one by one. Some recurrent layers forget their state when
    they are given several at once; `check_continuation` finds out.
    """

    def __init__(self, model, name: str):
        self.model, self.name = model.eval(), name
        self.config = model.config.get_text_config()
        model.set_attn_implementation(_base_implementation(model, self.config))
        parameters = inspect.signature(type(model).forward).parameters
        # transformers renamed the argument; the old name still works but warns
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters
        self.stepwise = False

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
        steps = input_ids.split(1, dim=1) if self.stepwise else [input_ids]
        with self._explained():
            parts = [self._forward(ids, cache, keep=min(keep, ids.shape[1])) for ids in steps]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))[:, -keep:]

    def check_continuation(self, cache: Any, prefix: torch.Tensor, following: torch.Tensor) -> None:
        """Make sure that a model with recurrent states goes on from `cache`, which holds `prefix`, as without a cache.

        Sets `stepwise` where only single tokens do; ToolError where not even they do. Models whose every layer is
        attention need no check: their state is K and V.
        """
        if not any(_is_recurrent(layer) for layer in cache.layers):
            return
        following = following[:, :CHECK_TOKENS]
        whole = self._forward(torch.cat([prefix, following], dim=1), full_cache(self.config), keep=CHECK_TOKENS)
        expected = torch.log_softmax(whole[0, -following.shape[1] :].double(), dim=-1)
        for self.stepwise in (False, True):
            found = torch.log_softmax(self.logits(copy_cache(cache), following)[0].double(), dim=-1)
            kl = (expected.exp() * (expected - found)).sum(dim=-1)
            if float(kl.max()) < CHECK_KL.get(self.model.dtype, CHECK_KL[torch.bfloat16]):
                return
        raise ToolError(
            f"model {self.name}: does not go on from its cache as it does without one: KL {float(kl.max()):.3g} nats "
            f"in the first {following.shape[1]} tokens; its recurrent layers lose their state"
        )

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
                f"model {self.name}: does not run with a standard cache: {type(error).__name__}: {line}"
            ) from error


def _is_recurrent(layer: Any) -> bool:
    return getattr(layer, "keys", None) is None or hasattr(layer, "conv_states") or hasattr(layer, "recurrent_states")


def copy_cache(cache: Any) -> Any:
    """A cache of its own, recurrent states of linear-attention layers included: a run changes them in place."""
    with torch.inference_mode():
        return copy.deepcopy(cache)
