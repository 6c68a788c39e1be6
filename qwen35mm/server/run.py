"""Serving the application on a port, until it is ended."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette

from qwen35mm.errors import ConfigError
from qwen35mm.server.connection import Connection
from qwen35mm.server.ends import end_signals, interrupt

# A reply in the middle may go on so long after Ctrl-C.
_GRACE_S = 3


def run(app: Starlette, *, host: str, port: int, line: Callable[[str], str]) -> None:
    """Serves until Ctrl-C or SIGTERM; prints a line with the address.

    Args:
        port: 0 takes a free one.
        line: what is printed, for the address.

    Raises:
        ConfigError: the address can't be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host.strip("[]"), port))
        except OSError as error:
            message = f"Port {port} on {host} can't be used ({error.strerror}). Take another one with --port."
            raise ConfigError(message) from None
        # Whoever reads the line may ask at once.
        listener.listen(128)
        address = f"http://{f'[{host}]' if family == socket.AF_INET6 else host}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            app, http=Connection, log_level="warning", timeout_graceful_shutdown=_GRACE_S, access_log=False
        )
        # uvicorn sends what ended it once more when it has ended: what comes behind here is to be done all the same.
        with end_signals(interrupt), contextlib.suppress(KeyboardInterrupt):
            print(f"{line(address)} (Ctrl-C ends it)", flush=True)
            uvicorn.Server(config).run(sockets=[listener])
    finally:
        listener.close()
