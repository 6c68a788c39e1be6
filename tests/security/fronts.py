"""The three HTTP fronts in processes of their own, as a person starts them; everything here goes over their sockets."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import psutil

from qwen35mm.assets import asset_path
from tests.children import environment
from tests.forked import ForkedProcess

Name = Literal["serve", "chat", "review"]
NAMES: tuple[Name, ...] = ("serve", "chat", "review")
# Only reached where a test fails.
PATIENCE_S = 60.0
KEYS = ("first-key-of-sixteen", "second-key-of-sixteen")
MIB = 2**20
_ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+)(?:/t/([\w-]+)/|\S*) \(Ctrl-C ends it\)")
# What no refusal of ours writes.
_BUG = re.compile(r"Traceback|Exception in|went wrong inside|never awaited|Task exception|Fatal Python error")


@dataclass
class Front:
    """One front.

    Attributes:
        address: without a slash at its end.
        headers: what opens it.
        folder: what it was started in.
        said: the lines of its standard error so far.
    """

    name: Name
    address: str
    headers: dict[str, str]
    process: ForkedProcess
    folder: Path
    said: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return urlsplit(self.address).port or 0

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def client(self, **how: Any) -> httpx.Client:
        """A client whom it lets in."""
        how = {
            "timeout": PATIENCE_S,
            "trust_env": False,
            "verify": False,
            **how,
            "headers": {**self.headers, **how.get("headers", {})},
        }
        return httpx.Client(base_url=self.address, **how)

    def stranger(self, **how: Any) -> httpx.Client:
        """One that has nothing that opens it."""
        return httpx.Client(
            base_url=self.address, **{"timeout": PATIENCE_S, "trust_env": False, "verify": False, **how}
        )

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def ask(self, client: httpx.Client) -> httpx.Response:
        """A small request that every front answers at once."""
        if self.name == "serve":
            return client.get("/v1/models")
        return client.post("/qwen35mm/api/start" if self.name == "chat" else "/api/look", json={})

    def rss(self) -> int:
        """Bytes of it and its children."""
        found = 0
        server = psutil.Process(self.process.pid)
        for each in (server, *server.children(recursive=True)):
            try:
                found += each.memory_info().rss
            except psutil.Error:
                continue  # it has just ended
        return found

    def check(self) -> None:
        """It still runs, answers, and has told of no bug."""
        assert self.process.poll() is None, "".join(self.said[-50:])
        with self.client() as client:
            assert self.ask(client).status_code == 200
        self.check_said()

    def check_said(self) -> None:
        wrong = [number for number, line in enumerate(self.said) if _BUG.search(line)]
        assert not wrong, "".join(self.said[wrong[0] : wrong[0] + 80])


@contextmanager
def started(name: Name, folder: Path, *options: object, **variables: str) -> Iterator[Front]:
    """Starts `qwen35mm NAME` with options; what it writes lies under the folder.

    Ends it by SIGTERM, which must be a clean end, with nothing on its standard error that tells of a bug.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("CACHE", "DATA")}
    own["GRADIO_TEMP_DIR"] = str(folder / "gradio")
    own["TMPDIR"] = str(folder / "tmp")
    Path(own["TMPDIR"]).mkdir(exist_ok=True)
    inherited = {each: value for each, value in environment().items() if not each.startswith("QWEN35MM_")}
    arguments = [name, *_options(name, folder), *options]
    process = ForkedProcess("qwen35mm", *arguments, cwd=folder, env={**inherited, **own, **variables})
    said: list[str] = []
    # A pipe that nobody reads would hold it up.
    reading = threading.Thread(target=lambda: said.extend(process.stderr), daemon=True)
    reading.start()
    try:
        line = process.stdout.readline()
        found = _ADDRESS.search(line)
        if found is None:
            process.kill()
            reading.join(PATIENCE_S)
            raise AssertionError(line + "".join(said))
        headers = {"authorization": f"Bearer {found[2] or KEYS[0]}"}
        if name != "serve":
            headers["x-qwen35mm"] = "1"
        yield (front := Front(name, found[1], headers, process, folder, said))
        process.terminate()
        assert process.wait(PATIENCE_S) == 0, "".join(said[-50:])
        reading.join(PATIENCE_S)
        front.check_said()
    finally:
        process.kill()
        process.wait()


def _options(name: Name, folder: Path) -> list[object]:
    """The bundled model with a short context: whatever a request asks for ends soon."""
    model = ["--port", 0, "--no-disk-cache", "--context-length", 512]
    if name == "review":
        return [pictures(folder), *model]
    if name == "chat":
        return model
    (folder / "keys").write_text("\n".join(KEYS))
    (folder / "media").mkdir(exist_ok=True)
    media = ["--media-root", folder / "media", "--allow-urls"]
    return [*model, *media, "--api-key-file", folder / "keys", "--no-store"]


def pictures(folder: Path) -> Path:
    """A folder of two pictures, one of them with a caption."""
    made = folder / "pictures"
    made.mkdir(exist_ok=True)
    for number, sample in enumerate(sorted(asset_path("samples").glob("*.jpg"))[:2]):
        (made / f"{number}.jpg").write_bytes(sample.read_bytes())
    (made / "0.txt").write_text("A caption.\n")
    return made
