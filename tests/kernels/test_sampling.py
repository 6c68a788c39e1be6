"""Sampling in torch against its twin, transformers' logits processors and Philox's published numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from qwen35mm_kernels.sampling import exponentials, naive_sample, philox, random_bits, sample
from tests.kernels.sampling_cases import CASES, VOCAB, copied, make_case, make_rows, pools

PROMPT = [3, 5, 5, 8]


def oracle_probs(values: dict[str, float], logits: torch.Tensor) -> torch.Tensor:
    processors = LogitsProcessorList()
    if "repetition_penalty" in values:
        processors.append(RepetitionPenaltyLogitsProcessor(values["repetition_penalty"]))
    processors.append(TemperatureLogitsWarper(values.get("temperature", 1.0)))
    if "top_k" in values:
        processors.append(TopKLogitsWarper(int(values["top_k"])))
    if "top_p" in values:
        processors.append(TopPLogitsWarper(values["top_p"]))
    if "min_p" in values:
        processors.append(MinPLogitsWarper(values["min_p"]))
    scores = processors(torch.tensor([PROMPT]), logits[None].clone())  # pyright: ignore[reportArgumentType]
    return torch.softmax(scores[0], dim=-1)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.3},
    ],
)
def test_draws_follow_the_oracles_distribution(values: dict[str, float]) -> None:
    logits = torch.randn(VOCAB) * 2
    expected = oracle_probs(values, logits)
    draws = 6000
    rows = make_rows(draws, **values)
    seen_in_text, seen_in_reply = pools(draws)
    seen_in_text[:, PROMPT] = True
    banned = torch.zeros(VOCAB, dtype=torch.bool)
    chosen = sample(logits.expand(draws, -1), rows, seen_in_text, seen_in_reply, banned)
    counts = torch.bincount(chosen, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    # Five standard deviations of a binomial count: a wrong formula is far outside, chance isn't.
    deviation = (draws * expected * (1 - expected)).sqrt()
    assert ((counts - draws * expected).abs() <= 5 * deviation + 1).all()


@pytest.mark.parametrize("case", CASES)
def test_sampling_equals_its_twin(case: str) -> None:
    """The same ids, exactly, and the same pools afterwards."""
    logits, rows, seen, banned = make_case(case, batch=60)
    expected_seen = copied(seen)
    expected = naive_sample(logits, rows, *expected_seen, banned)
    before = logits.clone()
    assert torch.equal(sample(logits, rows, *seen, banned), expected)
    assert all(map(torch.equal, seen, expected_seen))
    assert torch.equal(logits, before)


def test_a_draw_depends_on_its_own_row_alone() -> None:
    """Alone, in another order and at another place in the pools: the same token."""
    logits, rows, seen, banned = make_case("mixed", batch=12)
    together = sample(logits, rows, *copied(seen), banned)
    for row in range(12):
        alone = make_rows(1, **{name: getattr(rows, name)[row].item() for name in vars(rows)})
        alone = replace(alone, slots=torch.tensor([1]))
        in_text, in_reply = (torch.stack([pool[0], pool[rows.slots[row]]]) for pool in seen)
        assert sample(logits[row : row + 1], alone, in_text, in_reply, banned[row : row + 1]) == together[row]


def test_seeds_and_steps_give_other_draws() -> None:
    rows = make_rows(500)
    ids = torch.arange(VOCAB)[None]
    for other in (replace(rows, seeds=rows.seeds + 2**32), replace(rows, steps=rows.steps + 2**32)):
        bits = random_bits(rows.seeds[:, None], rows.steps[:, None], ids)
        assert (bits == random_bits(other.seeds[:, None], other.steps[:, None], ids)).float().mean() < 0.01


def test_philox_gives_the_published_numbers() -> None:
    """Known answers of Random123's kat_vectors for philox4x32-10."""
    zeros = [torch.tensor([0])] * 6
    ones = [torch.tensor([0xFFFFFFFF])] * 6
    for words, expected in (
        (zeros, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (ones, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ):
        assert tuple(word.item() for word in philox(tuple(words[:4]), (words[4], words[5]))) == expected


def test_exponentials_are_precise_at_both_ends() -> None:
    bits = torch.tensor([0, 1, 1000, 2**24, 2**25 - 1, 2**25, 2**31, 2**32 - 2**12, 2**32 - 1])
    exact = -torch.log1p(-(bits.double() + 0.5) * 2.0**-32)
    assert torch.allclose(exponentials(bits)[:-1].double(), exact[:-1], rtol=1e-3)
    assert torch.allclose(exponentials(bits)[:7].double(), exact[:7], rtol=1e-6)
    assert torch.isfinite(exponentials(bits)).all()


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, [7, 11]] = 2.0
    rows = make_rows(2, temperature=[0.0, 1.0], top_k=[0, 1])
    banned = torch.zeros(2, VOCAB, dtype=torch.bool)
    assert sample(logits, rows, *pools(2), banned).tolist() == [7, 7]
    banned[1, 7] = True
    assert sample(logits, rows, *pools(2), banned).tolist() == [7, 11]


def test_what_does_not_fit_is_refused() -> None:
    logits, rows, (seen_in_text, seen_in_reply), banned = make_case("mixed", batch=3)
    with pytest.raises(ValueError, match=r"seen_in_reply must be \[S, vocab\] = \[any, 97\], got \[5, 96\]"):
        sample(logits, rows, seen_in_text, seen_in_reply[:, :-1], banned)
    with pytest.raises(TypeError, match=r"top_k must be torch.int32, got torch.float32"):
        sample(logits, replace(rows, top_k=rows.top_p), seen_in_text, seen_in_reply, banned)
    with pytest.raises(ValueError, match=r"seeds must be \[B\] = \[3\], got \[2\]"):
        sample(logits, replace(rows, seeds=rows.seeds[:2]), seen_in_text, seen_in_reply, banned)
    with pytest.raises(ValueError, match=r"banned must be .* = \[3, 97\], got \[2, 97\]"):
        sample(logits, rows, seen_in_text, seen_in_reply, banned[:2])
