"""Reads paths that clients build from an address with `/v1` where they add another, or without it."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

# The protocols' resources: programs have no others below /v1.
_SHORT = re.compile(r"/(chat/completions|completions|embeddings|messages|models|responses)(?=/|\Z)")
_TWICE = re.compile(r"/v1(?=/v1/)")


class ForgivingPaths:
    """Middleware: `/v1/v1/messages` and `/messages` are `/v1/messages`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = _TWICE.sub("", scope["path"], count=1)
            path = f"/v1{path}" if _SHORT.match(path) else path
            if path != scope["path"]:
                scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)
