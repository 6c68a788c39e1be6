"""Backends for tests: their waits between attempts are noted and not waited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from qwen35mm.backends.remote.backend import RemoteBackend
from qwen35mm.contract import Event, GenerationRequest, Message, Result, Text
from tests.backends.events import collect, result_of
from tests.backends.remote.server import ModelServer
from tests.forked import PATIENCE_S

QUESTION = [Message("user", (Text("What is this?"),))]


class Asker:
    """Makes backends for one server, which give whole answers where nothing else is said.

    Attributes:
        waits_s: the waits between attempts, in order.
    """

    def __init__(self, server: ModelServer) -> None:
        self._server = server
        self._backends: list[RemoteBackend] = []
        self.waits_s: list[float] = []

    def backend(self, url: str | None = None, **options: Any) -> RemoteBackend:
        options = {"model": "tiny", "whole": True, "sleep": self._sleep, "jitter": lambda: 1.0} | options
        self._backends.append(RemoteBackend(url or self._server.url, **options))
        return self._backends[-1]

    async def ask(self, messages: Sequence[Message] = QUESTION, params: Any = None, **options: Any) -> Result:
        """One question to a new backend; what `stream` knows goes there, the rest to the constructor."""
        asked = {name: options.pop(name) for name in list(options) if name in ("enable_thinking", "tools")}
        return result_of(await events_of(self.backend(**options), messages, params, **asked))

    async def aclose(self) -> None:
        for backend in self._backends:
            await backend.aclose()

    async def _sleep(self, seconds: float) -> None:
        self.waits_s.append(seconds)


async def events_of(
    backend: RemoteBackend, messages: Sequence[Message] = QUESTION, params: Any = None, **options: Any
) -> list[Event]:
    return await collect(backend.stream(GenerationRequest(messages, params, **options)))


async def until(is_so: Callable[[], bool], step_s: float = 0.005) -> None:
    """Waits for something that another thread brings about; its time is over only where it never does."""
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s, "it never came to be"
        await asyncio.sleep(step_s)
