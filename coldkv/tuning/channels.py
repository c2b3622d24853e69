"""Means and weights of K's and V's channels from a dump: the static part of a calibration."""

from dataclasses import dataclass

import torch

from coldkv.geometry import Geometry

LEAST_WEIGHT_SHARE = 1e-4  # of the mean query energy: a channel no query reads must not get an endless step


@dataclass
class Channels:
    """fp32 `[heads, D]` each: what is subtracted, and the factor by which a channel's step is larger than the row's."""

    mean: torch.Tensor
    weight: torch.Tensor


def flat_channels(geometry: Geometry) -> Channels:
    shape = (geometry.kv_heads, geometry.head_dim)
    return Channels(torch.zeros(shape), torch.ones(shape))


def key_channels(values: torch.Tensor, queries: torch.Tensor | None, *, skip: int) -> Channels:
    """K fp32 `[tokens, heads, D]`, queries fp32 `[samples, q_heads, D]` -> its channels.

    The mean leaves out the first `skip` tokens, where attention sinks sit (all tokens where there are no others).
    Softmax does not see q . mean, which is the same for every key. The weight is E[q^2]^-1/2 over the queries of a
    head's group, geometric mean 1: equal steps in logits instead of in channels. 1 without queries.
    """
    tokens, heads, head_dim = values.shape
    mean = values[skip:].double().mean(dim=0) if tokens > skip else values.double().mean(dim=0)
    weight = torch.ones((heads, head_dim), dtype=torch.float64)
    if queries is not None and queries.numel():
        energy = queries.double().square().reshape(len(queries), heads, -1, head_dim).mean(dim=(0, 2))
        energy = energy.clamp(min=1e-300)
        energy = torch.maximum(energy, LEAST_WEIGHT_SHARE * energy.mean(dim=1, keepdim=True))
        weight = (energy.log().mean(dim=1, keepdim=True) - energy.log()).mul(0.5).exp()
    return Channels(mean.float(), weight.float())
