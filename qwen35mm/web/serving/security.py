"""Who may call, and what the browser may do with the page: nothing of it comes from, or goes to, another machine.

An answer is Markdown and may hold `![](https://...)`: loading that would tell a stranger what was said.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

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
_HEADERS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)


class OnlyThisMachine:
    """ASGI middleware that answers nobody who calls this machine by another name.

    A website could point a name of its own to 127.0.0.1, and would then be this page's origin.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_called_by_its_name(scope):
            await send({"type": "http.response.start", "status": 421, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"This page is for this machine: http://127.0.0.1"})
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

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                # A route's own, stricter policy stands.
                present = {name.lower() for name, _ in message.get("headers", [])}
                added = [header for header in _HEADERS if header[0] not in present]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)
