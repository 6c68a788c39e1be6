"""Replies that run beside others, make room for them, or begin again have the bits of a reply that runs alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from qwen35mm.contract import Image, Message, SamplingParams
from qwen35mm.engine import Engine, EngineSettings
from qwen35mm.engine.commits import Commits
from qwen35mm.engine.decoder import Decoder
from qwen35mm.model import LoadedModel
from tests.engine.exact import (
    MODELS,
    Chat,
    assert_same,
    cache_settings,
    chat_model,
    cold,
    commit,
    dialog,
    endless_replies,
    picture,
    serve,
    small_blocks,
    user,
    words,
)

BLOCK = 8
CONTEXT = 128
SETTINGS = EngineSettings(context_length=CONTEXT, chunk_tokens=16, slots=3, batch_invariant=True)


BOTH = pytest.mark.parametrize("loaded", MODELS, ids=[spec.name for spec, _ in MODELS], indirect=True)
# Of what the kind of model doesn't touch, one is asked.
MIXTURE = pytest.mark.parametrize("loaded", MODELS[1:], ids=[MODELS[1][0].name], indirect=True)


@pytest.fixture
def loaded(request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    loaded = chat_model(*getattr(request, "param", MODELS[0]))
    with small_blocks(BLOCK), endless_replies(loaded):
        yield loaded


@pytest.fixture
def chat(loaded: LoadedModel) -> Chat:
    return Chat(loaded, min_segment=16)


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often somebody had to make room."""
    happened: Counter[str] = Counter()

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(self: Any, *args: Any) -> Any:
            result = original(self, *args)
            happened[name] += result is not False
            return result

        monkeypatch.setattr(owner, name, watched)

    watch(Decoder, "_preempt")
    watch(Engine, "_give_way_to")
    watch(Engine, "_wait_for_room")
    watch(Commits, "give_way")
    return happened


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def ask(chat: Chat, *parts: Any, max_tokens: int = 20, **options: Any) -> Any:
    return chat.request([user(*parts)], params=greedy(max_tokens), **options)


def assert_all_cold(engine: Engine, chat: Chat, *requests: Any, settings: EngineSettings = SETTINGS) -> None:
    for request, answer in zip(requests, serve(engine, *requests), strict=True):
        assert_same(answer, cold(chat.loaded, request, settings, like=engine.runtime.cache_settings))


@BOTH
def test_replies_in_company_equal_replies_alone(loaded: LoadedModel, chat: Chat) -> None:
    """Of other lengths, with other pictures, and coming and going at different times."""
    engine = Engine(loaded, SETTINGS, cache_settings(loaded, num_tokens=8 * CONTEXT))
    for _ in range(2):
        assert_all_cold(
            engine,
            chat,
            ask(chat, words("one", count=3), max_tokens=30),
            ask(chat, Image(picture(1)), words("two", count=20), max_tokens=5),
            ask(chat, words("three", count=40), max_tokens=12),
            ask(chat, words("four"), max_tokens=1),
            ask(chat, Image(picture(2)), words("five"), max_tokens=25),
        )


@MIXTURE
@pytest.mark.parametrize("kv_keep", ["1", "0.5"])
def test_replies_that_made_room_for_others_equal_cold(
    loaded: LoadedModel, chat: Chat, happened: Counter[str], kv_keep: str
) -> None:
    """The pool holds one full context; three replies grow to more than half of it each."""
    engine = Engine(loaded, SETTINGS, cache_settings(loaded, num_tokens=CONTEXT, kv_keep=kv_keep))
    requests = [ask(chat, words(name, count=8), Image(picture(seed)), max_tokens=50) for seed, name in enumerate("abc")]
    assert_all_cold(engine, chat, *requests)
    assert happened["_preempt"] >= 2


def test_a_prompt_that_has_to_begin_again_equals_cold(loaded: LoadedModel, chat: Chat, happened: Counter[str]) -> None:
    """It gives its blocks to the only reply that runs, once that has none left to grow into."""
    settings = replace(SETTINGS, chunk_tokens=1)
    engine = Engine(loaded, settings, cache_settings(loaded, num_tokens=CONTEXT))
    running = ask(chat, words("long answer", count=8), max_tokens=90)
    second = ask(chat, words("a long question", count=26), max_tokens=4)
    assert len(running.prompt.token_ids) + len(second.prompt.token_ids) < CONTEXT - 3 * BLOCK
    assert_all_cold(engine, chat, running, second, settings=settings)
    assert happened["_give_way_to"] >= 1


def half_a_commit(engine: Engine, chat: Chat, num_chunks: int) -> None:
    messages: list[Message] = dialog([user(words("turn", number, count=6)) for number in range(4)])
    history = chat.history(messages[:-1])
    assert CONTEXT // 2 < len(history.prompt.token_ids) <= CONTEXT
    engine.commit(history)
    for _ in range(num_chunks * len(engine.loaded.model.layers)):
        engine.step()
    assert engine._commits.begun


def test_a_commit_gives_its_blocks_to_a_question(loaded: LoadedModel, chat: Chat, happened: Counter[str]) -> None:
    engine = Engine(loaded, SETTINGS, cache_settings(loaded, num_tokens=CONTEXT))
    half_a_commit(engine, chat, 8)
    request = ask(chat, words("a long question", count=55), max_tokens=10)
    assert_all_cold(engine, chat, request)
    assert happened["give_way"] == 1


@MIXTURE
def test_a_commit_gives_its_blocks_to_a_reply(loaded: LoadedModel, chat: Chat, happened: Counter[str]) -> None:
    """No reply that runs is taken off the device for a commit's sake."""
    engine = Engine(loaded, SETTINGS, cache_settings(loaded, num_tokens=CONTEXT))
    half_a_commit(engine, chat, 8)
    requests = [ask(chat, words(name, count=2), max_tokens=30) for name in "ab"]
    assert_all_cold(engine, chat, *requests)
    assert happened["give_way"] == 1
    assert happened["_preempt"] == 0


def test_a_full_pool_of_cached_segments_is_no_obstacle(loaded: LoadedModel, chat: Chat, happened: Counter[str]) -> None:
    engine = Engine(loaded, SETTINGS, cache_settings(loaded, num_tokens=CONTEXT))
    for number in range(6):
        messages = [user(words("chat", number, count=20))]
        assert_all_cold(engine, chat, ask(chat, words("chat", number, count=20), max_tokens=3))
        commit(engine, chat.history([*messages, *dialog([user("x"), user("y")])[1:2]]))
    allocator = engine.runtime.pools.kv.allocator
    assert allocator.num_free < allocator.num_blocks // 2
    assert_all_cold(engine, chat, ask(chat, words("the largest", count=60), max_tokens=10))
    assert not happened
