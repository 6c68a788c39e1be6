"""How a browser's page identifies itself. Not by cookies: they reach every port of a host, so any other server there
could collect them with a plain link.

A page has a key. It keeps the key in its origin's storage and sends it in the header `HEADER` with each request.
Browsers request pictures and videos without headers, so those addresses have a ticket, which is derived from the key
and opens only files.

A page of one person is opened by an address with a token (`/t/TOKEN/`), because other users of the machine reach its
port too. That address redirects to the page with a one-time code, and the page exchanges the code for its key. So
neither token nor key gets into a browser's history. For programs everything is below that address as well, for clients
that take nothing but an address.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from urllib.parse import parse_qs

from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from qwen35mm.http.guards import without_prefix

# Another site's page needs a preflight to set it, which is never allowed.
HEADER = "x-qwen35mm"
TICKET = "ticket"
_KEY = re.compile(r"[0-9a-f]{32,64}")
_MAX_TICKETS = 100_000
_MAX_CODES = 1000
_CODE_S = 600.0
_REFUSAL = (
    "This page is for the person who started it. Open the whole address that the program has written in its "
    "terminal, with the token at its end."
)


def new_key() -> str:
    """A random key."""
    return secrets.token_hex(16)


def name_of_key(key: str) -> str:
    """The name under which a key is remembered; it lets nobody in."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def key_of(connection: HTTPConnection) -> str | None:
    """The key in a request's header, if it has the right form."""
    found = connection.headers.get(HEADER, "")
    return found if _KEY.fullmatch(found) else None


class Tickets:
    """The tickets of known keys. Only in the event loop."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, str] = OrderedDict()

    def of(self, key: str) -> str:
        """The ticket of a key."""
        ticket = _derived(key, "files")
        self._names[ticket] = name_of_key(key)
        self._names.move_to_end(ticket)
        if len(self._names) > _MAX_TICKETS:
            self._names.popitem(last=False)
        return ticket

    def opened(self, key: str) -> dict[str, str]:
        """What a page gets: its key and ticket."""
        return {"key": key, "ticket": self.of(key)}

    def name(self, connection: HTTPConnection) -> str | None:
        """The name of the key that a file request's ticket belongs to."""
        if connection.scope.get("method") not in ("GET", "HEAD"):
            return None
        return self._names.get(connection.query_params.get(TICKET, ""))


class PageToken:
    """Lets browsers and programs in to a page of one person.

    Args:
        value: the token; None makes one.

    Attributes:
        value: the token.
        key: of every page that the token lets in.
    """

    def __init__(self, value: str | None = None) -> None:
        self.value = value or secrets.token_urlsafe(24)
        self.key = _derived(self.value, "page")
        self._codes: OrderedDict[str, float] = OrderedDict()

    def address(self, url: str) -> str:
        """The page's address with the token."""
        return f"{url.rstrip('/')}/t/{self.value}/"

    def address_for_once(self, url: str) -> str:
        """An address that lets in one browser, since everybody on the machine can read its command line."""
        return f"{url.rstrip('/')}/t/{self.new_code()}/"

    def new_code(self) -> str:
        """A one-time code in place of the token."""
        code = secrets.token_urlsafe(24)
        self._codes[code] = time.monotonic() + _CODE_S
        if len(self._codes) > _MAX_CODES:
            self._codes.popitem(last=False)
        return code

    def is_known(self, given: str) -> bool:
        """Whether this is the token."""
        return secrets.compare_digest(given.encode(), self.value.encode())

    def take(self, given: str) -> bool:
        """Whether this lets a browser in: the token, or an unused code, which is then used up."""
        return self.is_known(given) or self._codes.pop(given, 0.0) > time.monotonic()

    def is_shown(self, connection: HTTPConnection) -> bool:
        """Whether a request has the key, or the token as programs send it: `Authorization: Bearer TOKEN`."""
        bearer = re.fullmatch(r"[Bb]earer +(\S+)", connection.headers.get("authorization", ""))
        key = key_of(connection)
        return (key is not None and secrets.compare_digest(key, self.key)) or (
            bearer is not None and self.is_known(bearer[1])
        )


class TokenAddress:
    """ASGI middleware for addresses with a token: passes the token on as a program's header.

    Also accepts the older `/?token=TOKEN`.
    """

    def __init__(self, app: ASGIApp, token: PageToken) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            found = re.match(r"/t/([^/]*)", scope["path"])
            if found and self._token.is_known(found[1]) and len(scope["path"]) > len(found[0]) + 1:
                headers = [header for header in scope["headers"] if header[0] != b"authorization"]
                shown = (b"authorization", f"Bearer {self._token.value}".encode())
                scope = {**without_prefix(scope, found[0]), "headers": [*headers, shown]}
            elif answer := self._opened(scope, found):
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _opened(self, scope: Scope, found: re.Match[str] | None) -> Response | None:
        """The redirect to the page, or a refusal; None if the request isn't for an address that opens the page."""
        query = parse_qs(scope["query_string"].decode("latin-1")) if scope["path"] == "/" else {}
        given = found[1] if found else query.get("token", [None])[-1]
        # HEAD uses up no code.
        if given is None or scope["method"] != "GET":
            return None
        how = {"cache-control": "no-store"}
        if not self._token.take(given):
            return PlainTextResponse(_REFUSAL, 403, how)
        up = "../" * (scope["path"].count("/") - 1) or "./"
        return RedirectResponse(f"{up}#once={self._token.new_code()}", 303, how)


def _derived(secret: str, purpose: str) -> str:
    return hmac.new(secret.encode(), f"qwen35mm {purpose}".encode(), hashlib.sha256).hexdigest()[:32]
