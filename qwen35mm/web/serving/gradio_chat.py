"""The Gradio page of examples/gradio_chat.py behind our guards: `qwen35mm chat --ui gradio`.

The example is plain, since people read and fork it. This module mounts the same page, by Gradio's public interface, on
an application that admits one person's browser and answers only the page's own requests.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import tempfile
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import gradio as gr
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen35mm.assets import example_path
from qwen35mm.contract import Backend
from qwen35mm.http.guards import guards, refuse
from qwen35mm.http.run import run
from qwen35mm.http.sessions import PageToken
from qwen35mm.http.settings import HttpSettings

# Gradio's page has inline scripts and styles. It loads everything else from here, as our own page does.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "media-src 'self' blob:",
        "font-src 'self' data:",
        "worker-src 'self' blob:",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
# The page's requests. Gradio has many more routes.
_PATHS = re.compile(
    r"/|/theme\.css|/config|/favicon\.ico|/(?:assets|static)/.*"
    r"|/gradio_api/(?:info|upload|upload_progress|queue/join|queue/data|run/predict|cancel|reset|heartbeat/\w+)"
)
_FILE = "/gradio_api/file="
_REFUSAL = (
    "This page is for the person who started it. Open the whole address that the program has written in its "
    "terminal, with the token at its end."
)


class OnlyThePage:
    """ASGI middleware that only admits requests of Gradio's page, and sends its content security policy.

    Only files on this machine are served. Gradio fetches addresses, too, so a picture at `/gradio_api/file=https://...`
    in an answer could send parts of the chat to a stranger.

    Args:
        token: is in the page's path, `/t/TOKEN/`, since Gradio's scripts send no key, and cookies go to every port of a
            host. None lets every user of the machine in.
    """

    def __init__(self, app: ASGIApp, token: PageToken | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", CONTENT_SECURITY_POLICY.encode())
                message = {**message, "headers": [*message.get("headers", []), policy]}
            await send(message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        if self._token is not None:
            given, path = _parted(path)
            if path in ("", "/") and not self._token.is_known(given) and self._token.take(given):
                await RedirectResponse(f"/t/{self._token.value}/", 303, {"cache-control": "no-store"})(
                    scope, receive, send
                )
                return
            if not self._token.is_known(given):
                await refuse(scope, receive, send, 403, _REFUSAL)
                return
        if not _is_of_the_page(path):
            await refuse(scope, receive, send, 404, "There is nothing here.")
            return
        await self._app(scope, receive, send_with_policy)


def _parted(path: str) -> tuple[str, str]:
    """The token in a path, and the path below it."""
    found = re.fullmatch(r"/t/([^/]+)(.*)", path, re.DOTALL)
    return (found[1], found[2]) if found else ("", path)


def _is_of_the_page(path: str) -> bool:
    if path.startswith(_FILE):
        return Path(path.removeprefix(_FILE)).is_absolute()
    return _PATHS.fullmatch(path) is not None


def build(backend: Backend) -> gr.ChatInterface:
    """The example's page for a backend."""
    spec = importlib.util.spec_from_file_location("qwen35mm_gradio_chat", example_path("gradio_chat.py"))
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.build(backend)


def create_app(backend: Backend, token: PageToken | None, settings: HttpSettings | None = None) -> FastAPI:
    """The guarded application.

    Args:
        token: opens the page; None lets every user of the machine in.
        settings: how the page is reached.
    """
    in_front = guards(settings or HttpSettings(), only_this_machine=True)
    app = FastAPI(openapi_url=None, middleware=[*in_front, Middleware(OnlyThePage, token)])
    # As in guest.py: nobody sees Gradio's statistics, which run pandas after every event.
    os.environ.setdefault("GRADIO_ANALYTICS_CACHE_FREQUENCY", "1000000000")
    # Switches off every other service by name, since environment variables could switch it on.
    return gr.mount_gradio_app(
        app,
        build(backend),
        path="/" if token is None else f"/t/{token.value}",
        footer_links=["gradio", "settings"],
        max_file_size=backend.media.limits.max_bytes(None),
        show_error=False,
        run_history=False,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
    )


def launch(
    backend: Backend, *, host: str, port: int, http: HttpSettings, token: str | None, open_browser: bool
) -> None:
    """Serves the page until Ctrl-C or SIGTERM; prints its address.

    Args:
        token: the end of the address; None makes one, and "" lets every user of the machine in.

    Raises:
        ConfigError: the address can't be used.
    """
    page_token = None if token == "" else PageToken(token)

    def line(url: str) -> str:
        url = f"{url}/"
        if open_browser:
            webbrowser.open(url if page_token is None else page_token.address_for_once(url))
        address = url if page_token is None else page_token.address(url)
        return f"qwen35mm chats with {backend.info.name} on {address}"

    with _own_uploads():
        run(create_app(backend, page_token, http), host=host, port=port, line=line, settings=http)


@contextlib.contextmanager
def _own_uploads() -> Iterator[None]:
    """A private folder for uploads, deleted at the end. Everybody on the machine can read Gradio's default folder."""
    name = "GRADIO_TEMP_DIR"
    if name in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="qwen35mm-gradio-", ignore_cleanup_errors=True) as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            del os.environ[name]
