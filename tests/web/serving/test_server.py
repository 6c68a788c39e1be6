"""The served page, looked at without a browser."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from qwen35mm.assets import asset_path
from qwen35mm.errors import ConfigError
from qwen35mm.web import Server, serve
from qwen35mm.web.serving.app import LOOK_FOR_EVENTS_S, LOOK_FOR_PROGRESS_S, LOOK_WHEN_IDLE_S, QueuePace
from qwen35mm.web.serving.examples import NUM_EXAMPLES
from tests.chat.fake_backend import FakeBackend


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = serve(FakeBackend(is_demo=True), port=0)
    yield server
    server.close()


def visit(server: Server) -> httpx.Client:
    """A client that has opened the page by its address."""
    client = httpx.Client(base_url=server.url, follow_redirects=True)
    assert client.get(server.address).status_code == 200
    return client


@pytest.fixture(scope="module")
def visitor(server: Server) -> Iterator[httpx.Client]:
    with contextlib.closing(visit(server)) as client:
        yield client


def test_a_used_port_is_said_to_be_used(server: Server) -> None:
    port = int(server.url.rstrip("/").rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=rf"Port {port} on 127.0.0.1 can't be used .* --port {port + 1}"):
        serve(FakeBackend(), port=port)


def test_a_foreign_address_is_said_to_be_foreign() -> None:
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1"):
        serve(FakeBackend(), host="203.0.113.1")


def test_a_machine_too_busy_for_gradios_own_look_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradio.networking.url_ok", lambda url: False)
    server = serve(FakeBackend(), port=0)
    try:
        visit(server).close()
    finally:
        server.close()


def test_only_this_machine_is_served(server: Server) -> None:
    port = int(server.url.rstrip("/").rsplit(":", 1)[1])
    with socket.create_server(("127.0.0.2", port)):
        pass  # nobody listens on the machine's other addresses


def test_the_browser_is_told_to_ask_no_other_machine(visitor: httpx.Client) -> None:
    policy = visitor.get("").headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert not re.search("http|unsafe|script-src|style-src", policy)


def test_nothing_that_was_not_asked_for_is_served(visitor: httpx.Client) -> None:
    config = visitor.get("config").json()
    assert config["analytics_enabled"] is False
    for path in ("monitoring", "gradio_api/mcp/sse", "gradio_api/monitoring"):
        assert visitor.get(path).status_code in (403, 404), path
    info = visitor.get("gradio_api/info").json()
    assert (list(info["named_endpoints"]), info["unnamed_endpoints"]) == (["/chat"], {})


def test_the_queue_looks_often_only_while_the_page_is_used(server: Server, visitor: httpx.Client) -> None:
    queue = server.app._queue
    assert visitor.get("").status_code == 200
    assert queue.sleep_when_free == LOOK_FOR_EVENTS_S
    assert queue.progress_update_sleep_when_free == LOOK_FOR_PROGRESS_S


async def test_the_queue_rests_when_nothing_was_asked_for_a_while() -> None:
    async def answer(*_: Any) -> None:
        assert queue.sleep_when_free == LOOK_FOR_EVENTS_S

    queue: Any = SimpleNamespace(sleep_when_free=None)
    pace = QueuePace(answer, queue, idle_after_s=0)
    for _ in range(2):
        await pace({"type": "http"}, None, None)  # pyright: ignore[reportArgumentType]
        await asyncio.sleep(0.001)
        assert queue.sleep_when_free == LOOK_WHEN_IDLE_S


@pytest.mark.parametrize("path", ["pyproject.toml", "assets/demo/config.json", "/etc/passwd"])
def test_files_of_the_machine_are_not_served(visitor: httpx.Client, path: str) -> None:
    absolute = path if path.startswith("/") else asset_path("..") / path
    response = visitor.get(f"gradio_api/file={absolute}")
    assert (response.status_code, "token" in response.text) == (403, False)


def ask(client: httpx.Client, method: str, /, **arguments: Any) -> httpx.Response:
    """One of the page's requests."""
    return client.post(f"qwen35mm/api/{method}", json=arguments, headers={"x-qwen35mm": "1"})


def test_the_page_is_told_what_it_shows(visitor: httpx.Client) -> None:
    app = ask(visitor, "start").json()["app"]
    assert (app["model"], app["is_demo"], app["context_length"]) == ("Fake-1B", True, 4096)
    assert len(app["examples"]) == NUM_EXAMPLES
    for example in app["examples"]:
        assert visitor.get(example["url"].removeprefix("./")).status_code == 200
    assert visitor.get("qwen35mm/web/main.js").status_code == 200


def test_other_users_of_the_machine_need_the_token(server: Server) -> None:
    port = httpx.URL(server.url).port
    with httpx.Client(base_url=server.url, cookies={f"qwen35mm-token-{port}": "guess"}) as stranger:
        for path in ("", "?token=", "?token=guess", "config", "qwen35mm/web/main.js", "gradio_api/info", "nothing"):
            response = stranger.get(path)
            assert (response.status_code, "in its terminal" in response.text) == (403, True), path
        assert ask(stranger, "start").json()["error"]["kind"] == "token"
        token = server.address.partition("?token=")[2]
        known = {"authorization": f"Bearer {token}"}
        assert ask(stranger, "start").status_code == 403
        assert stranger.get("config", headers=known).status_code == 200
        assert stranger.get("config", headers={"authorization": "Bearer guess"}).status_code == 403
        opened = stranger.get(f"?a=b&token={token}")
    assert (opened.status_code, opened.headers["location"]) == (303, "/?a=b")
    assert opened.headers["set-cookie"] == f"qwen35mm-token-{port}={token}; HttpOnly; Path=/; SameSite=lax"


def test_an_address_that_a_command_line_held_lets_in_once(server: Server) -> None:
    address = server.address_for_once
    assert address.partition("?")[0] == server.url
    with httpx.Client(base_url=server.url, follow_redirects=True) as first:
        assert first.get(address).status_code == 200
        assert first.get(address).status_code == 200, "it has the cookie"
    assert httpx.get(address).status_code == 403


def test_a_token_can_be_chosen_or_left_out() -> None:
    with contextlib.closing(serve(FakeBackend(), port=0, token="my-own-token")) as server:
        assert server.address == f"{server.url}?token=my-own-token"
        visit(server).close()
    with contextlib.closing(serve(FakeBackend(), port=0, token="")) as server:
        assert server.address == server.address_for_once == server.url
        assert httpx.get(f"{server.url}config").status_code == 200
    several: Any
    for several in ({"host": "0.0.0.0"}, {"auth": [("ann", "secret")]}):
        with pytest.raises(ConfigError, match="--auth"):
            serve(FakeBackend(), port=0, token="my-own-token", **several)


def test_a_name_that_was_pointed_here_is_not_served(server: Server) -> None:
    for path in ("", "config", "qwen35mm/web/main.js"):
        response = httpx.get(server.url + path, headers={"host": "127.0.0.1.example.org"})
        assert response.status_code == 421, path


@pytest.mark.parametrize("path", ["", "qwen35mm/api/start", "gradio_api/call/watch", "gradio_api/info"])
def test_pages_of_other_ports_may_not_read_it(server: Server, visitor: httpx.Client, path: str) -> None:
    origin = {"origin": "http://localhost:9", "host": server.url.split("/")[2].replace("127.0.0.1", "localhost")}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-qwen35mm"}
    for method, headers in (("OPTIONS", {**origin, **asked}), ("POST", origin), ("GET", origin)):
        response = visitor.request(method, path, headers=headers)
        assert response.status_code == 403, method
        assert not [name for name in response.headers if name.startswith("access-control")], method
        assert response.headers["cross-origin-resource-policy"] == "same-origin"
    own = visitor.get(path, headers={"origin": server.url.rstrip("/")})
    assert "access-control-allow-origin" not in own.headers


def test_people_who_log_in_have_own_conversations() -> None:
    server = serve(FakeBackend(), port=0, auth=[("ann", "secret"), ("bob", "other")])
    try:
        assert ask(httpx.Client(base_url=server.url), "start").status_code == 401
        assert httpx.post(f"{server.url}login", data={"username": "ann", "password": "other"}).status_code == 400
        cookies = [
            dict(httpx.post(f"{server.url}login", data={"username": name, "password": password}).cookies)
            for name, password in (("ann", "secret"), ("bob", "other"))
        ]
        ann, bob, eve = (
            httpx.Client(base_url=server.url, cookies=each) for each in (*cookies, dict.fromkeys(cookies[0], "made up"))
        )
        assert ask(ann, "save_preset", name="mine", settings={}).status_code == 200
        starts = [ask(each, "start").json() for each in (ann, bob)]
        assert [start["presets"] for start in starts] == [{"mine": {}}, {}]
        assert [start["app"]["is_demo"] for start in starts] == [False, False]
        assert ask(eve, "start").status_code == 401
    finally:
        server.close()


def test_conversations_outlive_the_server_where_they_have_a_folder(tmp_path: Path) -> None:
    for presets in ({}, {"mine": {}}):
        server = serve(FakeBackend(), port=0, data_dir=tmp_path)
        try:
            with contextlib.closing(visit(server)) as client:
                assert ask(client, "start").json()["presets"] == presets
                ask(client, "save_preset", name="mine", settings={})
        finally:
            server.close()


def test_the_page_can_be_installed_as_an_app(visitor: httpx.Client) -> None:
    manifest = visitor.get("manifest.json").json()
    assert manifest["name"] == "qwen35mm"
    assert manifest["display"] == "standalone"
    (icon, *_) = manifest["icons"]
    picture = visitor.get(icon["src"].lstrip("/"))
    assert picture.status_code == 200
    assert b"#4f46e5" in picture.content
