"""A server on the bundled model, and OpenAI's own client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx
import openai
import pytest
from starlette.applications import Starlette

from qwen35mm.assets import asset_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.contract import Finished, GenerationRequest, TextDelta
from qwen35mm.engine import EngineSettings
from qwen35mm.http.run import ServerThread
from qwen35mm.model import LoadedModel
from qwen35mm.server.app import create_app

# Only reached where a test fails.
PATIENCE_S = 60
# One for all: to read the trusted certificates, as a new one does, takes 30 ms.
HTTP = httpx.Client(verify=False, timeout=PATIENCE_S)


CALL = "<tool_call>\n<function=weather>\n<parameter=days>\n{}\n</parameter>\n</function>\n</tool_call>"


def sample(name: str) -> str:
    """A sample as a data: address."""
    data = base64.b64encode(asset_path("samples").joinpath(name).read_bytes()).decode()
    return f"data:{'video/mp4' if name.endswith('mp4') else 'image/jpeg'};base64,{data}"


class Scripted:
    """The model's backend, but it says what it is told to, three characters at a time."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend
        self.text = ""
        self.asked: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Any]:
        self.asked.append(vars(request))
        async for event in self._backend.stream(request):
            if isinstance(event, Finished):
                for at in range(0, len(self.text), 3):
                    yield TextDelta(self.text[at : at + 3])
                yield Finished(replace(event.result, text=self.text))
            elif not isinstance(event, TextDelta):
                yield event


class Endless:
    """The model's backend, but its replies go on until they are let end."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend
        self.begun, self.ended = threading.Semaphore(0), threading.Semaphore(0)
        self.go_on = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Any]:
        self.begun.release()
        try:
            async for event in self._backend.stream(request):
                yield event
                while not self.go_on.is_set():
                    await asyncio.sleep(0.01)
        finally:
            self.ended.release()


@contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """Serves in a thread until the end of the block; gives the address."""
    with contextlib.closing(ServerThread(app, host="127.0.0.1", port=0)) as thread:
        yield thread.url.rstrip("/")


@contextmanager
def sent(address: str, path: str, body: dict[str, Any]) -> Iterator[None]:
    """A request that is on its way until the end of the block; then its sender hangs up, having read nothing."""
    place, data = urlsplit(address), json.dumps(body).encode()
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=PATIENCE_S) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        yield


@pytest.fixture(scope="session")
def backend(demo: LoadedModel) -> Iterator[LocalBackend]:
    backend = LocalBackend(demo, settings=EngineSettings(slots=2), min_segment=16)
    yield backend
    backend.close()


@pytest.fixture
def endless(backend: LocalBackend) -> Iterator[Endless]:
    endless = Endless(backend)
    yield endless
    endless.go_on.set()


@pytest.fixture(scope="session")
def address(backend: LocalBackend) -> Iterator[str]:
    """Open to everybody at this machine."""
    with serving(create_app(backend, num_places=2)) as address:
        yield address


@pytest.fixture(scope="session")
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


@pytest.fixture(scope="session")
def claude(address: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=address, api_key="none", max_retries=0, timeout=PATIENCE_S)


@pytest.fixture
def refused() -> Callable[..., Any]:
    """Calls, and gives the error that came, an openai.APIStatusError."""

    def call(ask: Callable[..., object], **arguments: object) -> Any:
        with pytest.raises(openai.APIStatusError) as caught:
            ask(**arguments)
        return caught.value

    return call
