"""Paths: those that clients build from an address with or without `/v1`, and what a path says of its protocol."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from qwen35mm.http.streams import frame
from qwen35mm.server.anthropic.reply import error_frame
from qwen35mm.server.errors import ApiError

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


def last_frame(error: ApiError, path: str, num_events: int) -> bytes:
    """An error as the last event of a stream, in the protocol of its path.

    Args:
        num_events: sent before it.
    """
    if path.startswith("/v1/messages"):
        return error_frame(error)
    if path.startswith("/v1/responses"):
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return frame({**told, "sequence_number": num_events}, "error")
    return frame(error.body)
