"""How a browser's page shows whose it is. There are no cookies: they go to every port of a host, and whoever serves
another one would have them by a plain link.

A page has a key, which it keeps in its origin's storage and sends in the header `HEADER` with each request. What
browsers ask for without headers (pictures, videos) has a ticket in its address instead, which is made of the key and
opens files alone.

The page of one person has a token in the address that opens it (`/t/TOKEN/`): other users of the machine reach its
port, too. The address leads a browser to the page with a code that is good for once, for which it gets its key; so
neither token nor key is in a browser's history. For programs everything is below that address as well, so that clients
that take an address alone can be given it.
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

# A page of another site can't set it without asking first, which is never allowed.
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
    """A key that nobody guesses."""
    return secrets.token_hex(16)


def name_of_key(key: str) -> str:
    """What a key is remembered by, which lets nobody in."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def key_of(connection: HTTPConnection) -> str | None:
    """The key that a request shows, if it can be one."""
    found = connection.headers.get(HEADER, "")
    return found if _KEY.fullmatch(found) else None


class Tickets:
    """The tickets of keys that were seen. Only in the event loop."""

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
        """What a page is given with its key."""
        return {"key": key, "ticket": self.of(key)}

    def name(self, connection: HTTPConnection) -> str | None:
        """The name of the key whose ticket a request for a file has in its address."""
        if connection.scope.get("method") not in ("GET", "HEAD"):
            return None
        return self._names.get(connection.query_params.get(TICKET, ""))


class PageToken:
    """What lets browsers and programs in to a page of one person.

    Args:
        value: the token; None makes one.

    Attributes:
        value: the token.
        key: of every page that it lets in.
    """

    def __init__(self, value: str | None = None) -> None:
        self.value = value or secrets.token_urlsafe(24)
        self.key = _derived(self.value, "page")
        self._codes: OrderedDict[str, float] = OrderedDict()

    def address(self, url: str) -> str:
        """The page's address with the token."""
        return f"{url.rstrip('/')}/t/{self.value}/"

    def address_for_once(self, url: str) -> str:
        """An address that lets one browser in: a browser's command line can be read by everybody on the machine."""
        return f"{url.rstrip('/')}/t/{self.new_code()}/"

    def new_code(self) -> str:
        """What is taken once for the token."""
        code = secrets.token_urlsafe(24)
        self._codes[code] = time.monotonic() + _CODE_S
        if len(self._codes) > _MAX_CODES:
            self._codes.popitem(last=False)
        return code

    def is_known(self, given: str) -> bool:
        """Whether this is the token."""
        return secrets.compare_digest(given.encode(), self.value.encode())

    def take(self, given: str) -> bool:
        """Whether this lets a browser in: the token, or a code, which is used up."""
        return self.is_known(given) or self._codes.pop(given, 0.0) > time.monotonic()

    def is_shown(self, connection: HTTPConnection) -> bool:
        """Whether a request shows the key, or the token as a program does: `Authorization: Bearer TOKEN`."""
        bearer = re.fullmatch(r"[Bb]earer +(\S+)", connection.headers.get("authorization", ""))
        key = key_of(connection)
        return (key is not None and secrets.compare_digest(key, self.key)) or (
            bearer is not None and self.is_known(bearer[1])
        )


class TokenAddress:
    """ASGI middleware for addresses with a token; it tells everything behind it that a program showed the token.

    Also takes `/?token=TOKEN`, which addresses had before.
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
        """What a browser is led to the page by; None where the request isn't for an address that opens it."""
        query = parse_qs(scope["query_string"].decode("latin-1")) if scope["path"] == "/" else {}
        given = found[1] if found else query.get("token", [None])[-1]
        # A look at it by HEAD uses no code up.
        if given is None or scope["method"] != "GET":
            return None
        how = {"cache-control": "no-store"}
        if not self._token.take(given):
            return PlainTextResponse(_REFUSAL, 403, how)
        up = "../" * (scope["path"].count("/") - 1) or "./"
        return RedirectResponse(f"{up}#once={self._token.new_code()}", 303, how)


def _derived(secret: str, purpose: str) -> str:
    return hmac.new(secret.encode(), f"qwen35mm {purpose}".encode(), hashlib.sha256).hexdigest()[:32]
