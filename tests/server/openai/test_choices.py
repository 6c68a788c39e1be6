"""Several replies to one request, asked for by OpenAI's own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import openai
import pytest

from qwen35mm.backends.local import LocalBackend
from qwen35mm.contract import (
    CacheReport,
    Event,
    Finished,
    GenerationRequest,
    Message,
    Prefilled,
    Result,
    SamplingParams,
    TextDelta,
)
from qwen35mm.server.app import create_app
from qwen35mm.server.openai.choices import OfChoice, events_of_choices
from qwen35mm.server.queue import FairQueue
from tests.server.conftest import PATIENCE_S, sample, serving

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
DRAWN: dict[str, Any] = {"temperature": 6, "top_p": 1, "max_tokens": 12}


def ask(client: openai.OpenAI, messages: list[Any] = HELLO, **options: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=messages, **{**DRAWN, **options})


def test_each_choice_is_a_reply_of_its_own(client: openai.OpenAI) -> None:
    """More than there are places, with the seeds behind the first."""
    alone = [ask(client, seed=seed) for seed in (5, 6, 7)]
    texts = [each.choices[0].message.content for each in alone]
    together = ask(client, seed=5, n=3, logprobs=True)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.message.content for choice in together.choices] == texts
    assert len(set(texts)) > 1
    usage = together.usage
    # All but what ended them.
    told = [len(choice.logprobs.content) for choice in together.choices]
    assert [each.usage.completion_tokens - (each.choices[0].finish_reason == "stop") for each in alone] == told
    assert usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert usage.completion_tokens == sum(each.usage.completion_tokens for each in alone)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert together.timings["predicted_n"] == usage.completion_tokens
    assert together.timings["predicted_ms"] > 0
    *chunks, last = ask(client, seed=5, n=3, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens == usage.completion_tokens
    parts = [choice for chunk in chunks for choice in chunk.choices]
    for index, text in enumerate(texts):
        own = [part for part in parts if part.index == index]
        assert "".join(part.delta.content or "" for part in own) == text
        assert [part.delta.role for part in own[:2]] == ["assistant", None]
        assert [part.finish_reason is not None for part in own] == [False] * (len(own) - 1) + [True]
        told_timings = [
            chunk.timings for chunk in chunks if hasattr(chunk, "timings") and chunk.choices[0].index == index
        ]
        assert [each["predicted_n"] for each in told_timings] == [alone[index].usage.completion_tokens]


def test_a_picture_is_read_once(client: openai.OpenAI, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    media_of = LocalBackend.media_of

    def reading(self: LocalBackend, part: Any, *more: Any) -> Any:
        read.append(part)
        return media_of(self, part, *more)

    monkeypatch.setattr(LocalBackend, "media_of", reading)
    parts = [
        {"type": "image_url", "image_url": {"url": sample("two-shapes.jpg"), "detail": "low"}},
        {"type": "text", "text": "How many shapes are there in all of this?"},
    ]
    answer = ask(client, [{"role": "user", "content": parts}], n=2, temperature=0)
    assert len({choice.message.content for choice in answer.choices}) == 1
    assert len(read) == 1


def test_what_cannot_be_used_is_named(client: openai.OpenAI, refused: Callable[..., Any]) -> None:
    for n in (0, 9):
        error = refused(ask, client=client, n=n)
        assert (error.status_code, error.body["param"]) == (400, "n")
    long = [{"role": "user", "content": "word " * 30_000}]
    for stream in (False, True):
        assert refused(ask, client=client, messages=long, n=3, stream=stream).status_code == 400


def asked(seed: int | None = None) -> GenerationRequest:
    return GenerationRequest([Message("user", "hi")], SamplingParams(seed=seed))


def seed_of(request: GenerationRequest) -> int | None:
    assert request.params is not None
    return request.params.seed


RESULT = Result("x", None, "stop", (), (), 1, 1, None, None)


async def test_whoever_leaves_ends_all_replies() -> None:
    ended: list[int | None] = []

    async def endless(one: GenerationRequest, is_more: bool) -> AsyncGenerator[Event, None]:
        try:
            yield Prefilled(1, 0.0, None, CacheReport())
            while True:
                yield TextDelta("x")
                await asyncio.sleep(0)
        finally:
            ended.append(seed_of(one))

    events = events_of_choices(asked(7), 4, endless)
    seen: set[int] = set()
    async for told in events:
        seen.add(told.index)
        if len(seen) == 4:
            break
    await events.aclose()
    assert sorted(each for each in ended if each is not None) == [7, 8, 9, 10]


async def test_one_that_fails_ends_the_others() -> None:
    open_ = 0

    async def failing(one: GenerationRequest, is_more: bool) -> AsyncGenerator[Event, None]:
        nonlocal open_
        open_ += 1
        try:
            yield Prefilled(1, 0.0, None, CacheReport())
            if seed_of(one) == 2:
                raise KeyError("two")
            await asyncio.sleep(PATIENCE_S)
        finally:
            open_ -= 1

    with pytest.raises(KeyError, match="two"):
        async for _ in events_of_choices(asked(0), 3, failing):
            pass
    assert open_ == 0


async def test_choices_take_turns_with_others_and_are_let_in_together() -> None:
    """One place: another caller's request comes between two choices, and a full line refuses none of them."""
    line, order = FairQueue(1, max_waiting=1), []

    async def answer(one: GenerationRequest, is_more: bool) -> AsyncGenerator[Event, None]:
        async with line.place("", may_be_refused=not is_more):
            order.append(seed_of(one))
            yield Prefilled(1, 0.0, None, CacheReport())
            for _ in range(5):
                await asyncio.sleep(0)
            yield Finished(RESULT)

    async def another() -> None:
        async with line.place("other"):
            order.append(None)

    told: list[OfChoice] = []
    waiting: asyncio.Task[None] | None = None
    async for each in events_of_choices(asked(0), 4, answer):
        told.append(each)
        waiting = waiting or asyncio.create_task(another())
    assert waiting is not None
    await waiting
    assert sorted(each.index for each in told if isinstance(each.event, Finished)) == [0, 1, 2, 3]
    assert sorted(each for each in order if each is not None) == [0, 1, 2, 3]
    assert order.index(None) < 4
    assert line.num_waiting == 0


def test_no_place_is_lost(backend: LocalBackend) -> None:
    with serving(create_app(backend, num_places=2, max_waiting=1)) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        for _ in range(3):
            stream = ask(client, n=6, stream=True, max_tokens=400, extra_body={"ignore_eos": True})
            for chunk in stream:
                if chunk.choices and chunk.choices[0].index == 1:
                    break
            stream.close()
        assert len(ask(client, n=6, max_tokens=3).choices) == 6
