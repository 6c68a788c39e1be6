"""A run's memory: files' digests, finished captions, failures, and each output's contents.

One SQLite file, which one run at a time locks. When `finish` returns, the caption is on the disk. So after a kill or a
power failure, whatever an output lacks can be written again from here without the model.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qwen35mm.captioning.items import Failed, Item, Unreadable
from qwen35mm.captioning.manifest.backups import Backups
from qwen35mm.captioning.manifest.files import RunLock, is_gone
from qwen35mm.captioning.manifest.tables import MIGRATIONS, OLDEST, TAKEN_OVER
from qwen35mm.captioning.records import Caption, printable
from qwen35mm.chat.store.database import Database
from qwen35mm.errors import CaptioningError, OutputError, StorageError

logger = logging.getLogger(__name__)

# The default name of the folder of a run's manifests.
STATE_FOLDER = ".qwen35mm"
# Rows per read, so that no transaction is open while a caller works on a row.
_ROWS_AT_ONCE = 500
# Fields of a caption that are lists in JSON.
_TUPLES = ("flags", "judged")
# A file that changed more recently is read again.
SETTLED_S = 2.0


class Manifest:
    """The manifest at `path`. Usable from all threads of one process; every method may raise OutputError.

    Attributes:
        backups: of the files that this run replaces.
    """

    def __init__(self, path: Path, lock: RunLock | None, folder: Path) -> None:
        self._base = os.path.abspath(folder)  # noqa: PTH100
        self._above = os.path.join(self._base, "")  # noqa: PTH118
        self._lock = lock
        self.backups = Backups(path.parent, self.place)
        self._written_ns = _changed_ns(path)
        self._database = Database(path, migrations=MIGRATIONS, oldest=OLDEST)
        # The thread inside `together`, and its connection.
        self._together: tuple[int, sqlite3.Connection] | None = None

    @classmethod
    def open(cls, path: Path, *, for_page: bool = False) -> Manifest:
        """Opens or creates the manifest and its folder, which may hold other shards' manifests.

        Args:
            for_page: whether the review page opens it.

        Raises:
            CaptioningError: another run has locked it, it is damaged, foreign or of another version, or its folder
                can't be written to.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CaptioningError(
                f"The folder {path.parent.name!r} can't be made: {error.strerror}. Choose another for the run."
            ) from error
        lock = RunLock(path.with_name(f"{path.name}.lock"), "here", for_page=for_page, needed=True)
        manifest = cls(path, lock, path.parent.parent)
        try:
            with manifest._database.writing():
                pass
        except StorageError as error:
            manifest.close()
            raise CaptioningError(str(error)) from error
        return manifest

    @classmethod
    @contextlib.contextmanager
    def borrowed(cls, path: Path) -> Iterator[Manifest]:
        """A temporary copy of the manifest at `path`, or an empty manifest: shows what a run would do.

        Raises:
            CaptioningError: it can't be read.
        """
        with tempfile.TemporaryDirectory(prefix="qwen35mm-") as folder:
            copy = Path(folder, path.name)
            try:
                _copy_database(path, copy)
            except (OSError, sqlite3.Error) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise CaptioningError(f"The manifest {path.name!r} can't be read: {reason}.") from error
            manifest = cls(copy, None, path.parent.parent)
            try:
                # Only a real run repairs what another run began.
                manifest.change("DELETE FROM sidecars_begun")
                yield manifest
            finally:
                manifest.close()

    def take_over(self, others: Iterable[Path]) -> None:
        """Copies captions, failures, files' digests and text files' owners from other manifests of the same folder.

        Only from manifests that changed after this one; the latest wins. One that can't be read is only logged.
        """
        written = self._written_ns
        for changed, path in sorted((_changed_ns(path), path) for path in others):
            if changed <= written:
                continue
            try:
                with Manifest.borrowed(path) as other, other.reading() as source, self.writing() as connection:
                    for query, statement in TAKEN_OVER:
                        connection.executemany(statement, source.execute(query))
            except CaptioningError as error:
                logger.warning("What %s knows is not used: %s", path.name, error)

    def close(self) -> None:
        """Unlocks the manifest for other runs. Call no method afterwards."""
        self._database.close()
        if self._lock is not None:
            self._lock.release()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Puts this thread's reads and writes in the body into one transaction, which isn't durable."""
        with self.writing(durable=False) as connection:
            self._together = (threading.get_ident(), connection)
            try:
                yield
            finally:
                self._together = None

    def _in_hand(self) -> sqlite3.Connection | None:
        """The connection of this thread's `together`; None outside of one."""
        together = self._together
        return together[1] if together is not None and together[0] == threading.get_ident() else None

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A transaction that reads. Raises OutputError."""
        if (connection := self._in_hand()) is not None:
            yield connection
            return
        with _errors_of_outputs(), self._database.reading() as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """A transaction that writes, all or nothing. Raises OutputError.

        Args:
            durable: it survives a power failure; every transaction survives a kill.
        """
        if (connection := self._in_hand()) is not None:
            assert not durable, "the transaction goes on"
            yield connection
            return
        with _errors_of_outputs(), self._database.writing(durable=durable) as connection:
            yield connection

    def rows(self, query: str, *arguments: object) -> list[tuple]:
        """All rows of a query."""
        # `reading` would take as long as the query, for each of a hundred thousand files.
        if (connection := self._in_hand()) is not None:
            return connection.execute(query, arguments).fetchall()
        with self.reading() as connection:
            return connection.execute(query, arguments).fetchall()

    def row(self, query: str, *arguments: object) -> tuple | None:
        """The first row of a query."""
        return next(iter(self.rows(query, *arguments)), None)

    def change(self, statement: str, *arguments: object, durable: bool = False) -> None:
        """A transaction of one statement; see `writing`."""
        if not durable and (connection := self._in_hand()) is not None:
            connection.execute(statement, arguments)
            return
        with self.writing(durable=durable) as connection:
            connection.execute(statement, arguments)

    def many_rows(self, query: str, *arguments: object) -> Iterator[tuple]:
        """Rows of a query, read in batches: nothing is locked while the caller works on a row.

        Args:
            query: its first column is a number, by which the rows are sorted. Its last two parameters, which are not in
                `arguments`, are the number that all rows must exceed and the most rows.
        """
        last = -1
        while found := self.rows(query, *arguments, last, _ROWS_AT_ONCE):
            yield from found
            last = found[-1][0]

    def place(self, path: Path | str) -> bytes:
        """A path as the manifest stores it: relative if it lies in the run's folder, so that the folder can move."""
        absolute = os.path.abspath(path)  # noqa: PTH100
        return os.fsencode(absolute.removeprefix(self._above))

    def path_of(self, place: bytes) -> Path:
        """The path of a `place`."""
        return Path(self._base, os.fsdecode(place))

    def is_gone(self, place: bytes) -> bool:
        """See `files.is_gone`, of the path of a `place`."""
        return is_gone(os.path.join(self._base, os.fsdecode(place)))  # noqa: PTH118 - called for every file

    def digest(self, path: Path, status: os.stat_result) -> bytes | None:
        """The stored digest of a file, if the file hasn't changed since."""
        query = "SELECT digest FROM digests WHERE place = ? AND num_bytes = ? AND mtime_ns = ? AND inode = ?"
        row = self.row(query, self.place(path), *file_state(status))
        return None if row is None else row[0]

    def remember_digest(self, path: Path, status: os.stat_result, digest: bytes) -> None:
        """Stores a file's digest."""
        statement = "INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?, ?)"
        self.change(statement, self.place(path), *file_state(status), digest)

    def parts(self, content: bytes, split: str) -> list[tuple[float, float]] | None:
        """Start and end of each part of the video with this digest, in seconds; None if it wasn't split like this."""
        row = self.row("SELECT parts FROM splits WHERE content = ? AND split = ?", content, split)
        return None if row is None else [(start_s, end_s) for start_s, end_s in json.loads(row[0])]

    def remember_parts(self, content: bytes, split: str, parts: Sequence[tuple[float, float]]) -> None:
        """Stores where a video was split."""
        self.change("INSERT OR REPLACE INTO splits VALUES (?, ?, ?)", content, split, json.dumps(parts))

    def facts(self, content: bytes) -> dict[str, Any]:
        """What is known of the medium with this digest; empty if nothing is."""
        row = self.row("SELECT facts FROM facts WHERE content = ?", content)
        return {} if row is None else json.loads(row[0])

    def remember_facts(self, content: bytes, facts: Mapping[str, Any]) -> None:
        """Adds to what is known of a medium."""
        known = self.facts(content)
        if known != (now := {**known, **facts}):
            self.change("INSERT OR REPLACE INTO facts VALUES (?, ?)", content, json.dumps(now))

    def kept(self) -> Iterator[tuple[str, Path | None, int]]:
        """Name, file and perceptual hash of the items that stand for those like them, the oldest first."""
        query = "SELECT sequence, name, place, similarity FROM kept WHERE sequence > ? ORDER BY sequence LIMIT ?"
        for _, name, place, similarity in self.many_rows(query):
            yield os.fsdecode(name), None if place is None else self.path_of(place), int(similarity, 16)

    def keep(self, name: str, path: Path | None, similarity: int) -> None:
        """Stores that an item stands for those like it."""
        statement = "INSERT OR REPLACE INTO kept (name, place, similarity) VALUES (?, ?, ?)"
        self.change(statement, os.fsencode(name), None if path is None else self.place(path), f"{similarity:x}")

    def caption(self, key: bytes) -> Caption | None:
        """The finished caption of this work."""
        row = self.row("SELECT caption FROM results WHERE key = ?", key)
        return None if row is None else load_caption(row[0])

    def finished(self, keys: Sequence[bytes]) -> bytes | None:
        """The first of these keys to be finished; None if none is."""
        query = f"SELECT key FROM results WHERE key IN ({','.join('?' * len(keys))}) ORDER BY sequence LIMIT 1"
        row = self.row(query, *keys)
        return None if row is None else row[0]

    def begin(self, key: bytes) -> int:
        """Counts a start of this work; returns how many there were, including this one and crashed ones."""
        statement = "INSERT INTO attempts VALUES (?, 1) ON CONFLICT DO UPDATE SET count = count + 1 RETURNING count"
        with self.writing(durable=False) as connection:
            return connection.execute(statement, (key,)).fetchone()[0]

    def take_back(self, key: bytes) -> None:
        """Uncounts a start that was cancelled on purpose, since it didn't crash."""
        self.change("UPDATE attempts SET count = count - 1 WHERE key = ? AND count > 0", key)

    def num_begun(self, key: bytes) -> int:
        """How often this work was started without finishing, failing or being cancelled."""
        row = self.row("SELECT count FROM attempts WHERE key = ?", key)
        return 0 if row is None else row[0]

    def finish(self, key: bytes, caption: Caption, *, name: str = "", similarity: int | None = None) -> None:
        """Stores a caption, durably, and forgets this key's failures.

        An output that has an earlier caption of this key needs the new one.

        Args:
            name: the item's name.
            similarity: the medium's perceptual hash, of any number of bits.
        """
        with self.writing() as connection:
            connection.execute(
                "INSERT INTO results (key, caption, first_name, similarity) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (key) DO UPDATE SET caption = excluded.caption, revision = revision + 1 "
                "WHERE caption != excluded.caption",
                (key, json.dumps(vars(caption)), os.fsencode(name), None if similarity is None else f"{similarity:x}"),
            )
            connection.execute("DELETE FROM attempts WHERE key = ?", (key,))
            connection.execute("DELETE FROM failures WHERE key = ?", (key,))

    def fail(self, item: Item | Unreadable, key: bytes | None, failed: Failed) -> None:
        """Stores why an item has no caption, in place of its name's earlier failure.

        Args:
            key: the work that failed; None if the item failed before its key was known.
        """
        with self.writing(durable=False) as connection:
            if failed.kind == "changed" and isinstance(item, Item) and isinstance(item.source, Path):
                # Its size and time didn't show the change.
                connection.execute("DELETE FROM digests WHERE place = ?", (self.place(item.source),))
            connection.execute(
                "INSERT OR REPLACE INTO failures (name, path, key, kind, message) VALUES (?, ?, ?, ?, ?)",
                (
                    os.fsencode(item.name),
                    None if item.path is None else os.fsencode(item.path),
                    key,
                    failed.kind,
                    # A message may contain a file name that isn't UTF-8.
                    printable(failed.message),
                ),
            )
            connection.execute("DELETE FROM attempts WHERE key = ?", (key,))

    def failure(self, key: bytes) -> Failed | None:
        """How this work failed, in this run or an earlier one, unless it was finished since."""
        row = self.row("SELECT kind, message FROM failures WHERE key = ? ORDER BY sequence LIMIT 1", key)
        return None if row is None else Failed(*row)

    def forget_failure(self, name: str) -> None:
        """Forgets the failure of an item that succeeded or was deleted."""
        self.change("DELETE FROM failures WHERE name = ?", os.fsencode(name))

    def failures(self) -> Iterator[Unreadable]:
        """The failed items, the oldest first."""
        query = "SELECT sequence, name, path, kind, message FROM failures WHERE sequence > ? ORDER BY sequence LIMIT ?"
        for _, name, path, kind, message in self.many_rows(query):
            where = None if path is None else Path(os.fsdecode(path))
            yield Unreadable(os.fsdecode(name), kind, message, where)

    def similarities(self) -> Iterator[tuple[int, bytes, str]]:
        """Perceptual hash, key and item name of every finished result with a hash, the oldest first."""
        query = (
            "SELECT sequence, similarity, key, first_name FROM results "
            "WHERE similarity IS NOT NULL AND sequence > ? ORDER BY sequence LIMIT ?"
        )
        for _, similarity, key, name in self.many_rows(query):
            yield int(similarity, 16), key, os.fsdecode(name)


def _copy_database(path: Path, copy: Path) -> None:
    """Copies a database, if there is one. A run may use it, or a killed run may have left it.

    Raises:
        OSError, sqlite3.Error: it can't be read.
    """
    log, index = Path(f"{path}-wal"), Path(f"{path}-shm")
    if log.exists() and index.exists():
        # A consistent copy while a run writes. Without these two files, SQLite would create them.
        with (
            contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source,
            contextlib.closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
        return
    for source, target in ((path, copy), (log, f"{copy}-wal")):
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(source, target)


def _changed_ns(path: Path) -> int:
    """When a database last changed; 0 if there is none."""
    times = [0]
    for each in (path, Path(f"{path}-wal")):
        with contextlib.suppress(OSError):
            times.append(each.stat().st_mtime_ns)
    return max(times)


def load_caption(text: str) -> Caption:
    """Reads a caption from the manifest's JSON."""
    values = json.loads(text)
    lists = {name: tuple(value) for name, value in values.items() if name in _TUPLES and value is not None}
    return Caption(**values | lists)


def file_state(status: os.stat_result) -> tuple[int, int, int]:
    """Identifies a file's content without reading it: size in bytes, modification time in ns, inode."""
    # SQLite's integers are signed; a Windows file number may use all 64 bits.
    return status.st_size, status.st_mtime_ns, status.st_ino - (1 << 64 if status.st_ino >= 1 << 63 else 0)


def is_settled(status: os.stat_result) -> bool:
    """Whether a file is too old for another change within its timestamp's resolution, which would go unnoticed."""
    return time.time() - status.st_mtime > SETTLED_S


@contextlib.contextmanager
def _errors_of_outputs() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        text = str(error.__cause__).lower()
        code = errno.ENOSPC if "full" in text else errno.EROFS if "readonly" in text else errno.EIO
        raise OutputError(str(error), code) from error
