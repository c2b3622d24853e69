"""Distortion of restored planes: sums kept per head while pages stream by, and the figures made from them."""

import math

import torch

# columns of the sums that Backend.stats returns, per head
XX, YY, XY, DD, MAX, COUNT = range(6)


class PairSums:
    """Running sums over pairs (x, y) of values, per head; x is the truth, y the approximation.

    `head_dim` is needed for `nmse_centered` only, which keeps a mean per channel.
    """

    def __init__(self, heads: int, head_dim: int | None = None):
        self.sums = torch.zeros((heads, 6), dtype=torch.float64)
        self.channels = None if head_dim is None else torch.zeros((heads, head_dim), dtype=torch.float64)

    def add(self, backend, x: torch.Tensor, y: torch.Tensor) -> None:
        """x, y: fp32 `[pages * heads, T, D]`, page-major."""
        sums, channels = backend.stats(x, y, self.sums.shape[0], channels=self.channels is not None)
        sums = sums.cpu()
        largest = torch.maximum(self.sums[:, MAX], sums[:, MAX])
        self.sums += sums
        self.sums[:, MAX] = largest
        if channels is not None:
            self.channels += channels.cpu()

    def nmse(self, head: int) -> float | None:
        """sum (x - y)^2 / sum x^2; 0 for an exact copy of zeros, None if the truth is all zero and y is not."""
        return _ratio(self.sums[head, DD], self.sums[head, XX])

    def nmse_centered(self, head: int) -> float | None:
        """The same error over the energy left after removing each channel's mean over the plane."""
        rows = float(self.sums[head, COUNT]) / self.channels.shape[1]
        mean_energy = float(self.channels[head].square().sum()) / rows if rows else 0.0
        energy = float(self.sums[head, XX]) - mean_energy
        if energy <= 1e-12 * float(self.sums[head, XX]):  # a constant plane: what is left is rounding
            energy = 0.0
        return _ratio(self.sums[head, DD], energy)

    def snr_db(self, head: int) -> float | None:
        """10 log10(signal / error) in dB; None where there is no error or no signal."""
        signal, error = float(self.sums[head, XX]), float(self.sums[head, DD])
        return 10 * math.log10(signal / error) if signal > 0 and error > 0 else None

    def cosine(self, head: int) -> float | None:
        norms = math.sqrt(float(self.sums[head, XX])) * math.sqrt(float(self.sums[head, YY]))
        return min(1.0, float(self.sums[head, XY]) / norms) if norms > 0 else None

    def max_abs_err(self, head: int) -> float:
        return float(self.sums[head, MAX])


def _ratio(error, energy) -> float | None:
    error, energy = float(error), float(energy)
    if energy > 0:
        return error / energy
    return 0.0 if error == 0 else None


class LogitError:
    """RMS of the attention logit error over sampled queries, in nats, each query's mean error removed.

    A query at position p attends the keys at positions <= p, in a sliding layer those above p - window. logit =
    scaling * q.k, or softcap * tanh(that / softcap). All in fp64. Softmax does not see what is the same for all of a
    query's keys, so each query's mean error is taken out.
    """

    def __init__(self, layer, queries: tuple[torch.Tensor, torch.Tensor]):
        q, self.q_pos = queries
        samples, q_heads, head_dim = q.shape
        self.heads = layer.kv_heads
        # query head h reads KV head h // group
        self.q = q.double().reshape(samples, self.heads, q_heads // self.heads, head_dim).permute(1, 0, 2, 3)
        self.scaling = layer.scaling if layer.scaling is not None else head_dim**-0.5
        self.softcap = layer.softcap
        self.window = layer.window
        self.positions = layer.positions()
        shape = self.q.shape[:3]
        self.count = torch.zeros(shape, dtype=torch.float64)
        self.total = torch.zeros(shape, dtype=torch.float64)
        self.squares = torch.zeros(shape, dtype=torch.float64)

    def add(self, first_token: int, ref: torch.Tensor, restored: torch.Tensor) -> None:
        """K as fp32 `[pages * heads, T, D]` for whole pages from `first_token` on: dump's values, restored."""
        page_tokens, head_dim = ref.shape[1:]
        truth = ref.double().reshape(-1, self.heads, page_tokens, head_dim).transpose(0, 1).flatten(1, 2)
        found = restored.double().reshape(-1, self.heads, page_tokens, head_dim).transpose(0, 1).flatten(1, 2)
        position = self.positions[first_token : first_token + truth.shape[1]]
        mask = position[None, :] <= self.q_pos[:, None]
        if self.window is not None:
            mask &= position[None, :] > self.q_pos[:, None] - self.window
        for head in range(self.heads):
            q = self.q[head]
            if self.softcap is None:
                error = q @ (found[head] - truth[head]).T * self.scaling
            else:
                capped = [
                    self.softcap * torch.tanh(q @ k[head].T * self.scaling / self.softcap) for k in (found, truth)
                ]
                error = capped[0] - capped[1]
            error = torch.where(mask[:, None, :], error, 0.0)
            self.count[head] += mask.sum(dim=1, dtype=torch.float64)[:, None]
            self.total[head] += error.sum(dim=-1)
            self.squares[head] += error.square().sum(dim=-1)

    def rmse(self, head: int) -> float | None:
        """RMS in nats of one KV head over its group's queries; None if no query attends a key of a whole page."""
        count = self.count[head]
        pairs = float(count.sum())
        if pairs == 0:
            return None
        spread = self.squares[head] - self.total[head].square() / count.clamp(min=1.0)
        return math.sqrt(max(0.0, float(spread.sum()) / pairs))
