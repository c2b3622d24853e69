"""How far one run's next-token distributions are from another's, in fp64 and a few tokens at a time."""

import math
from dataclasses import dataclass

import torch

CHUNK_ELEMENTS = 1 << 22  # logits per step: 32 MiB as fp64, also for vocabularies of 262,144


@dataclass
class Reference:
    """A run's logits `[tokens, vocabulary]` with what every comparison with them needs, per token, fp64."""

    logits: torch.Tensor
    log_total: torch.Tensor  # log of the sum of exp(logits)
    nll: torch.Tensor  # nats of the token that came


@dataclass
class Divergence:
    """Per token: `kl` = KL(reference || run) in nats, `nll` of the token that came, `agree`: the same first choice."""

    kl: torch.Tensor
    nll: torch.Tensor
    agree: torch.Tensor

    def figures(self, reference: Reference) -> dict[str, float]:
        """ppl, ppl_base, kl_mean, kl_p99, top1 over all tokens."""
        return {
            "ppl": perplexity(self.nll),
            "ppl_base": perplexity(reference.nll),
            "kl_mean": float(self.kl.mean()),
            "kl_p99": float(torch.quantile(self.kl, 0.99)),
            "top1": float(self.agree.double().mean()),
        }


def perplexity(nll: torch.Tensor) -> float:
    """exp of the mean, at most 1e300: a destroyed model must still give a finite figure."""
    return math.exp(min(float(nll.mean()), math.log(1e300)))


def reference(logits: torch.Tensor, targets: torch.Tensor) -> Reference:
    """`targets` int64 `[tokens]`: the token that came after each."""
    totals, nlls = [], []
    for span in _spans(logits):
        wide = logits[span].double()
        total = torch.logsumexp(wide, dim=-1)
        totals.append(total)
        nlls.append(total - wide.gather(-1, targets[span].to(wide.device)[:, None])[:, 0])
    return Reference(logits, torch.cat(totals), torch.cat(nlls))


def compare(base: Reference, logits: torch.Tensor, targets: torch.Tensor) -> Divergence:
    """A run's logits against the reference's; both `[tokens, vocabulary]`. Equal logits give a KL of exactly 0."""
    run = reference(logits, targets)
    kls, agree = [], []
    for span in _spans(logits):
        wide = base.logits[span].double()
        p = torch.exp(wide - base.log_total[span, None])
        shift = run.log_total[span] - base.log_total[span]
        kls.append(p.mul_(wide.sub_(logits[span])).sum(dim=-1) + shift)
        agree.append(base.logits[span].argmax(dim=-1) == logits[span].argmax(dim=-1))
    # rounding can leave a KL of -1e-17
    return Divergence(torch.cat(kls).clamp(min=0), run.nll, torch.cat(agree))


def _spans(logits: torch.Tensor):
    step = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    return [slice(start, start + step) for start in range(0, logits.shape[0], step)]
