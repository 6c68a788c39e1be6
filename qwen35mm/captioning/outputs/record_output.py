"""What files of records have in common: one run at a time, and which items' records are there.

The manifest has an entry for each, with all that the record says besides the caption.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.manifest.files import (
    RunLock,
    disk_errors,
    is_gone,
    json_text,
    lock_for,
    move_aside,
    sync_folder,
)
from qwen35mm.captioning.manifest.manifest import Manifest, load_caption
from qwen35mm.captioning.outputs.base import Mode, Output, OutputSettings, Wants
from qwen35mm.captioning.outputs.file_names import owner_of, place_in
from qwen35mm.captioning.records import Record


class RecordOutput(Output):
    """A file or folder of records that the manifest knows as `output`; one entry an owner, see `owner_of`.

    Args:
        label: for messages, such as `captions.jsonl`.
        locked: the file that only one run may write, or one that stands for a folder's.

    Raises:
        CaptioningError: another run writes there; or, in the mode `skip`, there is something that this run's manifest
            doesn't know.
        OutputError: the disk is full, read-only or fails.
    """

    def __init__(self, manifest: Manifest, label: str, output: bytes, locked: Path, settings: OutputSettings) -> None:
        self.label = label
        self._manifest = manifest
        self._output = output
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
        """Mends what a killed run left, and decides about what is there and isn't ours. Raises OSError."""

    def wants(self, item: Item, key: bytes | None) -> Wants:
        """See `Output`."""
        return Wants.DONE if key is not None and self._has(item, key) else Wants.CAPTION

    def gone(self) -> set[Path]:
        """See `Output`."""
        return {path for _, path in self._of_files() if is_gone(path)}

    def prune(self, media: Collection[Path]) -> None:
        """See `Output`."""
        positions = [position for position, path in self._of_files() if path in media]
        if not positions:
            return
        with disk_errors(self.label), self._manifest.writing() as connection:
            self._drop_entries(connection, positions)
        self.finish()

    def _drop_entries(self, connection: sqlite3.Connection, positions: Sequence[int]) -> None:
        """Takes entries out, within a transaction; `finish` then takes their records out."""
        connection.executemany("DELETE FROM entries WHERE position = ?", [(position,) for position in positions])

    def _of_files(self) -> Iterator[tuple[int, Path]]:
        """The entries of items with a file: where they are, and the file."""
        query = "SELECT position, owner, name FROM entries WHERE output = ? AND position > ? ORDER BY position LIMIT ?"
        for position, owner, name in self._manifest.many_rows(query, self._output):
            if (place := place_in(owner, name)) is not None:
                yield position, self._manifest.path_of(place)

    def close(self) -> None:
        """See `Output`."""
        self._run_lock.release()

    def _has(self, item: Item, key: bytes) -> bool:
        """Whether the caption of this work is in the output for this item."""
        query = (
            "SELECT 1 FROM entries JOIN results USING (key, revision) "
            "WHERE output = ? AND owner = ? AND entries.key = ?"
        )
        return self._manifest.row(query, self._output, owner_of(item, self._manifest), key) is not None

    def _replaced_by(self, record: Record, taken: Collection[int] = ()) -> int | None:
        """The position of the entry whose place a record takes, if any: its own with another key, or that of a file
        which was renamed to it, or which is gone and whose name it has now.

        Args:
            taken: positions that records got which aren't put yet.
        """
        own = owner_of(record.item, self._manifest)
        query = (
            "SELECT position, owner, name FROM entries WHERE output = ?1 AND name = ?2 "
            "UNION ALL SELECT position, owner, name FROM entries WHERE output = ?1 AND key = ?3 AND name != ?2"
        )
        rows = self._manifest.rows(query, self._output, os.fsencode(record.item.name), record.key)
        for position, owner, name in sorted(rows, key=lambda row: row[1] != own):
            if position not in taken and (owner == own or self._is_gone(owner, name)):
                return position
        return None

    def _put(
        self,
        connection: sqlite3.Connection,
        record: Record,
        replaced: int | None,
        shard: int | None = None,
        row: int | None = None,
    ) -> None:
        """Adds an entry, in place of the one at the position `replaced`. Within a transaction."""
        item = record.item
        if replaced is not None:
            connection.execute("DELETE FROM entries WHERE position = ?", (replaced,))
        connection.execute(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, (SELECT revision FROM results WHERE key = ?))",
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
            ),
        )

    def _records(self) -> Iterator[Record]:
        """Every record, in order; its item has no medium to read."""
        query = (
            "SELECT position, owner, name, entries.key, entries.content, path, metadata, caption FROM entries "
            "JOIN results ON results.key = entries.key WHERE output = ? AND position > ? ORDER BY position LIMIT ?"
        )
        for _, owner, name, key, content, path, metadata, text in self._manifest.many_rows(query, self._output):
            caption = load_caption(text)
            where = None if path is None else self._path_of(owner, name, Path(os.fsdecode(path)))
            item = Item(os.fsdecode(name), where or b"", caption.kind, where, json.loads(metadata))
            yield Record(item, key, content, caption)

    def _path_of(self, owner: bytes, name: bytes, path: Path) -> Path:
        """An item's path as a person wrote it, unless the program was in another folder then."""
        place = place_in(owner, name)
        return path if place is None or self._manifest.place(path) == place else self._manifest.path_of(place)

    def _is_gone(self, owner: bytes, name: bytes) -> bool:
        place = place_in(owner, name)
        return place is not None and is_gone(self._manifest.path_of(place))

    def _move_aside(self, path: Path) -> str:
        """Gives a file that isn't ours another name, which is returned. Raises OSError."""
        aside = move_aside(path, time.strftime("%Y%m%d-%H%M%S"))
        sync_folder(path.parent)
        return aside.name
