"""Clients that stall, at either end of a request, over real sockets: they are let go, and others are served."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from qwen35mm.contract import Event, TextDelta
from qwen35mm.engine import Request
from qwen35mm.http import bodies as body
from qwen35mm.http import connection
from qwen35mm.model import LoadedModel
from qwen35mm.server.app import create_app
from tests.server.conftest import HTTP, PATIENCE_S, serving
from tests.server.instant import Instant

BODY = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "stream": True}).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


class Talkative(Instant):
    """More is said than any socket holds for whom it is said to."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.all_said, self.left = threading.Semaphore(0), threading.Semaphore(0)

    async def _answer(self, work: Request, request: Any, *, commits: bool = False) -> AsyncGenerator[Event, None]:
        try:
            async for event in super()._answer(work, request):
                yield event
                if isinstance(event, TextDelta):
                    for _ in range(300):
                        yield TextDelta("x" * 100_000)
                    self.all_said.release()
        finally:
            self.left.release()


@pytest.fixture(scope="module")
def backend(demo: LoadedModel) -> Talkative:
    return Talkative(demo)


@pytest.fixture(scope="module")
def address(backend: Talkative) -> Iterator[str]:
    with serving(create_app(backend, num_places=1, max_waiting=1)) as address:
        yield address


def connect(address: str) -> socket.socket:
    place = urlsplit(address)
    client = socket.create_connection((place.hostname or "", place.port or 0), timeout=PATIENCE_S)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return client


def everything(client: socket.socket) -> bytes:
    """What comes until the server ends the connection."""
    found = b""
    try:
        while piece := client.recv(2**16):
            found += piece
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize(
    "said", [b"", b"G", HEAD, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nG"], ids=["none", "one", "half", "more"]
)
def test_who_says_nothing_is_let_go(said: bytes, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADERS_TIMEOUT_S", 0.1)
    with connect(address) as client:
        client.sendall(said)
        assert (b'{"status":"ok"}' in everything(client)) == (b"health" in said)


def test_two_hundred_that_say_nothing_hold_up_nobody(address: str) -> None:
    silent = [connect(address) for _ in range(200)]
    try:
        assert HTTP.get(f"{address}/health").status_code == 200
        answer = HTTP.post(f"{address}/tokenize", json={"prompt": "Hello"})
        assert answer.json()["count"] > 0
    finally:
        for client in silent:
            client.close()


@pytest.mark.parametrize(
    "head",
    [
        b"X: " + b"x" * 200_000,
        b"X: y\r\n" * 40_000,
        b"Content-Length: x",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"\0",
    ],
    ids=["a long one", "many", "no length", "two lengths", "no header"],
)
def test_headers_that_are_none_are_refused(head: bytes, address: str) -> None:
    with connect(address) as client:
        try:
            client.sendall(HEAD + head + b"\r\n\r\n")
        except ConnectionError:
            return  # refused before its end
        told = everything(client)
        assert told == b"" or told.startswith(b"HTTP/1.1 400 ")


def test_a_body_without_its_end(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.1)
    for ending in (b"Content-Length: 1000\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"):
        with connect(address) as client:
            client.sendall(HEAD + ending)
            assert client.recv(12) == b"HTTP/1.1 408"
        with connect(address) as client:
            client.sendall(HEAD + ending)  # and hangs up
    with connect(address) as client:
        client.sendall(HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
        for at in range(0, len(BODY), 7):
            piece = BODY[at : at + 7]
            client.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
        client.sendall(b"0\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 200"


def test_who_reads_slowly_holds_up_nobody(backend: Talkative, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "READING_TIMEOUT_S", 0.2)
    with serving(create_app(backend, num_places=1, max_waiting=1)) as address, connect(address) as slow:
        slow.sendall(WHOLE)
        # All of the reply is written, though nobody reads it, and its place is another's.
        assert backend.all_said.acquire(timeout=PATIENCE_S)
        assert backend.left.acquire(timeout=PATIENCE_S)
        with HTTP.stream("POST", f"{address}/v1/chat/completions", content=BODY) as answer:
            assert answer.status_code == 200
        # Who doesn't read at all is let go: the system is told so, though nothing is read.
        watch = select.poll()
        watch.register(slow, 0)
        assert watch.poll(1000 * PATIENCE_S)
