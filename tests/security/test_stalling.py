"""Clients that say nothing, say it slowly, or don't read: they take nothing from others, and are let go."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.security.conftest import OpenFront
from tests.security.fronts import NAMES, PATIENCE_S, Front, Name, started

SILENT = 950
# What a shell gives a program by default.
_FILES = 1024
_BODY = b"Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n{"
_JSON = {"serve": "/v1/chat/completions", "chat": "/qwen35mm/api/send", "review": "/api/save"}
# By what docs/api.md says of time, and some for a busy machine.
HEADERS_S, BODY_S = 30.0, 120.0
MARGIN_S = 45.0


@pytest.fixture(autouse=True)
def _many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 8192), hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def head(front: Front, method: str = "POST", path: str | None = None) -> bytes:
    lines = [f"{method} {path or _JSON[front.name]} HTTP/1.1", f"Host: {front.host}"]
    lines += [f"{name}: {value}" for name, value in front.headers.items()]
    return "\r\n".join([*lines, ""]).encode()


# What somebody sends, and then no more.
STALLS: dict[str, Callable[[Front], bytes]] = {
    "nothing": lambda front: b"",
    "a letter": lambda front: b"P",
    "a line": lambda front: b"POST / HTTP/1.1\r\n",
    "headers": head,
    "a body's begin": lambda front: head(front) + _BODY,
    "a chunk's begin": lambda front: head(front) + b"Transfer-Encoding: chunked\r\n\r\nfff\r\n{",
    "a request, and half of another": lambda front: head(front, "GET", "/") + b"\r\nG",
}


def stall(front: Front, number: int, said: bytes, stack: contextlib.ExitStack) -> list[socket.socket]:
    found = []
    for _ in range(number):
        client = stack.enter_context(front.connect())
        client.sendall(said)
        found.append(client)
    return found


def ask_others(front: Front, times: int = 3) -> float:
    """How long the slowest of a few small requests takes, each on a connection of its own."""
    waits = []
    for _ in range(times):
        began = time.monotonic()
        with front.client() as client:
            assert front.ask(client).status_code == 200
        waits.append(time.monotonic() - began)
    return max(waits)


@pytest.mark.skipif(sys.platform != "linux", reason="only there a process's number of files is limited from outside")
@pytest.mark.parametrize("name", NAMES)
def test_silent_connections_take_a_front_from_nobody(name: Name, open_front: OpenFront) -> None:
    front = open_front(name)
    server = psutil.Process(front.process.pid)
    soft, hard = server.rlimit(psutil.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        server.rlimit(psutil.RLIMIT_NOFILE, (_FILES, hard))
        stack.callback(server.rlimit, psutil.RLIMIT_NOFILE, (soft, hard))
        stall(front, SILENT, b"", stack)
        print(f"{name}: {ask_others(front):.2f} s beside {SILENT} silent connections")


def at_once(folder: Path, check: Callable[[Front, contextlib.ExitStack], None]) -> None:
    """Checks all fronts at one time: each check is a long wait."""
    with contextlib.ExitStack() as running, ThreadPoolExecutor() as pool:
        fronts = [running.enter_context(started(name, folder / name)) for name in NAMES]

        def checked(front: Front) -> None:
            with contextlib.ExitStack() as stack:
                ask_others(front)
                check(front, stack)

        list(pool.map(checked, fronts))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only there a process's number of files is limited from outside")
def test_more_silent_connections_than_files_are_let_go(tmp_path: Path) -> None:
    """Then nobody else may come in: for as long as a request's headers may take, and no longer."""

    def check(front: Front, stack: contextlib.ExitStack) -> None:
        psutil.Process(front.process.pid).rlimit(psutil.RLIMIT_NOFILE, (256, 256))
        stall(front, 300, b"", stack)
        deadline = time.monotonic() + HEADERS_S + MARGIN_S
        while True:
            with front.client(timeout=HEADERS_S + MARGIN_S) as client, contextlib.suppress(httpx.TransportError):
                if front.ask(client).status_code == 200:
                    break
            assert time.monotonic() < deadline, "nobody comes in any more"
            time.sleep(0.2)

    at_once(tmp_path, check)


@pytest.mark.parametrize("name", NAMES)
def test_half_requests_hold_up_nobody(name: Name, open_front: OpenFront) -> None:
    front = open_front(name)
    with contextlib.ExitStack() as stack:
        for said in STALLS.values():
            stall(front, 30, said(front), stack)
        print(f"{name}: {ask_others(front):.2f} s beside {30 * len(STALLS)} half requests")


@pytest.mark.parametrize("name", NAMES)
def test_who_does_not_read_holds_up_nobody(name: Name, open_front: OpenFront) -> None:
    path = {"serve": "/docs/swagger-ui-bundle.js", "chat": "/qwen35mm/web/main.js", "review": "/media/0"}[name]
    front = open_front(name)
    with contextlib.ExitStack() as stack:
        for client in stall(front, 40, b"", stack):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            # Pipelined: more is answered than any buffer between holds.
            client.sendall((head(front, "GET", path) + b"\r\n") * 20)
        print(f"{name}: {ask_others(front):.2f} s beside 40 that don't read")


@pytest.mark.slow
def test_who_stalls_is_let_go(tmp_path: Path) -> None:
    """Two minutes for a body, half a minute for all else."""

    def check(front: Front, stack: contextlib.ExitStack) -> None:
        open_files = psutil.Process(front.process.pid).num_fds()
        began = time.monotonic()
        waiting = {}
        for label, said in STALLS.items():
            for client in stall(front, 5, said(front), stack):
                client.setblocking(False)
                waiting[client] = label
        drip = [stack.enter_context(front.connect()) for _ in range(5)]
        for client in drip:
            client.sendall(head(front, "GET", "/"))
            waiting[client] = "headers one after the other"
        ended: dict[str, float] = {}
        while waiting and time.monotonic() - began < BODY_S + MARGIN_S:
            for client in drip:
                with contextlib.suppress(OSError):
                    client.sendall(b"X: y\r\n")
            for client in select.select(list(waiting), [], [], 1.0)[0]:
                try:
                    said = client.recv(2**16)
                except ConnectionError:
                    said = b""
                if not said:
                    ended[waiting.pop(client)] = time.monotonic() - began
            assert ask_others(front, 1) < PATIENCE_S
        print(f"{front.name}: { ({label: round(each) for label, each in ended.items()}) }")
        assert not waiting, f"never let go: {sorted(set(waiting.values()))}"
        for label, took_s in ended.items():
            most_s = BODY_S if "begin" in label else HEADERS_S
            assert took_s < most_s + MARGIN_S, (label, took_s)
        stack.close()
        deadline = time.monotonic() + PATIENCE_S
        while psutil.Process(front.process.pid).num_fds() > open_files + 5:
            assert time.monotonic() < deadline, "connections are kept that nobody has any more"
            time.sleep(0.1)
        front.check()

    at_once(tmp_path, check)
