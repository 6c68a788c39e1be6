"""Downloads a checkpoint into the Hugging Face cache, with progress and cancellation, never a byte twice.

huggingface_hub discards a file that is cut off and reports progress in steps of 10 MB. So we fetch the files' contents
ourselves, next to its files, check them against the Hub's checksums and rename them; it makes the folders around them.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from qwen35mm.config import SUPPORTED_MODEL_TYPES
from qwen35mm.errors import CheckpointError, Qwen35mmError
from qwen35mm.model.load import HUB_PATTERNS
from qwen35mm.model_library.installed import cache_folder, is_family, is_hub_id, repository_folder
from qwen35mm_preprocess.say import say, size

logger = logging.getLogger(__name__)

# Left free for the disk cache and everything else.
_RESERVE_BYTES = 256 << 20
# Short, because a stalled connection also hides a cancellation, and resuming costs nothing.
_TIMEOUT_S = 10.0
# Before each new try after one that brought nothing; together some four minutes.
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, *[15.0] * 15)
_ASK_S = 0.25
_READ_BYTES = 1 << 20

OnProgress = Callable[[int, int], None]


class DownloadCancelled(Exception):
    """A download that was cancelled; what has arrived stays for the next time."""


@dataclass(frozen=True)
class _RemoteFile:
    """A file as the Hub lists it.

    Attributes:
        digest: names the content: its SHA-256, or git's SHA-1 for small files.
    """

    path: str
    digest: str
    num_bytes: int
    is_git: bool

    def matches(self, path: Path, on_chunk: Callable[[], None]) -> bool:
        """Whether a file holds exactly this content; takes seconds for a large one."""
        if path.stat().st_size != self.num_bytes:
            return False
        digest = hashlib.sha1(b"blob %d\0" % self.num_bytes, usedforsecurity=False) if self.is_git else hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
                on_chunk()
        return digest.hexdigest() == self.digest


def download(
    hub_id: str,
    *,
    progress: OnProgress = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Path:
    """Downloads what a checkpoint needs, as far as it is missing, into the Hugging Face cache.

    Args:
        hub_id: such as `Qwen/Qwen3.5-2B`.
        progress: called with the bytes here so far and the total bytes, over all files.
        cancelled: asked at every chunk that arrives, and while it waits for a connection.

    Returns:
        The checkpoint's folder.

    Raises:
        DownloadCancelled: `cancelled` returned True. What has arrived stays for the next time.
        CheckpointError: the download fails; the message says why and what to do. What has arrived stays.
    """
    if not is_hub_id(hub_id):
        raise CheckpointError(
            say("'{name}' isn't a Hub id: expected an owner and a name, such as Qwen/Qwen3.5-2B.", name=hub_id)
        )
    try:
        return _Download(hub_id, progress, cancelled).run()
    except (Qwen35mmError, DownloadCancelled):
        raise
    except Exception as error:
        raise _in_words(hub_id, error) from error


def missing(hub_id: str, num_bytes: int) -> int:
    """Bytes still to download of a model with so many, by the files that an earlier download left."""
    try:
        here = sum(path.stat().st_size for path in (repository_folder(hub_id) / "blobs").iterdir())
    except OSError:
        here = 0
    return max(num_bytes - here, 0)


def lacking_disk_bytes(missing_bytes: int) -> int:
    """Bytes that the cache's disk lacks for so many and a reserve."""
    if not missing_bytes:
        return 0
    folder = next(each for each in (cache_folder(), *cache_folder().parents) if each.exists())
    return max(missing_bytes + _RESERVE_BYTES - shutil.disk_usage(folder).free, 0)


def download_config(hub_id: str) -> tuple[Path, int]:
    """Fetches and keeps a model's config.json alone. Errors as for `download`.

    Returns:
        its folder, and the bytes of all files that `download` would bring.
    """
    from huggingface_hub import hf_hub_download

    try:
        # Without a network this fails at once; `hf_hub_download` alone would try for half a minute.
        revision, files = _list_files(hub_id)
        config = Path(hf_hub_download(hub_id, "config.json", revision=revision))
        return config.parent, sum(file.num_bytes for file in files)
    except Qwen35mmError:
        raise
    except Exception as error:
        raise _in_words(hub_id, error) from error


class _Download:
    def __init__(self, hub_id: str, progress: OnProgress, cancelled: Callable[[], bool]) -> None:
        self._hub_id = hub_id
        self._progress = progress
        self._cancelled = cancelled
        self._revision, self._files = _list_files(hub_id)
        self._total_bytes = sum(file.num_bytes for file in self._files)
        self._blobs = repository_folder(hub_id) / "blobs"
        self._done_bytes = sum(map(self._bytes_here, self._files))

    def run(self) -> Path:
        """Fetches what is missing; returns the checkpoint's folder."""
        from huggingface_hub import snapshot_download

        self._blobs.mkdir(parents=True, exist_ok=True)
        _check_disk(self._total_bytes - self._done_bytes)
        with self._alone():
            self._tell(0)
            # Small files first: they show what is wrong with a model before its weights arrive.
            for file in sorted(self._files, key=lambda file: file.num_bytes):
                self._fetch(file)
                if file.path == "config.json":
                    _check_family(self._hub_id, self._target(file))
            return Path(snapshot_download(self._hub_id, allow_patterns=HUB_PATTERNS))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Waits until no other program downloads this model: both would write to the same files."""
        folder = cache_folder() / ".locks" / repository_folder(self._hub_id).name
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "qwen35mm.lock", blocking=False)
        while not lock.is_locked:
            try:
                lock.acquire()
            except Timeout:
                self._pause(1.0)
            # What the other program has brought.
            self._tell(sum(map(self._bytes_here, self._files)) - self._done_bytes)
        try:
            yield
        finally:
            lock.release()

    def _target(self, file: _RemoteFile) -> Path:
        return self._blobs / file.digest

    def _partial(self, file: _RemoteFile) -> Path:
        """Where an unfinished file lies."""
        return self._blobs / f"{file.digest}.qwen35mm.incomplete"

    def _bytes_here(self, file: _RemoteFile) -> int:
        """Bytes of the file on disk."""
        found = [path for path in (self._target(file), self._partial(file)) if path.is_file()]
        return min(found[0].stat().st_size, file.num_bytes) if found else 0

    def _tell(self, num_bytes: int) -> None:
        """Reports that so many bytes have arrived, or are lost if negative."""
        self._done_bytes += num_bytes
        self._progress(self._done_bytes, self._total_bytes)

    def _fetch(self, file: _RemoteFile) -> None:
        """Brings a file into the blobs; resumes a broken connection until many tries in a row bring no byte."""
        self._check_cancelled()
        target, partial = self._target(file), self._partial(file)
        if target.is_file():
            return
        failures = 0
        while (before := self._bytes_here(file)) < file.num_bytes or not partial.exists():
            try:
                with partial.open("ab") as out:
                    self._stream(file, out)
            except Exception as error:
                if not _may_pass(error):
                    raise
                here = self._bytes_here(file)
                logger.info("%s was cut off after %d bytes: %s", file.path, here, type(error).__name__)
                failures = 0 if here > before else failures + 1
                if failures > len(_PAUSES_S):
                    raise
                if failures:
                    self._pause(_PAUSES_S[failures - 1])
        if not file.matches(partial, self._go_on):
            partial.unlink()
            self._tell(-file.num_bytes)
            raise CheckpointError(
                say(
                    "{name} arrived damaged: its checksum doesn't match the Hub's. Start the download again.",
                    name=file.path,
                )
            )
        partial.replace(target)

    def _go_on(self) -> None:
        self._check_cancelled()
        self._tell(0)

    def _check_cancelled(self) -> None:
        if self._cancelled():
            raise DownloadCancelled

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._check_cancelled()
            time.sleep(min(left, _ASK_S))

    def _stream(self, file: _RemoteFile, out: BinaryIO) -> None:
        """Appends to the unfinished file until it is whole or the connection ends."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        start = out.tell()
        # Compression would change the byte positions.
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        url = hf_hub_url(self._hub_id, file.path, revision=self._revision)
        with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True) as response:
            hf_raise_for_status(response)
            if start and response.status_code != 206:
                out.seek(0)
                out.truncate()
                self._tell(-start)
                start = 0
            for chunk in response.iter_bytes():
                self._check_cancelled()
                wanted = chunk[: file.num_bytes - start]
                out.write(wanted)
                start += len(wanted)
                self._tell(len(wanted))
        if start < file.num_bytes:
            raise ConnectionError("the server ended the file early")


def _list_files(hub_id: str) -> tuple[str, list[_RemoteFile]]:
    from huggingface_hub import HfApi

    info = HfApi().model_info(hub_id, files_metadata=True, timeout=_TIMEOUT_S)
    files = [
        _RemoteFile(file.rfilename, file.lfs.sha256, file.lfs.size, is_git=False)
        if file.lfs is not None
        else _RemoteFile(file.rfilename, file.blob_id or "", file.size or 0, is_git=True)
        for file in info.siblings or []
        if any(fnmatchcase(file.rfilename, pattern) for pattern in HUB_PATTERNS)
    ]
    names = {file.path for file in files}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise CheckpointError(
            say(
                "'{name}' has no config.json with *.safetensors files on the Hub, so it can't be run here (GGUF files "
                "and pickled weights can't be read). Choose the original checkpoint.",
                name=hub_id,
            )
        )
    if not all(file.digest.isalnum() for file in files):
        raise CheckpointError(
            say("The Hub lists '{name}' without checksums, so it can't be checked. Try again later.", name=hub_id)
        )
    return info.sha or "main", files


def _check_family(hub_id: str, config: Path) -> None:
    if not is_family(config):
        raise CheckpointError(
            say(
                "'{name}' is another kind of model: the model_type in its config.json is none of {types}. Choose a "
                "multimodal Qwen3.5 checkpoint.",
                name=hub_id,
                types=", ".join(SUPPORTED_MODEL_TYPES),
            )
        )


def _check_disk(missing_bytes: int) -> None:
    if more := lacking_disk_bytes(missing_bytes):
        raise CheckpointError(
            say(
                "Not enough disk space: free another {more}, or name a folder on another disk in HF_HOME and start the "
                "program again.",
                more=size(more),
            )
        )


def _in_words(hub_id: str, error: Exception) -> CheckpointError:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return CheckpointError(
            say(
                "'{name}' asks for your consent: accept its terms on its page on huggingface.co, then log in with "
                "`hf auth login`, and try again.",
                name=hub_id,
            )
        )
    if isinstance(error, RepositoryNotFoundError):
        return CheckpointError(
            say(
                "The Hugging Face Hub has no model '{name}'. Check the spelling; a private model needs "
                "`hf auth login`.",
                name=hub_id,
            )
        )
    if isinstance(error, OfflineModeIsEnabled):
        return CheckpointError(
            say("HF_HUB_OFFLINE is set, so nothing is downloaded. Unset it and start the program again.")
        )
    if isinstance(error, HfHubHTTPError) and getattr(error.response, "status_code", None) == 401:
        return CheckpointError(
            say("The Hub refuses your token for '{name}'. Log in again with `hf auth login`.", name=hub_id)
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CheckpointError(say("The disk is full. Free some space and start the download again: it resumes."))
    if isinstance(error, PermissionError):
        return CheckpointError(say("The Hugging Face cache can't be written to. Name another folder in HF_HOME."))
    if isinstance(error, (*_transport_errors(), LocalEntryNotFoundError)):
        return CheckpointError(
            say("Hugging Face can't be reached. Check the network and try again: a download resumes.")
        )
    if _may_pass(error):
        return CheckpointError(say("Hugging Face has a problem. Try again later: a download resumes."))
    logger.error("%s could not be downloaded", hub_id, exc_info=error)
    return CheckpointError(say("'{name}' couldn't be downloaded. The program's log has the details.", name=hub_id))


def _may_pass(error: Exception) -> bool:
    """Whether a later try may bring the rest: the connection or the server failed."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return isinstance(error, _transport_errors()) or status == 429 or status >= 500


def _transport_errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.utils import get_session

    # huggingface_hub 2 brings httpx2, earlier ones httpx.
    library: Any = __import__(type(get_session()).__module__.partition(".")[0])
    return (library.TransportError, ConnectionError)
