"""Applications over real sockets: how they are reached, how many connections they hold, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from qwen35mm.errors import ConfigError
from qwen35mm.http import connection, run
from qwen35mm.http.addresses import address_of
from qwen35mm.http.connection import Places
from qwen35mm.http.guards import guards
from qwen35mm.http.requests import in_words
from qwen35mm.http.run import ServerThread
from qwen35mm.http.settings import HttpSettings
from qwen35mm.http.streams import event_stream, frame, streaming, while_connected

PATIENCE_S = 60


async def who(request: Request) -> Response:
    return JSONResponse({"address": address_of(request), "scheme": request.url.scheme, "path": request.url.path})


async def endless(request: Request) -> Response:
    async def frames() -> AsyncIterator[bytes]:
        yield frame({"word": 1})
        await asyncio.Event().wait()

    return streaming(event_stream(request.scope, frames(), lambda error: frame({"error": str(error)}, "error")))


async def slow(request: Request) -> Response:
    await request.body()
    request.app.state.begun.set()
    await while_connected(request, asyncio.Event().wait())
    raise AssertionError


def app_of(settings: HttpSettings) -> Starlette:
    routes = [Route("/", who), Route("/who", who), Route("/endless", endless)]
    routes.append(Route("/slow", in_words(slow), methods=["POST"]))
    app = Starlette(routes=routes, middleware=guards(settings, only_this_machine=True))
    app.state.begun = threading.Event()
    return app


@contextlib.contextmanager
def served(**settings: Any):
    made = HttpSettings(**settings)
    app = app_of(made)
    with contextlib.closing(ServerThread(app, host="127.0.0.1", port=0, settings=made)) as thread:
        yield thread, app


def test_what_is_in_progress_is_told_of_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with served() as (thread, app):
        answers: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: answers.append(httpx.post(f"{thread.url}slow", timeout=PATIENCE_S)))
        waiting.start()
        with httpx.stream("GET", f"{thread.url}endless", timeout=PATIENCE_S) as stream:
            lines = stream.iter_lines()
            assert next(lines) == 'data: {"word":1}'
            assert app.state.begun.wait(PATIENCE_S)
            ending = threading.Thread(target=thread.close)
            ending.start()
            rest = list(lines)
        ending.join()
        waiting.join()
    assert [line for line in rest if line] == [
        "event: error",
        'data: {"error":"The program is being ended. Ask again when it runs."}',
    ]
    assert (answers[0].status_code, answers[0].json()["error"]["kind"]) == (503, "shutting_down")
    assert "Traceback" not in caplog.text


def test_an_event_is_one_line_also_for_those_who_split_as_python_does() -> None:
    said = "a\x85b\u2028c\u2029d\x1ce\r\nf\\u2028g"
    (line, end) = frame({"said": said}).decode().splitlines()
    assert (json.loads(line.removeprefix("data: ")), end) == ({"said": said}, "")


def test_names_paths_and_proxies() -> None:
    settings: Any = {"allowed_hosts": ("chat.example.org",), "base_path": "/chat", "trusted_proxies": ("127.0.0.1",)}
    with served(**settings) as (thread, _):
        forwarded = {"x-forwarded-for": "203.0.113.9", "x-forwarded-proto": "https"}
        told = httpx.get(f"{thread.url}chat/who", headers={"host": "chat.example.org", **forwarded}).json()
        assert told == {"address": "address 203.0.113.9", "scheme": "https", "path": "/who"}
        assert [httpx.get(f"{thread.url}{path}").status_code for path in ("who", "chat", "chat/", "chatter")] == [
            *(200, 307, 200, 404)
        ]
        assert httpx.get(thread.url, headers={"host": "other.example.org"}).status_code == 421
    with served() as (thread, _):
        assert httpx.get(f"{thread.url}who", headers=forwarded).json()["address"] == "address 127.0.0.1"


def test_other_origins_that_were_named() -> None:
    with served(cors_origins=("https://example.org",), embed_origins=("https://frame.example",)) as (thread, _):
        asked = {"origin": "https://example.org", "sec-fetch-site": "cross-site"}
        answer = httpx.get(f"{thread.url}who", headers=asked)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://example.org")
        preflight = {**asked, "access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
        assert httpx.options(f"{thread.url}who", headers=preflight).status_code == 200
        assert httpx.get(f"{thread.url}who", headers={**asked, "origin": "https://evil.example"}).status_code == 403
        assert answer.headers["content-security-policy"].endswith("frame-ancestors https://frame.example")


def test_tls(tmp_path: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    try:
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl makes the certificate")
    with served(tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem") as (thread, _):
        assert thread.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        assert httpx.get(f"{thread.url}who", verify=trusted).json()["scheme"] == "https"
    (tmp_path / "wrong.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match="TLS can't begin"), served(tls_cert=tmp_path / "wrong.pem"):
        pass


def test_silent_connections_make_room_for_those_that_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.Places, "of_this_process", lambda many: Places(most=20))
    with served() as (thread, _), contextlib.ExitStack() as stack:
        port = httpx.URL(thread.url).port or 0
        asking = stack.enter_context(httpx.stream("GET", f"{thread.url}endless", timeout=PATIENCE_S))
        lines = asking.iter_lines()
        assert next(lines) == 'data: {"word":1}'
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(50)]
        assert httpx.get(f"{thread.url}who", timeout=PATIENCE_S).status_code == 200
        for each in silent[:25]:
            each.settimeout(PATIENCE_S)
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b"", "the longest silent ones are gone"


@pytest.mark.parametrize("before", [b"", b"GET /who HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"], ids=["alone", "pipelined"])
def test_a_body_that_stalls_ends_its_connection(before: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SENDING_TIMEOUT_S", 0.05)
    with served() as (thread, _), contextlib.ExitStack() as stack:
        port = httpx.URL(thread.url).port or 0
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
        client.sendall(before + b"POST /slow HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\nabc")
        with contextlib.suppress(ConnectionResetError):
            while client.recv(65_536):
                pass


class Silent:
    """Stands for a connection."""

    def __init__(self) -> None:
        self.is_ended = False

    def end(self) -> None:
        self.is_ended = True


def test_one_address_takes_no_place_of_anothers() -> None:
    places: Any = Places(most=10, most_of_address=2)
    mine, other = [Silent() for _ in range(3)], Silent()
    assert places.enter(other, "198.51.100.1")
    for each in mine[:2]:
        assert places.enter(each, "203.0.113.1")
    assert not places.enter(mine[2], "203.0.113.1"), "both ask for something"
    places.fell_silent(other, "198.51.100.1")
    places.fell_silent(mine[1], "203.0.113.1")
    assert places.enter(mine[2], "203.0.113.1")
    assert [each.is_ended for each in (*mine, other)] == [False, True, False, False]
    assert all(places.enter(Silent(), "127.0.0.1") for _ in range(6)), "one's own machine has no limit but the whole"


def test_a_trusted_proxy_on_another_machine_has_no_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPACE_ID", raising=False)
    places: Any = Places.of_this_process(many=[ipaddress.ip_network("10.0.0.0/8")])
    most = connection.MAX_OF_ADDRESS
    assert all(places.enter(Silent(), "10.0.0.1") for _ in range(most + 1))
    assert [places.enter(Silent(), "203.0.113.1") for _ in range(most + 1)] == [True] * most + [False]


ADDRESSES = {socket.AF_INET: "192.168.1.7", socket.AF_INET6: "2001:db8::7"}


@pytest.mark.parametrize(
    ("host", "addresses", "settings", "here", "there"),
    [
        ("0.0.0.0", ADDRESSES, {}, "http://127.0.0.1", "http://192.168.1.7"),
        ("::", ADDRESSES, {}, "http://[::1]", "http://192.168.1.7"),
        ("::", {socket.AF_INET6: "2001:db8::7"}, {}, "http://[::1]", "http://[2001:db8::7]"),
        ("0.0.0.0", {}, {}, "http://127.0.0.1", None),
        ("127.0.0.1", ADDRESSES, {}, "http://127.0.0.1", None),
        ("0.0.0.0", ADDRESSES, {"allowed_hosts": ("chat.example.org",)}, "http://127.0.0.1", None),
        ("0.0.0.0", ADDRESSES, {"allowed_hosts": ("192.168.1.7",)}, "http://127.0.0.1", "http://192.168.1.7"),
        ("0.0.0.0", ADDRESSES, {"trusted_proxies": ("10.0.0.1",)}, "http://127.0.0.1", None),
    ],
)
def test_a_server_for_the_network_has_an_address_here_and_one_there(
    host: str, addresses: dict[Any, str], settings: Any, here: str, there: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPACE_ID", raising=False)
    monkeypatch.setattr(run, "_address_in_network", addresses.get)
    made = HttpSettings(**settings)
    try:
        listener = run.listen(host, 0)
    except ConfigError:
        pytest.skip(f"this machine has no {host}")
    with contextlib.closing(listener):
        port = listener.getsockname()[1]
        assert run.address_of(listener, host, made) == f"{here}:{port}"
        assert run.network_address(listener, made) == (there and f"{there}:{port}")
        monkeypatch.setenv("SPACE_ID", "someone/something")
        assert run.network_address(listener, made) is None


def test_the_own_address_is_found_without_a_network() -> None:
    found = [run._address_in_network(family) for family in (socket.AF_INET, socket.AF_INET6)]
    assert all(each is None or ipaddress.ip_address(each) for each in found)
