"""The asynchronous shell: many tasks, one engine thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from qwen35mm.engine import AsyncEngine, Engine, EngineSettings, Finished, Request, Result, TextDelta
from qwen35mm.errors import ContextTooLongError, EngineError
from qwen35mm.model import LoadedModel
from qwen35mm.prompt import Image, Text
from qwen35mm.sampling import SamplingParams
from tests.engine.conftest import MakeRequest, noise

LONG = SamplingParams(temperature=1.5, seed=0, max_tokens=2000)


@pytest.fixture
def shell(demo: LoadedModel) -> Iterator[AsyncEngine]:
    shell = AsyncEngine(Engine(demo))
    yield shell
    shell.close()


async def collect(shell: AsyncEngine, request: Request) -> Result:
    text = ""
    async for event in shell.stream(request):
        if isinstance(event, TextDelta):
            text += event.text
        if isinstance(event, Finished):
            assert event.result.text == text
            return event.result
    raise AssertionError("no Finished")


async def test_many_tasks_get_their_own_answers(shell: AsyncEngine, make_request: MakeRequest) -> None:
    questions = [(Image(noise(seed)), Text("What is this?")) for seed in range(4)]
    alone = [await collect(shell, make_request(*parts)) for parts in questions]
    together = await asyncio.gather(*(collect(shell, make_request(*parts)) for parts in questions))
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]


async def test_leaving_the_iterator_cancels_the_request(shell: AsyncEngine, make_request: MakeRequest) -> None:
    events = shell.stream(make_request(Text("hello"), params=LONG))
    await anext(events)
    assert not shell.idle
    await events.aclose()  # pyright: ignore[reportAttributeAccessIssue]
    assert await asyncio.to_thread(shell.wait_idle, 30)
    shell._engine.check_integrity()
    assert not shell._engine.has_work


async def test_cancelling_the_task_cancels_the_request(shell: AsyncEngine, make_request: MakeRequest) -> None:
    started = asyncio.Event()

    async def read() -> None:
        async for _ in shell.stream(make_request(Text("hello"), params=LONG)):
            started.set()

    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(shell.wait_idle, 30)
    assert not shell._engine.has_work


async def test_a_refused_request_raises_and_others_go_on(demo: LoadedModel, make_request: MakeRequest) -> None:
    shell = AsyncEngine(Engine(demo, EngineSettings(context_length=64)))
    try:
        with pytest.raises(ContextTooLongError):
            await collect(shell, make_request(Text("word " * 100)))
        assert (await collect(shell, make_request(Text("hello")))).num_generated_tokens > 0
    finally:
        shell.close()


async def test_closing_ends_running_streams_with_an_error(demo: LoadedModel, make_request: MakeRequest) -> None:
    shell = AsyncEngine(Engine(demo))
    events = shell.stream(make_request(Text("hello"), params=LONG))
    await anext(events)
    await asyncio.to_thread(shell.close)
    with pytest.raises(EngineError, match="shut down"):
        async for _ in events:
            pass
    with pytest.raises(EngineError, match="shut down"):
        await collect(shell, make_request(Text("hello")))


async def test_a_bug_in_the_engine_reaches_the_callers(
    shell: AsyncEngine, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise KeyError("bug")

    monkeypatch.setattr(shell._engine, "step", broken)
    with pytest.raises(EngineError, match="has stopped"):
        await collect(shell, make_request(Text("hello")))
