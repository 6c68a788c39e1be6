"""What a browser was given is of use for the front that gave it, and for no other: cookies don't know of ports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.security.fronts import Front, Name, started

TOKENS: tuple[Name, ...] = ("chat", "review")


@pytest.fixture(scope="module", params=TOKENS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Front, Front]]:
    """Two of one kind on one machine."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(started(request.param, tmp_path_factory.mktemp("one"))) for _ in "ab")
        yield first, second


def token_of(front: Front) -> str:
    return front.headers["authorization"].removeprefix("Bearer ")


def opened(front: Front) -> httpx.Cookies:
    """What a browser has that opened the page by its address."""
    with front.stranger(follow_redirects=True) as browser:
        assert browser.get(f"/?token={token_of(front)}").status_code == 200
        return browser.cookies


def statuses(front: Front, **how: dict[str, str]) -> set[int]:
    """Of the page's own requests, and of a program's where it answers some."""
    with front.stranger(
        headers={"x-qwen35mm": "1", **how.get("headers", {})}, cookies=how.get("cookies", {})
    ) as client:
        found = {front.ask(client).status_code, client.get("/").status_code}
        if front.name == "chat":
            found.add(client.get("/v1/models").status_code)
    return found


def test_a_cookie_opens_the_page_that_gave_it(pair: tuple[Front, Front]) -> None:
    for front in pair:
        with front.stranger(headers={"x-qwen35mm": "1"}, cookies=opened(front)) as browser:
            assert front.ask(browser).status_code == 200


def test_what_a_neighbour_on_another_port_sees_is_not_the_token(pair: tuple[Front, Front]) -> None:
    """A browser sends a cookie to every port of its host. So it must not be the token, which is a key for programs."""
    for front in pair:
        for value in opened(front).values():
            assert token_of(front) not in value
            assert statuses(front, headers={"authorization": f"Bearer {value}"}) <= {401, 403}
            assert statuses(front, headers={"x-api-key": value}) <= {401, 403}
            with front.stranger() as client:
                assert client.get("/", params={"token": value}).status_code == 403


def test_a_cookie_of_one_page_opens_no_other(pair: tuple[Front, Front]) -> None:
    first, second = pair
    for name, value in opened(first).items():
        for named in (name, re.sub(r"\d+$", str(second.port), name)):
            assert statuses(second, cookies={named: value}) <= {401, 403}


def test_every_cookie_says_its_port(pair: tuple[Front, Front]) -> None:
    for front in pair:
        assert {name for name in opened(front) if str(front.port) not in name} == set()


def test_a_private_cookie_says_its_port_and_is_for_no_other_page(tmp_path: Path) -> None:
    """Where strangers share a page, a cookie is all that somebody's chats are kept by."""
    with started("chat", tmp_path, "--host", "127.0.0.1", SPACE_ID="ann/chat") as front:
        with front.stranger() as browser:
            header = browser.get("/").headers["set-cookie"]
        assert "HttpOnly" in header
        assert str(front.port) in header.partition("=")[0]
