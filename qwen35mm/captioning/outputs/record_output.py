"""The common part of all files of records: a lock for one run, and the entries.

The manifest has one entry per record, with all its fields besides the caption.
"""

from __future__ import annotations

import json
import os
import sqlite3
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from qwen35mm.captioning.items import Item, Part
from qwen35mm.captioning.manifest.files import (
    RunLock,
    disk_errors,
    is_gone,
    json_text,
    lock_for,
)
from qwen35mm.captioning.manifest.manifest import Manifest, load_caption
from qwen35mm.captioning.outputs.base import IsOld, Mode, Output, OutputSettings, Wants
from qwen35mm.captioning.outputs.file_names import owner_of, place_in
from qwen35mm.captioning.records import Record, edited, printable

# All entries of an output: position, the arguments of `RecordOutput._record`, and a person's edit and acceptance.
ENTRIES = (
    "SELECT position, owner, name, entries.key, entries.content, path, metadata, part, caption, edited, accepted "
    "FROM entries JOIN results ON results.key = entries.key WHERE output = ?"
)


class RecordOutput(Output):
    """A file or folder of records, `output` in the manifest; one entry per owner, see `owner_of`.

    Args:
        label: for messages, such as `captions.jsonl`.
        locked: the file that only one run may write, or one that stands for the folder.

    Raises:
        CaptioningError: another run writes there; or, in the mode `skip`, this run's manifest doesn't know what is
            there.
        OutputError: the disk is full, read-only or fails.
    """

    def __init__(self, manifest: Manifest, label: str, output: bytes, locked: Path, settings: OutputSettings) -> None:
        self.label = label
        self._manifest = manifest
        self._output = output
        self._mode: Mode = settings.mode
        with disk_errors(label):
            locked.parent.mkdir(parents=True, exist_ok=True)
            self._run_lock = RunLock(lock_for(locked), f"to {label}")
            try:
                self._begin(settings.mode)
            except BaseException:
                self.close()
                raise

    @abstractmethod
    def _begin(self, mode: Mode) -> None:
        """Repairs what a killed run left, and handles foreign content as `mode` says. Raises OSError."""

    def wants(self, item: Item, key: bytes | None) -> Wants:
        """See `Output`."""
        return self._wants(item, key)

    def gone(self) -> set[Path]:
        """See `Output`."""
        return {path for _, path, _ in self._of_files() if is_gone(path)}

    def prune(self, media: Collection[Path]) -> None:
        """See `Output`."""
        positions = [position for position, path, is_edited in self._of_files() if path in media and not is_edited]
        if not positions:
            return
        with disk_errors(self.label), self._manifest.writing() as connection:
            self._drop_entries(connection, positions)
        self.finish()

    def of_other_splits(self, is_old: IsOld, *, removes: bool) -> int:
        """See `Output`."""
        query = (
            "SELECT position, owner, name FROM entries WHERE output = ? AND edited IS NULL "
            "AND position > ? ORDER BY position LIMIT ?"
        )
        found = self._manifest.many_rows(query, self._output)
        positions = [position for position, owner, name in found if is_old(os.fsdecode(name), place_in(owner, name))]
        if removes and positions:
            with disk_errors(self.label), self._manifest.writing() as connection:
                self._drop_entries(connection, positions)
            self.finish()
        return len(positions)

    def _drop_entries(self, connection: sqlite3.Connection, positions: Sequence[int]) -> None:
        """Removes entries, within a transaction; `finish` then removes their records."""
        connection.executemany("DELETE FROM entries WHERE position = ?", [(position,) for position in positions])

    def _of_files(self) -> Iterator[tuple[int, Path, bool]]:
        """The entries of items with a file: position, file, and whether a person has edited the caption."""
        query = (
            "SELECT position, owner, name, edited IS NOT NULL FROM entries "
            "WHERE output = ? AND position > ? ORDER BY position LIMIT ?"
        )
        for position, owner, name, is_edited in self._manifest.many_rows(query, self._output):
            if (place := place_in(owner, name)) is not None:
                yield position, self._manifest.path_of(place), bool(is_edited)

    def close(self) -> None:
        """See `Output`."""
        self._run_lock.release()

    def _wants(self, item: Item, key: bytes | None) -> Wants:
        """What the entry of this item wants."""
        query = (
            "SELECT edited IS NOT NULL, entries.key = ?1, entries.revision = results.revision, overwrote FROM entries "
            "JOIN results ON results.key = entries.key WHERE output = ?2 AND owner = ?3"
        )
        row = self._manifest.row(query, key, self._output, owner_of(item, self._manifest))
        is_edited, is_same, is_newest, overwrote = row or (False, False, False, False)
        if is_edited:
            is_lost = self._mode == "overwrite" and not (is_same and overwrote)
            return Wants.CAPTION if is_lost else Wants.KEPT
        return Wants.DONE if is_same and is_newest else Wants.CAPTION

    def _replaced_by(self, record: Record, taken: Collection[int] = ()) -> int | None:
        """The position of the entry that a record replaces, if any.

        That is the item's own entry with another key, the entry of a file that was renamed to this item, or the entry
        of a deleted file with this name. An edited caption is only replaced by the same caption, which keeps the edit.

        Args:
            taken: positions that other records take which aren't stored yet.
        """
        own = owner_of(record.item, self._manifest)
        query = (
            "SELECT position, owner, name, edited IS NOT NULL AND key != ?3 FROM entries "
            "WHERE output = ?1 AND name = ?2 "
            "UNION ALL SELECT position, owner, name, 0 FROM entries WHERE output = ?1 AND key = ?3 AND name != ?2"
        )
        rows = self._manifest.rows(query, self._output, os.fsencode(record.item.name), record.key)
        for position, owner, name, is_kept in sorted(rows, key=lambda row: row[1] != own):
            if position in taken or (is_kept and self._mode != "overwrite"):
                continue
            if owner == own or self._is_gone(owner, name):
                return position
        return None

    def _reviewed(self, replaced: int | None, key: bytes) -> tuple[str | None, bytes | None, str | None]:
        """Of the entry at a position: the person's text that the record with this key gets, its accepted digest, and
        the person's text that is lost."""
        query = "SELECT edited, accepted, key = ? AND overwrote FROM entries WHERE position = ?"
        theirs, accepted, is_kept = self._manifest.row(query, key, replaced) or (None, None, False)
        return (None, accepted, theirs) if self._mode == "overwrite" and not is_kept else (theirs, accepted, None)

    def _put(
        self,
        connection: sqlite3.Connection,
        record: Record,
        replaced: int | None,
        shard: int | None = None,
        row: int | None = None,
        reviewed: tuple[str | None, bytes | None] = (None, None),
    ) -> None:
        """Adds an entry, in place of the one at the position `replaced`. Within a transaction.

        Args:
            reviewed: a person's text and accepted digest; shards have none.
        """
        item = record.item
        if replaced is not None:
            connection.execute("DELETE FROM entries WHERE position = ?", (replaced,))
        connection.execute(
            "INSERT INTO entries VALUES "
            "(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, (SELECT revision FROM results WHERE key = ?), ?, ?, ?, ?)",
            (
                replaced,
                self._output,
                owner_of(item, self._manifest),
                os.fsencode(item.name),
                record.key,
                record.content,
                None if item.path is None else os.fsencode(item.path),
                json_text(dict(item.metadata)),
                shard,
                row,
                record.key,
                *reviewed,
                None if item.part is None else json_text(vars(item.part)),
                self._mode == "overwrite",
            ),
        )

    def _records(self) -> Iterator[Record]:
        """Every record of the output, in order; its item has no medium to read."""
        for _, *row, theirs, _ in self._rows_of_entries():
            record = self._record(*row)
            yield record if theirs is None else replace(record, caption=edited(record.caption, theirs))

    def _rows_of_entries(self) -> Iterator[tuple]:
        """The rows of `ENTRIES`, in order."""
        return self._manifest.many_rows(f"{ENTRIES} AND position > ? ORDER BY position LIMIT ?", self._output)

    def _record(
        self,
        owner: bytes,
        name: bytes,
        key: bytes,
        content: bytes,
        path: bytes | None,
        metadata: str,
        part: str | None,
        caption: str,
    ) -> Record:
        made = load_caption(caption)
        where = None if path is None else self._path_of(owner, name, Path(os.fsdecode(path)))
        of = None if part is None else Part(**json.loads(part))
        item = Item(os.fsdecode(name), where or b"", made.kind, where, json.loads(metadata), of)
        return Record(item, key, content, made)

    def _path_of(self, owner: bytes, name: bytes, path: Path) -> Path:
        """An item's path as a person wrote it, or from its place if the working directory was another then."""
        place = place_in(owner, name)
        return path if place is None or self._manifest.place(path) == place else self._manifest.path_of(place)

    def _is_gone(self, owner: bytes, name: bytes) -> bool:
        place = place_in(owner, name)
        return place is not None and is_gone(self._manifest.path_of(place))

    def _move_aside(self, path: Path) -> str:
        """Moves a foreign file to the backups; returns its new path. Raises OSError."""
        return printable(str(self._manifest.backups.move(path)))
