"""What one tenant wrote or showed is never found by another; what all of them begin with is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.backends.local import LocalBackend
from qwen35mm.contract import Event, Finished, GenerationRequest, Image, Message, Result, Text
from qwen35mm.engine import Engine, Request
from qwen35mm.model import LoadedModel
from tests.engine.exact import (
    GREEDY,
    MIN_SEGMENT,
    SETTINGS,
    Chat,
    assert_same,
    cache_settings,
    cold,
    commit,
    dialog,
    picture,
    serve,
    user,
    words,
)

SIZE = (160, 224)
LONG = Message("system", (Text(words("everybody's", count=60)),))
SHORT = Message("system", (Text("Be kind."),))
QUESTION = user(Image(picture(1, SIZE)), words("what is this", count=40))


@pytest.fixture(params=["memory", "disk"])
def engine_of(loaded: LoadedModel, tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """engine_of(): where a second tenant asks: the same engine, or another one on the same folder."""
    on_disk = request.param == "disk"
    made: list[Engine] = []

    def make() -> Engine:
        if made and not on_disk:
            return made[0]
        if made:
            made[-1].flush()
        made.append(Engine(loaded, SETTINGS, cache_settings(loaded, directory=tmp_path if on_disk else None)))
        return made[-1]

    return make


def ask(engine: Engine, chat: Chat, messages: list[Message], salt: bytes) -> tuple[Request, Result]:
    prompt = chat.request(messages).prompt
    request = chat.request(messages, salt=salt, salt_from=prompt.system_stop)
    (answer,) = serve(engine, request)
    assert_same(answer, cold(chat.loaded, request))
    return request, answer.result


def test_one_person_with_several_tenants_has_one_share(loaded: LoadedModel, chat: Chat) -> None:
    engine = Engine(loaded, SETTINGS, cache_settings(loaded))
    for salt in (b"ann\0one", b"ann\0two", b"bob\0one"):
        engine.add(chat.request([user("hello")], salt=salt))
        engine.step()
    assert [reply.tenant for reply in engine._running.values()] == [b"ann", b"ann", b"bob"]


@pytest.mark.parametrize(
    ("engine_of", "system"),
    [("disk", None), ("memory", SHORT), ("memory", LONG), ("disk", LONG)],
    ids=["no system", "short system", "long system", "long system on disk"],
    indirect=["engine_of"],
)
def test_the_same_words_and_pictures_of_another_tenant_are_a_miss(
    engine_of: Any, chat: Chat, system: Message | None
) -> None:
    messages = [QUESTION] if system is None else [system, QUESTION]
    for salt in (b"one", b"two", b""):
        request, result = ask(engine_of(), chat, messages, salt)
        shared = request.prompt.system_stop if system is LONG and salt != b"one" else 0
        assert result.cache.num_cached_tokens == shared
        assert (result.cache.num_encoded_units, result.cache.num_cached_units) == (1, 0)
        assert result.cache.miss == "new content", "the reason tells nothing of what others have sent"
    for salt in (b"one", b"two", b""):
        request, result = ask(engine_of(), chat, messages, salt)
        assert result.cache.num_cached_tokens == request.prompt.tail_start, "everybody's own is there"


def test_a_shared_system_prompt_is_a_hit_and_what_follows_is_not(engine_of: Any, chat: Chat) -> None:
    first = dialog([QUESTION, user(words("more", count=30)), user("last")])
    ask(engine_of(), chat, [LONG, *first[:1]], b"one")
    engine = engine_of()
    prompt = chat.request([LONG, *first[:1]]).prompt
    commit(engine, chat.history([LONG, *first[:-1]], salt=b"one", salt_from=prompt.system_stop))
    request, result = ask(engine, chat, [LONG, *first], b"two")
    assert result.cache.num_cached_tokens == request.prompt.system_stop >= MIN_SEGMENT
    request, result = ask(engine, chat, [LONG, *first], b"one")
    assert result.cache.num_cached_tokens >= chat.history([LONG, *first[:-1]]).prompt.tail_start


def test_embeddings_are_kept_apart(engine_of: Any, chat: Chat) -> None:
    """An edit before the picture, so that only its embeddings could help: they help their owner."""
    ask(engine_of(), chat, [user("one", *QUESTION.content)], b"one")
    for salt, is_owner in ((b"two", False), (b"one", True)):
        _, result = ask(engine_of(), chat, [user("another", *QUESTION.content)], salt)
        assert (result.cache.num_encoded_units, result.cache.num_cached_units) == (not is_owner, is_owner)


def test_a_salt_is_no_ones_prefix(engine_of: Any, chat: Chat) -> None:
    """The salts a | bc and ab | c don't meet, nor does a salt that spells out another's first words."""
    for salt in (b"a", b"ab", b"abc", b"\x00", b"\x00\x00"):
        _, result = ask(engine_of(), chat, [QUESTION], salt)
        assert result.cache.num_cached_tokens == 0
        assert result.cache.num_cached_units == 0


async def last(events: AsyncIterator[Event]) -> Result:
    (result,) = [event.result async for event in events if isinstance(event, Finished)]
    return result


@pytest.fixture
def backend(loaded: LoadedModel) -> Iterator[LocalBackend]:
    backend = LocalBackend(loaded, settings=SETTINGS, cache=cache_settings(loaded), min_segment=MIN_SEGMENT)
    yield backend
    backend.close()


async def test_tenants_of_a_backend_are_kept_apart(backend: LocalBackend, chat: Chat) -> None:
    """With the histories that it commits by itself."""
    system_stop = chat.request([LONG, QUESTION]).prompt.system_stop
    replies: list[str] = []
    for tenant in ("one", "two", None):
        result = await last(backend.stream(GenerationRequest([LONG, QUESTION], GREEDY, tenant=tenant)))
        assert backend.wait_idle(60)
        replies.append(result.text)
        assert result.cache.num_cached_tokens == (0 if tenant == "one" else system_stop)
        assert result.cache.num_cached_units == 0
        assert result.cache.miss == "new content"
    assert len(set(replies)) == 1
    following = [LONG, QUESTION, Message("assistant", (Text(replies[0]),)), user(words("go on"))]
    history = chat.history(following[:-1]).prompt
    for tenant, cached in (("three", system_stop), ("one", history.tail_start), ("two", history.tail_start)):
        result = await last(backend.stream(GenerationRequest(following, GREEDY, tenant=tenant)))
        assert backend.wait_idle(60)
        assert result.cache.num_cached_tokens == cached
