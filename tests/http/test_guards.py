from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from qwen35mm.http.guards import CONTENT_SECURITY_POLICY, OnlyTheseHosts, SameOrigin, SecurityHeaders


def client_of(*middleware: Any) -> httpx.AsyncClient:
    async def page(request: Request) -> PlainTextResponse:
        return PlainTextResponse("here")

    async def strict(request: Request) -> PlainTextResponse:
        return PlainTextResponse("here", headers={"Content-Security-Policy": "default-src 'none'"})

    app: Any = Starlette(
        routes=[Route("/", page, methods=["GET", "POST"]), Route("/strict", strict, methods=["GET", "POST"])],
        middleware=[Middleware(each) for each in middleware],
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.mark.parametrize("host", ["127.0.0.1", "LocalHost:80", "[::1]:7860", "127.8.9.10:1"])
async def test_the_machine_s_own_names_are_answered(host: str) -> None:
    response = await client_of(OnlyTheseHosts).get("/", headers={"host": host})
    assert (response.status_code, response.text) == (200, "here")


@pytest.mark.parametrize(
    "host",
    [
        "example.org",
        "127.0.0.1.example.org:7860",
        "localhost.example.org",
        "127.0.0.1:7860.example.org",
        "0.0.0.0",
        "[::2]",
        "127.1",
        "",
    ],
)
async def test_a_name_that_was_pointed_here_is_not_answered(host: str) -> None:
    response = await client_of(OnlyTheseHosts).get("/", headers={"host": host})
    assert response.status_code == 421
    assert response.text.startswith("This isn't the name of this program")


@pytest.mark.parametrize("hosts", [[], ["127.0.0.1", "example.org"]])
async def test_one_name_is_expected(hosts: list[str]) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("it was let through")

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", host.encode()) for host in hosts]
    await OnlyTheseHosts(app)({"type": "http", "headers": headers}, None, send)  # pyright: ignore[reportArgumentType]
    assert sent[0]["status"] == 421


LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        # What no browser sends.
        ("GET", "/strict", {}, 200),
        # The page itself, and an address that was typed.
        ("POST", "/strict", {"sec-fetch-site": "same-origin", "origin": "http://chat.example:7860"}, 200),
        ("GET", "/strict", {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, 200),
        ("POST", "/strict", {"sec-fetch-site": "same-origin", "origin": "https://behind.a.proxy"}, 200),
        # A link elsewhere, a Space's frame; but no form.
        ("GET", "/", LINK, 200),
        ("GET", "/", {**LINK, "sec-fetch-site": "same-site", "sec-fetch-dest": "iframe"}, 200),
        ("POST", "/", {**LINK, "origin": "https://elsewhere.example"}, 403),
        ("GET", "/strict", LINK, 403),
        # Another site, another port.
        ("GET", "/", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}, 403),
        ("POST", "/strict", {"sec-fetch-site": "same-site", "origin": "http://chat.example:7861"}, 403),
        ("GET", "/strict", {"sec-fetch-site": "made up"}, 403),
        # Old browsers, and plain HTTP, say only the origin.
        ("POST", "/strict", {"origin": "http://chat.example:7860"}, 200),
        ("POST", "/strict", {"origin": "https://CHAT.example", "host": "chat.example:443"}, 200),
        ("POST", "/strict", {"origin": "https://chat.example", "x-forwarded-host": "chat.example, inner"}, 200),
        ("POST", "/strict", {"origin": "http://chat.example:7861"}, 403),
        ("POST", "/strict", {"origin": "http://elsewhere.example:7860"}, 403),
        ("POST", "/strict", {"origin": "null"}, 403),
        ("POST", "/strict", {"origin": "http://chat.example:port"}, 403),
        ("GET", "/strict", {"origin": "http://[", "host": ""}, 403),
    ],
)
async def test_only_the_page_s_own_origin_is_answered(
    method: str, path: str, headers: dict[str, str], status: int
) -> None:
    client = client_of(SameOrigin)
    response = await client.request(method, path, headers={"host": "chat.example:7860", **headers})
    assert response.status_code == status


async def test_every_answer_has_the_headers_but_keeps_a_stricter_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(SecurityHeaders)
    headers = (await client.get("/")).headers
    policy = f"{CONTENT_SECURITY_POLICY}; frame-ancestors 'none'"
    assert headers["content-security-policy"] == policy
    assert (headers["referrer-policy"], headers["x-content-type-options"]) == ("no-referrer", "nosniff")
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert (await client.get("/strict")).headers.get_list("content-security-policy") == ["default-src 'none'"]
    assert (await client.get("/missing")).headers["content-security-policy"] == policy
    monkeypatch.setenv("SPACE_ID", "someone/something")
    framed = (await client_of(SecurityHeaders).get("/")).headers["content-security-policy"]
    assert framed.endswith("; frame-ancestors https://huggingface.co https://*.huggingface.co")
