"""Answers while they come: the text of one, and the results of many prompts in their order."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from qwen35mm.backends.scripting import loop
from qwen35mm.contract import Event, Finished, MediaPlanned, Result, TextDelta
from qwen35mm.errors import RequestError
from qwen35mm.prompt.calls import CallParser
from qwen35mm_preprocess import MediaPlan

In = TypeVar("In")
Out = TypeVar("Out")

_END: Any = object()


class ReplyStream:
    """An answer's text while it is written, for `for` and for `async for`; thinking and calls are in `result`.

    Whoever leaves it before its end, by `break`, Ctrl-C or `close`, ends the answer. It is read by one reader.

    Args:
        events: of the answer; they are taken on the loop of scripts.
        tools: whose calls are no text.
        schema: what the result's `parsed` is read with.
        on_end: called once, with what was read of the text, with how the media were read (None where that isn't
            known), and with the result, which is None for an answer that was left.
    """

    def __init__(
        self,
        events: AsyncGenerator[Event, None],
        tools: Sequence[Mapping[str, Any]],
        on_end: Callable[[str, tuple[MediaPlan, ...] | None, Result | None], None],
        schema: Any = None,
    ) -> None:
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue()
        # It must not hold this object, whose last reference ends it.
        self._job = loop.Job(_pump(events, self._queue))
        self._parser = CallParser(tools) if tools else None
        self._on_end = on_end
        self._schema = schema
        self._plans: tuple[MediaPlan, ...] | None = None
        self._pending: deque[str] = deque()
        self._read: list[str] = []
        self._result: Result | None = None
        self._error: RequestError | None = None
        self._has_failed = False
        self._is_open = True
        self._job.begin()

    @property
    def result(self) -> Result:
        """The whole answer. Raises RequestError before the stream was read to its end."""
        if self._result is None or self._is_open:
            raise RequestError("This answer isn't complete: read its stream to the end first.")
        return self._result

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while self._wants_more():
            with self._left_by_errors():
                self._take(loop.run(_received(self._queue)))
        text = self._next()
        if text is None:
            raise StopIteration
        return text

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        while self._wants_more():
            with self._left_by_errors():
                self._take(await loop.arun(_received(self._queue)))
        text = self._next()
        if text is None:
            raise StopAsyncIteration
        return text

    def close(self, why: RequestError | None = None) -> None:
        """Ends the answer with what was read of it; a second call does nothing.

        Args:
            why: told to whoever reads on; None ends the reading as the end of the answer does.
        """
        self._end(None)
        self._error = self._error or why

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _take(self, events: list[Event | None]) -> None:
        for event in events:
            if isinstance(event, MediaPlanned):
                self._plans = event.plans
            elif isinstance(event, TextDelta) and event.channel == "answer":
                self._add(self._parser.push(event.text) if self._parser else [event.text])
            elif isinstance(event, Finished):
                self._add(self._parser.flush() if self._parser else [])
                self._result = replace(event.result, schema=self._schema)
            elif event is None:
                self._has_failed = self._result is None

    def _wants_more(self) -> bool:
        """Whether something is still to come before the next text; raises what ended it, behind the last text."""
        if not self._is_open or self._pending or self._result is not None:
            return False
        if self._has_failed:
            with self._left_by_errors():
                self._job.wait()
        return True

    def _add(self, found: Iterable[object]) -> None:
        self._pending.extend(each for each in found if isinstance(each, str) and each)

    def _next(self) -> str | None:
        if self._is_open and self._pending:
            self._read.append(self._pending.popleft())
            return self._read[-1]
        if self._result is not None:
            self._end(self._result)
        if self._error is not None:
            raise self._error
        return None

    @contextlib.contextmanager
    def _left_by_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._forget()
            raise
        except BaseException:
            self.close()
            raise

    def _forget(self) -> None:
        """Ends it as if it had never been asked for."""
        self._read.clear()
        self._end(None)

    def _end(self, result: Result | None) -> None:
        if self._is_open:
            self._is_open, self._result = False, result
            self._job.cancel()
            self._on_end("".join(self._read), self._plans, result)


async def _pump(events: AsyncGenerator[Event, None], queue: asyncio.Queue[Event | None]) -> None:
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                queue.put_nowait(event)
    finally:
        queue.put_nowait(None)


async def _received(queue: asyncio.Queue[Event | None]) -> list[Event | None]:
    """What has come, and at least one."""
    found = [await queue.get()]
    while not queue.empty():
        found.append(queue.get_nowait())
    return found


class InOrder(Generic[In, Out]):
    """What becomes of many things, in their order, for `for` and for `async for`.

    Args:
        things: taken one by one, no more of them ahead than are under way.
        work: what is done with each, on the loop of scripts.
        most: how many are under way at one time, or done and not yet read.
    """

    def __init__(self, things: Iterable[In], work: Callable[[In], Coroutine[Any, Any, Out]], most: int) -> None:
        self._things = things
        self._work = work
        self._most = most

    def __iter__(self) -> Iterator[Out]:
        things, jobs = iter(self._things), deque[loop.Job[Out]]()
        try:
            while self._fill(jobs, things):
                found = jobs[0].result()
                jobs.popleft()
                yield found
        finally:
            loop.cancel(list(jobs))

    async def __aiter__(self) -> AsyncGenerator[Out, None]:
        things, jobs = iter(self._things), deque[loop.Job[Out]]()
        try:
            while self._fill(jobs, things):
                found = await jobs[0].awaited()
                jobs.popleft()
                yield found
        finally:
            loop.begin_to_cancel(list(jobs))
            ends = [asyncio.wrap_future(job.ended) for job in jobs]
            await asyncio.gather(*ends, return_exceptions=True)

    def _fill(self, jobs: deque[loop.Job[Out]], things: Iterator[In]) -> bool:
        while len(jobs) < self._most and (thing := next(things, _END)) is not _END:
            jobs.append(loop.Job(self._work(thing)))
            jobs[-1].begin()
        return bool(jobs)
