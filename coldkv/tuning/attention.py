"""How much attention outputs move when cold K or V of one layer are replaced: the distortion that tuning weighs."""

from dataclasses import dataclass

import torch


@dataclass
class AttentionProbe:
    """Sampled queries of one layer over its K and V, fp64; keys hotter than the policy's limits stay exact.

    `error_k(restored)` and `error_v(restored)`: squared change of the outputs over their squared size, summed over
    sampled queries and heads, for K or V fp32 `[tokens, heads, D]` of the first whole pages.
    """

    q: torch.Tensor  # [heads, samples * group, D]
    mask: torch.Tensor  # bool [samples * group, tokens]: keys a query attends
    cold: torch.Tensor  # bool [samples * group, tokens]: those of them that are cold for it
    k: torch.Tensor  # [heads, tokens, D]
    v: torch.Tensor
    scaling: float
    softcap: float | None

    @classmethod
    def of(cls, layer, k: torch.Tensor, v: torch.Tensor, *, keep: int, sink: int) -> "AttentionProbe":
        """`k`, `v` fp32 `[tokens, heads, D]` as the hot tier holds them. The layer must have queries."""
        q, q_pos = layer.queries()
        heads, tokens = k.shape[1], k.shape[0]
        group = q.shape[1] // heads
        position = layer.positions()[:tokens]
        mask = position[None, :] <= q_pos[:, None]
        if layer.window is not None:
            mask &= position[None, :] > q_pos[:, None] - layer.window
        used = mask.any(dim=1)
        q, q_pos, mask = q[used], q_pos[used], mask[used]
        cold = mask & (position[None, :] <= q_pos[:, None] - keep) & (torch.arange(tokens) >= sink)[None, :]
        scaling = layer.scaling if layer.scaling is not None else q.shape[2] ** -0.5
        by_head = q.double().reshape(len(q), heads, group, -1).permute(1, 0, 2, 3).flatten(1, 2)
        spread = [m.repeat_interleave(group, dim=0) for m in (mask, cold)]
        return cls(by_head, *spread, k.double().transpose(0, 1), v.double().transpose(0, 1), scaling, layer.softcap)

    def _logits(self, k: torch.Tensor) -> torch.Tensor:
        logits = self.q @ k.transpose(1, 2) * self.scaling
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def _weights(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.softmax(logits.masked_fill(~self.mask, -torch.inf), dim=-1)

    def prepare(self) -> None:
        """Outputs of the exact planes, kept for the errors."""
        self.exact_logits = self._logits(self.k)
        self.p = self._weights(self.exact_logits)
        self.out = self.p @ self.v
        self.energy = float(self.out.square().sum())

    def error_k(self, restored: torch.Tensor) -> float:
        k = restored.double().transpose(0, 1)
        p = self._weights(torch.where(self.cold, self._logits(k), self.exact_logits))
        return self._relative(p @ self.v - self.out)

    def error_v(self, restored: torch.Tensor) -> float:
        v = restored.double().transpose(0, 1)
        return self._relative((self.p * self.cold) @ (v - self.v))

    def _relative(self, change: torch.Tensor) -> float:
        return float(change.square().sum()) / self.energy if self.energy > 0 else 0.0
