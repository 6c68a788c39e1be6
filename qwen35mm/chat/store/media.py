"""Files by their content, and their owners. A file that is sent twice, even by two people, is stored once.

    <folder>/<first two digits>/<SHA-256 of the bytes>

A file is written under a temporary name in the folder, then renamed. It never changes afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from qwen35mm.chat.store.database import Database, is_full, make_folder
from qwen35mm.chat.store.records import DIGEST
from qwen35mm.errors import ConversationDataError, FileTooLargeError, NotFoundError, StorageError
from qwen35mm_preprocess.say import decimal, say

_PIECE_BYTES = 1 << 20
_HELD_S = 24 * 3600.0
# Writers wait while files are deleted, so few go at a time.
_DELETED_AT_ONCE = 64
# OCTET_LENGTH doesn't read the text.
SIZE_IN_BYTES = "OCTET_LENGTH({})" if sqlite3.sqlite_version_info >= (3, 43) else "LENGTH(CAST({} AS BLOB))"
_TEMPORARY = ".writing-"
# An older temporary file was left by a process that is gone.
_LEFTOVER_AGE_S = 3600.0


class Kept(NamedTuple):
    """What a person has stored: bytes of texts and files, files that are in no message yet, and conversations."""

    num_bytes: int
    num_unsent: int
    num_conversations: int


class MediaStore:
    """The files under `folder`, which is created (mode 0700) with the first one. Usable from any thread and process.

    A file stays while a message contains it, or while an owner holds it to send it soon. Callers check `is_of` before
    they serve a file.

    Args:
        database: the conversations' database, with the messages and holds.
    """

    def __init__(self, folder: Path, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._database = database
        self._clock = clock

    def add(self, stream: BinaryIO, *, max_bytes: int, digest: str | None = None) -> tuple[str, int]:
        """Stores the rest of `stream`; returns its digest and its length in bytes.

        Args:
            digest: the expected digest; None accepts any.

        Raises:
            FileTooLargeError: there are more than `max_bytes`.
            ConversationDataError: the content has another digest.
            StorageError: the disk is full or can't be written.
        """
        make_folder(self._folder)
        with _disk_errors_in_words():
            descriptor, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=self._folder)
            temporary = Path(name)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    found, num_bytes = _copy(stream, file, max_bytes)
                    if digest not in (None, found):
                        raise ConversationDataError(say("A file's content doesn't match its name: it is damaged."))
                    file.flush()
                    os.fsync(file.fileno())
                self._put(temporary, self.path(found), num_bytes)
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink()
        return found, num_bytes

    def path(self, digest: str) -> Path:
        """Where a file is or would be. Raises ConversationDataError for an invalid digest."""
        if re.fullmatch(DIGEST, digest) is None:
            raise ConversationDataError(say("A file's digest must be 64 hex digits."))
        return self._folder / digest[:2] / digest

    def __contains__(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def open(self, digest: str) -> BinaryIO:
        """Opens a file for reading. Raises NotFoundError, or StorageError if it can't be read."""
        try:
            return self.path(digest).open("rb")
        except FileNotFoundError:
            raise NotFoundError(say("This file is no longer stored. Add it again.")) from None
        except OSError as error:
            raise StorageError(
                say("A stored file can't be read: the disk failed, or it belongs to another user.")
            ) from error

    def delete(self, digest: str) -> bool:
        """Removes a file; False if there is none, or if it can't be removed."""
        try:
            self.path(digest).unlink()
        except OSError:
            return False
        return True

    def hold(self, owner: str, digest: str) -> None:
        """Marks an upload as this owner's until a message with it is added, until `release`, or for a day.

        Raises:
            NotFoundError: the file isn't stored, or not any more: add it again.
        """
        with self._database.writing() as connection:
            # Files are only deleted in a writing transaction, so the file can't go in this one.
            if digest not in self:
                raise NotFoundError(say("This file is no longer stored. Add it again."))
            connection.execute(
                "INSERT OR REPLACE INTO held (owner, digest, since_s) VALUES (?, ?, ?)", (owner, digest, self._clock())
            )

    def release(self, owner: str, digest: str) -> None:
        """Undoes `hold`; does nothing if the file isn't held."""
        with self._database.writing() as connection:
            connection.execute("DELETE FROM held WHERE owner = ? AND digest = ?", (owner, digest))

    def held(self, owner: str) -> set[str]:
        """The digests that `hold` marked for an owner."""
        with self._database.reading() as connection:
            rows = connection.execute("SELECT digest FROM held WHERE owner = ?", (owner,)).fetchall()
        return {digest for (digest,) in rows}

    def is_of(self, owner: str, digest: str) -> bool:
        """Whether this owner may see a file: one of their messages contains it, or they hold it."""
        with self._database.reading() as connection:
            row = connection.execute(
                "SELECT EXISTS (SELECT 1 FROM attachments AS a JOIN nodes AS n ON n.id = a.node "
                "JOIN present AS c ON c.id = n.conversation WHERE a.digest = ? AND c.owner = ?) "
                "OR EXISTS (SELECT 1 FROM held WHERE owner = ? AND digest = ? AND since_s > ?)",
                (digest, owner, owner, digest, self._clock() - _HELD_S),
            ).fetchone()
        return bool(row[0])

    def kept(self, owner: str, *, count_bytes: bool = True) -> Kept:
        """What an owner has stored; a shared file counts for each of its owners.

        Args:
            count_bytes: whether to count bytes, which reads every message; 0 bytes if not.
        """
        with self._database.reading() as connection:
            held = connection.execute(
                "SELECT digest FROM held WHERE owner = ? AND since_s > ?", (owner, self._clock() - _HELD_S)
            ).fetchall()
            (num_conversations,) = connection.execute(
                "SELECT COUNT(*) FROM present WHERE owner = ?", (owner,)
            ).fetchone()
            if not count_bytes:
                return Kept(0, len(held), num_conversations)
            (num_files,) = connection.execute(
                "SELECT COALESCE(SUM(num_bytes), 0) FROM (SELECT DISTINCT a.digest, a.num_bytes FROM attachments AS a "
                "JOIN nodes AS n ON n.id = a.node JOIN present AS c ON c.id = n.conversation WHERE c.owner = ?)",
                (owner,),
            ).fetchone()
            (num_texts,) = connection.execute(
                f"SELECT COALESCE(SUM({SIZE_IN_BYTES.format('n.text')} + {SIZE_IN_BYTES.format('n.reasoning')}), 0) "
                "FROM nodes AS n JOIN present AS c ON c.id = n.conversation WHERE c.owner = ?",
                (owner,),
            ).fetchone()
            num_settings = 0
            for table in ("presets", "preferences"):
                size = f"SELECT COALESCE(SUM({SIZE_IN_BYTES.format('value')}), 0) FROM {table} WHERE owner = ?"
                num_settings += connection.execute(size, (owner,)).fetchone()[0]
        num_held = sum(_size(self.path(digest)) for (digest,) in held)
        return Kept(num_files + num_texts + num_settings + num_held, len(held), num_conversations)

    def num_bytes(self) -> int:
        """Bytes of the database, without its free pages, and of all files in messages or on hold."""
        with self._database.reading() as connection:
            (num_files,) = connection.execute(
                "SELECT COALESCE(SUM(num_bytes), 0) FROM (SELECT DISTINCT digest, num_bytes FROM attachments)"
            ).fetchone()
            num_pages, num_free, page_bytes = (
                connection.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_count", "freelist_count", "page_size")
            )
            held = connection.execute("SELECT DISTINCT digest FROM held").fetchall()
        return num_files + (num_pages - num_free) * page_bytes + sum(_size(self.path(digest)) for (digest,) in held)

    def collect_garbage(self, min_age_s: float = 3600.0) -> int:
        """Deletes files that no message contains and nobody holds, and leftovers of killed writers.

        Args:
            min_age_s: files that were added (again) within this time stay: somebody may be about to hold them.

        Returns:
            How many files were deleted.
        """
        now_s = time.time()
        num_deleted = 0
        for path in self._folder.glob(f"{_TEMPORARY}*"):
            if _is_older(path, now_s - _LEFTOVER_AGE_S):
                with contextlib.suppress(OSError):
                    path.unlink()
                    num_deleted += 1
        files = self._folder.glob("??/*")
        old = (path.name for path in files if re.fullmatch(DIGEST, path.name) and _is_older(path, now_s - min_age_s))
        while digests := list(islice(old, _DELETED_AT_ONCE)):
            num_deleted += self.discard(digests)
        # Last, since a full disk may need the files' room for the database.
        with self._database.writing() as connection:
            connection.execute("DELETE FROM held WHERE since_s <= ?", (self._clock() - _HELD_S,))
        return num_deleted

    def discard(self, digests: Iterable[str], *, min_age_s: float = 0.0) -> int:
        """Deletes the given files that no message contains, nobody holds and that were added (again) at least
        `min_age_s` ago; returns how many."""
        newest_s = time.time() - min_age_s
        old = [digest for digest in digests if not min_age_s or _is_older(self.path(digest), newest_s)]
        used = (
            "SELECT EXISTS (SELECT 1 FROM attachments WHERE digest = ?) "
            "OR EXISTS (SELECT 1 FROM held WHERE digest = ? AND since_s > ?)"
        )
        with self._database.writing() as connection:
            held_since_s = self._clock() - _HELD_S
            rows = [(digest, connection.execute(used, (digest, digest, held_since_s)).fetchone()) for digest in old]
            return sum(self.delete(digest) for digest, (is_used,) in rows if not is_used)

    def _put(self, temporary: Path, path: Path, num_bytes: int) -> None:
        make_folder(path.parent)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size == num_bytes:
                os.utime(path)  # counts as new for `collect_garbage`
                return
        temporary.replace(path)


def _copy(stream: BinaryIO, file: BinaryIO, max_bytes: int) -> tuple[str, int]:
    sha256 = hashlib.sha256()
    num_bytes = 0
    while piece := _read(stream):
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise FileTooLargeError(
                say("The file is larger than the limit of {most} MiB.", most=decimal(max_bytes / 2**20, 1))
            )
        sha256.update(piece)
        file.write(piece)
    return sha256.hexdigest(), num_bytes


def _read(stream: BinaryIO) -> bytes:
    try:
        return stream.read(_PIECE_BYTES)
    except OSError as error:
        raise StorageError(say("The file can't be read to its end. Add it again.")) from error


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


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
            raise StorageError(
                say("The disk is full, so the file was not saved. Free some space and try again.")
            ) from error
        raise StorageError(say("The file can't be saved: the disk failed, or its folder isn't writable.")) from error
