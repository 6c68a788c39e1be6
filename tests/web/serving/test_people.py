from __future__ import annotations

from typing import Any

import pytest

from qwen35mm.http.errors import HttpError
from qwen35mm.http.sessions import PageToken
from qwen35mm.web.serving.people import People, Person
from tests.web.serving.page_client import showing

KEY = "0123456789abcdef" * 2


class Named:
    """Logins: a page's key, or a program's cookie, is the name of who has it."""

    def __init__(self, guests: bool = False) -> None:
        from qwen35mm.http.sessions import Tickets, name_of_key

        self.guests, self.tickets, self._ann = guests, Tickets(), name_of_key("a" * 32)

    def user(self, key_name: str | None) -> str | None:
        return "ann" if key_name == self._ann else None

    def calling(self, connection: Any) -> str | None:
        return connection.cookies.get("login")


def test_one_person_has_the_machine() -> None:
    people = People(shared=False)
    assert people.asking(showing("1")) == people.asking(showing(KEY)) == Person("local", None, 4)


def test_the_token_lets_in_its_page_and_programs() -> None:
    token = PageToken("my-long-token")
    people = People(shared=False, token=token)
    assert people.asking(showing(token.key)) == Person("local", None, 4)
    assert people.asking(showing("1", authorization="Bearer my-long-token")) == Person("local", None, 4)
    for key, more in ((KEY, {}), ("my-long-token", {}), ("1", {"authorization": "Bearer another"})):
        with pytest.raises(HttpError) as refused:
            people.asking(showing(key, **more))
        assert (refused.value.status, refused.value.code) == (403, "token")


def test_browsers_are_told_apart_by_their_keys() -> None:
    people = People(shared=True, max_replies=1)
    mine, theirs = people.asking(showing(KEY)), people.asking(showing("f" * 32))
    assert mine == people.asking(showing(KEY)) == Person(mine.owner, mine.owner, 1)
    assert mine.owner != theirs.owner
    assert KEY not in mine.owner
    for key in ("", "short", KEY.upper(), f"{KEY}x", "../" * 11):
        with pytest.raises(HttpError, match="Reload the page"):
            people.asking(showing(key))


@pytest.mark.parametrize("shared", [False, True])
def test_people_who_log_in_are_told_apart_by_their_names(shared: bool) -> None:
    people = People(shared=shared, logins=Named())  # pyright: ignore[reportArgumentType]
    with pytest.raises(HttpError, match="Log in first"):
        people.asking(showing(KEY))
    assert people.asking(showing("a" * 32)) == Person("user ann", "user ann", 4)
    with pytest.raises(HttpError, match="Log in first"):
        people.calling(showing("1"))
    assert people.calling(showing("1", cookie="login=bob")).owner == "user bob calling"


def test_a_programs_cookie_opens_no_page() -> None:
    """Browsers hand it to every port of a host."""
    people = People(shared=True, logins=Named(guests=True))  # pyright: ignore[reportArgumentType]
    with pytest.raises(HttpError, match="Reload the page"):
        people.asking(showing("1", cookie="login=ann"))


def test_who_was_not_seen_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("qwen35mm.web.serving.people.time.monotonic", lambda: now_s)
    people = People(shared=True)
    old = people.asking(showing(KEY))
    people.asking(showing("f" * 32))
    now_s = 100.0
    people.asking(showing("f" * 32))
    assert people.gone_for(50.0) == [old.owner]
    people.forget(old.owner)
    assert people.gone_for(50.0) == []
