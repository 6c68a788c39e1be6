"""What fake servers share: a handler that logs nothing, and a thread that serves."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class QuietHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def send_whole(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """An answer of one piece, which is JSON unless the headers say otherwise; its length only, where HEAD asks."""
        self.send_response(status)
        length = {"Content-Length": str(len(data))}
        for name, value in ({"Content-Type": "application/json"} | length | dict(headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[None]:
    """Serves until the end of the block."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
