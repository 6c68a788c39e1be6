"""The token in the page's address: other users of the machine reach its port too, and must not get in.

A browser brings it once and has a cookie from then on. Cookies ignore ports, so its name says the port.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qsl, urlencode

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response

from qwen35mm.server.guards import Receive, Scope, Send

PARAMETER = "token"
_REFUSAL = (
    "This page is for the person who started it. Open the whole address that the program has written in its "
    "terminal, with the token at its end."
)
# Gradio asks itself for it when it has started; it says nothing.
_OPEN_PATH = "/gradio_api/startup-events"


class PageToken:
    """What lets a browser in.

    Args:
        value: the token; None makes one.

    Attributes:
        value: the token.
    """

    def __init__(self, value: str | None = None) -> None:
        self.value = value or secrets.token_urlsafe(24)
        self._once: set[str] = set()

    def address(self, url: str) -> str:
        """The page's address with the token."""
        return f"{url}?{urlencode({PARAMETER: self.value})}"

    def address_for_once(self, url: str) -> str:
        """An address that lets one browser in: a browser's command line can be read by everybody on the machine."""
        code = secrets.token_urlsafe(24)
        self._once.add(code)
        return f"{url}?{urlencode({PARAMETER: code})}"

    def cookie(self, host: str) -> tuple[str, str]:
        """The name and the value of the cookie, for a request's Host."""
        port = re.search(r":(\d+)$", host)
        return f"qwen35mm-token-{port[1] if port else 80}", self.value

    def is_known(self, given: str) -> bool:
        """Whether this is the token."""
        return secrets.compare_digest(given.encode(), self.value.encode())

    def take(self, given: str) -> bool:
        """Whether an address with this lets a browser in."""
        known = self.is_known(given)
        if not known and given in self._once:
            self._once.discard(given)
            return True
        return known


class OnlyWithToken:
    """ASGI middleware that answers only who came with the token, by its cookie, or `Authorization: Bearer TOKEN`."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], token: PageToken) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != _OPEN_PATH:
            response = self._answer(HTTPConnection(scope), scope["path"] == "/")
            if response is not None:
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _answer(self, connection: HTTPConnection, is_page: bool) -> Response | None:
        """What is answered in the page's place; None lets the request through."""
        name, value = self._token.cookie(connection.headers.get("host", ""))
        query = parse_qsl(connection.url.query, keep_blank_values=True)
        given = [text for key, text in query if key == PARAMETER]
        if is_page and given and self._token.take(given[-1]):
            # To the address without it, so that it isn't in the browser's history.
            rest = urlencode([(key, text) for key, text in query if key != PARAMETER])
            response = RedirectResponse(f"/?{rest}" if rest else "/", 303, {"cache-control": "no-store"})
            # Not "strict": a link in a notebook or in a mail is to open the page, too.
            response.set_cookie(name, value, httponly=True, samesite="lax")
            return response
        bearer = re.fullmatch(r"[Bb]earer +(\S+)", connection.headers.get("authorization", ""))
        if any(map(self._token.is_known, (connection.cookies.get(name, ""), bearer[1] if bearer else ""))):
            return None
        if is_page:
            return PlainTextResponse(_REFUSAL, 403, {"cache-control": "no-store"})
        return JSONResponse({"error": {"message": _REFUSAL, "kind": "token"}}, 403)
