"""Which requests are let in at all, by where they say that they come from and go to, and what the browser may do with
a page: nothing of it comes from, or goes to, another machine. Nothing here needs Gradio.

An answer is Markdown and may hold `![](https://...)`: loading that would tell a stranger what was said.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

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
_SPACE_FRAMES = "https://huggingface.co https://*.huggingface.co"


async def refuse(scope: Scope, send: Send, status: int, text: str) -> None:
    """Answers with plain text."""
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


Refuse = Callable[[Scope, Send, int, str], Awaitable[None]]


class SameOrigin:
    """ASGI middleware that refuses what pages of other sites, or of other ports of this machine, have a browser ask
    for; they may lead to the page by a link. What no browser sends is for others to judge: it can say what it likes.

    Args:
        refuse: tells them so.
    """

    def __init__(self, app: App, refuse: Refuse = refuse) -> None:
        self._app = app
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_same_origin(scope):
            await self._refuse(scope, send, 403, "Only this page itself is answered, and no other site or port.")
            return
        await self._app(scope, receive, send)


def _is_same_origin(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    site = headers.get("sec-fetch-site")
    if site is not None:
        # "none" is an address that the person typed, or a bookmark. Behind a proxy only the browser knows who "same"
        # is, so this counts before Origin.
        is_link = scope["method"] == "GET" and scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate"
        return site in ("same-origin", "none") or is_link
    origin = headers.get("origin")
    # No page can set either name: it would have to ask first, with an Origin, and be refused here.
    names = (headers.get("host", ""), headers.get("x-forwarded-host", "").partition(",")[0])
    return origin is None or any(_is_origin_of(name.strip(), origin) for name in names)


def _is_origin_of(host: str, origin: str) -> bool:
    try:
        parts = urlsplit(origin)
        here = urlsplit(f"//{host}")
        default = {"http": 80, "https": 443}.get(parts.scheme)
        same_port = (parts.port or default) == (here.port or default)
    except ValueError:
        return False
    return default is not None and same_port and bool(here.hostname) and here.hostname == parts.hostname


class OnlyThisMachine:
    """ASGI middleware that answers nobody who calls this machine by another name.

    A website could point a name of its own to 127.0.0.1, and would then be this page's origin.

    Args:
        refuse: tells them so.
    """

    def __init__(self, app: App, refuse: Refuse = refuse) -> None:
        self._app = app
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_called_by_its_name(scope):
            await self._refuse(scope, send, 421, "This page is for this machine: http://127.0.0.1")
            return
        await self._app(scope, receive, send)

    def _is_called_by_its_name(self, scope: Scope) -> bool:
        hosts = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"host"]
        return len(hosts) == 1 and _is_this_machine(re.sub(r":\d*$", "", hosts[0]))


def _is_this_machine(name: str) -> bool:
    if name.lower() == "localhost" or name == "[::1]":
        return True
    try:
        # An address and nothing else: 127.0.0.1.example.org is anybody's name.
        return ipaddress.IPv4Address(name).is_loopback
    except ValueError:
        return False


class SecurityHeaders:
    """ASGI middleware that adds the headers to every response; no buffering, so streams stay streams."""

    def __init__(self, app: App) -> None:
        self._app = app
        frames = _SPACE_FRAMES if os.environ.get("SPACE_ID") else "'none'"
        self._headers = (
            (b"content-security-policy", f"{CONTENT_SECURITY_POLICY}; frame-ancestors {frames}".encode()),
            (b"cross-origin-resource-policy", b"same-origin"),
            (b"referrer-policy", b"no-referrer"),
            (b"x-content-type-options", b"nosniff"),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                # A route's own, stricter policy stands.
                present = {name.lower() for name, _ in message.get("headers", [])}
                added = [header for header in self._headers if header[0] not in present]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)
