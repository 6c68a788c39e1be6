"""`--ui gradio`: who is let in, and what of Gradio is answered."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from qwen35mm.http.sessions import PageToken
from qwen35mm.web.serving import gradio_chat
from tests.chat.fake_backend import FakeBackend

HERE = "/t/let-me-in"


@pytest.fixture(scope="module")
def token() -> PageToken:
    return PageToken("let-me-in")


@pytest.fixture(scope="module")
def app(token: PageToken, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.mktemp("uploads")))
        yield gradio_chat.create_app(FakeBackend(), token)


@pytest.fixture
def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:7860")


async def test_only_who_has_the_token_is_let_in(client: httpx.AsyncClient) -> None:
    for path in (
        "/",
        "/config",
        "/gradio_api/info",
        "/t/other/",
        "/t/let-me-i/config",
        "/t//config",
        "/t/x/t/let-me-in/",
    ):
        refused = await client.get(path)
        assert (refused.status_code, refused.text) == (403, gradio_chat._REFUSAL), path
    page = await client.get(f"{HERE}/")
    assert page.status_code == 200
    policy = page.headers.get_list("content-security-policy", split_commas=False)
    assert policy == [gradio_chat.CONTENT_SECURITY_POLICY]
    assert page.headers["referrer-policy"] == "no-referrer"


async def test_an_address_for_once_leads_to_the_page(client: httpx.AsyncClient, token: PageToken) -> None:
    once = token.address_for_once("http://127.0.0.1:7860/")
    led = await client.get(once)
    assert (led.status_code, led.headers["location"], led.headers["cache-control"]) == (303, f"{HERE}/", "no-store")
    assert (await client.get(once)).status_code == 403
    code = token.new_code()
    assert (await client.get(f"/t/{code}/config")).status_code == 403, "it opens the page alone"


@pytest.mark.parametrize(
    ("headers", "status"), [({"host": "example.org"}, 421), ({"origin": "http://127.0.0.1:7861"}, 403), ({}, 200)]
)
async def test_other_names_and_other_sites_are_refused(
    client: httpx.AsyncClient, headers: dict[str, str], status: int
) -> None:
    assert (await client.get(f"{HERE}/config", headers=headers)).status_code == status


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=https://example.org/?said",
        "/gradio_api/file=https%3A//example.org/",
        "/gradio_api/file=pyproject.toml",
        "/gradio_api/proxy=https://example.hf.space/",
        "/gradio_api/startup-events",
        "/gradio_api/call/chat",
        "/gradio_api/mcp/schema",
        "/docs",
    ],
)
async def test_what_the_page_does_not_ask_for_is_not_there(client: httpx.AsyncClient, path: str) -> None:
    for method in ("GET", "POST"):
        response = await client.request(method, f"{HERE}{path}")
        assert (response.status_code, response.text) == (404, "There is nothing here.")


async def test_a_file_of_this_machine_is_gradios_to_judge(client: httpx.AsyncClient) -> None:
    response = await client.get(f"{HERE}/gradio_api/file=/etc/hosts")
    assert (response.status_code, "File not allowed" in response.text) == (403, True)


async def test_the_environment_switches_on_no_service_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANALYTICS_ENABLED", "MCP_SERVER", "SSR_MODE", "RUN_HISTORY"):
        monkeypatch.setenv(f"GRADIO_{name}", "True")
    transport = httpx.ASGITransport(gradio_chat.create_app(FakeBackend(), None))
    config = (await httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1").get("/config")).json()
    services = ("analytics_enabled", "mcp_server", "pwa", "run_history")
    assert {name: config[name] for name in services} == dict.fromkeys(services, False)


def test_uploads_lie_where_nobody_else_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADIO_TEMP_DIR", raising=False)
    with gradio_chat._own_uploads():
        folder = Path(os.environ["GRADIO_TEMP_DIR"])
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "upload").write_text("mine")
    assert not folder.exists()
    assert "GRADIO_TEMP_DIR" not in os.environ
    monkeypatch.setenv("GRADIO_TEMP_DIR", "/chosen")
    with gradio_chat._own_uploads():
        assert os.environ["GRADIO_TEMP_DIR"] == "/chosen"
