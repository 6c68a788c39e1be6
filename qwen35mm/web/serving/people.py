"""Who is asking: the person at this machine, somebody who logged in, or a browser with a private cookie."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse

from qwen35mm.chat.turns import Person
from qwen35mm.server.guards import Receive, Scope, Send
from qwen35mm_preprocess.say import say

COOKIE = "qwen35mm"
_USER, _BROWSER = "user ", "browser "
_CALLING = " calling"
_TOKEN = re.compile(r"[0-9a-f]{32}")
# A year: a browser that comes back finds its conversations.
_MAX_AGE_S = 365 * 86400
WRONG_PASSWORDS_S = 600.0
# Where a password is asked for, and what is answered to a wrong one.
_WRONG = {"/login": 400, "/qwen35mm/password": 403}


class People:
    """Tells people apart.

    Args:
        shared: whether more than the person at this machine use the page. If not, all browsers are that one person's.
        username: the name that a request's cookies are logged in as, where there is a login.
        guests: whether those who aren't logged in may use the page, too.
        max_replies: a person's replies in progress at one time.
    """

    def __init__(
        self,
        *,
        shared: bool,
        username: Callable[[Mapping[str, str]], str | None] | None = None,
        guests: bool = False,
        max_replies: int = 4,
    ) -> None:
        self.shared = shared
        self._username = username
        self._guests = guests
        self._max_replies = max_replies
        self._seen_s: dict[str, float] = {}

    @property
    def need_login(self) -> bool:
        """Whether nobody gets in without a name and a password."""
        return self._username is not None and not self._guests

    def gone_for(self, seconds: float) -> list[str]:
        """Owners that were last seen longer ago; a page that is open is seen every minute."""
        now = time.monotonic()
        return [owner for owner, seen_s in list(self._seen_s.items()) if now - seen_s > seconds]

    def forget(self, owner: str) -> None:
        """Takes a person off the list of those that were seen."""
        self._seen_s.pop(owner, None)

    def person(self, cookies: Mapping[str, str], address: str = "") -> Person | None:
        """Whose request this is, by its cookies; None where it can't be told, or there is a login to pass first.

        Args:
            address: `address_of` it. Who isn't logged in is counted by it: anybody can have another cookie.
        """
        person = self._find(cookies)
        if person is None:
            return None
        self._seen_s[person.owner] = time.monotonic()
        return replace(person, account=address) if person.owner.startswith(_BROWSER) else person

    def asking(self, connection: HTTPConnection) -> Person | None:
        """`person` of a request."""
        return self.person(connection.cookies, address_of(connection))

    def calling(self, connection: HTTPConnection) -> Person | None:
        """Who calls without a page: what is theirs is apart from their page's. A program without cookies is the one of
        its address; None where there is a login to pass first."""
        person = self.asking(connection)
        if person is None:
            if self.need_login:
                return None
            address = address_of(connection)
            person = replace(
                self._one_of_many(f"{_BROWSER}{hashlib.sha256(address.encode()).hexdigest()}"), account=address
            )
        calling = replace(person, owner=f"{person.owner}{_CALLING}", account=person.account or person.owner)
        self._seen_s[calling.owner] = time.monotonic()
        return calling

    def _find(self, cookies: Mapping[str, str]) -> Person | None:
        if self._username is not None:
            name = self._username(cookies)
            if name is not None or not self._guests:
                return None if name is None else self._one_of_many(f"{_USER}{name}")
        elif not self.shared:
            return Person("local", None, self._max_replies)
        token = cookies.get(COOKIE, "")
        if not _TOKEN.fullmatch(token):
            return None
        # What is stored doesn't let anybody in.
        return self._one_of_many(f"{_BROWSER}{hashlib.sha256(token.encode()).hexdigest()[:32]}")

    def _one_of_many(self, owner: str) -> Person:
        return Person(owner, owner, self._max_replies)


def name_of(person: Person) -> str | None:
    """The name of who is logged in."""
    return person.owner.removeprefix(_USER) if person.owner.startswith(_USER) else None


def address_of(connection: HTTPConnection) -> str:
    """Where a request comes from. A network of IPv6 is one address: each customer of a provider has one at least.

    A Space's proxy says for whom it asks, behind whatever the client itself says; elsewhere nobody is believed that.
    """
    names = [connection.client.host] if connection.client else []
    if os.environ.get("SPACE_ID"):
        names = [*",".join(connection.headers.getlist("x-forwarded-for")).split(","), *names]
    found = []
    for name in reversed(names):
        with contextlib.suppress(ValueError):
            found.append(ipaddress.ip_address(name.strip()))
    # From the last on: proxies within a data centre have addresses of no public network.
    address = next((each for each in found if each.is_global), found[0] if found else None)
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False)
    return f"address {address}"


class WrongPasswords:
    """ASGI middleware that lets nobody guess passwords: after too many wrong ones an address waits.

    Args:
        most: wrong passwords of one address in `WRONG_PASSWORDS_S`.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], most: int) -> None:
        self._app = app
        self._most = most
        self._tried_s: dict[str, list[float]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wrong = _WRONG.get(scope.get("path", "").rstrip("/"))
        if scope["type"] != "http" or scope["method"] != "POST" or wrong is None:
            await self._app(scope, receive, send)
            return
        since_s = time.monotonic() - WRONG_PASSWORDS_S
        self._tried_s = {each: kept for each, old in self._tried_s.items() if (kept := [s for s in old if s > since_s])}
        tried_s = self._tried_s.setdefault(address_of(HTTPConnection(scope)), [])
        if len(tried_s) >= self._most:
            words = say(
                "{n} wrong passwords came from your address within {minutes} minutes: no more are tried. Wait that "
                "long, then try again.",
                n=len(tried_s),
                minutes=round(WRONG_PASSWORDS_S / 60),
            )
            refusal = {"error": {"message": words, "kind": "refused"}}
            await JSONResponse(refusal, status_code=429)(scope, receive, send)
            return
        # Each counts until it is known to be right: many may come at one time.
        tried_s.append(now_s := time.monotonic())

        async def send_and_count(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and message["status"] != wrong:
                tried_s.remove(now_s)
            await send(message)

        await self._app(scope, receive, send_and_count)


class PrivateCookie:
    """ASGI middleware that gives every browser a secret of its own with its first page."""

    def __init__(self, app: Callable[[Scope, Receive, Send], object]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _TOKEN.fullmatch(_cookie(scope)):
            await self._app(scope, receive, send)  # pyright: ignore[reportGeneralTypeIssues]
            return
        token = secrets.token_hex(16)
        header = set_cookie(COOKIE, token, max_age_s=_MAX_AGE_S)

        async def send_with_cookie(message):
            # Only with the page itself: requests beside it would each bring another one.
            if message["type"] == "http.response.start" and scope["path"] == "/":
                message = {**message, "headers": [*message.get("headers", []), (b"set-cookie", header)]}
            await send(message)

        await self._app(scope, receive, send_with_cookie)  # pyright: ignore[reportGeneralTypeIssues]


def _cookie(scope: Scope) -> str:
    # As the page's requests are read: http.cookies would stop at another site's odd cookie on the same host.
    return HTTPConnection(scope).cookies.get(COOKIE, "")


def set_cookie(name: str, value: str, *, max_age_s: int) -> bytes:
    """The header of a cookie that no script can read."""
    # A Space shows its page inside another site's, where browsers only keep partitioned cookies.
    where = "SameSite=None; Secure; Partitioned" if os.environ.get("SPACE_ID") else "SameSite=Lax"
    return f"{name}={value}; Path=/; Max-Age={max_age_s}; HttpOnly; {where}".encode()
