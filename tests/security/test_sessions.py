"""What a page was given opens that page alone. There are no cookies: a browser sends them to every port of a host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.security.fronts import Front, Name, started

PAGES: tuple[Name, ...] = ("chat", "review")
# Where a page asks for its key; it shows the code of the address that opened it.
SESSION: dict[Name, str] = {"chat": "/qwen35mm/session", "review": "/session"}
FIRST = {"x-qwen35mm": "1"}


@pytest.fixture(scope="module", params=PAGES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Front, Front]]:
    """Two of one kind on one machine."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(started(request.param, tmp_path_factory.mktemp("one"))) for _ in "ab")
        yield first, second


def token_of(front: Front) -> str:
    return front.headers["authorization"].removeprefix("Bearer ")


def opening(front: Front) -> httpx.Response:
    """What a browser is answered at the address that the program has written."""
    with front.stranger() as browser:
        answer = browser.get(f"/t/{token_of(front)}/")
    assert answer.status_code == 303
    return answer


def opened(front: Front) -> dict[str, Any]:
    """The key and the ticket of a page that was opened so."""
    code = opening(front).headers["location"].partition("#once=")[2]
    with front.stranger(headers=FIRST) as browser:
        answer = browser.post(SESSION[front.name], json={"once": code})
        assert answer.status_code == 200, answer.text
        assert browser.post(SESSION[front.name], json={"once": code}).status_code == 403, "a code is good for once"
    return answer.json()


def statuses(front: Front, headers: dict[str, str]) -> set[int]:
    """Of the page's own requests, and of a program's where it answers some."""
    with front.stranger(headers={**FIRST, **headers}) as client:
        found = {front.ask(client).status_code}
        if front.name == "chat":
            found.add(client.get("/v1/models").status_code)
    return found


def test_a_key_opens_the_page_that_gave_it_and_no_other(pair: tuple[Front, Front]) -> None:
    first, second = pair
    keys = [opened(front)["key"] for front in pair]
    assert keys[0] != keys[1]
    for front, own, other in ((first, *keys), (second, *reversed(keys))):
        with front.stranger(headers={"x-qwen35mm": own}) as client:
            assert front.ask(client).status_code == 200
        for name in ("x-qwen35mm", "x-api-key"):
            assert statuses(front, {name: other}) <= {401, 403}
        assert statuses(front, {"authorization": f"Bearer {other}"}) <= {401, 403}


def test_no_answer_sets_a_cookie_or_holds_the_token(pair: tuple[Front, Front]) -> None:
    for front in pair:
        token = token_of(front)
        answers = [opening(front)]
        with front.client() as client, front.stranger() as stranger:
            answers += [each.get(path) for each in (client, stranger) for path in ("/", f"/?token={token}", "/nothing")]
            assert "set-cookie" not in front.ask(client).headers
        for answer in answers:
            assert "set-cookie" not in answer.headers
            assert token not in answer.text
            assert token not in str(answer.headers.get("location"))
            assert answer.headers["referrer-policy"] == "no-referrer"


def test_neither_key_nor_ticket_is_the_token(pair: tuple[Front, Front]) -> None:
    """A page keeps its key in its storage; the token is a key for programs as well."""
    for front in pair:
        for value in opened(front).values():
            assert token_of(front) not in value
            assert statuses(front, {"authorization": f"Bearer {value}"}) <= {401, 403}
            assert statuses(front, {"x-api-key": value}) <= {401, 403}
            with front.stranger() as client:
                assert client.get("/", params={"token": value}).status_code == 403
                assert client.get(f"/t/{value}/").status_code == 403


def test_a_ticket_opens_files_alone(pair: tuple[Front, Front]) -> None:
    """It stands in addresses, which others may see."""
    for front in pair:
        ticket = opened(front)["ticket"]
        assert statuses(front, {"x-qwen35mm": ticket}) <= {401, 403}
        with front.stranger(headers=FIRST, params={"ticket": ticket}) as client:
            assert front.ask(client).status_code == 403
            assert client.post(SESSION[front.name], json={}).status_code == 403


def test_a_strangers_page_gives_each_browser_a_key_of_its_own(tmp_path: Path) -> None:
    """Where strangers share a page, a key is all that somebody's chats are kept by."""
    with started("chat", tmp_path, "--host", "127.0.0.1", SPACE_ID="ann/chat") as front:
        keys = []
        for _ in range(2):
            with front.stranger(headers=FIRST) as browser:
                answer = browser.post(SESSION["chat"], json={})
            assert "set-cookie" not in answer.headers
            keys.append(answer.json()["key"])
            assert len(set(keys[-1])) > 5
        assert keys[0] != keys[1]
