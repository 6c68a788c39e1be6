"""Divergence of a model's next-token distributions from a reference's, and perplexity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

# Parts of the longest text; shorter ones than this many tokens aren't split.
_NUM_DEPTHS = 4
_LEAST_DEEP = 1024


@dataclass(frozen=True)
class Depth:
    """Divergence over the tokens with `start` to `stop` tokens before them."""

    start: int
    stop: int
    num_tokens: int
    kl_mean: float
    top1_percent: float


@dataclass(frozen=True)
class Divergence:
    """Divergence over the tokens of a text.

    Attributes:
        kl_mean, kl_p99, kl_max: KL(reference || model) of a token, in nats; p99 interpolates linearly between tokens.
        top1_percent: how often both have the same most likely token.
        perplexity: the model's own: exp of the mean of -log p of the text's tokens.
        depths: the same by position, in quarters of the longest text; () if that is short.
    """

    num_tokens: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1_percent: float
    perplexity: float
    depths: tuple[Depth, ...]


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Scores of each token, [T]: `kl` and `loss` (-log p of the text's token) in float64, `agrees` bool.

    Attributes:
        first: tokens before the first token; each later one has one more.
    """

    kl: torch.Tensor
    loss: torch.Tensor
    agrees: torch.Tensor
    first: int = 0


def score_tokens(reference: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, first: int = 0) -> TokenScores:
    """Compares a model's logits with a reference's.

    Args:
        first: tokens before the first target.
        reference, logits: [T, vocab]. Computed in float64: equal logits give exactly 0.
        targets: [T] int64, the text's next tokens.
    """
    expected, found = (each.double().log_softmax(dim=-1) for each in (reference, logits))
    # Rounding may leave a sum slightly below zero.
    kl = (expected.exp() * (expected - found)).sum(dim=-1).clamp_(min=0)
    loss = -found.gather(1, targets[:, None])[:, 0]
    return TokenScores(kl, loss, reference.argmax(dim=-1) == logits.argmax(dim=-1), first)


def summarise(scores: Iterable[TokenScores]) -> Divergence:
    """Combines the scores of all tokens; there must be at least one."""
    parts = list(scores)
    kl, loss, agrees = (torch.cat([getattr(part, name) for part in parts]) for name in ("kl", "loss", "agrees"))
    return Divergence(
        num_tokens=len(kl),
        kl_mean=float(kl.mean()),
        kl_p99=float(kl.quantile(0.99)),
        kl_max=float(kl.max()),
        top1_percent=100 * float(agrees.double().mean()),
        perplexity=math.exp(float(loss.mean())),
        depths=tuple(_by_depth(parts, kl, agrees)),
    )


def _by_depth(parts: Sequence[TokenScores], kl: torch.Tensor, agrees: torch.Tensor) -> Iterator[Depth]:
    places = torch.cat([torch.arange(part.first, part.first + len(part.kl)) for part in parts])
    longest = int(places.max()) + 1
    if longest < _LEAST_DEEP:
        return
    size = math.ceil(longest / _NUM_DEPTHS)
    for start in range(0, longest, size):
        here = (places >= start) & (places < start + size)
        if num_tokens := int(here.sum()):
            top1_percent = 100 * float(agrees[here].double().mean())
            yield Depth(start, min(start + size, longest), num_tokens, float(kl[here].mean()), top1_percent)
