"""Which pages of a dump go cold: policies, their options, and the plan they give. Knows neither torch nor numpy."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from coldkv.errors import InputError

POLICIES = ("none", "window", "host")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
# why a page is where it is
COLD, SINK, RECENT, INVALID, NO_CODEC, NO_POLICY = "cold", "sink", "recent", "invalid", "no_codec", "policy_none"
POOL_FULL, HOST_FULL, PINNED, WRITING, SHARED_RECENT = "pool_full", "host_full", "pinned", "writing", "shared_recent"


def parse_bytes(text: str) -> int:
    """`"4g"`, `"512m"`, `"64k"`, `"100"` -> bytes (powers of 1024); InputError if malformed."""
    match = re.fullmatch(r"([0-9]{1,15})([kmg]?)", text.strip().lower())
    if not match:
        raise InputError(f"bytes {text!r}: expected N, Nk, Nm or Ng with a whole N")
    return int(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True)
class Policy:
    """`name`: "none" everything stays hot; "window" whole pages older than the last `keep_tokens` go cold, except
    those that hold one of the first `sink_tokens`; "host" like window, and an exact replica of each cold page is kept
    as long as all replicas fit `host_bytes`."""

    name: str = "window"
    keep_tokens: int = 128
    sink_tokens: int = 64
    host_bytes: int = 4 << 30

    def __post_init__(self):
        if self.name not in POLICIES:
            raise InputError(f"cold policy: expected one of {', '.join(POLICIES)}, found {self.name!r}")
        for key in ("keep_tokens", "sink_tokens", "host_bytes"):
            if getattr(self, key) < 0:
                raise InputError(f"cold policy: {key}: expected at least 0, found {getattr(self, key)}")

    def to_json(self) -> dict:
        return asdict(self)

    def cold_limit(self, tokens: int, page_tokens: int) -> int:
        """Pages `[0, limit)` are old enough; only whole pages count."""
        if self.name == "none" or tokens <= self.keep_tokens:
            return 0
        return min(-(-tokens // page_tokens), (tokens - self.keep_tokens) // page_tokens)


@dataclass(frozen=True)
class LayerPages:
    """What the policy needs to know of a layer. `sink_pages`: pages that hold one of the first positions of the text
    (a sliding layer that kept only its last tokens may have none). `can_go_cold`: its codec fits."""

    index: int
    tokens: int
    page_bytes: int  # one whole hot page of all planes and heads
    can_go_cold: bool = True
    sink_pages: frozenset[int] = frozenset()


@dataclass
class LayerPlan:
    """`cold`: logical page of each slot, in slot order; `replicas`: those of them with a replica; `counts`: pages of
    the layer by reason (cold, sink, recent, invalid, no_codec, policy_none); `replicas_missed`: did not fit."""

    cold: list[int] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    replicas_missed: int = 0


def plan_pages(
    policy: Policy, layers: Sequence[LayerPages], page_tokens: int, invalid: Mapping[int, set[int]] | None = None
) -> dict[int, LayerPlan]:
    """Layer index -> plan. Layers with the same number of tokens go cold together, page by page.

    `invalid`: tokens -> pages that some codec refused in some layer of that length; their slot is free again at once
    (the next page takes it) and they stay hot in every such layer.
    Replicas are given to pages in the order in which they retire, longest layers first, while the hot bytes of the
    page in all its layers fit what is left of the budget.
    """
    invalid = invalid or {}
    plans = {layer.index: LayerPlan() for layer in layers}
    budget = policy.host_bytes if policy.name == "host" else 0
    for tokens in sorted({layer.tokens for layer in layers}, reverse=True):
        together = [layer for layer in layers if layer.tokens == tokens and layer.can_go_cold]
        sinks = frozenset().union(*(layer.sink_pages for layer in together))
        limit = policy.cold_limit(tokens, page_tokens)
        reasons = [
            _reason(page, policy, limit, sinks, invalid.get(tokens, ())) for page in range(-(-tokens // page_tokens))
        ]
        cold = [page for page, reason in enumerate(reasons) if reason == COLD]
        page_bytes = sum(layer.page_bytes for layer in together)
        replicas = []
        for page in cold if policy.name == "host" else ():
            if page_bytes <= budget:
                budget -= page_bytes
                replicas.append(page)
        for layer in layers:
            if layer.tokens != tokens:
                continue
            plan = plans[layer.index]
            if not layer.can_go_cold:
                plan.counts = {NO_CODEC: len(reasons)}
                continue
            plan.cold, plan.replicas, plan.counts = cold, replicas, dict(Counter(reasons))
            plan.replicas_missed = len(cold) - len(replicas) if policy.name == "host" else 0
    return plans


def _reason(page: int, policy: Policy, limit: int, sinks: frozenset[int], invalid) -> str:
    if policy.name == "none":
        return NO_POLICY
    if page >= limit:
        return RECENT
    if page in sinks:
        return SINK
    return INVALID if page in invalid else COLD
