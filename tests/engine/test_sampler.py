"""The sampler against transformers' logits processors."""

from __future__ import annotations

import numpy as np
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

from qwen35mm.contract import SamplingParams
from qwen35mm.engine.sampler import Sampler

VOCAB = 97
PROMPT = [3, 5, 5, 8]


class OneReply:
    """A sampler with one slot, and the reply in it."""

    def __init__(self, params: SamplingParams, *, seed: int = 0, banned: tuple[int, ...] = ()) -> None:
        self.sampler = Sampler(1, VOCAB, banned, torch.device("cpu"))
        self.sampler.admit(0, params, seed, np.array(PROMPT), [])
        self.num_tokens = 0

    def sample(self, logits: torch.Tensor, allowed: torch.Tensor | None = None) -> int:
        self.num_tokens += 1
        return self.sampler.sample_one(0, self.num_tokens - 1, logits, allowed)


def make(params: SamplingParams, banned: tuple[int, ...] = ()) -> OneReply:
    return OneReply(params, seed=params.seed or 0, banned=banned)


def oracle_probs(params: SamplingParams, logits: torch.Tensor, seen: list[int]) -> torch.Tensor:
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    scores = processors(torch.tensor([seen]), logits[None].clone())  # pyright: ignore[reportArgumentType]
    return torch.softmax(scores[0], dim=-1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.6),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.3),
    ],
)
def test_draws_follow_the_oracles_distribution(params: SamplingParams) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    expected = oracle_probs(params, logits, PROMPT)
    draws = 500
    sampler = Sampler(draws, VOCAB, (), torch.device("cpu"))
    for seed in range(draws):
        sampler.admit(seed, params, seed, np.array(PROMPT), [])
    slots = torch.arange(draws)
    counts = torch.bincount(sampler.sample(logits.expand(draws, -1), slots, torch.zeros_like(slots)), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    # Five standard deviations of a binomial count: a wrong formula is far outside, chance isn't.
    deviation = (draws * expected * (1 - expected)).sqrt()
    assert ((counts - draws * expected).abs() <= 5 * deviation + 1).all()


def test_greedy_takes_the_likeliest_and_the_first_of_equals() -> None:
    logits = torch.zeros(VOCAB)
    logits[[7, 11]] = 2.0
    assert make(SamplingParams(temperature=0.0)).sample(logits) == 7
    assert make(SamplingParams(top_k=1)).sample(logits) == 7


def test_a_seed_repeats_a_reply_in_any_slot_beside_any_other() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))
    alone = make(SamplingParams(seed=4))
    expected = [alone.sample(logits) for _ in range(20)]
    sampler = Sampler(3, VOCAB, (), torch.device("cpu"))
    for slot, seed in ((1, 5), (2, 4)):
        sampler.admit(slot, SamplingParams(), seed, np.array(PROMPT), [])
    rows, slots = logits.expand(3, -1), torch.tensor([1, -1, 2])
    together = [sampler.sample(rows, slots, torch.full((3,), step)).tolist() for step in range(20)]
    assert [row[2] for row in together] == expected
    assert [row[0] for row in together] != expected


def test_a_reply_that_is_admitted_again_goes_on_as_before() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    params = SamplingParams(presence_penalty=1.5, repetition_penalty=1.4)
    whole = make(params)
    expected = [whole.sample(logits) for _ in range(20)]
    again = make(params)
    again.sampler.admit(0, params, 0, np.array(PROMPT), expected[:12])
    again.num_tokens = 12
    assert [again.sample(logits) for _ in range(8)] == expected[12:]


@pytest.mark.parametrize("params", [SamplingParams(temperature=1e-40), SamplingParams(top_p=1e-50)])
def test_what_is_too_small_for_float32_takes_the_likeliest(params: SamplingParams) -> None:
    logits = torch.linspace(-5, 5, VOCAB)
    sampler = make(params)
    assert {sampler.sample(logits) for _ in range(5)} == {VOCAB - 1}


def test_banned_ids_are_never_chosen() -> None:
    logits = torch.zeros(VOCAB)
    logits[10] = 100.0
    for params in (SamplingParams(temperature=0.0), SamplingParams(seed=0), SamplingParams(top_k=2, seed=0)):
        sampler = make(params, banned=(10, 11))
        assert all(sampler.sample(logits) not in (10, 11) for _ in range(20))


def test_what_a_grammar_allows_is_what_is_drawn_from() -> None:
    """top-k, top-p and min-p count what may come: the likeliest token that may not doesn't crowd it out."""
    logits = torch.zeros(VOCAB)
    logits[10], logits[20], logits[21] = 100.0, 2.0, 1.9
    allowed = torch.zeros(VOCAB, dtype=torch.bool)
    allowed[[20, 21]] = True
    for params in (
        SamplingParams(top_k=2, seed=0),
        SamplingParams(top_p=0.9, seed=0),
        SamplingParams(min_p=0.5, seed=0),
    ):
        sampler = make(params)
        assert {sampler.sample(logits, allowed) for _ in range(20)} == {20, 21}
    greedy = make(SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=1.0))
    assert [greedy.sample(logits, allowed) for _ in range(2)] == [20, 21]


def test_presence_penalty_counts_the_reply_once_and_not_the_prompt() -> None:
    logits = torch.zeros(VOCAB)
    logits[3], logits[4], logits[9] = 2.0, 1.5, 0.8
    sampler = make(SamplingParams(temperature=0.0, presence_penalty=1.0))
    assert [sampler.sample(logits) for _ in range(4)] == [3, 4, 3, 3]


def test_frequency_penalty_counts_each_time_in_the_reply() -> None:
    """As OpenAI's documentation has it: the logit less the penalty times the number of times so far."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4)) * 0.3
    sampler, said = make(SamplingParams(temperature=0.0, frequency_penalty=0.2, presence_penalty=0.05)), [0] * VOCAB
    for _ in range(60):
        counts = torch.tensor(said)
        expected = (logits - 0.05 * (counts > 0) - 0.2 * counts).argmax().item()
        assert sampler.sample(logits) == expected
        said[int(expected)] += 1
    assert max(said) >= 3


def test_counts_go_on_where_a_reply_is_admitted_again_and_end_at_their_most() -> None:
    logits = torch.full((VOCAB,), -10.0)
    logits[20], logits[21] = 2.0, 0.0
    params = SamplingParams(temperature=0.0, frequency_penalty=0.5)
    sampler = make(params)
    sampler.sampler.admit(0, params, 0, np.array(PROMPT), [20, 21, 20, 20, 20, 20, 20])
    assert sampler.sample(logits) == 21
    sampler.sampler.observe(0, 21)
    sampler.sampler.admit(0, params, 0, np.array(PROMPT), [20] * 300)
    for _ in range(3):
        sampler.sampler.observe(0, 20)
    assert sampler.sampler._counts[0, 20] == 255


def test_repetition_penalty_counts_forced_tokens() -> None:
    logits = torch.zeros(VOCAB)
    logits[20], logits[21] = 2.0, 1.5
    sampler = make(SamplingParams(temperature=0.0, repetition_penalty=2.0))
    sampler.sampler.observe(0, 20)
    assert sampler.sample(logits) == 21


def test_the_callers_logits_stay() -> None:
    logits = torch.randn(VOCAB)
    before = logits.clone()
    make(SamplingParams(seed=0, repetition_penalty=1.5, presence_penalty=1.0), banned=(1,)).sample(logits)
    assert torch.equal(logits, before)
