"""Files by their content: a file that is sent twice, by whomever, is kept once.

    <folder>/<first two digits>/<SHA-256 of the bytes>

A file appears whole, by a rename, and never changes. What is being written lies in the folder under a temporary name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from qwen35mm.chat.database import is_full, make_folder
from qwen35mm.chat.node_json import DIGEST
from qwen35mm.errors import ConversationDataError, FileTooLargeError, NotFoundError, StorageError

_PIECE_BYTES = 1 << 20
_TEMPORARY = ".writing-"
# A file that is written has been touched within this time; an older one was left by a process that is gone.
_LEFTOVER_AGE_S = 3600.0


class MediaStore:
    """The files under `folder`, which is made (mode 0700) with the first one. Usable from any thread and process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, stream: BinaryIO, *, max_bytes: int, digest: str | None = None) -> tuple[str, int]:
        """Keeps what is left to read of `stream`; returns its digest and its length in bytes.

        Args:
            digest: what the content must be.

        Raises:
            FileTooLargeError: there are more than `max_bytes`.
            ConversationDataError: the content has another digest.
            StorageError: the disk is full, or can't be written to.
        """
        make_folder(self._folder)
        with _disk_errors_in_words():
            descriptor, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=self._folder)
            temporary = Path(name)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    found, num_bytes = _copy(stream, file, max_bytes)
                    if digest not in (None, found):
                        raise ConversationDataError("A file's content is not what its name says: it is damaged.")
                    file.flush()
                    os.fsync(file.fileno())
                self._put(temporary, self.path(found), num_bytes)
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink()
        return found, num_bytes

    def path(self, digest: str) -> Path:
        """Where a file is, or would be. Raises ConversationDataError for what is no digest."""
        if DIGEST.fullmatch(digest) is None:
            raise ConversationDataError("A file's digest must be 64 hex digits.")
        return self._folder / digest[:2] / digest

    def __contains__(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def open(self, digest: str) -> BinaryIO:
        """A file for reading. Raises NotFoundError, and StorageError where it can't be read."""
        try:
            return self.path(digest).open("rb")
        except FileNotFoundError:
            raise NotFoundError("This file is not kept any more. Add it again.") from None
        except OSError as error:
            raise StorageError("A kept file can't be read: the disk fails, or it belongs to another user.") from error

    def delete(self, digest: str) -> bool:
        """Removes a file; False where there was none, or where it can't be removed."""
        try:
            self.path(digest).unlink()
        except OSError:
            return False
        return True

    def older_than(self, min_age_s: float) -> Iterator[str]:
        """The digests of the files that were added, or added again, at least `min_age_s` ago."""
        newest_s = time.time() - min_age_s
        for path in self._folder.glob("??/*"):
            if DIGEST.fullmatch(path.name) and _is_older(path, newest_s):
                yield path.name

    def remove_leftovers(self) -> int:
        """Removes what processes left that were killed while they wrote; returns how many files."""
        newest_s = time.time() - _LEFTOVER_AGE_S
        num_removed = 0
        for path in self._folder.glob(f"{_TEMPORARY}*"):
            if _is_older(path, newest_s):
                with contextlib.suppress(OSError):
                    path.unlink()
                    num_removed += 1
        return num_removed

    def _put(self, temporary: Path, path: Path, num_bytes: int) -> None:
        make_folder(path.parent)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size == num_bytes:
                os.utime(path)  # so that it is as new to `older_than` as a file that is added now
                return
        temporary.replace(path)


def _copy(stream: BinaryIO, file: BinaryIO, max_bytes: int) -> tuple[str, int]:
    sha256 = hashlib.sha256()
    num_bytes = 0
    while piece := _read(stream):
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise FileTooLargeError(f"The file is larger than the {max_bytes / 2**20:,.1f} MiB that are allowed.")
        sha256.update(piece)
        file.write(piece)
    return sha256.hexdigest(), num_bytes


def _read(stream: BinaryIO) -> bytes:
    try:
        return stream.read(_PIECE_BYTES)
    except OSError as error:
        raise StorageError("The file can't be read to its end. Add it again.") from error


def _is_older(path: Path, newest_s: float) -> bool:
    try:
        return path.stat().st_mtime <= newest_s
    except OSError:
        return False


@contextlib.contextmanager
def _disk_errors_in_words() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise StorageError("The disk is full, so the file was not kept. Free some space and try again.") from error
        raise StorageError("The file can't be kept: the disk fails, or its folder can't be written to.") from error
