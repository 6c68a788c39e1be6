"""How far a model's next-token distributions are from a reference's, and how well it foretells a text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Divergence:
    """Over the tokens of a text.

    Attributes:
        kl_mean, kl_p99, kl_max: of KL(reference || model), in nats, token by token; p99 between two tokens is linear.
        top1_percent: how often both hold the same token for the likeliest.
        perplexity: the model's own; exp of the mean of -log p of the text's tokens.
    """

    num_tokens: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1_percent: float
    perplexity: float


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Of each token, [T]: `kl` and `loss` (-log p of the text's token) in float64, `agrees` bool."""

    kl: torch.Tensor
    loss: torch.Tensor
    agrees: torch.Tensor


def score_tokens(reference: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> TokenScores:
    """Scores of a model's logits.

    Args:
        reference, logits: [T, vocab]. The sums are made in float64: equal logits give exactly 0.
        targets: [T] int64, the text's next tokens.
    """
    expected, found = (each.double().log_softmax(dim=-1) for each in (reference, logits))
    # Rounding may leave a sum a little below zero.
    kl = (expected.exp() * (expected - found)).sum(dim=-1).clamp_(min=0)
    loss = -found.gather(1, targets[:, None])[:, 0]
    return TokenScores(kl, loss, reference.argmax(dim=-1) == logits.argmax(dim=-1))


def summarise(scores: Iterable[TokenScores]) -> Divergence:
    """All tokens together; there has to be one."""
    parts = list(scores)
    kl, loss, agrees = (torch.cat([getattr(part, name) for part in parts]) for name in ("kl", "loss", "agrees"))
    return Divergence(
        num_tokens=len(kl),
        kl_mean=float(kl.mean()),
        kl_p99=float(kl.quantile(0.99)),
        kl_max=float(kl.max()),
        top1_percent=100 * float(agrees.double().mean()),
        perplexity=math.exp(float(loss.mean())),
    )
