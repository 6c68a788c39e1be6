"""A Hugging Face Hub on 127.0.0.1 with one repository, that can misbehave."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from qwen35mm.cache.gates import GATES_FILE
from tests.http_server import QuietHandler, serving

HUB_ID = "tiny-org/tiny-model"
COMMIT = "c0ffee" + "0" * 34


class FakeHub:
    """The files of a folder, without gates, as the repository `tiny-org/tiny-model`.

    Attributes:
        cut_after: bytes after which each answer with weights is cut off; None for never.
        status: what every request is answered with instead, and the Hub's own name for the error.
        gate: weights stop at half of them until it is set.
        ignore_ranges: whether the whole file comes where only its rest was asked for.
        sent: bytes of each answer with weights, in order.
        ranges: the Range headers of the requests for weights, None for those without.
    """

    def __init__(self, folder: Path) -> None:
        paths = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != GATES_FILE]
        self.files = {path.name: path.read_bytes() for path in paths}
        self.cut_after: int | None = None
        self.status: tuple[int, str] | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.ignore_ranges = False
        self.sent: list[int] = []
        self.ranges: list[str | None] = []
        self.url = ""

    def siblings(self) -> list[dict[str, Any]]:
        return [{"rfilename": name, "path": name, "type": "file", **self._identity(name)} for name in self.files]

    def etag(self, name: str) -> str:
        return _digest(self.files[name], name.endswith(".safetensors"))

    def _identity(self, name: str) -> dict[str, Any]:
        size, etag = len(self.files[name]), self.etag(name)
        if not name.endswith(".safetensors"):
            return {"size": size, "oid": etag, "blobId": etag}
        lfs = {"size": size, "sha256": etag, "oid": etag, "pointerSize": 130}
        return {"size": size, "oid": "0" * 40, "blobId": "0" * 40, "lfs": lfs}


@functools.cache
def _digest(content: bytes, is_large: bool) -> str:
    if is_large:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serve_hub(folder: Path) -> Iterator[FakeHub]:
    """Serves it until the end of the block."""
    hub = FakeHub(folder)

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if hub.status is not None:
                self.send_whole(hub.status[0], b"{}", {"X-Error-Code": hub.status[1]})
            elif path.startswith(f"/api/models/{HUB_ID}/tree/"):
                self.send_whole(200, json.dumps(hub.siblings()).encode())
            elif path.startswith(f"/api/models/{HUB_ID}"):
                known = {"id": HUB_ID, "sha": COMMIT, "siblings": hub.siblings(), "tags": []}
                self.send_whole(200, json.dumps(known).encode())
            elif path.startswith(f"/{HUB_ID}/resolve/"):
                self._send_file(path.rsplit("/", 1)[1])
            else:
                self.send_whole(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

        def _send_file(self, name: str) -> None:
            content, wanted = hub.files[name], self.headers.get("Range")
            start = 0 if wanted is None or hub.ignore_ranges else int(wanted.removeprefix("bytes=").rstrip("-"))
            rest, cut = content[start:], None
            if name.endswith(".safetensors") and self.command == "GET":
                cut = hub.cut_after
                hub.ranges.append(wanted)
                hub.sent.append(len(rest[:cut]))
            self.close_connection = cut is not None and cut < len(rest)
            headers = {"ETag": f'"{hub.etag(name)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            is_held = name.endswith(".safetensors") and not hub.gate.is_set()
            first = len(rest) // 2 if is_held else len(rest)
            self.send_whole(206 if start else 200, rest[:cut][:first], headers | {"Content-Length": str(len(rest))})
            if first < len(rest) and self.command == "GET":
                hub.gate.wait()
                self.wfile.write(rest[:cut][first:])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    with serving(server):
        yield hub
