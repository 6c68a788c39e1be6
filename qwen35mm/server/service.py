"""What the routes of one backend share: keys, the queue, metrics, streams and hang-ups."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from prometheus_client import generate_latest
from starlette.requests import Request
from starlette.responses import Response

from qwen35mm.contract import Event, GenerationRequest
from qwen35mm.http.streams import KEEP_ALIVE_S, event_stream, streaming, while_connected
from qwen35mm.server.errors import ApiError, api_error
from qwen35mm.server.generation import ServedBackend
from qwen35mm.server.keys import Caller, Keys
from qwen35mm.server.metrics import Metrics
from qwen35mm.server.notes import notes_of
from qwen35mm.server.openai.choices import OfChoice
from qwen35mm.server.parts import Sources
from qwen35mm.server.queue import FairQueue
from qwen35mm.server.streams import first_of, later, note_stand_ins, read_ahead

# Among the model's names: it answers to every name.
ANY_NAME = "*"
MAX_NAME = 200  # characters
# For one request that asks for several replies; other requests wait in the queue, too.
_STREAMS_AT_ONCE = 4
# An event of one reply, or of one of several replies.
E = TypeVar("E", Event, OfChoice)
E_contra = TypeVar("E_contra", contravariant=True)


def no_such_model(name: str, here: Iterable[str]) -> ApiError:
    """The error for a name that no model has. `here`: the names that there are."""
    names = list(here)
    told = f"{', '.join(map(repr, names))} {'is' if len(names) == 1 else 'are'}"
    return ApiError(404, f"There is no model {name[:MAX_NAME]!r} here; {told}.", "model", "model_not_found")


class Reader(Protocol[E_contra]):
    """Reads the events of a reply."""

    def take(self, event: E_contra, /) -> Iterable[object]: ...


class Service:
    """Answers the requests of those who may ask, each in its turn."""

    def __init__(
        self, backend: ServedBackend, keys: Keys, sources: Sources, queue: FairQueue, names: Sequence[str] = ()
    ) -> None:
        self._backend = backend
        self._keys = keys
        self._sources = sources
        self._queue = queue
        self._names = names
        self._metrics = Metrics(backend, queue)
        self._created = int(time.time())

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self._queue.num_waiting

    def counted(self) -> bytes:
        """Counters and gauges as Prometheus reads them."""
        return generate_latest(self._metrics.registry)

    def caller(self, request: Request) -> Caller:
        return self._keys.caller_of(request)

    def check_model(self, name: str | None) -> str:
        """The name that the answer carries: the model's own, or any name if the model answers to all.

        Raises:
            ApiError: 404, `name` isn't a name of this model.
        """
        own = self._backend.loaded.name
        if name in (None, "", "default", own):
            return own
        if self.adapter_of(name) is not None:
            return name
        if ANY_NAME in self._names and len(name) <= MAX_NAME:
            return name
        if name not in self._names:
            raise no_such_model(name, (own, *self._backend.loaded.named_adapters))
        return own

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter of this name; the model's own names come first."""
        loaded = self._backend.loaded
        return name if name in loaded.named_adapters and name not in (loaded.name, "default", *self._names) else None

    async def finish(self, request: Request, caller: Caller, asked: GenerationRequest, reader: Reader[Event]) -> None:
        """Reads a reply to its end.

        Raises:
            ClientDisconnect: the client hung up.
        """

        await self.read(request, [(self.answer(caller, asked), reader)])

    async def read(self, request: Request, streams: Sequence[tuple[AsyncGenerator[E, None], Reader[E]]]) -> None:
        """Reads streams to their end, a few at a time.

        Raises:
            ClientDisconnect: the client hung up.
        """
        turns, notes = asyncio.Semaphore(_STREAMS_AT_ONCE), notes_of(request)

        async def read_one(stream: AsyncGenerator[E, None], reader: Reader[E]) -> None:
            async with turns, contextlib.aclosing(stream) as events:
                async for event in events:
                    note_stand_ins(event, notes)
                    for _ in reader.take(event):
                        pass

        async def read_all() -> None:
            tasks = [asyncio.ensure_future(read_one(*each)) for each in streams]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        await while_connected(request, read_all())

    async def stream(
        self,
        request: Request,
        caller: Caller,
        asked: GenerationRequest,
        frames: Callable[[AsyncGenerator[Event, None]], AsyncIterator[bytes]],
        failed: Callable[[ApiError], bytes],
    ) -> Response:
        """Streams a reply as frames. Raises what refuses the request before the first frame, if that comes soon: else
        the stream begins with comments, since proxies and clients close silent connections, and ends with the refusal.

        Raises:
            ClientDisconnect: the client hung up before its turn.
        """
        return await self.stream_events(request, self.answer(caller, asked), frames, failed)

    async def stream_events(
        self,
        request: Request,
        events: AsyncGenerator[E, None],
        frames: Callable[[AsyncGenerator[E, None]], AsyncIterator[bytes]],
        failed: Callable[[ApiError], bytes],
    ) -> Response:
        """Like `stream`, for events that exist already."""
        events = read_ahead(events)
        beginning = asyncio.ensure_future(first_of(events, notes_of(request)))
        try:
            await while_connected(request, asyncio.wait({beginning}, timeout=KEEP_ALIVE_S))
            begun = beginning.result() if beginning.done() else later(beginning)
        except BaseException:
            await _cancelled(beginning)
            await events.aclose()
            raise
        return streaming(self._sent(request, events, beginning, frames(begun), failed))

    async def _sent(
        self,
        request: Request,
        events: AsyncGenerator[E, None],
        beginning: asyncio.Future[AsyncGenerator[E, None]],
        frames: AsyncIterator[bytes],
        failed: Callable[[ApiError], bytes],
    ) -> AsyncGenerator[bytes, None]:
        """The frames of a stream. Closes `events` however the stream ends."""
        async with contextlib.aclosing(events):
            stream = event_stream(request.scope, frames, lambda error: failed(api_error(error)))
            try:
                async with contextlib.aclosing(stream):
                    async for data in stream:
                        yield data
            finally:
                await _cancelled(beginning)

    async def answer(
        self, caller: Caller, asked: GenerationRequest, is_more: bool = False
    ) -> AsyncGenerator[Event, None]:
        """The events of a reply, once it is the caller's turn. `is_more`: not the first reply of its request."""
        answering = self.in_turn(caller, lambda: self._backend.stream(asked), is_more=is_more)
        async with contextlib.aclosing(answering) as events:
            async for event in events:
                yield event

    async def in_turn(
        self, caller: Caller, begin: Callable[[], AsyncGenerator[Event, None]], *, is_more: bool = False
    ) -> AsyncGenerator[Event, None]:
        """Calls `begin` when it is the caller's turn and yields its events."""
        async with self._queue.place(caller.name, may_be_refused=not is_more):
            with self._metrics.request() as counted:
                async with contextlib.aclosing(begin()) as events:
                    async for event in events:
                        counted.take(event)
                        yield event


async def _cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
