"""What `coldkv eval` does: each text once without cold pages, then once per codec, into rows."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from coldkv.codecs import Codec
from coldkv.errors import InputError
from coldkv.evaluation.coldcache import ColdPages, KvLayer, cold_pages, kv_layers, page_tokens_of
from coldkv.evaluation.divergence import compare, reference
from coldkv.evaluation.model_run import ModelRun, copy_cache
from coldkv.evaluation.needle import place_needles, retrieved
from coldkv.evaluation.results import HOT
from coldkv.layers import format_layers, select_layers
from coldkv.measure import choose_codecs
from coldkv.models import LoadedModel, encode_text
from coldkv.pool.policy import Policy
from coldkv.table import Assignment, LayerTable, assign


@dataclass(frozen=True)
class Settings:
    """`prefix` tokens are read once, `window` tokens predicted after them; `layers`: a selection such as "0,3-7"."""

    prefix: int = 2048
    window: int = 512
    page_tokens: int = 64
    policy: Policy = field(default_factory=Policy)
    layers: str | None = None
    needle: bool = False
    seed: int = 0


class Evaluation:
    """One model, one table, some codecs; `rows(name, text)` evaluates one text."""

    def __init__(
        self,
        loaded: LoadedModel,
        table: LayerTable,
        codecs: list[Codec] | None,
        settings: Settings,
        backend,
        message: Callable[[str], None] = lambda line: None,
    ):
        """InputError where no page would go cold, or the model's context is too short."""
        self.loaded, self.table, self.wanted, self.settings = loaded, table, codecs, settings
        self.backend, self.message = backend, message
        self.run = ModelRun(loaded.model, loaded.name)
        s = settings
        self.pages = cold_pages(s.policy, s.prefix, s.page_tokens)
        if not self.pages:
            raise InputError(
                f"prefix of {s.prefix} tokens: expected at least one whole page of {s.page_tokens} tokens after the "
                f"first {s.policy.sink_tokens} and before the last {s.policy.keep_tokens}, found none",
                hint="use a larger --prefix",
            )
        context = getattr(self.run.config, "max_position_embeddings", None)
        if context and self.needed_tokens > context:
            raise InputError(
                f"prefix and window: {s.prefix} + {s.window} tokens do not fit the context of {loaded.name}, "
                f"which holds {context}",
                hint="use a smaller --prefix or --window",
            )

    @property
    def needed_tokens(self) -> int:
        """Tokens of a text: prefix, window, and the token that comes after the window's last."""
        return self.settings.prefix + self.settings.window + 1

    def encode(self, name: str, text: str):
        """int64 `[1, needed_tokens]`; InputError if the text has fewer."""
        ids = encode_text(self.loaded, text, tokens=self.needed_tokens, where=f"text {name}")
        if ids.shape[1] < self.needed_tokens:
            s = self.settings
            raise InputError(
                f"text {name}: expected at least {self.needed_tokens} tokens (prefix {s.prefix}, window {s.window}, "
                f"and one), found {ids.shape[1]}",
                hint="use a longer text, or a smaller --prefix or --window",
            )
        return ids

    def rows(self, name: str, ids) -> list[dict]:
        """One row for the hot tier alone and one per codec; `ids` as from `encode`."""
        s = self.settings
        self.message(f"{name}: {s.prefix} tokens, then {s.window} without cold pages")
        cache = self.run.prefill(ids[:, : s.prefix])
        layers = kv_layers(cache, s.prefix, self.run.config)
        self.run.check_continuation(cache, ids[:, : s.prefix], ids[:, s.prefix :])
        assignment = self._assign(layers)
        codecs = choose_codecs(self.wanted, [assignment])
        chosen = _pair(layers, assignment)
        window, targets = ids[:, s.prefix : -1], ids[0, s.prefix + 1 :]
        base = reference(self.run.logits(copy_cache(cache), window)[0], targets)
        cold = ColdPages(cache, chosen, self.pages, s.page_tokens, self.backend)
        needles = self._needles(name, ids, chosen) if s.needle else None
        rows = []
        for codec in (None, *codecs):
            label = HOT if codec is None else codec.label
            altered = copy_cache(cache)
            cost = cold.through(altered, codec)
            figures = compare(base, self.run.logits(altered, window)[0], targets).figures(base)
            del altered
            found = needles(codec) if needles else {"needle": None, "needle_base": None, "needles": 0}
            rows.append(
                {
                    "model": self.loaded.name,
                    "text": name,
                    "codec": label,
                    "policy": s.policy.name,
                    "keep_tokens": s.policy.keep_tokens,
                    "sink_tokens": s.policy.sink_tokens,
                    "tokens": s.window,
                    "bits_per_element": 8 * cost.cold_bytes / cost.elements,
                    "ratio": cost.hot_bytes / cost.cold_bytes if cost.cold_bytes else None,
                    **figures,
                    **found,
                    "tier": assignment.name,
                    "layers": format_layers(layer.index for layer, _ in chosen),
                    "left_hot": format_layers(cost.left_hot),
                    "page_tokens": s.page_tokens,
                    "prefix": s.prefix,
                    "cold_tokens": len(self.pages) * s.page_tokens,
                    "pages": cost.pages,
                    "elements": cost.elements,
                    "hot_bytes": cost.hot_bytes,
                    "cold_bytes": cost.cold_bytes,
                    "invalid_pages": cost.invalid_pages,
                    "backend": self.backend.name if codec is None else self.backend.runs(codec),
                    "calib": None if codec is None else _calibration(codec),
                }
            )
            bits, kl = rows[-1]["bits_per_element"], rows[-1]["kl_mean"]
            self.message(f"{name}: {label}: {bits:.3f} bits per element, KL {kl:.3g}")
        return rows

    def _assign(self, layers: list[KvLayer]) -> Assignment:
        existing = [layer.index for layer in layers]
        selected = select_layers(self.settings.layers, existing, f"model {self.loaded.name}")
        assignment = assign(self.table, existing, selected=selected, of="model")
        if assignment.mode == "tiers":
            raise InputError(
                f"table {assignment.name}: is for another number of layers than model {self.loaded.name} has "
                f"({len(existing)} with KV), so no layer of it has a tier",
                hint="use --tier, or a table that names the model's layers",
            )
        for note in assignment.notes:
            self.message(f"note: {note}")
        return assignment

    def _needles(self, name: str, ids, chosen) -> Callable[[Codec | None], dict]:
        """Reads a prefix with needles once; codec -> the needle columns of its row."""
        s, tokenizer = self.settings, self.loaded.tokenizer
        cold_tokens = page_tokens_of(self.pages, s.page_tokens).tolist()
        digest = hashlib.sha256(ids[:, : s.prefix].contiguous().numpy().tobytes()).hexdigest()
        planted, needles = place_needles(tokenizer, ids[0].tolist(), s.prefix, cold_tokens, f"{s.seed} {digest}")
        self.message(f"{name}: {s.prefix} tokens with {len(needles)} needles")
        cache = self.run.prefill(planted)
        base = retrieved(self.run, tokenizer, cache, needles)
        cold = ColdPages(cache, chosen, self.pages, s.page_tokens, self.backend)

        def ask(codec: Codec | None) -> dict:
            altered = copy_cache(cache)
            cold.through(altered, codec)
            found = retrieved(self.run, tokenizer, altered, needles)
            return {"needle": found, "needle_base": base, "needles": len(needles)}

        return ask


def _pair(layers: list[KvLayer], assignment: Assignment) -> list[tuple[KvLayer, str]]:
    by_index = {layer.index: layer for layer in layers}
    return [(by_index[index], tier) for index, tier in assignment.pairs]


def _calibration(codec: Codec) -> str | None:
    """Name of the calibration file that a codec was given, without its folder."""
    found = codec.config.get("calib")
    return found.replace("\\", "/").rsplit("/", 1)[-1] if isinstance(found, str) else None
