"""Record K, V and sampled queries of a transformers model, exactly as its attention reads them.

The model's attention implementation is switched to one registered here, which stores what it is given and then calls
the implementation it stands in for. It sees post-RoPE keys before they are repeated over query heads, so any model
that goes through transformers' attention interface is captured without knowing its architecture; layers without such
attention (linear, recurrent) never call it and so have no KV. MLA layers show the interface keys and values expanded
from a latent; for them the latent is taken from the model's cache instead and the layer is a single plane.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from coldkv.errors import InputError, ToolError
from coldkv.layers import format_layers

INSTALL_HINT = "pip install 'coldkv[capture]'"
_PREFIX = "coldkv_capture_"


def import_transformers():
    """The transformers module, or a one-line ToolError. Off a terminal its progress bars are switched off."""
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # the GGUF reader's bar obeys nothing else, and only at import
    try:
        import transformers
    except ImportError as error:
        raise ToolError(f"transformers cannot be imported ({error})", hint=INSTALL_HINT) from None
    if not hasattr(transformers, "AttentionInterface") or not hasattr(transformers, "AttentionMaskInterface"):
        raise ToolError(f"transformers {transformers.__version__} has no attention interface", hint=INSTALL_HINT)
    return transformers


@dataclass
class RecordedLayer:
    """k, v `[tokens, kv_heads, head_dim]` (v None for an MLA latent), q `[samples, q_heads, head_dim]` or None, q_pos.

    `scaling` multiplies q.k; `window` counts the key at the query's own position; `rope` overrides the dump's rope.
    """

    index: int
    kind: str
    window: int | None
    scaling: float
    softcap: float | None
    k: Any
    v: Any
    q: Any
    extra: dict = field(default_factory=dict)


@dataclass
class Recording:
    layers: list[RecordedLayer]
    q_pos: Any  # int64 [samples]
    rope: dict | None
    tokens: int


def sample_positions(tokens: int, samples: int) -> list[int]:
    """Up to `samples` positions spread evenly over `0 .. tokens-1`, the last token always among them."""
    samples = min(samples, tokens)
    return [(j + 1) * tokens // samples - 1 for j in range(samples)]


class _Recorder:
    def __init__(self, config, base: str, tokens: int, samples: int, layers: list[int] | None, dtype):
        import torch

        self.config, self.base, self.tokens, self.wanted, self.dtype = config, base, tokens, layers, dtype
        self.q_pos = torch.tensor(sample_positions(tokens, samples) if samples else [], dtype=torch.int64)
        self.found: dict[int, RecordedLayer] = {}
        self.seen: set[int] = set()
        self.rotation: bool | None = None

    def layer_type(self, index: int) -> str | None:
        types = getattr(self.config, "layer_types", None)
        return types[index] if types and index < len(types) else None

    def __call__(self, module, query, key, value, mask, kwargs) -> None:
        index = getattr(module, "layer_idx", None)
        if index is None or kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
            return  # not decoder self-attention: a vision tower, cross attention
        if getattr(module, "is_kv_shared_layer", False):
            return  # reads the KV of an earlier layer, holds none
        if index in self.seen:
            raise InputError(f"capture: layer {index} attends twice in one pass; its KV cannot be told apart")
        if query.shape[0] != 1 or query.shape[2] != self.tokens or key.shape[2] != self.tokens:
            raise InputError(
                f"capture: layer {index}: expected one sequence of {self.tokens} tokens, "
                f"found queries {list(query.shape)} and keys {list(key.shape)}"
            )
        self.seen.add(index)
        if self.rotation is None:
            self.rotation = _interleaved(module)
        if self.wanted is not None and index not in self.wanted:
            return
        kind, window = self._kind(index, module, kwargs)
        self._check_mask(index, mask, window)
        scaling, softcap = kwargs.get("scaling"), kwargs.get("softcap")
        latent = getattr(module, "kv_lora_rank", None) is not None
        if not latent and key.shape != value.shape:
            raise InputError(
                f"capture: layer {index}: expected K and V of one shape, found {list(key.shape)} "
                f"and {list(value.shape)}"
            )
        layer = RecordedLayer(
            index=index,
            kind="mla" if latent else kind,
            window=window,
            scaling=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
            softcap=None if softcap is None else float(softcap),
            k=None if latent else self._keep(index, "k", key),
            v=None if latent else self._keep(index, "v", value),
            # Queries of an MLA layer meet expanded keys, not the stored latent.
            q=None if latent or not len(self.q_pos) else self._keep(index, "q", query[:, :, self.q_pos]),
        )
        rope = _rope(self.config, self.layer_type(index), module, self.rotation)
        if rope != _rope(self.config, None, None, self.rotation):
            layer.extra["rope"] = rope
        if kwargs.get("s_aux") is not None:
            layer.extra["sinks"] = [float(x) for x in kwargs["s_aux"].detach().float().reshape(-1)]
        self.found[index] = layer

    def _keep(self, index: int, what: str, states):
        import torch

        kept = states[0].transpose(0, 1).detach().to(self.dtype, copy=True).contiguous().cpu()
        if not bool(torch.isfinite(kept).all()):
            name = str(self.dtype).removeprefix("torch.")
            raise InputError(f"capture: layer {index}: {what} is not finite in {name}", hint="try --dtype fp32 or bf16")
        return kept

    def _kind(self, index: int, module, kwargs) -> tuple[str, int | None]:
        declared = self.layer_type(index)
        if declared in ("full_attention", None):
            window = kwargs.get("sliding_window")
        else:
            window = kwargs.get("sliding_window") or getattr(module, "sliding_window", None)
            window = window or getattr(self.config, "sliding_window", None)
        return ("sliding", int(window)) if window else ("full", None)

    def _check_mask(self, index: int, mask, window: int | None) -> None:
        """The mask decides which keys a query may attend; kind and window must describe it, or they would mislead."""
        import torch

        if mask is None:
            if window is not None and window < self.tokens:
                raise InputError(f"capture: layer {index}: a window of {window} tokens is declared but not applied")
            return
        if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
            raise InputError(f"capture: layer {index}: the attention mask has a form that is not understood")
        rows = self.q_pos if len(self.q_pos) else torch.tensor(sample_positions(self.tokens, 16))
        allowed = mask[0, 0].index_select(0, rows.to(mask.device))[:, : self.tokens].cpu()
        allowed = allowed if allowed.dtype == torch.bool else allowed == 0
        keys = torch.arange(self.tokens)
        expected = keys <= rows[:, None]
        if window is not None:
            expected &= keys > rows[:, None] - window
        if not torch.equal(allowed, expected):
            raise InputError(
                f"capture: layer {index}: its attention mask is neither causal nor a sliding window of "
                f"{window or 'any'} tokens; this kind of attention cannot be described in a dump"
            )


def _interleaved(module) -> bool | None:
    """Whether RoPE pairs neighbours (True) or halves (False), by the model's own rotation; None if it has none."""
    import torch

    rotate = getattr(sys.modules.get(type(module).__module__), "rotate_half", None)
    if rotate is None:
        return None
    try:
        first = float(rotate(torch.arange(1.0, 9.0).reshape(1, 1, 1, 8)).reshape(-1)[0])
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    return {-2.0: True, -5.0: False}.get(first)


def _rope(config, layer_type: str | None, module, interleaved: bool | None) -> dict | None:
    """{theta, dim, interleaved, applied, type, ...} for one layer type (None: the model's default)."""
    if module is not None and getattr(module, "use_rope", True) in (False, 0):
        return None
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = {k: v for k, v in parameters.items() if isinstance(v, dict)}
    if nested:
        parameters = nested.get(layer_type) or nested.get("full_attention") or next(iter(nested.values()))
    theta = parameters.get("rope_theta", getattr(config, "rope_theta", None))
    if layer_type == "sliding_attention" and not nested:
        theta = getattr(config, "rope_local_base_freq", None) or theta
    if theta is None:
        return None
    head_dim = getattr(config, "qk_rope_head_dim", None) or getattr(config, "head_dim", None)
    if head_dim is None:
        head_dim = config.hidden_size // config.num_attention_heads
    factor = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None)) or 1.0
    rope = {"theta": float(theta), "dim": int(head_dim * factor), "interleaved": interleaved, "applied": True}
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        rope["type"] = kind
        rope["parameters"] = {k: v for k, v in parameters.items() if isinstance(v, int | float | str)}
    return rope


_active: list[_Recorder] = []


def _recording(base: str):
    def attention(module, query, key, value, attention_mask=None, **kwargs):
        if _active:
            _active[-1](module, query, key, value, attention_mask, kwargs)
        if base == "eager":
            forward = sys.modules[type(module).__module__].eager_attention_forward
        else:
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

            forward = ALL_ATTENTION_FUNCTIONS[base]
        return forward(module, query, key, value, attention_mask, **kwargs)

    return attention


def _base_implementation(model, config) -> str:
    # sdpa knows neither softcaps nor sinks, and a model says itself whether it may run on sdpa.
    softcap = getattr(config, "attn_logit_softcapping", None)
    return "sdpa" if getattr(model, "_supports_sdpa", False) and softcap is None else "eager"


@contextmanager
def _switched(model, base: str) -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = _PREFIX + base
    AttentionInterface.register(name, _recording(base))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before or base)


def record(model, input_ids, *, samples: int = 64, layers: list[int] | None = None, dtype: str = "bf16") -> Recording:
    """One forward pass of a causal `model` over `input_ids` (int64 `[1, tokens]`), recording every attention layer.

    `samples` queries per layer, evenly spread; `layers`: model layer numbers, None for all; `dtype`: bf16, fp16 or
    fp32 of what is kept. InputError: unknown layer, values not finite in `dtype`, attention that a dump cannot
    describe. ToolError: the model does not go through transformers' attention interface.
    """
    import torch

    from coldkv.dumps.model import torch_dtype

    import_transformers()
    config = model.config.get_text_config()
    base = _base_implementation(model, config)
    recorder = _Recorder(config, base, input_ids.shape[1], samples, layers, torch_dtype(dtype))
    latents = getattr(config, "kv_lora_rank", None) is not None
    was_training = model.training
    model.eval()
    _active.append(recorder)
    try:
        with torch.inference_mode(), _switched(model, base):
            # The trunk alone: logits over a large vocabulary would take more memory than the whole cache.
            output = model.base_model(input_ids=input_ids, use_cache=latents)
    finally:
        _active.pop()
        model.train(was_training)
    if not recorder.seen:
        raise ToolError(
            f"capture: {type(model).__name__} has no attention layer that goes through transformers' "
            "attention interface"
        )
    unknown = sorted(set(layers or []) - recorder.seen)
    if unknown:
        raise InputError(
            f"layers: the model has no KV in layer {format_layers(unknown)}; layers with KV: "
            f"{format_layers(recorder.seen)}"
        )
    found = [recorder.found[index] for index in sorted(recorder.found)]
    _take_latents([layer for layer in found if layer.kind == "mla"], output, config, recorder)
    rope = _rope(config, None, None, recorder.rotation)
    return Recording(layers=found, q_pos=recorder.q_pos, rope=rope, tokens=input_ids.shape[1])


def _take_latents(layers: list[RecordedLayer], output, config, recorder: _Recorder) -> None:
    """Fill in k = latent followed by the shared rotated key, `[tokens, 1, kv_lora_rank + qk_rope_head_dim]`."""
    import torch

    if not layers:
        return
    cache = getattr(output, "past_key_values", None) or getattr(output, "cache", None)
    for layer in layers:
        stored = getattr(cache, "layers", None)
        entry = stored[layer.index] if stored and layer.index < len(stored) else None
        keys, values = getattr(entry, "keys", None), getattr(entry, "values", None)
        expected = [[1, 1, recorder.tokens, config.kv_lora_rank], [1, 1, recorder.tokens, config.qk_rope_head_dim]]
        shapes = [list(x.shape) if x is not None else None for x in (keys, values)]
        if shapes != expected:
            raise InputError(
                f"capture: layer {layer.index}: an MLA model whose cache does not hold the latent: "
                f"expected {expected}, found {shapes}",
                hint="a newer transformers may cache it",
            )
        layer.k = recorder._keep(layer.index, "latent", torch.cat([keys, values], dim=-1))
        layer.extra["latent"] = {"kv_lora_rank": config.kv_lora_rank, "qk_rope_head_dim": config.qk_rope_head_dim}


def write_recording(path, recording: Recording, *, dtype: str = "bf16", meta: dict | None = None) -> None:
    """Write a Recording as a coldkv dump, atomically. `meta`: model, text_sha256, provenance, page_tokens."""
    from coldkv.dumps.writer import DumpWriter, LayerSpec

    windows = {layer.window for layer in recording.layers if layer.window}
    specs = []
    for layer in recording.layers:
        tokens, kv_heads, head_dim = layer.k.shape
        specs.append(
            LayerSpec(
                index=layer.index,
                tokens=tokens,
                kv_heads=kv_heads,
                head_dim=head_dim,
                dtype=dtype,
                kind=layer.kind,
                window=layer.window,
                scaling=layer.scaling,
                softcap=layer.softcap,
                planes=("k",) if layer.v is None else ("k", "v"),
                q_samples=0 if layer.q is None else layer.q.shape[0],
                q_heads=0 if layer.q is None else layer.q.shape[1],
                extra=layer.extra,
            )
        )
    common = {"rope": recording.rope, "sliding_window": windows.pop() if len(windows) == 1 else None}
    with DumpWriter(path, specs, {**common, **(meta or {})}) as writer:
        for layer in recording.layers:
            base = f"layers.{layer.index}"
            writer.write(f"{base}.k", layer.k)
            if layer.v is not None:
                writer.write(f"{base}.v", layer.v)
            if layer.q is not None:
                writer.write(f"{base}.q", layer.q)
                writer.write(f"{base}.q_pos", recording.q_pos)
