"""Shards: files of many records, each written once. A shard with its final name never changes again.

A shard is written under a temporary name. When it is full or the run ends, one transaction stores its records in the
manifest, and then the shard is renamed. If a kill comes between the two, the folder's next opening renames it. So the
manifest lists exactly the records in shards; all others are written again, without the model.

At a run's end, shards with replaced records are rewritten: the others move to a new shard. With `compact`, small shards
are merged the same way. One transaction moves the records, and a shard without records is removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.manifest.files import (
    create,
    disk_errors,
    remove_leftovers,
    sync,
    sync_folder,
    temporary_for,
)
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.outputs.base import Mode, OutputSettings, Wants
from qwen35mm.captioning.outputs.file_names import owner_of
from qwen35mm.captioning.outputs.record_output import RecordOutput
from qwen35mm.captioning.records import Record
from qwen35mm.errors import CaptioningError, OutputError

_log = logging.getLogger(__name__)


@dataclass
class _OpenShard:
    """A shard that is being written.

    Attributes:
        moved: the source shard and row of each of its first records.
        added: the new records after those, by owner, each with the position of the entry that it replaces.
    """

    number: int
    file: BinaryIO
    moved: list[tuple[int, int]] = field(default_factory=list)
    added: dict[bytes, tuple[Record, int | None]] = field(default_factory=dict)

    @property
    def num_records(self) -> int:
        return len(self.moved) + len(self.added)


class Shards(RecordOutput):
    """The shards `000000<suffix>`, `000001<suffix>`, ... in `folder`."""

    suffix: str

    def __init__(self, manifest: Manifest, folder: Path, settings: OutputSettings) -> None:
        if settings.records_per_shard < 1:
            raise CaptioningError(f"A shard must hold at least one record; got {settings.records_per_shard}.")
        self._folder = folder
        self._settings = settings
        self._open_shard: _OpenShard | None = None
        output = manifest.place(folder) + os.fsencode(f"/*{self.suffix}")
        # One lock for all kinds of shards in the folder, since leftovers of every kind are removed.
        super().__init__(manifest, folder.name, output, folder / "shards", settings)

    def _start(self, file: BinaryIO, form: Any) -> None:
        """Begins a shard of this form; None for the form of this run's records. Raises OSError."""

    @abstractmethod
    def _add(self, file: BinaryIO, record: Record) -> None:
        """Adds a record, all or nothing. Raises OSError, CaptioningError."""

    @abstractmethod
    def _copy(self, file: BinaryIO, path: Path, rows: Sequence[int]) -> None:
        """Copies these rows, in ascending order, from another shard of the same form. Raises OSError."""

    @abstractmethod
    def _end(self, file: BinaryIO) -> None:
        """Writes the end of the format. Raises OSError."""

    def _drop(self) -> None:
        """Prepares for the file to be closed and removed without its end."""

    def _form(self, path: Path) -> Any:
        """The form of a shard; only shards of equal form can be merged."""
        return None

    def _is_outdated(self, path: Path) -> bool:
        """Whether a shard's records must be rewritten in another form, that of `_form`."""
        return False

    def write(self, record: Record) -> None:
        """See `Output`."""
        with disk_errors(self.label):
            if self._wants(record.item, record.key) is not Wants.CAPTION:
                return
            owner = owner_of(record.item, self._manifest)
            if self._open_shard is not None and owner in self._open_shard.added:
                self._seal(self._open_shard)
            with self._abandoned_on_error():
                shard = self._open_shard or self._new_shard()
                # Records that aren't sealed yet have taken their positions, too.
                replaced = self._replaced_by(record, [taken for _, taken in shard.added.values() if taken is not None])
                self._add(shard.file, record)
                shard.added[owner] = (record, replaced)
                self._seal_full(shard)

    def finish(self) -> None:
        """See `Output`."""
        with disk_errors(self.label):
            if self._open_shard is not None:
                self._seal(self._open_shard)
            wanted = []
            for number, num_records, _, num_live in self._known():
                is_replaced = num_live < num_records or self._is_outdated(self._path(number))
                if is_replaced or (self._settings.compact and num_live < self._settings.records_per_shard):
                    wanted.append((number, is_replaced))
            for form, group in groupby(wanted, key=lambda each: self._form(self._path(each[0]))):
                shards = list(group)
                # A single small shard would only be copied.
                if len(shards) > 1 or shards[0][1]:
                    self._move([number for number, _ in shards], form)

    def close(self) -> None:
        """See `Output`."""
        self._abandon()
        super().close()

    def _wants(self, item: Item, key: bytes | None) -> Wants:
        shard = self._open_shard
        added = None if shard is None else shard.added.get(owner_of(item, self._manifest))
        if added is None:
            return super()._wants(item, key)
        return Wants.DONE if added[0].key == key else Wants.CAPTION

    def _abandon(self) -> None:
        """Drops the open shard; a later run writes its records again."""
        shard, self._open_shard = self._open_shard, None
        if shard is not None:
            self._drop()
            with contextlib.suppress(OSError):
                shard.file.close()
            with contextlib.suppress(OSError):
                temporary_for(self._path(shard.number)).unlink()

    @contextlib.contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        """Calls `_abandon` after an error, unless it is only one item's."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, OutputError) or not isinstance(error, CaptioningError):
                self._abandon()
            raise

    def _new_shard(self, form: Any = None) -> _OpenShard:
        number = max([-1, *(known[0] for known in self._known()), *self._numbers()]) + 1
        file = create(temporary_for(self._path(number)))
        self._start(file, form)
        self._open_shard = _OpenShard(number, file)
        return self._open_shard

    def _move(self, numbers: Sequence[int], form: Any) -> None:
        """Moves the records of shards to new ones."""
        query = "SELECT row FROM entries WHERE output = ? AND shard = ? ORDER BY row"
        with self._abandoned_on_error():
            for number in numbers:
                rows = [row for (row,) in self._manifest.rows(query, self._output, number)]
                while rows:
                    shard = self._open_shard or self._new_shard(form)
                    room = self._settings.records_per_shard - shard.num_records
                    moved, rows = rows[:room], rows[room:]
                    self._copy(shard.file, self._path(number), moved)
                    shard.moved += [(number, row) for row in moved]
                    self._seal_full(shard)
            if self._open_shard is not None:
                self._seal(self._open_shard)
        self._remove_empty()

    def _seal_full(self, shard: _OpenShard) -> None:
        if shard.num_records >= self._settings.records_per_shard:
            self._seal(shard)

    def _seal(self, shard: _OpenShard) -> None:
        """Ends a shard, stores its records in the manifest, and renames it."""
        with self._abandoned_on_error():
            self._end(shard.file)
            sync(shard.file)
            num_bytes = shard.file.tell()
            shard.file.close()
            sync_folder(self._folder)
            with self._manifest.writing() as connection:
                connection.execute(
                    "INSERT INTO shards VALUES (?, ?, ?, ?)",
                    (self._output, shard.number, shard.num_records, num_bytes),
                )
                connection.executemany(
                    "UPDATE entries SET shard = ?, row = ? WHERE output = ? AND shard = ? AND row = ?",
                    [(shard.number, row, self._output, *old) for row, old in enumerate(shard.moved)],
                )
                for row, (record, replaced) in enumerate(shard.added.values(), len(shard.moved)):
                    self._put(connection, record, replaced, shard.number, row)
        self._open_shard = None
        self._rename(self._path(shard.number))

    def _rename(self, path: Path) -> None:
        """Gives a shard that the manifest knows its final name."""
        temporary_for(path).replace(path)
        sync_folder(self._folder)

    def _begin(self, mode: Mode) -> None:
        for number, _, num_bytes, num_live in self._known():
            path = self._path(number)
            if _has_size(temporary_for(path), num_bytes):
                self._rename(path)
            elif not _has_size(path, num_bytes):
                aside = self._move_aside(path) if os.path.lexists(path) else "gone"
                if num_live:
                    _log.warning("%s/%s was changed by somebody else: it is now %s.", self.label, path.name, aside)
                self._forget(number)
        self._remove_empty()
        remove_leftovers(self._folder)
        foreign = sorted(self._numbers() - {known[0] for known in self._known()})
        if foreign and mode == "skip":
            raise CaptioningError(
                f"{self.label} has shards that were not written by this run, such as {self._path(foreign[0]).name}. "
                "Name another folder, or let them be moved aside (mode overwrite) or kept (mode append)."
            )
        for number in foreign if mode == "overwrite" else ():
            self._move_aside(self._path(number))

    def _remove_empty(self) -> None:
        for number, _, _, num_live in self._known():
            if not num_live:
                self._path(number).unlink(missing_ok=True)
                self._forget(number)

    def _known(self) -> list[tuple[int, int, int, int]]:
        """The manifest's shards by number: number, records, bytes, and records that weren't replaced."""
        return self._manifest.rows(
            "SELECT number, num_records, num_bytes, "
            "(SELECT count(*) FROM entries WHERE entries.output = shards.output AND shard = number) "
            "FROM shards WHERE output = ? ORDER BY number",
            self._output,
        )

    def _forget(self, number: int) -> None:
        with self._manifest.writing() as connection:
            connection.execute("DELETE FROM entries WHERE output = ? AND shard = ?", (self._output, number))
            connection.execute("DELETE FROM shards WHERE output = ? AND number = ?", (self._output, number))

    def _numbers(self) -> set[int]:
        """The numbers of all shards in the folder."""
        pattern = re.compile(rf"(\d{{6,}}){re.escape(self.suffix)}")
        return {int(match[1]) for path in self._folder.iterdir() if (match := pattern.fullmatch(path.name))}

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}{self.suffix}"


def _has_size(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes
