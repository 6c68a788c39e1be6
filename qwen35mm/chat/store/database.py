"""One SQLite database: opened lazily, usable from any thread, closed during a fork, with errors in plain words.

A connection that lives through a fork corrupts the database. So a hook closes every `Database` of the process before
os.fork, and both sides open it again at the next use. A killed process loses nothing that a transaction wrote: the
kernel has the pages of the write-ahead log. A power failure may lose the last transactions that weren't durable, but
never damages the database.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from qwen35mm.errors import StorageError
from qwen35mm_preprocess.say import Said, say

_BUSY_TIMEOUT_S = 10.0

# SQLite's fixed error texts, and what a person can do about each.
_IN_WORDS: dict[str, Callable[[str], Said]] = {
    "disk is full": lambda _: say("The disk is full, so this could not be saved. Free some space and try again."),
    "readonly": lambda name: say(
        "The database {name} can't be written to. Make the file and its folder writable.", name=name
    ),
    "locked": lambda name: say(
        "The database {name} is in use by another program. Try again, or close that program.", name=name
    ),
    "unable to open": lambda name: say(
        "The database {name} can't be opened. Check that its folder can be read and written to.", name=name
    ),
    "disk i/o": lambda name: say(
        "The database {name} can't be read or written: the disk is full or failed. Existing data wasn't changed.",
        name=name,
    ),
    "too big": lambda _: say("This is too large to be saved: a text can have up to 1 GB."),
}


def _damaged(name: str) -> Said:
    return say(
        "The database {name} is damaged, or isn't a database. It was left unchanged. Restore it from "
        "a backup, or move it away to start fresh.",
        name=name,
    )


_creation = itertools.count()
_registry_lock = threading.Lock()
_databases: weakref.WeakSet[Database] = weakref.WeakSet()
_held_by_fork: list[Database] = []


class Database:
    """The database at `path`, created with its folder (mode 0700) at first use.

    Every transaction may raise StorageError: a full, failing or read-only disk, or a file that is damaged, foreign or
    of another version. Data stored before stays unchanged.

    Args:
        path: None is a database in memory, which `close` deletes.
        migrations: the statements of each version of its tables, the oldest first.
        oldest: the version of the first of them. A database of an older version is refused.
        prepare: sets up each new connection.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        migrations: Sequence[Sequence[str]],
        oldest: int = 1,
        prepare: Callable[[sqlite3.Connection], None] = lambda connection: None,
    ) -> None:
        self._path = path
        self._migrations = migrations
        self._oldest = oldest
        self._newest = oldest + len(migrations) - 1
        self._prepare = prepare
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.RLock()
        self._order = next(_creation)
        with _registry_lock:
            _databases.add(self)

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A transaction that sees one state of the database."""
        with self._transaction("BEGIN") as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """A transaction that waits for other writers; commits at the end, rolls back after an exception.

        Args:
            durable: whether this and all earlier transactions must survive a power failure from then on.
        """
        with self._transaction("BEGIN IMMEDIATE", "FULL" if durable else "NORMAL") as connection:
            yield connection

    @property
    def _name(self) -> str:
        return "in memory" if self._path is None else self._path.name

    def _close_file(self) -> None:
        """Closes unless the database is in memory, where `close` would delete it."""
        if self._path is not None:
            self.close()

    def close(self) -> None:
        """Closes the file; the next use opens it again."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                with contextlib.suppress(sqlite3.Error):
                    connection.close()

    @contextlib.contextmanager
    def _transaction(self, begin: str, synchronous: str = "NORMAL") -> Iterator[sqlite3.Connection]:
        with self._lock, self._errors_in_words():
            if self._connection is None:
                self._connection = self._open()
            connection = self._connection
            assert not connection.in_transaction, "a transaction inside another"
            connection.execute(f"PRAGMA synchronous={synchronous}")
            with _committed(connection, begin):
                yield connection

    @contextlib.contextmanager
    def _errors_in_words(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.IntegrityError):
            raise
        except sqlite3.Error as error:
            self._close_file()
            text = str(error).lower()
            words = next((words for key, words in _IN_WORDS.items() if key in text), _damaged)
            raise StorageError(words(self._name)) from error
        except UnicodeEncodeError as error:
            raise StorageError(
                say("The text has half of a surrogate pair, which isn't a character. Remove it.")
            ) from error

    def _open(self) -> sqlite3.Connection:
        if self._path is None:
            connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            self._set_up(connection)
            return connection
        make_folder(self._path.parent)
        try:
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600))
        except OSError as error:
            words = _IN_WORDS["disk is full" if is_full(error) else "unable to open"]
            raise StorageError(words(self._name)) from error
        connection = sqlite3.connect(self._path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            self._refuse_foreign(connection)
            _use_wal(connection)
            self._set_up(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _set_up(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA foreign_keys=ON")
        self._migrate(connection)
        self._prepare(connection)

    def _refuse_foreign(self, connection: sqlite3.Connection) -> int:
        """The database's version, 0 for a new one. Raises StorageError for one that can't be used."""
        # In one statement, since another process may create the tables at this moment.
        version, num_tables = connection.execute(
            "SELECT user_version, (SELECT count(*) FROM sqlite_master) FROM pragma_user_version"
        ).fetchone()
        if version > self._newest:
            raise StorageError(
                say(
                    "The database {name} was written by a newer version (its format is {version}, this version "
                    "knows {known}). It was left unchanged: update the program.",
                    name=self._name,
                    version=version,
                    known=self._newest,
                )
            )
        if 0 < version < self._oldest:
            raise StorageError(
                say(
                    "The database {name} was written by an older version (its format is {version}, the oldest that "
                    "opens is {oldest}). It was left unchanged: choose another folder, or move it away to start fresh.",
                    name=self._name,
                    version=version,
                    oldest=self._oldest,
                )
            )
        if version == 0 and num_tables > 0:
            # The first migration is one transaction, so our databases never have tables without a version.
            raise StorageError(
                say(
                    "The file {name} is another program's database. It was left unchanged: choose another folder.",
                    name=self._name,
                )
            )
        return version

    def _migrate(self, connection: sqlite3.Connection) -> None:
        if self._refuse_foreign(connection) == self._newest:
            return
        with _committed(connection, "BEGIN IMMEDIATE"):
            done = max(self._refuse_foreign(connection) - self._oldest + 1, 0)
            for statements in self._migrations[done:]:
                for statement in statements:
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version={self._newest}")


@contextlib.contextmanager
def _committed(connection: sqlite3.Connection, begin: str) -> Iterator[None]:
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def make_folder(folder: Path) -> None:
    """Creates a folder and its missing parents with mode 0700; leaves an existing one as it is.

    Raises:
        StorageError: the folder can't be created.
    """
    try:
        for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(exist_ok=True)  # raises if it is a file
    except OSError as error:
        needs_room = is_full(error)
        reason = say("the disk is full") if needs_room else say("check that the folder is writable")
        raise StorageError(
            say("The folder '{name}' can't be made: {reason}.", name=folder.name, reason=reason)
        ) from error


def is_full(error: OSError) -> bool:
    """Whether an error means that the disk is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _use_wal(connection: sqlite3.Connection) -> None:
    """Turns the write-ahead log on.

    If two processes do this to a new database at once, SQLite fails instead of waiting, so this tries again.
    """
    give_up_s = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > give_up_s:
                raise
            time.sleep(0.01)


def _before_fork() -> None:
    _registry_lock.acquire()
    for database in sorted(_databases, key=lambda database: database._order):
        database._lock.acquire()
        _held_by_fork.append(database)
        database._close_file()


def _after_fork_in_parent() -> None:
    while _held_by_fork:
        _held_by_fork.pop()._lock.release()
    _registry_lock.release()


def _after_fork_in_child() -> None:
    while _held_by_fork:
        _held_by_fork.pop()._lock = threading.RLock()
    _registry_lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
