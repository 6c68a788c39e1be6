"""Divergences against values that were worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from qwen35mm.evaluation.divergence import TokenScores, score_tokens, summarise


def logits(*rows: list[float]) -> torch.Tensor:
    """Of distributions, up to the constant that a softmax takes away."""
    return torch.tensor(rows).log() + 3


def test_divergence_of_two_tokens() -> None:
    reference = logits([0.5, 0.25, 0.25], [0.5, 0.25, 0.25])
    model = logits([0.25, 0.5, 0.25], [0.5, 0.125, 0.375])
    scores = score_tokens(reference, model, torch.tensor([1, 2]))
    # 0.5 ln 2 - 0.25 ln 2, and 0.25 ln 2 + 0.25 ln (2 / 3).
    expected = [0.25 * math.log(2), 0.25 * math.log(4 / 3)]
    assert scores.kl.tolist() == pytest.approx(expected, rel=1e-5)
    assert scores.agrees.tolist() == [False, True]
    found = summarise([scores])
    assert found.num_tokens == 2
    assert found.kl_mean == pytest.approx(sum(expected) / 2, rel=1e-5)
    assert found.kl_max == pytest.approx(expected[0], rel=1e-5)
    assert found.top1_percent == 50
    assert found.perplexity == pytest.approx((0.5 * 0.375) ** -0.5, rel=1e-5)


def test_equal_logits_are_no_distance_at_all() -> None:
    values = torch.randn(7, 1000, generator=torch.Generator().manual_seed(0)) * 10
    found = summarise([score_tokens(values, values.clone(), torch.arange(7))])
    assert (found.kl_mean, found.kl_p99, found.kl_max, found.top1_percent) == (0, 0, 0, 100)


def test_the_percentile_lies_between_two_tokens() -> None:
    def scores(values: range) -> TokenScores:
        kl = torch.tensor([*values], dtype=torch.float64)
        return TokenScores(kl, torch.zeros_like(kl), torch.ones(len(values), dtype=torch.bool))

    # Place 0.99 * 200 = 198 of 0 to 200, and 0.99 * 10 = 9.9 of 0 to 10.
    assert summarise([scores(range(100, 201)), scores(range(100))]).kl_p99 == 198
    assert summarise([scores(range(11))]).kl_p99 == pytest.approx(9.9)


def test_texts_of_different_lengths_are_told_by_depth() -> None:
    def scores(first: int, count: int, kl: float) -> TokenScores:
        agrees = torch.zeros(count, dtype=torch.bool)
        return TokenScores(torch.full((count,), kl, dtype=torch.float64), torch.zeros(count), agrees, first)

    first, second = summarise([scores(1, 599, 1.0), scores(600, 1400, 4.0), scores(1, 499, 3.0)]).depths[:2]
    assert (first.start, first.stop, first.num_tokens, first.kl_mean) == (0, 500, 998, 2.0)
    assert (second.start, second.stop, second.num_tokens, second.kl_mean) == (500, 1000, 500, 3.4)
    assert summarise([scores(0, 1023, 1.0)]).depths == ()


def test_what_is_no_number_is_told() -> None:
    broken = torch.tensor([[0.0, float("nan")]])
    assert math.isnan(summarise([score_tokens(torch.zeros(1, 2), broken, torch.tensor([0]))]).kl_mean)
