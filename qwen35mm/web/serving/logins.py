"""Login, logout and password changes. A session lasts as long as its password."""

from __future__ import annotations

import re
import threading
import time
import unicodedata
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import anyio
from pydantic import BaseModel, ConfigDict, TypeAdapter
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response

from qwen35mm.chat.accounts import Accounts
from qwen35mm.errors import PromptError
from qwen35mm.http.addresses import address_of
from qwen35mm.http.bodies import as_body, read_bytes
from qwen35mm.http.errors import HttpError
from qwen35mm.http.requests import problem, read_json
from qwen35mm.http.sessions import HEADER, Tickets, key_of, name_of_key, new_key
from qwen35mm.pools import PASSWORDS
from qwen35mm_preprocess.say import say

WRONG_PASSWORDS_S = 600.0
# An account allows this many times as many wrong passwords, from everywhere, as one address.
_OF_ACCOUNT = 10
_COOKIE = "qwen35mm-login-"
_MAX_AGE_S = 30 * 86400
_MAX_SESSIONS = 100
_MAX_BODY_BYTES = 16_384
_MAX_KNOWN = 10_000


@dataclass(frozen=True)
class Session:
    """One browser's or program's session. `stamp` identifies the password that it was opened with."""

    name: str
    stamp: str
    is_page: bool


class Change(BaseModel):
    """A new password for the person who is logged in."""

    model_config = ConfigDict(strict=True)

    old: str
    new: str


class Logout(BaseModel):
    """Whether to log out every browser, or only this one."""

    model_config = ConfigDict(strict=True)

    everywhere: bool = False


_CHANGE, _LOGOUT = TypeAdapter(Change), TypeAdapter(Logout)


class Guesses:
    """Prevents guessing of passwords. Used only in the event loop.

    After too many wrong passwords an address has to wait. So does an account, but not for addresses that have logged in
    to it before.

    Args:
        most: most wrong passwords from one address in `WRONG_PASSWORDS_S`.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._wrong_s: OrderedDict[str, list[float]] = OrderedDict()
        self._turns: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()

    async def check(self, connection: HTTPConnection, name: str, matches: Callable[[], bool]) -> bool:
        """Whether a password is right. Checks those of one address one after the other, so that right ones don't count.

        Args:
            matches: checks the password; called in a thread.

        Raises:
            HttpError: there were too many wrong passwords.
        """
        address, account = address_of(connection), f"account {name_of_key(name)}"
        turn = self._turns.setdefault(address, anyio.Lock())
        async with turn:
            self._refuse(address, self._most, say("your address"))
            if (account, address) not in self._known:
                self._refuse(account, self._most * _OF_ACCOUNT, say("many addresses for this name"))
            is_right = await PASSWORDS.run(matches)
            if is_right:
                self._known[account, address] = None
                if len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
            else:
                for each in (address, account):
                    self._wrong_s.setdefault(each, []).append(time.monotonic())
                    self._wrong_s.move_to_end(each)
                while len(self._wrong_s) > _MAX_KNOWN:
                    self._wrong_s.popitem(last=False)
            return is_right

    def _refuse(self, who: str, most: int, origin: Any) -> None:
        since_s = time.monotonic() - WRONG_PASSWORDS_S
        recent = [wrong_s for wrong_s in self._wrong_s.pop(who, ()) if wrong_s > since_s]
        if recent:
            self._wrong_s[who] = recent
        num_wrong = len(recent)
        if num_wrong >= most:
            words = say(
                "{n} wrong passwords came from {origin} within {minutes} minutes, so no more are tried. Wait "
                "that long, then try again.",
                n=num_wrong,
                origin=origin,
                minutes=round(WRONG_PASSWORDS_S / 60),
            )
            raise HttpError(429, words, "refused")


class Logins:
    """The sessions of people who are logged in.

    Args:
        accounts: who may log in.
        guests: whether others may use the page, too.
        wrong_passwords: see `Guesses`.
    """

    def __init__(self, accounts: Accounts, *, guests: bool = False, wrong_passwords: int = 100) -> None:
        self.guests = guests
        self._accounts = accounts
        self._guesses = Guesses(wrong_passwords)
        self._lock = threading.Lock()
        # By the names of the keys.
        self._sessions: dict[str, Session] = {}
        self.tickets = Tickets()

    def user(self, key_name: str | None) -> str | None:
        """The person who is logged in on the page whose key has this name."""
        session = self._sessions.get(key_name or "")
        return session.name if session is not None and session.is_page and self._is_good(session) else None

    def calling(self, connection: HTTPConnection) -> str | None:
        """The person who is logged in by a program's cookie or a page's key. The cookie doesn't open the page, since
        browsers send cookies to every port of a host."""
        cookies = (value for name, value in connection.cookies.items() if name.startswith(_COOKIE))
        for key in filter(None, (key_of(connection), *cookies)):
            session = self._sessions.get(name_of_key(key))
            if session is not None and self._is_good(session):
                return session.name
        return None

    def describe(self, name: str | None) -> dict[str, Any]:
        """A person's account for the page; `name` is None for a guest."""
        return {"name": name, "can_change": self._accounts.can_change and name is not None}

    async def log_in(self, request: Request) -> Response:
        """`POST /login` with `username` and `password` as a form: gives a page a key, and a program a cookie."""
        body = as_body(bytes(await read_bytes(request, _MAX_BODY_BYTES)))
        async with Request(request.scope, body).form(max_files=0, max_fields=8) as form:
            name, password = (str(form.get(each, "")) for each in ("username", "password"))
        name = unicodedata.normalize("NFC", name).strip()
        if not await self._guesses.check(request, name, lambda: self._accounts.check(name, password)):
            return _wrong()
        return self._begun(request, name)

    async def log_out(self, request: Request) -> Response:
        """`POST .../logout`: ends the session, or all of this person's."""
        asked = await read_json(_from_page(request), _LOGOUT, _MAX_BODY_BYTES)
        key_name = name_of_key(key_of(request) or "")
        session = self._sessions.get(key_name)
        with self._lock:
            for each, other in list(self._sessions.items()):
                if each == key_name or (asked.everywhere and session is not None and other.name == session.name):
                    del self._sessions[each]
        # Others may use this browser, which caches pictures.
        return JSONResponse({}, headers={"clear-site-data": '"cache"'})

    async def change_password(self, request: Request) -> Response:
        """`POST .../password`: changes the password of the person who is logged in, and ends their other sessions."""
        asked = await read_json(_from_page(request), _CHANGE, _MAX_BODY_BYTES)
        name = self.user(name_of_key(key_of(request) or ""))
        if name is None:
            raise HttpError(401, say("Log in first: reload the page."), "login")
        if not await self._guesses.check(request, name, lambda: self._accounts.change(name, asked.old, asked.new)):
            return problem(say("The old password is wrong."), "wrong password", 403)
        with self._lock:
            self._sessions = {key: each for key, each in self._sessions.items() if each.name != name}
        return self._begun(request, name)

    def _is_good(self, session: Session) -> bool:
        return self._accounts.stamp(session.name) == session.stamp

    def _begun(self, request: Request, name: str) -> Response:
        stamp = self._accounts.stamp(name)
        if stamp is None:  # removed at this moment
            return _wrong()
        # Longer than a guest's key, so that it isn't taken for one after its session ends.
        key, is_page = new_key() + new_key(), HEADER in request.headers
        with self._lock:
            mine = [each for each, session in self._sessions.items() if session.name == name]
            for each in mine[: len(mine) - _MAX_SESSIONS + 1]:
                del self._sessions[each]
            self._sessions[name_of_key(key)] = Session(name, stamp, is_page)
        if is_page:
            return JSONResponse({"success": True, **self.tickets.opened(key)}, headers={"cache-control": "no-store"})
        response = JSONResponse({"success": True})
        safely = "; Secure" if request.url.scheme == "https" else ""
        cookie = f"{_cookie_name(request)}={key}; Path=/; Max-Age={_MAX_AGE_S}; HttpOnly; SameSite=Strict{safely}"
        response.headers.append("set-cookie", cookie)
        return response


def is_of_login(key: str | None) -> bool:
    """Whether a key comes from a login."""
    return key is not None and len(key) == len(new_key()) * 2


def _from_page(request: Request) -> Request:
    if HEADER not in request.headers:
        raise PromptError(say("Only the page itself can request this."))
    return request


def _cookie_name(connection: HTTPConnection) -> str:
    """The name of the cookie. Includes the port, since cookies ignore it."""
    port = re.search(r":(\d+)$", connection.headers.get("host", ""))
    return f"{_COOKIE}{port[1] if port else 80}"


def _wrong() -> Response:
    return problem(say("Wrong name or password."), "wrong password", 400)
