"""Who may call, and what the browser may do with the page: nothing of it comes from, or goes to, another machine.

An answer is Markdown and may hold `![](https://...)`: loading that would tell a stranger what was said.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from gradio.route_utils import CustomCORSMiddleware
from gradio.routes import App
from starlette.middleware import Middleware

from qwen35mm.server.guards import Receive, Scope, Send

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


class GuardedApp(App):
    """Gradio's application behind middleware of ours: Gradio would put its own in front of what it is given.

    Its answers to other origins are left out: it lets every port of localhost, and on other addresses every website,
    read all that a browser's cookies open.
    """

    def add_middleware(self, middleware_class: Any, *args: Any, **kwargs: Any) -> None:
        """Adds it behind those that are there."""
        if middleware_class is not CustomCORSMiddleware:
            self.user_middleware.append(Middleware(middleware_class, *args, **kwargs))


class SecurityHeaders:
    """ASGI middleware that adds the headers to every response; no buffering, so streams stay streams."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
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
