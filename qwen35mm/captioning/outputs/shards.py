"""Records in files of many, each written whole.

A shard is written under a temporary name. When it is full, the manifest takes its records and its CRC-32 in one
transaction, and then it is renamed; a kill between the two is made good when the folder is next opened. So the manifest
names exactly the records that are in shards; all others are asked for again, without work for the model.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.manifest.files import (
    create,
    disk_errors,
    is_whole,
    lock_for,
    move_aside,
    remove_leftovers,
    sync,
    sync_folder,
    temporary_for,
)
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.manifest.run_lock import RunLock
from qwen35mm.captioning.outputs.base import Mode, Wants
from qwen35mm.captioning.outputs.entries import Entries, Entry
from qwen35mm.captioning.outputs.names import owner_of
from qwen35mm.captioning.outputs.shard_writer import ShardWriter, SummedFile
from qwen35mm.captioning.records import Record
from qwen35mm.errors import CaptioningError, OutputError

_log = logging.getLogger(__name__)


class _OpenShard:
    """A shard that is being written: rows that were copied, and after them new records."""

    def __init__(self, number: int, file: BinaryIO, summed: SummedFile, writer: ShardWriter, kept: list[int]) -> None:
        self.number = number
        self.file = file
        self.summed = summed
        self.writer = writer
        self.kept = kept
        self.added: dict[bytes, tuple[Record, Entry | None]] = {}
        # The positions of the entries that are replaced when the shard is sealed.
        self.taken: set[int] = set()

    @property
    def num_records(self) -> int:
        return len(self.kept) + len(self.added)


class Shards(ABC):
    """The shards `000000<suffix>`, `000001<suffix>`, ... in `folder`.

    Raises:
        CaptioningError: another run writes to the folder; or, in the mode `skip`, there are shards that this run's
            manifest doesn't know.
        OutputError: the disk is full, read-only or fails.
    """

    suffix: str

    def __init__(self, manifest: Manifest, folder: Path, records_per_shard: int, *, mode: Mode = "skip") -> None:
        if records_per_shard < 1:
            raise CaptioningError(f"A shard must hold at least one record; got {records_per_shard}.")
        self.label = folder.name
        self._manifest = manifest
        self._folder = folder
        self._records_per_shard = records_per_shard
        self._output = manifest.place(folder) + os.fsencode(f"/*{self.suffix}")
        self._entries = Entries(manifest, self._output)
        self._lock = threading.RLock()
        self._open_shard: _OpenShard | None = None
        with disk_errors(self.label):
            folder.mkdir(parents=True, exist_ok=True)
            # One for the folder, whatever the shards' kind: leftovers of every kind are removed from it.
            self._run_lock = RunLock(lock_for(folder / "shards"), f"to {self.label}")
            try:
                self._mend()
                self._adopt(mode)
            except BaseException:
                self.close()
                raise

    @abstractmethod
    def _writer(self, file: SummedFile, old: Path | None) -> ShardWriter:
        """A writer of a new shard; where it begins with rows of an old one, in that one's form."""

    @abstractmethod
    def _can_grow(self, path: Path) -> bool:
        """Whether new records have the form of those in this shard."""

    def wants(self, item: Item, key: bytes | None) -> Wants:
        """See `Output`."""
        if key is None:
            return Wants.CAPTION
        with self._lock:
            return Wants.DONE if self._has(item, key) else Wants.CAPTION

    def write(self, record: Record) -> None:
        """See `Output`."""
        with self._lock, disk_errors(self.label):
            if self._has(record.item, record.key):
                return
            owner = owner_of(record.item, self._manifest)
            if self._open_shard is not None and owner in self._open_shard.added:
                self._seal()
            taken = () if self._open_shard is None else self._open_shard.taken
            replaced = self._entries.replaced_by(record, taken)
            with self._abandoned_on_error():
                shard = self._open_shard or self._begin()
                shard.writer.add(record)
                shard.added[owner] = (record, replaced)
                if replaced is not None:
                    shard.taken.add(replaced.position)
                if shard.num_records >= self._records_per_shard:
                    self._seal()

    def finish(self) -> None:
        """See `Output`."""
        with self._lock, disk_errors(self.label):
            if self._open_shard is not None:
                self._seal()
            for number, num_stale in self._rows("SELECT number, num_stale FROM shards WHERE output = ?"):
                if num_stale:
                    self._rewrite(number)

    def close(self) -> None:
        """See `Output`."""
        with self._lock:
            self._abandon()
            self._run_lock.release()

    def _has(self, item: Item, key: bytes) -> bool:
        shard = self._open_shard
        added = None if shard is None else shard.added.get(owner_of(item, self._manifest))
        return self._entries.has(item, key) if added is None else added[0].key == key

    def _abandon(self) -> None:
        """Leaves the shard that was being written to a later run."""
        shard, self._open_shard = self._open_shard, None
        if shard is not None:
            shard.summed.abandon()
            with contextlib.suppress(OSError):
                shard.file.close()
            with contextlib.suppress(OSError):
                temporary_for(self._path(shard.number)).unlink()

    @contextlib.contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        """After an error of the disk, though not of one item, `_abandon`."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, OutputError) or not isinstance(error, CaptioningError):
                self._abandon()
            raise

    def _begin(self) -> _OpenShard:
        """Goes on with the last shard where there is room in it, or begins a new one."""
        rows = self._rows("SELECT number, num_records - num_stale FROM shards WHERE output = ? ORDER BY number")
        if rows and rows[-1][1] < self._records_per_shard and self._can_grow(self._path(rows[-1][0])):
            return self._start(rows[-1][0], grows=True)
        return self._start(max([-1, *(row[0] for row in rows), *self._numbers()]) + 1, grows=False)

    def _start(self, number: int, *, grows: bool) -> _OpenShard:
        path = self._path(number)
        file = create(temporary_for(path))
        summed = SummedFile(file)
        self._open_shard = shard = _OpenShard(
            number, file, summed, self._writer(summed, path if grows else None), self._kept(number) if grows else []
        )
        if grows:
            shard.writer.copy(path, shard.kept)
        return shard

    def _rewrite(self, number: int) -> None:
        """Writes a shard without the rows that were replaced."""
        with self._abandoned_on_error():
            self._start(number, grows=True)
            self._seal()

    def _seal(self) -> None:
        shard = self._open_shard
        assert shard is not None
        with self._abandoned_on_error():
            shard.writer.end()
            sync(shard.file)
            shard.file.close()
            sync_folder(self._folder)
            self._record(shard)
        self._open_shard = None
        self._put(shard.number, shard.num_records)

    def _record(self, shard: _OpenShard) -> None:
        """Gives the shard's records to the manifest."""
        in_shard = (self._output, shard.number)
        with self._manifest.writing() as connection:
            for row, old in enumerate(shard.kept):
                if row != old:
                    connection.execute(
                        "UPDATE entries SET row = ? WHERE output = ? AND shard = ? AND row = ?", (row, *in_shard, old)
                    )
            connection.execute(
                "INSERT OR REPLACE INTO shards VALUES (?, ?, ?, ?, ?, 0)",
                (*in_shard, shard.num_records, shard.summed.num_bytes, shard.summed.crc),
            )
            for row, (record, replaced) in enumerate(shard.added.values(), len(shard.kept)):
                if replaced is not None:
                    connection.execute(
                        "UPDATE shards SET num_stale = num_stale + 1 WHERE output = ? AND number = ?",
                        (self._output, replaced.shard),
                    )
                self._entries.put(connection, record, replaced, shard=shard.number, row=row)

    def _put(self, number: int, num_records: int) -> None:
        """Renames a shard that the manifest has; an empty one is removed instead."""
        path = self._path(number)
        if num_records:
            temporary_for(path).replace(path)
            sync_folder(self._folder)
            return
        for unused in (temporary_for(path), path):
            unused.unlink(missing_ok=True)
        sync_folder(self._folder)
        with self._manifest.writing(durable=False) as connection:
            connection.execute("DELETE FROM shards WHERE output = ? AND number = ?", (self._output, number))

    def _mend(self) -> None:
        """Ends what a killed run began, and forgets shards that are gone or that somebody else changed."""
        query = "SELECT number, num_records, num_bytes, crc FROM shards WHERE output = ?"
        for number, num_records, num_bytes, crc in self._rows(query):
            path = self._path(number)
            if num_records == 0 or is_whole(temporary_for(path), num_bytes, crc):
                self._put(number, num_records)
            elif not path.is_file() or path.stat().st_size != num_bytes:
                aside = self._move_aside(path) if os.path.lexists(path) else "gone"
                _log.warning("%s/%s was changed by somebody else: it is now %s.", self.label, path.name, aside)
                with self._manifest.writing() as connection:
                    for statement in (
                        "DELETE FROM entries WHERE output = ? AND shard = ?",
                        "DELETE FROM shards WHERE output = ? AND number = ?",
                    ):
                        connection.execute(statement, (self._output, number))
        remove_leftovers(self._folder)

    def _adopt(self, mode: Mode) -> None:
        """Decides about shards that the manifest doesn't know."""
        known = {row[0] for row in self._rows("SELECT number FROM shards WHERE output = ?")}
        foreign = sorted(self._numbers() - known)
        if foreign and mode == "skip":
            raise CaptioningError(
                f"{self.label} has shards that were not written by this run, such as {self._path(foreign[0]).name}. "
                "Name another folder, or let them be moved aside (mode overwrite) or kept (mode append)."
            )
        for number in foreign if mode == "overwrite" else ():
            self._move_aside(self._path(number))

    def _kept(self, number: int) -> list[int]:
        """The rows of a shard that are still somebody's, rising."""
        with self._manifest.reading() as connection:
            rows = connection.execute(
                "SELECT row FROM entries WHERE output = ? AND shard = ? ORDER BY row", (self._output, number)
            ).fetchall()
        return [row[0] for row in rows]

    def _rows(self, query: str) -> list[tuple]:
        with self._manifest.reading() as connection:
            return connection.execute(query, (self._output,)).fetchall()

    def _numbers(self) -> set[int]:
        """The numbers of all shards in the folder."""
        pattern = re.compile(rf"(\d{{6,}}){re.escape(self.suffix)}")
        return {int(match[1]) for path in self._folder.iterdir() if (match := pattern.fullmatch(path.name))}

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}{self.suffix}"

    def _move_aside(self, path: Path) -> str:
        aside = move_aside(path, time.strftime("%Y%m%d-%H%M%S"))
        sync_folder(self._folder)
        return aside.name
