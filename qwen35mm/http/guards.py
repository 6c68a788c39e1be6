"""Which requests are let in, by their host and origin, and what a browser may do with a page.

Pages load nothing from other machines and send nothing there. An answer is Markdown and may contain `![](https://...)`:
loading that would tell a stranger what was said.
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

# Previews are blobs, and the style sheets' small pictures are data URIs.
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
# Sites that show a Space's page in a frame.
_SPACE_FRAMES = ("https://huggingface.co", "https://*.huggingface.co")

Refuse = Callable[[Scope, Receive, Send, int, str], Awaitable[None]]


async def refuse(scope: Scope, receive: Receive, send: Send, status: int, text: str) -> None:
    """Answers with plain text."""
    await PlainTextResponse(text, status)(scope, receive, send)


def guards(settings: HttpSettings, *, only_this_machine: bool, refuse: Refuse = refuse) -> list[Middleware]:
    """The middleware in front of every route of a server, from the outside to the inside.

    Args:
        only_this_machine: whether to refuse names other than this machine's and `allowed_hosts`.
        refuse: answers refused requests.
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
    """ASGI middleware for a proxy that serves the application under a path and passes that path on."""

    def __init__(self, app: ASGIApp, base_path: str) -> None:
        self._app = app
        self._base_path = base_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == self._base_path:
            # Relative, like all addresses of the page.
            await RedirectResponse(f"{self._base_path.rpartition('/')[2]}/")(scope, receive, send)
            return
        if scope["type"] == "http" and scope["path"].startswith(f"{self._base_path}/"):
            scope = without_prefix(scope, self._base_path)
        await self._app(scope, receive, send)


def without_prefix(scope: Scope, prefix: str) -> Scope:
    """The request without the beginning of its path. Nothing here builds addresses from the root path."""
    raw = scope.get("raw_path") or scope["path"].encode()
    return {**scope, "path": scope["path"][len(prefix) :] or "/", "raw_path": raw[len(prefix) :] or b"/"}


class SameOrigin:
    """ASGI middleware that refuses browser requests from other sites and from other ports of this machine.

    They may only link to the page. Requests without a browser's headers pass: a program can send any header, so later
    checks must judge it.

    Args:
        allowed: other allowed origins; "*" allows all.
        refuse: answers refused requests.
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
        # "none" means a typed address or a bookmark. Behind a proxy only the browser knows what "same" means, so this
        # counts before Origin.
        is_link = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate" and _is_page(scope["path"])
        return site in ("same-origin", "none") or is_link
    origin = headers.get("origin")
    # No page can set either header: it would need a preflight with an Origin, which is refused here.
    names = (headers.get("host", ""), headers.get("x-forwarded-host", "").partition(",")[0])
    return origin is None or any(_is_origin_of(name.strip(), origin) for name in names)


def _is_page(path: str) -> bool:
    """Whether links may lead here: to the page, also by the address that opens it."""
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
    """ASGI middleware that refuses requests for another host name.

    Otherwise a website could point its own name to 127.0.0.1 and share this page's origin.

    Args:
        names: allowed names besides the machine's own.
        refuse: answers refused requests.
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
        # Exactly an address: anybody may own 127.0.0.1.example.org.
        return ipaddress.IPv4Address(name).is_loopback
    except ValueError:
        return False


class SecurityHeaders:
    """ASGI middleware that adds security headers to every response, without buffering streams.

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
                # A route's own, stricter policy wins.
                present = {name.lower() for name, _ in message.get("headers", [])}
                added = [header for header in self._headers if header[0] not in present]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)
