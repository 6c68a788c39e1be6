"""Identifies who sends a request: the person at this machine, somebody who logged in, or a browser with its own key."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from dataclasses import replace

from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response

from qwen35mm.chat.replies.turns import Person
from qwen35mm.errors import NotFoundError
from qwen35mm.http.addresses import address_of
from qwen35mm.http.errors import HttpError
from qwen35mm.http.owner import Owner, read_beginning
from qwen35mm.http.sessions import PageToken, Tickets, key_of, name_of_key, new_key
from qwen35mm.web.serving.logins import Logins, is_of_login
from qwen35mm_preprocess.say import say

_USER, _BROWSER = "user ", "browser "
_CALLING = " calling"
_MAX_SEEN = 100_000


class People:
    """Identifies people. Used only in the event loop.

    Args:
        shared: whether several people use the page. If not, everybody who is let in counts as the same person.
        token: lets people in; None lets in everybody who reaches the page.
        logins: sessions of people, if there is a login.
        max_replies: most replies in progress for one person.
    """

    def __init__(
        self, *, shared: bool, token: PageToken | None = None, logins: Logins | None = None, max_replies: int = 4
    ) -> None:
        self.shared = shared
        self._owner = None if shared or logins else Owner(token)
        self._logins = logins
        self._max_replies = max_replies
        self._tickets = Tickets() if logins is None else logins.tickets
        self._seen_s: OrderedDict[str, float] = OrderedDict()

    def gone_for(self, seconds: float) -> list[str]:
        """Owners last seen more than `seconds` ago; an open page is seen every minute."""
        now = time.monotonic()
        return [owner for owner, seen_s in list(self._seen_s.items()) if now - seen_s > seconds]

    def forget(self, owner: str) -> None:
        """Removes a person from the list of those seen."""
        self._seen_s.pop(owner, None)

    async def begin(self, request: Request) -> Response:
        """`POST .../session`: gives a page without a key a new key, and a ticket for its files. No key if the login
        gives one, or if none is needed."""
        if self._owner is not None:
            return await self._owner.begin(request)
        if (await read_beginning(request)).once is not None:
            # Any link may contain `once`; the page keeps its key then.
            raise NotFoundError(say("There is no such request."))
        has_guests = self._logins is None or self._logins.guests
        return JSONResponse(self._tickets.opened(new_key()) if has_guests else {"key": None, "ticket": None})

    def asking(self, connection: HTTPConnection) -> Person:
        """The person whose page sends a request. Guests count by address, since anybody can get another key.

        Raises:
            HttpError: the page is unknown, or needs a token or a login first.
        """
        if self._owner is None:
            return self._seen(self._one_by_key(connection))
        self._owner.check(connection, takes_tickets=True)
        return self._seen(self._local())

    def calling(self, connection: HTTPConnection) -> Person:
        """The person who calls without a page, with data apart from their page's. Without a login, an address is a
        person.

        Raises:
            HttpError: the call needs a token or a login first.
        """
        user = None if self._logins is None else self._logins.calling(connection)
        if self._owner is not None:
            self._owner.check(connection)
            person = self._local()
        elif user is not None:
            person = self._one_of_many(f"{_USER}{user}")
        elif self._logins is not None and not self._logins.guests:
            raise log_in_first()
        else:
            address = address_of(connection)
            digest = hashlib.sha256(address.encode()).hexdigest()
            person = replace(self._one_of_many(f"{_BROWSER}{digest}"), account=address)
        calling = replace(person, owner=f"{person.owner}{_CALLING}", account=person.account or person.owner)
        return self._seen(calling)

    def _seen(self, person: Person) -> Person:
        self._seen_s[person.owner] = time.monotonic()
        self._seen_s.move_to_end(person.owner)
        if len(self._seen_s) > _MAX_SEEN:
            self._seen_s.popitem(last=False)
        return person

    def _local(self) -> Person:
        return Person("local", None, self._max_replies)

    def _one_by_key(self, connection: HTTPConnection) -> Person:
        key = key_of(connection)
        if key is not None:
            self._tickets.of(key)
        name = self._tickets.name(connection) if key is None else name_of_key(key)
        user = None if self._logins is None else self._logins.user(name)
        if user is not None:
            return self._one_of_many(f"{_USER}{user}")
        if self._logins is not None and (not self._logins.guests or is_of_login(key)):
            raise log_in_first()
        if name is None:
            words = say("Reload the page: this browser is no longer known here.")
            raise HttpError(401, words, "unknown person")
        return replace(self._one_of_many(f"{_BROWSER}{name}"), account=address_of(connection))

    def _one_of_many(self, owner: str) -> Person:
        return Person(owner, owner, self._max_replies)


def name_of(person: Person) -> str | None:
    """The name of a person who is logged in; None for others."""
    return person.owner.removeprefix(_USER) if person.owner.startswith(_USER) else None


def owner_named(name: str) -> str:
    """Who a person with this name is in the store, once they are logged in."""
    return f"{_USER}{name}"


def log_in_first() -> HttpError:
    """The error for a request without a login."""
    return HttpError(401, say("Log in first: reload the page."), "login")
