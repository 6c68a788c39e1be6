"""Who refers to which file: the messages that have it, and the uploads that wait to be sent."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from qwen35mm.chat.database import Database
from qwen35mm.chat.media import MediaStore
from qwen35mm.errors import NotFoundError

_HELD_S = 24 * 3600.0
# Writers wait while files are deleted, so not for many at once.
_DELETED_AT_ONCE = 64


class MediaReferences:
    """The part of a `ConversationStore` that knows whose a file is.

    media    the files themselves
    """

    media: MediaStore
    _database: Database
    _clock: Callable[[], float]

    def hold(self, owner: str, digest: str) -> None:
        """Marks an upload as this owner's, until a message with it is added, `release`, or for a day.

        Raises:
            NotFoundError: the file is not there (any more): add it again.
        """
        with self._database.writing() as connection:
            # Files are deleted in a writing transaction, so a file that is seen here stays.
            if digest not in self.media:
                raise NotFoundError("This file is not kept any more. Add it again.")
            connection.execute(
                "INSERT OR REPLACE INTO held (owner, digest, since_s) VALUES (?, ?, ?)", (owner, digest, self._clock())
            )

    def release(self, owner: str, digest: str) -> None:
        """Takes `hold` back; nothing happens where there is none."""
        with self._database.writing() as connection:
            release(connection, owner, [digest])

    def has_media(self, owner: str, digest: str) -> bool:
        """Whether this owner may see a file: one of the owner's messages has it, or it is held."""
        with self._database.reading() as connection:
            row = connection.execute(
                "SELECT EXISTS (SELECT 1 FROM attachments AS a JOIN nodes AS n ON n.id = a.node "
                "JOIN conversations AS c ON c.id = n.conversation WHERE a.digest = ? AND c.owner = ?) "
                "OR EXISTS (SELECT 1 FROM held WHERE owner = ? AND digest = ? AND since_s > ?)",
                (digest, owner, owner, digest, self._clock() - _HELD_S),
            ).fetchone()
        return bool(row[0])

    def collect_garbage(self, min_age_s: float = 3600.0) -> int:
        """Deletes the files that no message has and nobody holds, and what killed writers left.

        Args:
            min_age_s: a file that was added (again) later than this stays: it may be about to be held.

        Returns:
            How many files were deleted.
        """
        num_deleted = self.media.remove_leftovers()
        for digests in _batches(self.media.older_than(min_age_s)):
            num_deleted += self.discard(digests)
        # Last, since the database may need the room that the files took.
        with self._database.writing() as connection:
            connection.execute("DELETE FROM held WHERE since_s <= ?", (self._clock() - _HELD_S,))
        return num_deleted

    def discard(self, digests: Iterable[str]) -> int:
        """Deletes those of the files that no message has and nobody holds; returns how many."""
        with self._database.writing() as connection:
            held_since_s = self._clock() - _HELD_S
            unused = [digest for digest in digests if not _is_used(connection, digest, held_since_s)]
            return sum(self.media.delete(digest) for digest in unused)


def release(connection: sqlite3.Connection, owner: str, digests: Iterable[str]) -> None:
    """Forgets holds, inside a caller's transaction."""
    connection.executemany("DELETE FROM held WHERE owner = ? AND digest = ?", [(owner, digest) for digest in digests])


def _is_used(connection: sqlite3.Connection, digest: str, held_since_s: float) -> bool:
    row = connection.execute(
        "SELECT EXISTS (SELECT 1 FROM attachments WHERE digest = ?) "
        "OR EXISTS (SELECT 1 FROM held WHERE digest = ? AND since_s > ?)",
        (digest, digest, held_since_s),
    ).fetchone()
    return bool(row[0])


def _batches(digests: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(islice(digests, _DELETED_AT_ONCE)):
        yield batch
