"""A Hugging Face Hub on 127.0.0.1 with one repository, that can misbehave."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HUB_ID = "tiny-org/tiny-model"
COMMIT = "c0ffee" + "0" * 34


class FakeHub:
    """The files of a folder as the repository `tiny-org/tiny-model`.

    Attributes:
        cut_after: bytes after which each answer with weights is cut off; None for never.
        status: what every request is answered with instead, and the Hub's own name for the error.
        ignore_ranges: whether the whole file comes where only its rest was asked for.
        sent: bytes of each answer with weights, in order.
        ranges: the Range headers of the requests for weights, None for those without.
    """

    def __init__(self, folder: Path) -> None:
        self.files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
        self.cut_after: int | None = None
        self.status: tuple[int, str] | None = None
        self.ignore_ranges = False
        self.sent: list[int] = []
        self.ranges: list[str | None] = []
        self.paths: list[str] = []
        self.url = ""

    def siblings(self) -> list[dict[str, Any]]:
        return [{"rfilename": name, "path": name, "type": "file", **self._identity(name)} for name in self.files]

    def etag(self, name: str) -> str:
        content = self.files[name]
        if name.endswith(".safetensors"):
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def _identity(self, name: str) -> dict[str, Any]:
        size, etag = len(self.files[name]), self.etag(name)
        if not name.endswith(".safetensors"):
            return {"size": size, "oid": etag, "blobId": etag}
        lfs = {"size": size, "sha256": etag, "oid": etag, "pointerSize": 130}
        return {"size": size, "oid": "0" * 40, "blobId": "0" * 40, "lfs": lfs}


@contextmanager
def serve_hub(folder: Path) -> Iterator[FakeHub]:
    """Serves it until the end of the block."""
    hub = FakeHub(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.paths.append(path)
            if hub.status is not None:
                self._send(hub.status[0], b"{}", {"X-Error-Code": hub.status[1]})
            elif path.startswith(f"/api/models/{HUB_ID}/tree/"):
                self._send_json(hub.siblings())
            elif path.startswith(f"/api/models/{HUB_ID}"):
                self._send_json({"id": HUB_ID, "sha": COMMIT, "siblings": hub.siblings(), "tags": []})
            elif path.startswith(f"/{HUB_ID}/resolve/"):
                self._send_file(path.rsplit("/", 1)[1], with_body)
            else:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        def _send_file(self, name: str, with_body: bool) -> None:
            content, wanted = hub.files[name], self.headers.get("Range")
            start = 0 if wanted is None or hub.ignore_ranges else int(wanted.removeprefix("bytes=").rstrip("-"))
            headers = {"ETag": f'"{hub.etag(name)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            rest, weights = content[start:], name.endswith(".safetensors") and with_body
            cut = hub.cut_after if weights else None
            if weights:
                hub.ranges.append(wanted)
                hub.sent.append(len(rest[:cut]))
            self.send_response(206 if start else 200)
            for key, value in (*headers.items(), ("Content-Length", str(len(rest)))):
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(rest[:cut])
                self.close_connection = cut is not None and cut < len(rest)

        def _send_json(self, data: Any) -> None:
            self._send(200, json.dumps(data).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in (*headers.items(), ("Content-Length", str(len(body)))):
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
