"""Answers as they arrive: the text of one, and the results of many prompts in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from qwen35mm.backends.scripting import loop
from qwen35mm.contract import Event, Finished, MediaPlanned, Result, TextDelta, ToolCall
from qwen35mm.errors import RequestError
from qwen35mm.prompt.calls import CallLost, CallParser
from qwen35mm.prompt.replies import is_cut
from qwen35mm_preprocess import MediaPlan

In = TypeVar("In")
Out = TypeVar("Out")

_END: Any = object()


class ReplyStream:
    """An answer's text as it is written, for `for` and `async for`; thinking and calls are in `result`.

    Leaving it early, by `break`, Ctrl-C or `close`, ends the answer. Only one reader may use it.

    Args:
        events: the answer's; consumed on the loop of scripts.
        tools: the request's, whose calls aren't text.
        schema: for the result's `parsed`.
        on_end: called once with the text that was read, the media's plans (None if unknown), and the result (None if
            the stream was left).
    """

    def __init__(
        self,
        events: AsyncGenerator[Event, None],
        tools: Sequence[Mapping[str, Any]],
        on_end: Callable[[str, tuple[MediaPlan | None, ...] | None, Result | None], None],
        schema: Any = None,
    ) -> None:
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue()
        # The job must not hold this object, since dropping its last reference ends the job.
        self._job = loop.Job(_pump(events, self._queue))
        self._parser = CallParser(tools) if tools else None
        self._on_end = on_end
        self._schema = schema
        self._plans: tuple[MediaPlan | None, ...] | None = None
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

    def events(self) -> Iterator[str | ToolCall]:
        """Its texts, then its calls of tools."""
        yield from self
        yield from self.result.tool_calls

    async def aevents(self) -> AsyncGenerator[str | ToolCall, None]:
        """`events` for programs with an event loop."""
        async for text in self:
            yield text
        for call in self.result.tool_calls:
            yield call

    def close(self, why: RequestError | None = None) -> None:
        """Ends the answer with the text read so far; a second call does nothing.

        Args:
            why: raised for later readers; None stops them as at the answer's end.
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
                self._add(self._parser.flush(is_cut=is_cut(event.result)) if self._parser else [])
                self._result = replace(event.result, schema=self._schema)
            elif event is None:
                self._has_failed = self._result is None

    def _wants_more(self) -> bool:
        """Whether to wait before the next text. Raises the stream's error after its last text."""
        if not self._is_open or self._pending or self._result is not None:
            return False
        if self._has_failed:
            with self._left_by_errors():
                self._job.wait()
        return True

    def _add(self, found: Iterable[object]) -> None:
        texts = (each.text if isinstance(each, CallLost) else each for each in found)
        self._pending.extend(each for each in texts if isinstance(each, str) and each)

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
        """Ends it as if it had never been requested."""
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
    """All waiting events, at least one."""
    found = [await queue.get()]
    while not queue.empty():
        found.append(queue.get_nowait())
    return found


class InOrder(Generic[In, Out]):
    """The results for many things, in order, for `for` and `async for`.

    Args:
        things: taken one by one, at most `most` ahead.
        work: the work for each, on the loop of scripts.
        most: how many are in progress at a time, or done and not yet read.
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
