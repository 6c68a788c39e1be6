"""A server of one tool, `go`, over HTTP. What a call of it gives is a function of the test's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from queue import Queue
from threading import Event
from typing import Any

from qwen35mm.tools.config import ToolServer
from tests.http_server import QuietHandler, serving

# Only for tests that fail.
PATIENCE_S = 30.0


class FakeHttp(ThreadingHTTPServer):
    """
    Attributes:
        heard: messages in their order of arrival.
        says_goodbye: whether the end of a session is answered.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, go: Callable[[Handler, dict[str, Any]], None]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.go = go
        self.heard: Queue[dict[str, Any]] = Queue()
        self.encodings: set[str | None] = set()
        self.num_redirected = 0
        self.says_goodbye = True
        self.is_over = Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/mcp"

    def hear(self, method: str) -> dict[str, Any]:
        """The next message of a method."""
        while (message := self.heard.get(timeout=PATIENCE_S)).get("method") != method:
            pass
        return message


class Handler(QuietHandler):
    server: FakeHttp  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        server = self.server
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.encodings.add(self.headers["Accept-Encoding"])
        server.heard.put(asked)
        match asked.get("method"):
            case "initialize":
                told = {"protocolVersion": "2025-06-18", "serverInfo": {"name": "fake", "version": "1"}}
                self.say(asked, {**told, "capabilities": {}}, {"Mcp-Session-Id": "one"})
            case "tools/list":
                self.say(asked, {"tools": [{"name": "go", "inputSchema": {"type": "object"}}]})
            case "tools/call":
                server.go(self, asked)
            case "ping":
                self.say(asked, {})
            case _:
                self.send_whole(202, b"")

    def do_GET(self) -> None:
        self.send_whole(405, b"")

    def do_DELETE(self) -> None:
        if not self.server.says_goodbye:
            self.server.is_over.wait(PATIENCE_S)
        self.send_whole(200, b"")

    def say(self, asked: dict[str, Any], result: Any, headers: dict[str, str] | None = None) -> None:
        self.send_whole(200, json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}).encode(), headers)


def result(asked: dict[str, Any], words: str, num: int = 1) -> bytes:
    """A call's result, with a text `num` times."""
    content = [{"type": "text", "text": words}] * num
    return json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": {"content": content}}).encode()


@contextmanager
def fake_http(go: Callable[[Handler, dict[str, Any]], None]) -> Iterator[tuple[FakeHttp, ToolServer]]:
    server = FakeHttp(go)
    with serving(server):
        try:
            yield server, ToolServer("fake", url=server.url)
        finally:
            server.is_over.set()
