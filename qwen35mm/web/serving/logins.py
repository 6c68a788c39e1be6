"""Logging in and out, and changing one's password; a session is a cookie, and lasts as long as its password."""

from __future__ import annotations

import re
import secrets
import threading
import unicodedata
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response

from qwen35mm.chat.accounts import Accounts
from qwen35mm.errors import PromptError
from qwen35mm.pools import PASSWORDS
from qwen35mm.server.guards import Receive, Scope, Send
from qwen35mm.web.serving.people import set_cookie
from qwen35mm.web.serving.requests import HEADER, log_in_first, problem, read_body
from qwen35mm_preprocess.say import say

_COOKIE = "qwen35mm-login-"
_MAX_AGE_S = 30 * 86400
_MAX_SESSIONS = 100
_MAX_BODY_BYTES = 16_384
# What a page needs to ask for a name and a password.
_OPEN = re.compile(r"/|/login/?|/manifest\.json|/pwa_icon(/.*)?|/favicon\.ico|/qwen35mm/.*|/gradio_api/startup-events")


@dataclass(frozen=True)
class Session:
    """Somebody's in one browser; `stamp` is their password's."""

    name: str
    stamp: str


class Change(BaseModel):
    """Another password for who is logged in."""

    model_config = ConfigDict(strict=True)

    old: str
    new: str


class Logout(BaseModel):
    """Whether every browser is logged out, or this one."""

    model_config = ConfigDict(strict=True)

    everywhere: bool = False


class Logins:
    """Who is logged in.

    Args:
        accounts: who may.
        guests: whether others may use the page, too.
    """

    def __init__(self, accounts: Accounts, *, guests: bool = False) -> None:
        self.guests = guests
        self._accounts = accounts
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}

    def username(self, cookies: Mapping[str, str]) -> str | None:
        """Who is logged in by these cookies."""
        session = self._sessions.get(self._token(cookies))
        is_good = session is not None and self._accounts.stamp(session.name) == session.stamp
        return session.name if session is not None and is_good else None

    def describe(self, name: str | None) -> dict[str, Any]:
        """What a page needs to know; `name` is None for a guest."""
        return {"name": name, "can_change": self._accounts.can_change and name is not None}

    async def log_in(self, request: Request) -> Response:
        """`POST /login` with a form of `username` and `password`."""
        body = await read_body(request, _MAX_BODY_BYTES)

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async with Request(request.scope, receive).form(max_files=0, max_fields=8) as form:
            name, password = (str(form.get(each, "")) for each in ("username", "password"))
        name = unicodedata.normalize("NFC", name).strip()
        if not await PASSWORDS.run(self._accounts.check, name, password):
            return _wrong()
        return self._begun(request, name)

    async def log_out(self, request: Request) -> Response:
        """`POST .../logout`: ends the session, or all of this person's."""
        asked = await self._asked(request, Logout)
        token = self._token(request.cookies)
        session = self._sessions.get(token)
        with self._lock:
            for each, other in list(self._sessions.items()):
                if each == token or (asked.everywhere and session is not None and other.name == session.name):
                    del self._sessions[each]
        response = JSONResponse({})
        response.headers.append("set-cookie", set_cookie(_name(request), "", max_age_s=0).decode())
        return response

    async def change_password(self, request: Request) -> Response:
        """`POST .../password`: gives who is logged in another one, and ends their other sessions."""
        asked = await self._asked(request, Change)
        name = self.username(request.cookies)
        if name is None:
            return log_in_first()
        if not await PASSWORDS.run(self._accounts.change, name, asked.old, asked.new):
            # As a wrong one at the login, which is counted.
            return problem(say("The old password is wrong."), "wrong password", 403)
        with self._lock:
            self._sessions = {token: each for token, each in self._sessions.items() if each.name != name}
        return self._begun(request, name)

    def _token(self, cookies: Mapping[str, str]) -> str:
        """Of all that begin so: a browser has those of other ports, too."""
        return next((each for name, each in cookies.items() if name.startswith(_COOKIE) and each in self._sessions), "")

    async def _asked(self, request: Request, form: type[Any]) -> Any:
        if HEADER not in request.headers:
            raise PromptError(say("Only the page itself may ask for this."))
        try:
            return form.model_validate_json(await read_body(request, _MAX_BODY_BYTES) or b"{}")
        except ValidationError:
            raise PromptError(say("The request is damaged: it isn't JSON as expected.")) from None

    def _begun(self, request: Request, name: str) -> Response:
        stamp = self._accounts.stamp(name)
        if stamp is None:  # taken out at this moment
            return _wrong()
        token = secrets.token_urlsafe(32)
        with self._lock:
            mine = [each for each, session in self._sessions.items() if session.name == name]
            for each in mine[: len(mine) - _MAX_SESSIONS + 1]:
                del self._sessions[each]
            self._sessions[token] = Session(name, stamp)
        response = JSONResponse({"success": True})
        response.headers.append("set-cookie", set_cookie(_name(request), token, max_age_s=_MAX_AGE_S).decode())
        return response


class OnlyLoggedIn:
    """ASGI middleware that answers what is not the page's own, such as Gradio's routes, only to who is logged in."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], logins: Logins) -> None:
        self._app = app
        self._logins = logins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or _OPEN.fullmatch(scope["path"])
            or self._logins.username(HTTPConnection(scope).cookies) is not None
        ):
            await self._app(scope, receive, send)
        else:
            await log_in_first()(scope, receive, send)


def _name(connection: HTTPConnection) -> str:
    """The cookie's: cookies ignore ports, so it says the port."""
    port = re.search(r":(\d+)$", connection.headers.get("host", ""))
    return f"{_COOKIE}{port[1] if port else 80}"


def _wrong() -> Response:
    return problem(say("This name and this password don't let you in."), "wrong password", 400)
