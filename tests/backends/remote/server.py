"""A real HTTP server with OpenAI's chat completions, which answers each request as it was told to beforehand."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import ThreadingHTTPServer
from typing import Any

from tests.http_server import QuietHandler, serving

Act = Callable[["Handler"], None]

USAGE = {"prompt_tokens": 40, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 32}}


def chunk(delta: dict[str, Any] | None = None, finish_reason: str | None = None) -> dict[str, Any]:
    """A chunk as servers send it."""
    return {"id": "1", "choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish_reason}], "usage": None}


def event(values: Any) -> bytes:
    return b"data: " + json.dumps(values).encode() + b"\n\n"


def pieces(
    words: Sequence[str], *, reasoning: Sequence[str] = (), key: str = "reasoning_content", finish_reason: str = "stop"
) -> list[bytes]:
    """A whole good answer, an event a piece."""
    return [
        event(chunk({"role": "assistant", "content": ""})),
        *(event(chunk({key: word})) for word in reasoning),
        *(event(chunk({"content": word})) for word in words),
        event(chunk(finish_reason=finish_reason)),
        event({"id": "1", "choices": [], "usage": USAGE}),
        b"data: [DONE]\n\n",
    ]


def answers(words: Sequence[str], **options: Any) -> Act:
    """Streams a good answer."""
    return sends(pieces(words, **options))


def sends(parts: Sequence[bytes], *, pause_s: float = 0.0, then: Act | None = None) -> Act:
    """Streams these bytes, one chunk each, with a pause before each; then ends well, or does something else."""

    def act(handler: Handler) -> None:
        handler.begin_stream()
        for part in parts:
            time.sleep(pause_s)
            handler.send_part(part)
        if then is None:
            handler.end_stream()
        else:
            then(handler)

    return act


def fails(status: int, body: Any = None, **headers: str) -> Act:
    """Answers with a status; a body that isn't bytes goes out as JSON."""

    def act(handler: Handler) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_whole(status, data, {name.replace("_", "-"): value for name, value in headers.items()})

    return act


def closes(handler: Handler) -> None:
    """Breaks the connection."""
    handler.close_connection = True


def stalls(handler: Handler) -> None:
    """Says no more until the server ends or the other side has gone, which is noted."""
    handler.wait_for_end()


class ModelServer(ThreadingHTTPServer):
    """Acts are used up in the order of the requests; when none is left, it answers well.

    Attributes:
        acts: what is still to be done.
        bodies: the requests' bodies, in order of arrival.
        headers: the requests' headers, in the same order.
        models: what GET /v1/models lists.
        told: what it tells of each of them there.
        pages: what is at other addresses, GET or POST: JSON values, or a function of a POST's body.
        asked: what was posted there: the address, and the body.
        max_active: most requests that were under way at once.
        num_gone: requests whose sender had left.
        num_connections: how often somebody connected.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.acts: list[Act] = []
        self.model_acts: list[Act] = []
        self.otherwise: Act = answers(["A ", "red ", "square."])
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.models = ["tiny"]
        self.told: dict[str, Any] = {}
        self.pages: dict[str, Any] = {}
        self.asked: list[tuple[str, Any]] = []
        self.max_active = 0
        self.num_gone = 0
        self.num_connections = 0
        self.ended = threading.Event()
        self.lock = threading.Lock()
        self._active = 0

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Around each request for an answer."""
        with self.lock:
            self._active += 1
            self.max_active = max(self.max_active, self._active)
        try:
            yield
        finally:
            with self.lock:
                self._active -= 1

    def process_request(self, request: Any, client_address: Any) -> None:
        self.num_connections += 1
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever leaves early is expected here."""


class Handler(QuietHandler):
    """One connection."""

    server: ModelServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.headers.append(dict(self.headers.items()))
            act = self.server.model_acts.pop(0) if self.server.model_acts else None
        if act is not None:
            act(self)
        elif self.path == "/v1/models":
            models = [{"id": name, "object": "model", **self.server.told} for name in self.server.models]
            self.send_whole(200, json.dumps({"object": "list", "data": models}).encode())
        elif self.path in self.server.pages:
            self.send_whole(200, json.dumps(self.server.pages[self.path]).encode())
        else:
            self.send_whole(404, b'{"detail": "Not Found"}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path in self.server.pages:
            self.server.asked.append((self.path, body))
            page = self.server.pages[self.path]
            self.send_whole(200, json.dumps(page(body) if callable(page) else page).encode())
            return
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.headers.append(dict(self.headers.items()))
            act = self.server.acts.pop(0) if self.server.acts else self.server.otherwise
        with self.server.counted():
            if self.path == "/v1/chat/completions":
                act(self)
            else:
                self.send_whole(404, b'{"detail": "Not Found"}')

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send_part(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def end_stream(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def wait_for_end(self) -> None:
        self.close_connection = True
        self.connection.settimeout(0.02)
        while not self.server.ended.is_set():
            try:
                gone = self.connection.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                gone = True
            if gone:
                with self.server.lock:
                    self.server.num_gone += 1
                return


@contextlib.contextmanager
def running_server() -> Iterator[ModelServer]:
    """A server in a thread, on a port of its own."""
    server = ModelServer()
    with serving(server):
        try:
            yield server
        finally:
            server.ended.set()
