"""Which items an output of records has, with all that their records say besides the caption."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Collection, Iterator
from pathlib import Path

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.manifest.files import json_text
from qwen35mm.captioning.manifest.manifest import Manifest, load_caption
from qwen35mm.captioning.outputs.file_names import owner_of, place_in
from qwen35mm.captioning.records import Record


class Entries:
    """The items of the output that the manifest knows as `output`; one entry an owner, see `owner_of`."""

    def __init__(self, manifest: Manifest, output: bytes) -> None:
        self._manifest = manifest
        self._output = output

    def has(self, item: Item, key: bytes) -> bool:
        """Whether the caption of this work is in the output for this item."""
        with self._manifest.reading() as connection:
            row = connection.execute(
                "SELECT 1 FROM entries WHERE output = ? AND owner = ? AND key = ?",
                (self._output, owner_of(item, self._manifest), key),
            ).fetchone()
        return row is not None

    def replaced_by(self, record: Record, taken: Collection[int] = ()) -> int | None:
        """The position of the entry whose place a record takes, if any: its own with another key, or that of a file
        which was renamed to it, or which is gone and whose name it has now.

        Args:
            taken: positions that records got which aren't put yet.
        """
        own = owner_of(record.item, self._manifest)
        with self._manifest.reading() as connection:
            rows = connection.execute(
                "SELECT position, owner, name FROM entries WHERE output = ?1 AND name = ?2 "
                "UNION ALL SELECT position, owner, name FROM entries "
                "WHERE output = ?1 AND key = ?3 AND name != ?2",
                (self._output, os.fsencode(record.item.name), record.key),
            ).fetchall()
        for position, owner, name in sorted(rows, key=lambda row: row[1] != own):
            if position not in taken and (owner == own or self._is_gone(owner, name)):
                return position
        return None

    def put(
        self,
        connection: sqlite3.Connection,
        record: Record,
        replaced: int | None,
        *,
        shard: int | None = None,
        row: int | None = None,
    ) -> None:
        """Adds an entry, in place of the one at the position `replaced`. Within a transaction."""
        path = record.item.path
        if replaced is not None:
            connection.execute("DELETE FROM entries WHERE position = ?", (replaced,))
        connection.execute(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                replaced,
                self._output,
                owner_of(record.item, self._manifest),
                os.fsencode(record.item.name),
                record.key,
                record.content,
                None if path is None else os.fsencode(path),
                json_text(dict(record.item.metadata)),
                shard,
                row,
            ),
        )

    def records(self) -> Iterator[Record]:
        """Every record, in order; its item has no medium to read."""
        query = (
            "SELECT position, owner, name, entries.key, entries.content, path, metadata, caption FROM entries "
            "JOIN results ON results.key = entries.key WHERE output = ? AND position > ? ORDER BY position LIMIT ?"
        )
        for _, owner, name, key, content, path, metadata, text in self._manifest.rows(query, self._output):
            caption = load_caption(text)
            where = None if path is None else self._path(owner, name, Path(os.fsdecode(path)))
            item = Item(os.fsdecode(name), where or b"", caption.kind, where, json.loads(metadata))
            yield Record(item, key, content, caption)

    def _path(self, owner: bytes, name: bytes, path: Path) -> Path:
        """An item's path as a person wrote it, unless the program was in another folder then."""
        place = place_in(owner, name)
        return path if place is None or self._manifest.place(path) == place else self._manifest.path_of(place)

    def _is_gone(self, owner: bytes, name: bytes) -> bool:
        place = place_in(owner, name)
        return place is not None and not os.path.lexists(self._manifest.path_of(place))
