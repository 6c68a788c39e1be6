"""Which requests are let in at all, by where they say that they come from and go to, and what a browser may do with a
page: nothing of it comes from, or goes to, another machine.

An answer is Markdown and may hold `![](https://...)`: loading that would tell a stranger what was said.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Awaitable, Callable, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen35mm.http.settings import HttpSettings

# Previews are blobs, and small pictures of the style sheets are data.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "img-src 'self' data: blob:",
        "media-src 'self' blob:",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
    )
)
# The sites that show a Space's page in a frame.
_SPACE_FRAMES = ("https://huggingface.co", "https://*.huggingface.co")

Refuse = Callable[[Scope, Receive, Send, int, str], Awaitable[None]]


async def refuse(scope: Scope, receive: Receive, send: Send, status: int, text: str) -> None:
    """Answers with plain text."""
    await PlainTextResponse(text, status)(scope, receive, send)


def guards(settings: HttpSettings, *, only_this_machine: bool, refuse: Refuse = refuse) -> list[Middleware]:
    """What stands in front of every route of a front, from the outside to the inside.

    Args:
        only_this_machine: whether names other than this machine's and `allowed_hosts` are refused.
        refuse: tells those who aren't let in.
    """
    found = [Middleware(BasePath, settings.base_path)] if settings.base_path else []
    found.append(Middleware(SecurityHeaders, settings.embed_origins))
    if only_this_machine or settings.allowed_hosts:
        found.append(Middleware(OnlyTheseHosts, settings.allowed_hosts, refuse))
    if settings.cors_origins:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=[each.lower() for each in settings.cors_origins],
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["*"],
            )
        )
    return [*found, Middleware(SameOrigin, settings.cors_origins, refuse)]


class BasePath:
    """ASGI middleware for a proxy that has the front under a path and passes that path on."""

    def __init__(self, app: ASGIApp, base_path: str) -> None:
        self._app = app
        self._base_path = base_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == self._base_path:
            # The page's addresses are relative to it.
            await RedirectResponse(f"{self._base_path.rpartition('/')[2]}/")(scope, receive, send)
            return
        if scope["type"] == "http" and scope["path"].startswith(f"{self._base_path}/"):
            scope = without_prefix(scope, self._base_path)
        await self._app(scope, receive, send)


def without_prefix(scope: Scope, prefix: str) -> Scope:
    """A request as it is without the beginning of its path. Nothing here makes addresses from the root path."""
    raw = scope.get("raw_path") or scope["path"].encode()
    return {**scope, "path": scope["path"][len(prefix) :] or "/", "raw_path": raw[len(prefix) :] or b"/"}


class SameOrigin:
    """ASGI middleware that refuses what pages of other sites, or of other ports of this machine, have a browser ask
    for; they may lead to the page by a link. What no browser sends is for others to judge: it can say what it likes.

    Args:
        allowed: other origins that may ask; "*" is all.
        refuse: tells the others.
    """

    def __init__(self, app: ASGIApp, allowed: Iterable[str] = (), refuse: Refuse = refuse) -> None:
        self._app = app
        self._allowed = frozenset(each.lower() for each in allowed)
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_allowed(scope) and not _is_same_origin(scope):
            text = "Only this page itself is answered, and no other site or port."
            await self._refuse(scope, receive, send, 403, text)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        return "*" in self._allowed or Headers(scope=scope).get("origin") in self._allowed


def _is_same_origin(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    site = headers.get("sec-fetch-site")
    if site is not None:
        # "none" is an address that the person typed, or a bookmark. Behind a proxy only the browser knows who "same"
        # is, so this counts before Origin.
        is_link = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate" and _is_page(scope["path"])
        return site in ("same-origin", "none") or is_link
    origin = headers.get("origin")
    # No page can set either name: it would have to ask first, with an Origin, and be refused here.
    names = (headers.get("host", ""), headers.get("x-forwarded-host", "").partition(",")[0])
    return origin is None or any(_is_origin_of(name.strip(), origin) for name in names)


def _is_page(path: str) -> bool:
    """Whether a link may lead here: the page, also by the address that opens it."""
    return re.fullmatch(r"/(t/[^/]*/?)?", path) is not None


def _is_origin_of(host: str, origin: str) -> bool:
    try:
        parts = urlsplit(origin)
        here = urlsplit(f"//{host}")
        default = {"http": 80, "https": 443}.get(parts.scheme)
        same_port = (parts.port or default) == (here.port or default)
    except ValueError:
        return False
    return default is not None and same_port and bool(here.hostname) and here.hostname == parts.hostname


class OnlyTheseHosts:
    """ASGI middleware that answers nobody who calls this machine by another name.

    A website could point a name of its own to 127.0.0.1, and would then be this page's origin.

    Args:
        names: those besides the machine's own.
        refuse: tells them so.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str] = (), refuse: Refuse = refuse) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in names)
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_called_by_its_name(scope):
            text = "This isn't the name of this program: call it 127.0.0.1, or by a name of --allowed-host."
            await self._refuse(scope, receive, send, 421, text)
            return
        await self._app(scope, receive, send)

    def _is_called_by_its_name(self, scope: Scope) -> bool:
        hosts = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"host"]
        if len(hosts) != 1:
            return False
        name = re.sub(r":\d*$", "", hosts[0])
        return name.lower() in self._names or _is_this_machine(name)


def _is_this_machine(name: str) -> bool:
    if name.lower() == "localhost" or name == "[::1]":
        return True
    try:
        # An address and nothing else: 127.0.0.1.example.org is anybody's name.
        return ipaddress.IPv4Address(name).is_loopback
    except ValueError:
        return False


class SecurityHeaders:
    """ASGI middleware that adds the headers to every response; no buffering, so streams stay streams.

    Args:
        frames: origins that may show the page in a frame, besides Hugging Face on a Space.
    """

    def __init__(self, app: ASGIApp, frames: Iterable[str] = ()) -> None:
        self._app = app
        allowed = " ".join((*frames, *(_SPACE_FRAMES if os.environ.get("SPACE_ID") else ()))) or "'none'"
        self._headers = (
            (b"content-security-policy", f"{CONTENT_SECURITY_POLICY}; frame-ancestors {allowed}".encode()),
            (b"cross-origin-resource-policy", b"same-origin"),
            (b"referrer-policy", b"no-referrer"),
            (b"x-content-type-options", b"nosniff"),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                # A route's own, stricter policy stands.
                present = {name.lower() for name, _ in message.get("headers", [])}
                added = [header for header in self._headers if header[0] not in present]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)
