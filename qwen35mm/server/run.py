"""Serving the application on a port, until it is ended."""

from __future__ import annotations

import socket

import uvicorn
from fastapi import FastAPI

from qwen35mm.errors import ConfigError

# A reply in the middle may go on so long after Ctrl-C.
_GRACE_S = 3


def run(app: FastAPI, *, host: str, port: int, name: str) -> None:
    """Serves until Ctrl-C or SIGTERM; prints the address.

    Args:
        port: 0 takes a free one.
        name: of the model, for the line that is printed.

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
        address = f"http://{f'[{host}]' if family == socket.AF_INET6 else host}:{listener.getsockname()[1]}"
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_GRACE_S, access_log=False)
        print(f"qwen35mm serves {name} on {address}/v1 (Ctrl-C ends it)", flush=True)
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        listener.close()
