from __future__ import annotations

from typing import Any

import pytest

from qwen35mm.http.errors import HttpError
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


def test_browsers_are_told_apart_by_their_keys() -> None:
    people = People(shared=True, max_replies=1)
    mine, theirs = people.asking(showing(KEY)), people.asking(showing("f" * 32))
    assert mine == people.asking(showing(KEY)) == Person(mine.owner, mine.owner, 1)
    assert mine.owner != theirs.owner
    assert KEY not in mine.owner
    for key in ("", "short", KEY.upper(), f"{KEY}x", "../" * 11):
        with pytest.raises(HttpError, match="Reload the page"):
            people.asking(showing(key))


def test_a_program_has_data_of_its_own() -> None:
    people = People(shared=True, logins=Named())  # pyright: ignore[reportArgumentType]
    assert people.calling(showing("1", cookie="login=bob")).owner == "user bob calling"
    with pytest.raises(HttpError, match="Log in first"):
        people.calling(showing("1"))


def test_a_programs_cookie_opens_no_page() -> None:
    """Browsers hand it to every port of a host."""
    people = People(shared=True, logins=Named(guests=True))  # pyright: ignore[reportArgumentType]
    with pytest.raises(HttpError, match="Reload the page"):
        people.asking(showing("1", cookie="login=ann"))
