"""Serving the page: one port, no services of others, an end that cleans up."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import gradio as gr
from starlette.middleware import Middleware

from qwen35mm.assets import asset_path
from qwen35mm.errors import ConfigError
from qwen35mm.ui.app import build_app
from qwen35mm.ui.protocol import ChatBackend
from qwen35mm.ui.security import SecurityHeaders
from qwen35mm.ui.sharing import is_shared
from qwen35mm.ui.theme import HEAD, make_theme

# Above the largest video that preprocessing reads, so that it's the one to say what is too large, and in words.
MAX_UPLOAD_SIZE = "1gb"


@dataclass(frozen=True)
class Server:
    """A page that is being served."""

    app: gr.Blocks
    url: str

    def close(self) -> None:
        """Ends the server and the replies in progress, and deletes the uploads."""
        # A page in the middle of a reply would hold the server open longer than Gradio waits before it gives up, and
        # with it the deletion. What uvicorn says about ending such a page is no news here.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self.app.server.config.timeout_graceful_shutdown = 1
        self.app.close(verbose=False)


def serve(backend: ChatBackend, *, host: str = "127.0.0.1", port: int = 7860) -> Server:
    """Starts the page in threads of its own and returns; `port` 0 takes a free one.

    Raises:
        ConfigError: the port or the address can't be used.
    """
    port = _claim_port(host, port)
    # Its statistics, which nobody can see here, go through pandas at the end of every event.
    os.environ.setdefault("GRADIO_ANALYTICS_CACHE_FREQUENCY", "1000000000")
    app = build_app(backend, shared=is_shared(host))
    # Every service that Gradio offers besides is switched off by name: its environment variables could switch it on.
    _, url, _ = app.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=True,
        quiet=True,
        inbrowser=False,
        share=False,
        show_error=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        run_history=False,
        max_file_size=MAX_UPLOAD_SIZE,
        footer_links=[],
        theme=make_theme(),
        css_paths=asset_path("style.css"),
        head=HEAD,
        app_kwargs={"middleware": [Middleware(SecurityHeaders)]},
    )
    return Server(app, url)


def launch(backend: ChatBackend, *, host: str = "127.0.0.1", port: int = 7860, open_browser: bool = False) -> None:
    """Serves the page until Ctrl-C, SIGTERM or the terminal's end; prints its address.

    Raises:
        ConfigError: the port or the address can't be used.
    """
    server = serve(backend, host=host, port=port)
    try:
        # From the moment that the address is known, every end is a clean one.
        with _ends_as_interrupts(), contextlib.suppress(KeyboardInterrupt):
            print(f"qwen35mm chats with {backend.loaded.name} on {server.url} (Ctrl-C ends it)", flush=True)
            if open_browser:
                import webbrowser

                webbrowser.open(server.url)
            threading.Event().wait()
    finally:
        server.close()


def _claim_port(host: str, port: int) -> int:
    """The port to serve on, checked: Gradio would only say that it found none in a range."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        if sys.platform != "win32":
            # As the server does; there, a port whose last connections still fade counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            raise ConfigError(
                f"Port {port} on {host} can't be used ({error.strerror}). Another qwen35mm may be running there: "
                f"end it, or take another port with --port {port + 1}, or `make chat PORT={port + 1}`."
            ) from None
        return probe.getsockname()[1]


@contextlib.contextmanager
def _ends_as_interrupts() -> Iterator[None]:
    """Lets a service manager, or closing the terminal, end the page as Ctrl-C does: what is to be kept, is kept.

    Only a main thread may set signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    # Windows has no SIGHUP; nohup ignores it, and that stands.
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    taken = [number for name in names if signal.getsignal(number := getattr(signal, name)) is not signal.SIG_IGN]
    previous = [(number, signal.signal(number, interrupt)) for number in taken]
    try:
        yield
    finally:
        for number, handler in previous:
            signal.signal(number, handler)
