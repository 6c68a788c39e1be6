"""Speculation changes no bit: the same tokens out of the same logits, with and without drafts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from qwen35mm.assets import demo_model_path
from qwen35mm.contract import Image, SamplingParams
from qwen35mm.engine import Engine, EngineSettings, Request
from qwen35mm.engine.reply import Reply
from qwen35mm.engine.speculation import (
    MAX_DRAFTS,
    Draft,
    Offer,
    Origin,
    Repeats,
    StepTimes,
    chosen_lengths,
    num_drafts,
)
from qwen35mm.engine.trust import Experience, Trust
from qwen35mm.errors import ConfigError
from qwen35mm.model import load
from tests.engine.exact import (
    GREEDY,
    MODELS,
    Answer,
    Chat,
    assert_same,
    assistant,
    cache_settings,
    chat_model,
    commit,
    picture,
    serve,
    small_blocks,
    user,
    words,
)

SETTINGS = EngineSettings(context_length=200, chunk_tokens=64, slots=3)
SCHEMA = '{"type": "object", "properties": {"color": {"enum": ["red", "green"]}, "count": {"type": "integer"}}}'


def engine_of(loaded: Any, speculate: str, *, num_tokens: int = 2048) -> Engine:
    return Engine(loaded, replace(SETTINGS, speculate=speculate), cache_settings(loaded, num_tokens=num_tokens))


def random_params(rng: random.Random) -> SamplingParams:
    """Of every kind that may change what is drawn."""
    maybe = lambda value, otherwise: value if rng.random() < 0.4 else otherwise  # noqa: E731
    return SamplingParams(
        temperature=rng.choice((0.0, 0.0, 0.3, 1.0, 1.5)),
        top_k=maybe(rng.randint(1, 50), 0),
        top_p=maybe(rng.uniform(0.5, 1.0), 1.0),
        min_p=maybe(rng.uniform(0.0, 0.2), 0.0),
        repetition_penalty=maybe(rng.uniform(1.0, 1.5), 1.0),
        presence_penalty=maybe(rng.uniform(-1.0, 1.0), 0.0),
        frequency_penalty=maybe(rng.uniform(-1.0, 1.0), 0.0),
        seed=rng.randint(0, 1 << 40),
        max_tokens=(most := rng.randint(1, 20)),
        min_tokens=maybe(rng.randint(0, min(most, 8)), 0),
        logit_bias=maybe({rng.randint(0, 900): rng.uniform(-20, 20)}, None) or {},
        logprobs=maybe(rng.randint(0, 3), None),
        stop=maybe(("e", "the "), ()),
        thinking_budget=maybe(rng.randint(0, 6), None),
        json_schema=SCHEMA if rng.random() < 0.15 else None,
    )


class Known:
    """Drafts what replies said before, with wrong tokens in between."""

    def __init__(self, rng: random.Random, right: float) -> None:
        self._rng, self._right = rng, right
        self._said: dict[str, tuple[int, ...]] = {}
        self.num_drafted = 0

    def learn(self, requests: Sequence[Request], answers: Sequence[Answer]) -> None:
        self._said |= {each.id: answer.result.token_ids for each, answer in zip(requests, answers, strict=True)}

    def draft(self, reply: Reply, most: int) -> Draft | None:
        place = len(reply.output.token_ids)
        coming = self._said.get(reply.request.id, ())[place : place + self._rng.randint(0, most)]
        tokens = tuple(x if self._rng.random() < self._right else self._rng.randint(0, 900) for x in coming)
        self.num_drafted += len(tokens)
        return Draft(tokens, Origin.GRAMMAR, place) if tokens else None


@pytest.fixture(params=MODELS, ids=[spec.name for spec, _ in MODELS])
def chat(request: pytest.FixtureRequest) -> Iterator[Chat]:
    loaded = chat_model(*request.param)
    with small_blocks(8):
        yield Chat(loaded, min_segment=16)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Known:
    """Seven of ten of its drafts are right; a step takes as many as there are, not those that pay here."""
    known = Known(random.Random(1), right=0.7)
    monkeypatch.setattr(Reply, "_new_draft", lambda reply, most: known.draft(reply, most))
    monkeypatch.setattr("qwen35mm.engine.decoder.chosen_lengths", _as_many_as_there_are)
    return known


def _as_many_as_there_are(offers: Sequence[Offer], times: StepTimes, most: int) -> list[int]:
    lengths = []
    for offer in offers:
        lengths.append(min(len(offer.chances), most))
        most -= lengths[-1]
    return lengths


def requests_of(chat: Chat, rng: random.Random, *key: int) -> list[Request]:
    return [
        chat.request(
            [user(words(*key, index, count=rng.randint(3, 30)))],
            params=random_params(rng),
            enable_thinking=rng.random() < 0.3,
            id=f"{key}-{index}",
        )
        for index in range(3)
    ]


@pytest.mark.parametrize("num_rounds", [10, pytest.param(150, marks=pytest.mark.slow)])
def test_random_settings_give_the_same_bits(num_rounds: int, chat: Chat, known: Known) -> None:
    """Three settings a round, in one batch."""
    rng = random.Random(7)
    plain, speculating = (engine_of(chat.loaded, speculate) for speculate in ("off", "auto"))
    for round_ in range(num_rounds):
        requests = requests_of(chat, rng, round_)
        expected = serve(plain, *requests)
        known.learn(requests, expected)
        for found, wanted in zip(serve(speculating, *requests), expected, strict=True):
            assert_same(found, wanted)
            assert found.result.text == wanted.result.text
            assert found.result.finish_reason == wanted.result.finish_reason
            assert found.result.logprobs == wanted.result.logprobs
    assert known.num_drafted > 10 * num_rounds


def test_replies_that_make_room_for_each_other_keep_their_bits(
    chat: Chat, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
    requests = [chat.request([user(words("room", index))], params=params, id=str(index)) for index in range(3)]
    expected = serve(engine_of(chat.loaded, "off"), *requests)
    known.learn(requests, expected)
    preempted: list[Reply] = []
    preempt = Reply.preempt
    monkeypatch.setattr(Reply, "preempt", lambda self, pools: (preempted.append(self), preempt(self, pools)))
    tight = engine_of(chat.loaded, "auto", num_tokens=208)
    for found, wanted in zip(serve(tight, *requests), expected, strict=True):
        assert_same(found, wanted)
    assert preempted


def test_a_cancelled_reply_gives_its_slots_back(chat: Chat, known: Known) -> None:
    params = replace(GREEDY, max_tokens=60, ignore_eos=True)
    first, second = (chat.request([user(words("cancel", i))], params=params, id=str(i)) for i in range(2))
    expected = serve(engine_of(chat.loaded, "off"), first, second)
    known.learn([first, second], expected)
    engine = engine_of(chat.loaded, "auto")
    engine.add(first)
    while not known.num_drafted:
        engine.step()
    engine.cancel(first.id)
    engine.check_integrity()
    (found,) = serve(engine, second)
    assert_same(found, expected[1])
    assert len(engine.runtime.pools.states.spare) == MAX_DRAFTS


def test_what_the_next_turn_finds_in_the_cache_is_untouched_by_drafts(chat: Chat, known: Known) -> None:
    messages = [user("Look at this:", Image(picture(1)), words("turn"))]
    speculating, plain = engine_of(chat.loaded, "auto"), engine_of(chat.loaded, "off")
    request = chat.request(messages, params=replace(GREEDY, max_tokens=20))
    (first,) = serve(plain, request)
    known.learn([request], [first])
    serve(speculating, request)
    more = [*messages, assistant(first.result.text), user("And now?")]
    for engine in (plain, speculating):
        commit(engine, chat.history(more[:2]))
    following = chat.request(more)
    (wanted,), (found,) = serve(plain, following), serve(speculating, following)
    assert_same(found, wanted)
    assert found.result.cache.num_cached_tokens == wanted.result.cache.num_cached_tokens > 0


def test_the_models_own_repetitions_are_drafts(chat: Chat) -> None:
    params = replace(GREEDY, max_tokens=60, logit_bias={65: 100.0})
    request = chat.request([user(words("repeat"))], params=params)
    (wanted,), (found,) = (serve(engine_of(chat.loaded, each), request) for each in ("off", "ngram"))
    assert_same(found, wanted)
    assert found.result.num_accepted_tokens > 0
    assert found.result.num_drafted_tokens >= found.result.num_accepted_tokens
    assert wanted.result.num_drafted_tokens == 0


def test_a_grammars_only_continuation_is_a_draft(chat: Chat) -> None:
    schema = '{"type": "object", "properties": {"a_long_name": {"const": 1}}, "required": ["a_long_name"]}'
    params = SamplingParams(temperature=0.0, max_tokens=60, json_schema=schema)
    request = chat.request([user("JSON, please.")], params=params)
    (wanted,), (found,) = (serve(engine_of(chat.loaded, each), request) for each in ("off", "auto"))
    assert_same(found, wanted)
    assert found.result.num_accepted_tokens > 2


def test_the_models_own_layer_drafts_most_of_its_answer() -> None:
    loaded = load(demo_model_path(), device="cpu", mtp=True)
    chat = Chat(loaded)
    params = [replace(GREEDY, max_tokens=40), SamplingParams(temperature=1.0, seed=4, max_tokens=40, logprobs=2)]
    requests = [chat.request([user(Image(picture(5)), "What do you see?")], params=each) for each in params]
    expected = serve(engine_of(loaded, "off"), *requests)
    answers = serve(engine_of(loaded, "mtp"), *requests)
    for found, wanted in zip(answers, expected, strict=True):
        assert_same(found, wanted)
        assert found.result.logprobs == wanted.result.logprobs
    assert sum(found.result.num_accepted_tokens for found in answers) > 5


def test_nothing_is_drafted_where_a_row_depends_on_its_company() -> None:
    card = torch.device("cuda")
    assert [num_drafts(each, card) for each in ("auto", "ngram", "off")] == [0, MAX_DRAFTS, 0]
    with pytest.raises(ConfigError, match="speculate must be one of auto, off, mtp, ngram; got 'yes'"):
        EngineSettings(speculate="yes")


@pytest.mark.parametrize("seed", range(20))
def test_repeats_are_those_of_a_search_through_the_text(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 3, 80).tolist()
    repeats = Repeats(np.array(text[:seed], dtype=np.int64))
    for end in range(seed, len(text)):
        repeats.extend(text[end - 1 : end] if end > seed else [])
        assert repeats.following(4) == _searched(text[:end], 4)


def _searched(text: list[int], most: int) -> tuple[list[int], Origin] | None:
    for length, origin in ((6, Origin.LONG_MATCH), (3, Origin.SHORT_MATCH)):
        for place in range(len(text) - 1, length - 1, -1):
            if len(text) >= length and text[place - length : place] == text[-length:]:
                found, period = text[place : place + most], len(text) - place
                while len(found) < most:
                    found.append(found[len(found) - period])
                return found, origin
    return None


def told(trust: Trust, num_right: int, count: int, *, length: int = 4, origin: Origin = Origin.MTP) -> None:
    """Compares drafts, the first `num_right` tokens of each right."""
    for _ in range(count):
        trust.remember(Draft((1,) * length, origin, 0))
        trust.compare([1] * num_right + [2])


def test_wrong_drafts_lose_trust_and_right_ones_gain_it_even_if_no_step_ran_them() -> None:
    trust = Trust(Experience())
    for num_right, is_trusted in ((2, True), (0, False)):
        told(trust, num_right, 60, length=2, origin=Origin.SHORT_MATCH)
        assert all((chance > 0.9) == is_trusted for chance in trust.chances(Origin.SHORT_MATCH)[: num_right or 1])


def test_each_token_of_a_draft_has_its_own_chance() -> None:
    trust = Trust(Experience())
    for _ in range(40):
        told(trust, 2, 1)
        told(trust, 1, 1)
    first, second, third, fourth = trust.chances(Origin.MTP)
    assert first > 0.9
    assert 0.4 < second < 0.6
    assert third < 0.1
    assert fourth == Origin.MTP.value, "no draft was right so far"
    times = StepTimes()
    for rows in range(1, 6):
        times.add(rows, 1 + 0.3 * (rows - 1))
    assert chosen_lengths([Offer(trust.chances(Origin.MTP))], times, 4) == [2]


def test_a_new_reply_starts_with_what_others_learned() -> None:
    experience = Experience()
    told(Trust(experience), 0, 100)
    later = Trust(experience)
    assert later.chances(Origin.MTP)[0] < 0.2
    assert later.chances(Origin.LONG_MATCH)[0] == Origin.LONG_MATCH.value
    told(later, 1, 4)
    assert later.chances(Origin.MTP)[0] > 0.5, "its own drafts soon count more"


def test_the_layer_is_tried_again_ever_more_rarely_while_it_fails() -> None:
    trust, tries = Trust(Experience()), []
    told(trust, 0, 60)
    for step in range(4000):
        length = int(trust.chances(Origin.MTP)[0] > 0.4)
        trust.rest(length, 4)
        if length:
            tries.append(step)
            told(trust, 0, 1, length=1)
    waits = [after - before for before, after in itertools.pairwise([0, *tries])]
    assert waits == sorted(waits)
    assert waits[0] < 100
    assert 1000 < waits[-1] < 1100
    told(trust, 1, 1, length=1)
    assert not trust.rest(1, 4)
    assert [trust.rest(0, 1) for _ in range(64)].index(True) == 63, "a right draft shortens the rests again"


def test_a_step_verifies_the_drafts_that_give_the_most_tokens_a_second() -> None:
    times = StepTimes()
    for rows, seconds in ((1, 1.0), (2, 1.2), (3, 1.4), (4, 1.6), (5, 1.8), (6, 2.0)):
        times.add(rows, seconds)
    assert chosen_lengths([Offer((0.95,) * 4)], times, 4) == [4]
    assert chosen_lengths([Offer((0.5,) * 4)], times, 4) == [1]
    assert chosen_lengths([Offer((0.1,) * 4)], times, 4) == [0]
    assert chosen_lengths([Offer((0.9, 0.2, 0.9))], times, 4) == [1]
    assert chosen_lengths([Offer((0.9, 0.9)), Offer((0.95,) * 4)], times, 4) == [1, 3]
    assert chosen_lengths([Offer(), Offer((0.1,) * 4)], times, 4) == [0, 0]
    # A gain of five percent is enough for one reply alone.
    assert chosen_lengths([Offer((0.26,))], times, 4) == [1]
    assert chosen_lengths([Offer((0.45,)), Offer()], times, 4) == [0, 0]
    # A row more that seems to take no time.
    assert Offer((0.9,)).worth(0.0) > Offer((0.95,), token_s=0.1).worth(0.0) > Offer().worth(0.0)
    dear = StepTimes()
    for rows in range(1, 7):
        dear.add(rows, float(rows))
    assert chosen_lengths([Offer((0.99,) * 4)], dear, 4) == [0]
