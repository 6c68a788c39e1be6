"""The served page, looked at without a browser."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator

import httpx
import pytest

from qwen35mm.assets import asset_path
from qwen35mm.errors import ConfigError
from qwen35mm.ui import Server, serve
from tests.ui.fake_backend import FakeBackend


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = serve(FakeBackend(is_demo=True), port=0)
    yield server
    server.close()


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


def test_the_page_names_no_other_machine(server: Server) -> None:
    page = httpx.get(server.url).text
    without_preview_texts = re.sub(r'<meta\s+(?:property|name)="(?:og|twitter):[^>]*>', "", page)
    scripts = re.findall(r'(?:src|href)="(https?:[^"]*)"', without_preview_texts)
    assert scripts == []
    assert "fonts.googleapis" not in httpx.get(f"{server.url}theme.css").text


def test_the_browser_is_told_to_ask_no_other_machine(server: Server) -> None:
    policy = httpx.get(server.url).headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "http" not in policy


def test_nothing_that_was_not_asked_for_is_served(server: Server) -> None:
    config = httpx.get(f"{server.url}config").json()
    assert config["analytics_enabled"] is False
    for path in ("monitoring", "gradio_api/mcp/sse", "gradio_api/monitoring"):
        assert httpx.get(f"{server.url}{path}").status_code in (403, 404), path
    info = httpx.get(f"{server.url}gradio_api/info").json()
    assert (info["named_endpoints"], info["unnamed_endpoints"]) == ({}, {})


@pytest.mark.parametrize("path", ["pyproject.toml", "assets/demo/config.json", "/etc/passwd"])
def test_files_of_the_machine_are_not_served(server: Server, path: str) -> None:
    absolute = path if path.startswith("/") else asset_path("..") / path
    response = httpx.get(f"{server.url}gradio_api/file={absolute}")
    assert response.status_code == 403


def test_the_demo_says_what_it_is(server: Server) -> None:
    config = json.dumps(httpx.get(f"{server.url}config").json())
    assert "Demo model." in config
    assert "make chat MODEL=Qwen/Qwen3.5-2B" in config


def test_a_real_model_has_no_banner() -> None:
    server = serve(FakeBackend(), port=0)
    try:
        config = json.dumps(httpx.get(f"{server.url}config").json())
        assert "Fake-1B" in config
        assert "Demo model." not in config
    finally:
        server.close()
