"""Distortion metrics against direct fp64 formulas, and what they must not be fooled by."""

import math

import pytest
import torch

from coldkv.backends import get_backend
from coldkv.dumps.model import LayerDump, PlaneSource
from coldkv.metrics import LogitError, PairSums

BACKEND = get_backend("torch")
PAGES, HEADS, TOKENS, DIM = 3, 2, 16, 64


def pair(bias=0.0):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((PAGES * HEADS, TOKENS, DIM), generator=generator) + bias
    return x, x + 0.1 * torch.randn(x.shape, generator=generator)


def of_head(x, head):
    return x.reshape(PAGES, HEADS, TOKENS * 1, DIM)[:, head].reshape(-1, DIM).double()


@pytest.mark.parametrize("parts", [1, 3])
def test_sums_over_chunks_give_the_plane_figures(parts):
    x, y = pair(bias=2.0)
    sums = PairSums(HEADS, DIM)
    for cx, cy in zip(x.chunk(parts), y.chunk(parts), strict=True):
        sums.add(BACKEND, cx, cy)
    for head in range(HEADS):
        a, b = of_head(x, head), of_head(y, head)
        error, energy = (a - b).square().sum(), a.square().sum()
        centered = (a - a.mean(dim=0)).square().sum()
        assert sums.nmse(head) == pytest.approx(float(error / energy), rel=1e-12)
        assert sums.nmse_centered(head) == pytest.approx(float(error / centered), rel=1e-9)
        assert sums.snr_db(head) == pytest.approx(-10 * math.log10(float(error / energy)), rel=1e-12)
        assert sums.max_abs_err(head) == float((a - b).abs().max())
        assert sums.cosine(head) == pytest.approx(float((a * b).sum() / a.norm() / b.norm()), rel=1e-12)


def test_bias_hides_error_in_nmse_but_not_in_the_centered_one():
    plain, biased = PairSums(HEADS, DIM), PairSums(HEADS, DIM)
    plain.add(BACKEND, *pair())
    biased.add(BACKEND, *pair(bias=10.0))
    assert biased.nmse(0) < plain.nmse(0) / 50
    assert biased.nmse_centered(0) == pytest.approx(plain.nmse_centered(0), rel=1e-2)


def test_edges():
    zeros = torch.zeros((PAGES * HEADS, TOKENS, DIM))
    same = PairSums(HEADS, DIM)
    same.add(BACKEND, zeros, zeros)
    assert (same.nmse(0), same.nmse_centered(0), same.snr_db(0), same.cosine(0)) == (0.0, 0.0, None, None)
    lost = PairSums(HEADS, DIM)
    lost.add(BACKEND, zeros, zeros + 1)
    assert lost.nmse(0) is None
    constant = PairSums(HEADS, DIM)
    constant.add(BACKEND, zeros + 3, zeros + 2)
    assert constant.nmse_centered(0) is None and constant.nmse(0) == pytest.approx(1 / 9)


def layer_of(window=None, softcap=None, scaling=0.2):
    source = PlaneSource("x", "layers.0.k", "fp32", PAGES * TOKENS, HEADS, DIM, 0)
    layer = LayerDump(0, "full" if window is None else "sliding", window, scaling, softcap, {"k": source})
    layer._positions = lambda: torch.arange(5, 5 + PAGES * TOKENS)  # a text whose first five tokens are not in the dump
    return layer


@pytest.mark.parametrize("window,softcap", [(None, None), (9, None), (None, 4.0)])
def test_logit_rmse_matches_a_loop_over_queries(window, softcap):
    x, y = pair()
    q = torch.randn((4, HEADS * 3, DIM), generator=torch.Generator().manual_seed(8))
    q_pos = torch.tensor([3, 5, 20, 52])  # the first one attends nothing
    layer = layer_of(window, softcap)
    error = LogitError(layer, (q, q_pos))
    per_page = HEADS
    for page in range(PAGES):
        span = slice(page * per_page, (page + 1) * per_page)
        error.add(page * TOKENS, x[span], y[span])
    cap = (lambda z: z) if softcap is None else (lambda z: softcap * torch.tanh(z / softcap))
    for head in range(HEADS):
        squares, count = 0.0, 0
        for sample in range(4):
            position = torch.arange(5, 5 + PAGES * TOKENS)
            seen = position <= q_pos[sample]
            if window is not None:
                seen &= position > q_pos[sample] - window
            for q_head in range(3 * head, 3 * head + 3):
                query = q[sample, q_head].double()
                logits = [cap(of_head(k, head)[seen] @ query * 0.2) for k in (x, y)]
                e = logits[1] - logits[0]
                if len(e):
                    squares += float((e - e.mean()).square().sum())
                    count += len(e)
        assert error.rmse(head) == pytest.approx(math.sqrt(squares / count), rel=1e-9)


def test_what_softmax_cannot_see_is_no_logit_error():
    x, _ = pair()
    layer = layer_of()
    error = LogitError(layer, (torch.ones((1, HEADS, DIM)), torch.tensor([100])))
    error.add(0, x, x + 1.0)
    assert error.rmse(0) == pytest.approx(0.0, abs=1e-5)
    nothing = LogitError(layer, (torch.ones((1, HEADS, DIM)), torch.tensor([0])))
    nothing.add(0, x, x + 1.0)
    assert nothing.rmse(0) is None
