"""The served page, looked at without a browser."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from qwen35mm.assets import asset_path
from qwen35mm.errors import ConfigError
from qwen35mm.http import run
from qwen35mm.http.sessions import Tickets
from qwen35mm.web import Server, launch, serve
from qwen35mm.web.serving import guest
from qwen35mm.web.serving.examples import NUM_EXAMPLES
from qwen35mm.web.serving.programs import ProgramAccess
from tests.chat.fake_backend import FakeBackend


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = serve(FakeBackend(is_demo=True), port=0, programs=ProgramAccess())
    yield server
    server.close()


def visit(server: Server) -> httpx.Client:
    """A client that has opened the page by its address, as `session.js` does."""
    client = httpx.Client(base_url=server.url, headers={"x-qwen35mm": "1"})
    opened = client.get(server.address)
    assert (opened.status_code, opened.headers["location"][:12]) == (303, "../../#once=")
    code = opened.headers["location"].partition("=")[2]
    begun = client.post("qwen35mm/session", json={"once": code})
    assert begun.status_code == 200
    client.headers["x-qwen35mm"] = begun.json()["key"]
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


def test_only_this_machine_is_served(server: Server) -> None:
    port = int(server.url.rstrip("/").rsplit(":", 1)[1])
    with socket.create_server(("127.0.0.2", port)):
        pass  # nobody listens on the machine's other addresses


def test_the_browser_is_told_to_ask_no_other_machine(visitor: httpx.Client) -> None:
    policy = visitor.get("").headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert not re.search("http|unsafe|script-src|style-src", policy)


# All that a page's port answers, by who may ask: everybody, who shows the key or the ticket, and programs.
OPEN = {"/", "/icon.svg", "/favicon.ico", "/docs", "/docs/{path:path}", "/health"}
OPEN |= {f"/qwen35mm/{name}" for name in ("preview", "web", "samples", "poster/{number}", "session")}
OPEN |= {f"/qwen35mm/web/page.{kind}" for kind in ("css", "js", "js.map")}
OF_THE_PAGE = {"api/{name}", "watch", "upload", "pages", "recode", "web_page", "import", "export"}
OF_THE_PAGE |= {f"{name}/{{digest}}" for name in ("media", "picture", "frame", "thumbnail")}
OF_PROGRAMS = {"/v1/{path:path}", "/tokenize", "/detokenize", "/apply-template", "/version", "/ready", "/metrics"}
OF_PROGRAMS |= {"/openapi.json", "/config"}
OF_PROGRAMS |= {
    f"/gradio_api/{name}" for name in ("info", "call/chat", "call/chat/{event}", "queue/join", "queue/data")
}
OF_PROGRAMS |= {"/gradio_api/heartbeat/{session}", "/gradio_api/cancel", "/gradio_api/upload"}


def paths(routes: Iterable[Any], prefix: str = "") -> set[str]:
    found = set()
    for each in routes:
        inner = getattr(each, "routes", None)
        found |= paths(inner, prefix + each.path) if inner else {prefix + each.path}
    return found


def test_each_route_is_known_and_asks_who_is_there(server: Server) -> None:
    """A route that isn't listed here answers somebody that nobody thought of."""
    listed = OPEN | {f"/qwen35mm/{name}" for name in OF_THE_PAGE} | OF_PROGRAMS
    assert paths(server.page.app.routes) == listed
    with httpx.Client(base_url=server.url, headers={"x-qwen35mm": "0" * 32}) as stranger:
        for path in listed - OPEN:
            path = re.sub(r"\{.*?\}", "models" if path.startswith("/v1") else "start", path)
            answers = {stranger.request(method, path, json={}).status_code for method in ("GET", "POST")}
            assert answers <= {401, 403, 404, 405}, (path, answers)
            assert answers & {401, 403} or path.endswith("export"), path


GRADIOS = ["file=http://127.0.0.1:9/page.png", "file=/etc/passwd", "proxy=http://127.0.0.1:9/", "process_recording"]
GRADIOS += ["startup-events", "app_id", "token", "user", "login_check", "run/chat", "api/chat", "call/v2/chat", "reset"]
GRADIOS += ["stream/x", "upload_progress", "theme.css", "dev/reload", "deep_link", "runs", "vibe-edit", "openapi.json"]
GRADIOS += ["mcp/", "mcp/sse", "call/watch", "call/watch/x", "component_server", "monitoring", "queue/status"]


def test_nothing_else_of_gradio_is_answered(server: Server, visitor: httpx.Client) -> None:
    assert httpx.get(f"{server.address}config").status_code == 200, "Gradio is there by now"
    names = [f"gradio_api/{name}" for name in GRADIOS]
    names += ["static/img/logo.svg", "assets/index.js", "svelte/x", "theme.css", "monitoring", "robots.txt", "pwa_icon"]
    for name in (*names, "manifest.json", "login", "logout", "gradio_api/", "custom_component/x"):
        for method in ("GET", "POST", "HEAD"):
            assert visitor.request(method, name).status_code in (404, 405), (method, name)
            assert visitor.request(method, f"{server.address}{name}").status_code in (404, 405), (method, name)
    info = httpx.get(f"{server.address}gradio_api/info").json()
    assert (list(info["named_endpoints"]), info["unnamed_endpoints"]) == (["/chat"], {})


def test_gradio_comes_when_it_is_asked_for_and_leaves_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest, "LEAVES_AFTER_S", 0.1)
    with contextlib.closing(serve(FakeBackend(), port=0)) as server:
        assert server.page.guest._app is None
        for _ in range(2):
            assert httpx.get(f"{server.address}config", timeout=60).json()["analytics_enabled"] is False
            while server.page.guest._app is not None:
                pass


def test_a_client_waits_for_an_import_that_takes_long(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest, "_PATIENCE_S", 0.01)
    make = guest.Guest._make
    monkeypatch.setattr(guest.Guest, "_make", lambda self: time.sleep(0.2) or make(self))
    with contextlib.closing(serve(FakeBackend(), port=0)) as slow:
        told = httpx.get(f"{slow.address}config", timeout=60)
    assert told.text.startswith("  ")
    assert told.json()["api_prefix"] == "/gradio_api"


@pytest.mark.parametrize("path", ["pyproject.toml", "assets/demo/config.json", "/etc/passwd"])
def test_files_of_the_machine_are_not_served(visitor: httpx.Client, path: str) -> None:
    absolute = path if path.startswith("/") else asset_path("..") / path
    assert visitor.get(f"gradio_api/file={absolute}").status_code == 404


def ask(client: httpx.Client, method: str, /, **arguments: Any) -> httpx.Response:
    """One of the page's requests."""
    return client.post(f"qwen35mm/api/{method}", json=arguments)


def test_the_page_is_told_what_it_shows(visitor: httpx.Client) -> None:
    app = ask(visitor, "start").json()["app"]
    assert (app["model"], app["is_demo"], app["context_length"]) == ("Fake-1B", True, 4096)
    assert len(app["examples"]) == NUM_EXAMPLES
    for example in app["examples"]:
        assert visitor.get(example["url"].removeprefix("./")).status_code == 200
    assert visitor.get("qwen35mm/web/main.js").status_code == 200


def test_other_users_of_the_machine_need_the_token(server: Server) -> None:
    assert server.token is not None
    token = server.token.value
    with httpx.Client(base_url=server.url, headers={"x-qwen35mm": "1"}) as stranger:
        for path in ("t/", "t/guess", "t/guess/", "t/guess/config", "?token=guess"):
            response = stranger.get(path)
            assert (response.status_code, "in its terminal" in response.text) == (403, True), path
        for method, path in (("POST", "qwen35mm/api/start"), ("GET", "config"), ("POST", "qwen35mm/watch")):
            refused = stranger.request(method, path, json={"answers": []})
            assert (refused.status_code, refused.json()["error"]["kind"]) == (403, "token"), path
        assert stranger.post("qwen35mm/session", json={"once": "guess"}).status_code == 403
        assert stranger.get("config", headers={"authorization": f"Bearer {token}"}).status_code == 200
        assert stranger.get(f"t/{token}/config").status_code == 200
        assert stranger.get("config", headers={"authorization": "Bearer guess"}).status_code == 403
        assert stranger.get(f"?token={token}").headers["location"].startswith("./#once=")


def test_the_address_for_other_devices_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "network_address", lambda *_: "http://192.168.1.7:7860")
    monkeypatch.setattr("qwen35mm.web.serving.server.wait_for_the_end", lambda: None)
    launch(FakeBackend(), port=0)
    assert "On the network: http://192.168.1.7:7860\n" in capsys.readouterr().out


def test_nothing_that_opens_the_page_reaches_another_port(server: Server) -> None:
    """A cookie would: browsers know no ports of cookies."""
    with contextlib.closing(visit(server)) as visitor:
        assert ask(visitor, "start").status_code == 200
        assert dict(visitor.cookies) == {}


def test_an_address_that_a_command_line_held_lets_in_once(server: Server) -> None:
    address = server.address_for_once
    assert address.startswith(f"{server.url}t/")
    assert [httpx.get(address).status_code for _ in range(2)] == [303, 403]
    code = httpx.get(server.address_for_once).headers["location"].partition("=")[2]
    how: Any = {"headers": {"x-qwen35mm": "1"}, "json": {"once": code}}
    assert [httpx.post(f"{server.url}qwen35mm/session", **how).status_code for _ in range(2)] == [200, 403]


def test_a_ticket_opens_files_alone(server: Server) -> None:
    assert server.token is not None
    with contextlib.closing(visit(server)) as visitor:
        assert ask(visitor, "start").status_code == 200
    ticket = Tickets().of(server.token.key)
    assert httpx.get(f"{server.url}qwen35mm/media/{'0' * 64}?ticket={ticket}").status_code == 404
    for path in ("config", "gradio_api/info", "qwen35mm/export"):
        assert httpx.get(f"{server.url}{path}?ticket={ticket}").status_code in (403, 404), path
    assert httpx.get(f"{server.url}config?ticket={ticket}").status_code == 403


def test_a_link_takes_nobodys_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """`/#once=x` has the page ask with a code, and it keeps its key where that is refused."""
    monkeypatch.setattr("qwen35mm.web.serving.server.is_shared", lambda host: True)
    with contextlib.closing(serve(FakeBackend(), port=0)) as shared:
        how: Any = {"headers": {"x-qwen35mm": "1"}}
        assert httpx.post(f"{shared.url}qwen35mm/session", json={"once": "x"}, **how).status_code == 404
        assert httpx.post(f"{shared.url}qwen35mm/session", json={}, **how).status_code == 200


def test_a_number_without_end_is_no_bug(server: Server) -> None:
    assert httpx.get(f"{server.url}qwen35mm/poster/{'1' * 5000}").status_code == 404


def test_a_token_can_be_chosen_or_left_out() -> None:
    with contextlib.closing(serve(FakeBackend(), port=0, token="my-own-token")) as server:
        assert server.address == f"{server.url}t/my-own-token/"
        visit(server).close()
    with contextlib.closing(serve(FakeBackend(), port=0, token="")) as server:
        assert server.address == server.address_for_once == server.url
        headers = {"x-qwen35mm": "1"}
        assert httpx.post(f"{server.url}qwen35mm/api/start", headers=headers, json={}).status_code == 200
    several: Any
    for several in ({"host": "0.0.0.0"}, {"auth": [("ann", "secret")]}):
        with pytest.raises(ConfigError, match="--auth"):
            serve(FakeBackend(), port=0, token="my-own-token", **several)


def test_a_name_that_was_pointed_here_is_not_served(server: Server) -> None:
    for path in ("", "config", "qwen35mm/web/main.js"):
        response = httpx.get(server.url + path, headers={"host": "127.0.0.1.example.org"})
        assert response.status_code == 421, path


@pytest.mark.parametrize("path", ["", "qwen35mm/api/start", "qwen35mm/watch", "gradio_api/info", "t/guess/"])
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
        how: Any = {"base_url": server.url, "headers": {"x-qwen35mm": "1"}}
        ann, bob, eve = httpx.Client(**how), httpx.Client(**how), httpx.Client(**how)
        assert ask(eve, "start").status_code == 401
        assert eve.post("login", data={"username": "ann", "password": "other"}).status_code == 400
        for client, name, password in ((ann, "ann", "secret"), (bob, "bob", "other")):
            client.headers["x-qwen35mm"] = client.post("login", data={"username": name, "password": password}).json()[
                "key"
            ]
        eve.headers["x-qwen35mm"] = "0" * 32
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
    manifest = visitor.get("qwen35mm/web/manifest.json").json()
    assert manifest["name"] == "qwen35mm"
    assert manifest["display"] == "standalone"
    (icon, *_) = manifest["icons"]
    picture = visitor.get(icon["src"].removeprefix("../../"))
    assert picture.status_code == 200
    assert b"#4f46e5" in picture.content
