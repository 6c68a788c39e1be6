"""/docs: Swagger UI over the OpenAPI document, from this server alone.

A browser can't send a key with a link, so the page and its files need none; they are the same on every server. The
document needs a key like every other route, and the page asks for it.
"""

from __future__ import annotations

import functools
import importlib.util

from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from qwen35mm.assets import asset_path
from qwen35mm.server.errors import ApiError

DOCS = "/docs"
# The package with Swagger UI's own distribution, from the extra `serve`. Nothing of it is imported.
_PACKAGE = "fastapi_offline"
# Set here, since a system's own table of types may call scripts plain text.
_TYPES = {
    "docs.css": "text/css; charset=utf-8",
    "docs.html": "text/html; charset=utf-8",
    "docs.js": "text/javascript; charset=utf-8",
    "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "swagger-ui.css": "text/css; charset=utf-8",
}
_HEADERS = {
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self' data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    # Browsers ask each time; the file is sent only if another version is installed.
    "cache-control": "no-cache",
}


async def show_docs(request: Request) -> Response:
    """The page."""
    return await _answer("docs.html", request)


async def docs_file(request: Request) -> Response:
    """A file that the page loads."""
    return await _answer(request.path_params["name"], request)


async def _answer(name: str, request: Request) -> Response:
    if name not in _TYPES:
        raise ApiError(404, f"{DOCS} has no file {name[:200]!r}.")
    answer = await _files().get_response(name, request.scope)
    answer.headers.update({**_HEADERS, "content-type": _TYPES[name]})
    return answer


@functools.cache
def _files() -> StaticFiles:
    if importlib.util.find_spec(_PACKAGE) is None:
        raise ApiError(501, f"{DOCS} needs Swagger UI: pip install 'qwen35mm[serve]'", code="unavailable")
    return StaticFiles(directory=asset_path("web"), packages=[(_PACKAGE, "static")])
