"""Many tasks, one engine thread."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen35mm.contract import Finished, Image, Result, SamplingParams, Text, TextDelta
from qwen35mm.engine import AsyncEngine, DeferredMedia, Engine, EngineSettings, Request, StepOutput
from qwen35mm.engine.grammar import Grammars
from qwen35mm.errors import ContextTooLongError, EngineError, RequestTimeoutError
from qwen35mm.model import LoadedModel
from qwen35mm_preprocess import MediaError, PreparedMedia
from tests.engine.conftest import MakeRequest, noise

OPENMP = Path(torch.__file__).parent / "lib/libgomp.so.1"
# Only reached where a test fails.
PATIENCE_S = 60
LONG = SamplingParams(temperature=1.5, seed=0, max_tokens=20_000, ignore_eos=True)


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(lambda reader, writer: Engine(loaded, reader=reader, writer=writer))
    yield engine
    engine.close()


async def collect(engine: AsyncEngine, request: Request) -> Result:
    text = ""
    async for event in engine.stream(request):
        if isinstance(event, TextDelta):
            text += event.text
        if isinstance(event, Finished):
            assert event.result.text == text
            return event.result
    raise AssertionError("no Finished")


async def test_a_grammar_that_compiles_for_long_holds_up_nobody(
    engine: AsyncEngine, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    others_is_there = threading.Event()
    matcher = Grammars.matcher

    def slow(self: Grammars, *args: Any) -> Any:
        assert others_is_there.wait(PATIENCE_S), "the other's reply waits for this"
        return matcher(self, *args)

    monkeypatch.setattr(Grammars, "matcher", slow)
    held = SamplingParams(json_schema='{"enum": ["slow"]}')
    slow_one = asyncio.ensure_future(collect(engine, make_request(Text("hi"), params=held)))
    await asyncio.sleep(0)
    assert (await collect(engine, make_request(Text("ho")))).token_ids
    others_is_there.set()
    assert (await slow_one).text == '"slow"'


async def test_many_tasks_get_their_own_answers(engine: AsyncEngine, make_request: MakeRequest) -> None:
    questions = [(Image(noise(seed)), Text("What is this?")) for seed in range(4)]
    alone = [await collect(engine, make_request(*parts)) for parts in questions]
    together = await asyncio.gather(*(collect(engine, make_request(*parts)) for parts in questions))
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]


@pytest.mark.skipif(not OPENMP.is_file(), reason="torch brings no libgomp on this system")
def test_its_thread_computes_with_as_many_threads_as_its_maker(loaded: LoadedModel, make_request: MakeRequest) -> None:
    """Another number of threads gives other bits (seen with fp32 and MKL on Intel), and the cache's root names one."""
    openmp = ctypes.CDLL(str(OPENMP))
    seen: list[int] = []

    class Watched(Engine):
        def step(self) -> list[StepOutput]:
            seen.append(openmp.omp_get_max_threads())
            return super().step()

    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        engine = AsyncEngine(lambda reader, writer: Watched(loaded, reader=reader, writer=writer))
        asyncio.run(collect(engine, make_request(Text("hello"))))
        engine.close()
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {before + 1}


async def test_leaving_the_iterator_cancels_the_request(engine: AsyncEngine, make_request: MakeRequest) -> None:
    events = engine.stream(make_request(Text("hello"), params=LONG))
    await anext(events)
    assert not engine.idle
    await events.aclose()  # pyright: ignore[reportAttributeAccessIssue]
    assert await asyncio.to_thread(engine.wait_idle, 30)
    engine._engine.check_integrity()
    assert not engine._engine.has_work


async def test_cancelling_the_task_cancels_the_request(engine: AsyncEngine, make_request: MakeRequest) -> None:
    started = asyncio.Event()

    async def read() -> None:
        async for _ in engine.stream(make_request(Text("hello"), params=LONG)):
            started.set()

    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(engine.wait_idle, 30)
    assert not engine._engine.has_work


async def test_a_refused_request_raises_and_others_go_on(loaded: LoadedModel, make_request: MakeRequest) -> None:
    engine = AsyncEngine(
        lambda reader, writer: Engine(loaded, EngineSettings(context_length=64), reader=reader, writer=writer)
    )
    try:
        with pytest.raises(ContextTooLongError):
            await collect(engine, make_request(Text("word " * 100)))
        assert (await collect(engine, make_request(Text("hello")))).num_generated_tokens > 0
    finally:
        engine.close()


@pytest.mark.parametrize("words", [1, 100])
async def test_an_idle_engine_holds_no_request(loaded: LoadedModel, make_request: MakeRequest, words: int) -> None:
    engine = AsyncEngine(lambda *threads: Engine(loaded, EngineSettings(context_length=64)))
    gc.collect()
    gc.disable()
    try:
        request = make_request(Text("word " * words))
        alive = weakref.ref(request)
        with contextlib.suppress(ContextTooLongError):
            await collect(engine, request)
        del request
        # The loop closes the iterator that `collect` has left, some time after.
        for _ in range(6000):
            if alive() is None and engine.idle:
                break
            await asyncio.sleep(0.01)
        assert alive() is None
    finally:
        gc.enable()
        engine.close()


async def begin_to_close(engine: AsyncEngine) -> asyncio.Task[None]:
    """Ends when the engine is closed, and has begun to be."""
    closing = asyncio.create_task(asyncio.to_thread(engine.close))
    while not engine._closing:
        await asyncio.sleep(0.01)
    return closing


async def test_closing_ends_running_streams_with_an_error(loaded: LoadedModel, make_request: MakeRequest) -> None:
    told, closing = threading.Event(), threading.Event()

    class Held(Engine):
        """Doesn't come to the reply's end before it is being closed."""

        def step(self) -> list[StepOutput]:
            if told.is_set():
                closing.wait(60)
            return super().step()

    engine = AsyncEngine(lambda reader, writer: Held(loaded, reader=reader, writer=writer))
    events = engine.stream(make_request(Text("hello"), params=LONG))
    await anext(events)
    told.set()
    close = await begin_to_close(engine)
    closing.set()
    await close
    with pytest.raises(EngineError, match="shut down"):
        async for _ in events:
            pass
    with pytest.raises(EngineError, match="shut down"):
        await collect(engine, make_request(Text("hello")))


async def test_a_request_that_comes_while_the_engine_closes_is_told(
    engine: AsyncEngine, make_request: MakeRequest
) -> None:
    busy, released = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        released.wait(60)

    engine._submit(hold)
    busy.wait(60)
    answer = asyncio.create_task(collect(engine, make_request(Text("hello"))))
    while not engine._commands:
        await asyncio.sleep(0.01)
    close = await begin_to_close(engine)
    released.set()
    await close
    with pytest.raises(EngineError, match="shut down"):
        await asyncio.wait_for(answer, 60)


async def test_a_request_that_cannot_be_looked_at_fails_alone(
    engine: AsyncEngine, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(request: Request) -> None:
        raise IndexError("no such token")

    with monkeypatch.context() as patch:
        patch.setattr(engine._engine._factory, "prepared", broken)
        with pytest.raises(EngineError, match="failed on this request"):
            await collect(engine, make_request(Text("hello")))
    assert (await collect(engine, make_request(Text("hello")))).num_generated_tokens > 0


class Panic(BaseException):
    """As a Rust library's."""


@pytest.mark.parametrize("error", [KeyError("bug"), Panic()])
async def test_a_bug_in_the_engine_reaches_the_callers(
    error: BaseException, engine: AsyncEngine, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise error

    monkeypatch.setattr(engine._engine, "step", broken)
    with pytest.raises(EngineError, match="is stopped until"):
        await asyncio.wait_for(collect(engine, make_request(Text("hello"))), 60)
    assert engine.has_ended


async def test_a_deadline_ends_a_request_that_waits_for_a_file(
    engine: AsyncEngine, make_request: MakeRequest, loaded: LoadedModel
) -> None:
    request = make_request(Image(noise(0)), Text("What is this?"))
    (medium,) = request.media
    released = threading.Event()

    def load() -> PreparedMedia:
        released.wait(30)
        assert isinstance(medium, PreparedMedia)
        return medium

    late = replace(request, media=(DeferredMedia(medium.plan, load),), id="late", deadline_s=time.monotonic() + 0.2)
    try:
        with pytest.raises(RequestTimeoutError, match="time allowed"):
            await collect(engine, late)
    finally:
        released.set()
    assert (await collect(engine, make_request(Text("hello")))).num_generated_tokens > 0


async def test_a_medium_that_is_gone_ends_its_request_in_words(engine: AsyncEngine, make_request: MakeRequest) -> None:
    request = make_request(Image(noise(0)), Text("What is this?"))

    def load() -> PreparedMedia:
        raise MediaError("photo.jpg is gone.")

    gone = replace(request, media=(DeferredMedia(request.media[0].plan, load),), id="gone")
    with pytest.raises(MediaError, match=r"photo\.jpg is gone"):
        await collect(engine, gone)
    engine._engine.check_integrity()
    # What is kept of the very same picture needs no file.
    await collect(engine, request)
    assert (await collect(engine, replace(gone, id="again"))).cache.num_cached_units == 1


async def test_a_stream_holds_no_pixels_while_its_reply_is_written(
    loaded: LoadedModel, make_request: MakeRequest
) -> None:
    engine = AsyncEngine(lambda *threads: Engine(loaded, EngineSettings(context_length=1024)))
    gc.collect()
    gc.disable()
    try:
        params = SamplingParams(temperature=0.0, max_tokens=200)
        request = make_request(Image(noise(0)), Text("What is this?"), params=params)
        request = replace(request, media=tuple(map(copy.copy, request.media)))
        medium = weakref.ref(request.media[0])
        events = engine.stream(request)
        del request
        kinds = [type(event) async for event in events if isinstance(event, Finished) or medium() is None]
        assert kinds[0] is not Finished, "the reply has long been written"
    finally:
        gc.enable()
        engine.close()
