from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from qwen35mm.web.serving.people import COOKIE, People, Person, PrivateCookie

TOKEN = "0123456789abcdef" * 2


def test_one_person_has_the_machine() -> None:
    people = People(shared=False)
    assert people.person({}) == people.person({COOKIE: TOKEN}) == Person("local", None, 4)


def test_browsers_are_told_apart_by_their_cookies() -> None:
    people = People(shared=True, max_replies=1)
    mine, theirs = people.person({COOKIE: TOKEN}), people.person({COOKIE: "f" * 32})
    assert mine is not None
    assert theirs is not None
    assert mine == people.person({COOKIE: TOKEN}) == Person(mine.owner, mine.owner, 1)
    assert mine.owner != theirs.owner
    assert TOKEN not in mine.owner
    for token in ("", "short", TOKEN.upper(), f"{TOKEN}\n", f"{TOKEN}0", "../" * 11):
        assert people.person({COOKIE: token}) is None


@pytest.mark.parametrize("shared", [False, True])
def test_people_who_log_in_are_told_apart_by_their_names(shared: bool) -> None:
    people = People(shared=shared, username=lambda cookies: cookies.get("login"))
    assert people.person({COOKIE: TOKEN}) is None
    assert people.person({"login": "ann"}) == Person("user ann", "user ann", 4)
    assert people.person({"login": "local"}) != Person("local", None, 4)


def test_who_was_not_seen_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("qwen35mm.web.serving.people.time.monotonic", lambda: now_s)
    people = People(shared=True)
    old, new = people.person({COOKIE: TOKEN}), people.person({COOKIE: "f" * 32})
    assert old is not None
    assert new is not None
    now_s = 100.0
    people.person({COOKIE: "f" * 32})
    assert people.gone_for(50.0) == [old.owner]
    people.forget(old.owner)
    assert people.gone_for(50.0) == []


@pytest.fixture
def client() -> httpx.AsyncClient:
    async def whoami(request: Request) -> PlainTextResponse:
        return PlainTextResponse(request.cookies.get(COOKIE, "nobody"))

    app: Any = Starlette(routes=[Route("/", whoami), Route("/other", whoami)], middleware=[Middleware(PrivateCookie)])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_a_browser_gets_a_cookie_with_its_first_page(client: httpx.AsyncClient) -> None:
    assert "set-cookie" not in (await client.get("/other")).headers
    header = (await client.get("/")).headers["set-cookie"]
    assert re.fullmatch(rf"{COOKIE}=[0-9a-f]{{32}}; Path=/; Max-Age=31536000; HttpOnly; SameSite=Lax", header)
    again = await client.get("/")
    assert "set-cookie" not in again.headers
    assert again.text == header[len(COOKIE) + 1 :].partition(";")[0]


@pytest.mark.parametrize("other", ['odd={"a": 1, "b"}', "a[b]=c", "=x", "path=/", 'quoted="a;b'])
async def test_another_site_s_odd_cookie_costs_nobody_the_own(client: httpx.AsyncClient, other: str) -> None:
    response = await client.get("/", headers={"cookie": f"{other}; {COOKIE}={TOKEN}"})
    assert response.text == TOKEN
    assert "set-cookie" not in response.headers


async def test_a_made_up_cookie_is_replaced(client: httpx.AsyncClient) -> None:
    response = await client.get("/", headers={"cookie": f"{COOKIE}=admin"})
    assert f"{COOKIE}=" in response.headers["set-cookie"]


async def test_inside_a_space_the_cookie_is_partitioned(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPACE_ID", "someone/something")
    header = (await client.get("/")).headers["set-cookie"]
    assert header.endswith("; HttpOnly; SameSite=None; Secure; Partitioned")
