"""Sends a request from the front to an engine's application in another process, and the answer back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

AsgiMessage = MutableMapping[str, Any]
App = Callable[[Any, Callable[[], Awaitable[AsgiMessage]], Callable[[AsgiMessage], Awaitable[None]]], Awaitable[None]]

_SCOPE = ("type", "http_version", "scheme", "method", "path", "raw_path", "query_string", "headers", "server", "client")


@dataclass(frozen=True)
class Call:
    """A request on its way to an engine.

    Attributes:
        scope: the parts of the ASGI scope that can be sent.
        addresses: see `addresses_of`.
        is_bound: whether only the engine that served the last known address can answer: it keeps the response.
    """

    scope: Mapping[str, Any]
    body: bytes = b""
    addresses: tuple[bytes, ...] = ()
    is_bound: bool = False


class EngineLostError(Exception):
    """The engine that got the request has ended."""


def scope_of(request: Request) -> dict[str, Any]:
    """The parts of a request's scope that can be sent."""
    return {name: request.scope[name] for name in _SCOPE if name in request.scope}


async def run_app(app: App, call: Call) -> AsyncGenerator[list[AsgiMessage], None]:
    """An application's answer, in batches of what is ready. Leaving the iterator ends its work."""
    out: asyncio.Queue[AsgiMessage | None] = asyncio.Queue()
    task = asyncio.ensure_future(_run(app, call, out))
    try:
        while True:
            batch = [await out.get()]
            while not out.empty():
                batch.append(out.get_nowait())
            messages = [message for message in batch if message is not None]
            if messages:
                yield messages
            if len(messages) < len(batch):
                break
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _run(app: App, call: Call, out: asyncio.Queue[AsgiMessage | None]) -> None:
    request: list[AsgiMessage] = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> AsgiMessage:
        # If the client hangs up, the whole task is cancelled.
        return request.pop() if request else await asyncio.get_running_loop().create_future()

    try:
        await app({**call.scope, "asgi": {"version": "3.0"}}, receive, out.put)
    finally:
        out.put_nowait(None)
