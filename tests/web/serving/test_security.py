from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from qwen35mm.web.serving.security import CONTENT_SECURITY_POLICY, OnlyThisMachine, SecurityHeaders


def client_of(*middleware: Any) -> httpx.AsyncClient:
    async def page(request: Request) -> PlainTextResponse:
        return PlainTextResponse("here")

    async def strict(request: Request) -> PlainTextResponse:
        return PlainTextResponse("here", headers={"Content-Security-Policy": "default-src 'none'"})

    app: Any = Starlette(
        routes=[Route("/", page), Route("/strict", strict)], middleware=[Middleware(each) for each in middleware]
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:7860", "localhost", "LocalHost:80", "[::1]", "[::1]:7860", "127.8.9.10:1"]
)
async def test_the_machine_s_own_names_are_answered(host: str) -> None:
    response = await client_of(OnlyThisMachine).get("/", headers={"host": host})
    assert (response.status_code, response.text) == (200, "here")


@pytest.mark.parametrize(
    "host",
    [
        "example.org",
        "127.example.org",
        "127.0.0.1.example.org:7860",
        "localhost.example.org",
        "127.0.0.1:7860.example.org",
        "192.168.1.7:7860",
        "0.0.0.0",
        "[::2]",
        "127.1",
        "",
        "user@127.0.0.1.example.org",
    ],
)
async def test_a_name_that_was_pointed_here_is_not_answered(host: str) -> None:
    response = await client_of(OnlyThisMachine).get("/", headers={"host": host})
    assert (response.status_code, response.text) == (421, "This page is for this machine: http://127.0.0.1")


@pytest.mark.parametrize("hosts", [[], ["127.0.0.1", "example.org"]])
async def test_one_name_is_expected(hosts: list[str]) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("it was let through")

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", host.encode()) for host in hosts]
    await OnlyThisMachine(app)({"type": "http", "headers": headers}, None, send)  # pyright: ignore[reportArgumentType]
    assert sent[0]["status"] == 421


async def test_every_answer_has_the_headers_but_keeps_a_stricter_policy() -> None:
    client = client_of(SecurityHeaders)
    headers = (await client.get("/")).headers
    assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert (headers["referrer-policy"], headers["x-content-type-options"]) == ("no-referrer", "nosniff")
    assert (await client.get("/strict")).headers.get_list("content-security-policy") == ["default-src 'none'"]
    assert (await client.get("/missing")).headers["content-security-policy"] == CONTENT_SECURITY_POLICY
