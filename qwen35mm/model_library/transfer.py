"""One file from the Hub to its blob in the cache: resumed, checked and renamed."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from qwen35mm.errors import CheckpointError

logger = logging.getLogger(__name__)

# Short, because a connection that stands still also hides that it was cancelled, and going on costs nothing.
_TIMEOUT_S = 10.0
_MAX_FAILURES = 5
_PAUSE_S = 1.0
_READ_BYTES = 1 << 20


class DownloadCancelled(Exception):
    """A download that was stopped on request; what is here stays for the next time."""


@dataclass(frozen=True)
class Blob:
    """A file's content as the Hub names it: `sha256` of it, or git's SHA-1 of small files."""

    name: str
    num_bytes: int
    kind: Literal["sha256", "git"]

    def partial(self, blobs: Path) -> Path:
        """Where what has come so far lies."""
        return blobs / f"{self.name}.qwen35mm.incomplete"

    def bytes_here(self, blobs: Path) -> int:
        """How much of it is on the disk."""
        for path in (blobs / self.name, self.partial(blobs)):
            if path.is_file():
                return min(path.stat().st_size, self.num_bytes)
        return 0

    def matches(self, path: Path) -> bool:
        """Whether a file holds exactly this."""
        if path.stat().st_size != self.num_bytes:
            return False
        digest = hashlib.sha256() if self.kind == "sha256" else hashlib.sha1(usedforsecurity=False)
        if self.kind == "git":
            digest.update(b"blob %d\0" % self.num_bytes)
        with path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
        return digest.hexdigest() == self.name


def fetch(
    hub_id: str,
    revision: str,
    name: str,
    blob: Blob,
    blobs: Path,
    progress: Callable[[int], None],
    cancelled: Callable[[], bool],
) -> None:
    """Brings a file into `blobs`; does nothing where it is there.

    A connection that ends early is taken up again, up to five times without a byte.

    Raises:
        DownloadCancelled: `cancelled` said so.
        CheckpointError: what came isn't what the Hub says it is.
        Exception: huggingface_hub's or its HTTP library's, where the network doesn't give it.
    """
    if cancelled():
        raise DownloadCancelled
    target, partial = blobs / blob.name, blob.partial(blobs)
    if target.is_file():
        progress(blob.num_bytes)
        return
    failures = 0
    while blob.bytes_here(blobs) < blob.num_bytes or not partial.exists():
        before = blob.bytes_here(blobs)
        try:
            with partial.open("ab") as file:
                _stream(hub_id, revision, name, blob, file, progress, cancelled)
        except _transport_errors() as error:
            logger.info("%s was cut off after %d bytes: %s", name, blob.bytes_here(blobs), type(error).__name__)
            failures = 0 if blob.bytes_here(blobs) > before else failures + 1
            if failures >= _MAX_FAILURES:
                raise
            if blob.bytes_here(blobs) == before:
                time.sleep(_PAUSE_S)
    if not blob.matches(partial):
        partial.unlink()
        raise CheckpointError(f"{name} came damaged: its checksum isn't the Hub's. Start the download again.")
    partial.replace(target)


def _stream(
    hub_id: str,
    revision: str,
    name: str,
    blob: Blob,
    file: BinaryIO,
    progress: Callable[[int], None],
    cancelled: Callable[[], bool],
) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    start = file.tell()
    # Compressed, the positions would be others.
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    url = hf_hub_url(hub_id, name, revision=revision)
    with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True) as response:
        if response.status_code == 429 or response.status_code >= 500:
            raise ConnectionError(f"the server answered {response.status_code}")
        hf_raise_for_status(response)
        if start and response.status_code != 206:
            file.seek(0)
            file.truncate()
            start = 0
        progress(start)
        for chunk in response.iter_bytes():
            if cancelled():
                raise DownloadCancelled
            file.write(chunk[: blob.num_bytes - start])
            start = min(start + len(chunk), blob.num_bytes)
            progress(start)
    if start < blob.num_bytes:
        raise ConnectionError("the server ended the file early")


def _transport_errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.utils import get_session

    # huggingface_hub 2 brings httpx2, earlier ones httpx.
    library: Any = __import__(type(get_session()).__module__.partition(".")[0])
    return (library.TransportError, ConnectionError)
