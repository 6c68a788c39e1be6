"""Which items an output of records has, with all that their records say besides the caption."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.manifest.files import json_text
from qwen35mm.captioning.manifest.manifest import Manifest, load_caption
from qwen35mm.captioning.records import Record


@dataclass(frozen=True)
class Entry:
    """One item of an output; `shard` and `row` are None where there are no shards."""

    position: int
    name: str
    key: bytes
    shard: int | None
    row: int | None


class Entries:
    """The items of the output that the manifest knows as `output`; one entry a name."""

    def __init__(self, manifest: Manifest, output: bytes) -> None:
        self._manifest = manifest
        self._output = output

    def has(self, name: str, key: bytes) -> bool:
        """Whether the caption of this work is in the output under this name."""
        with self._manifest.reading() as connection:
            row = connection.execute(
                "SELECT 1 FROM entries WHERE output = ? AND name = ? AND key = ?",
                (self._output, os.fsencode(name), key),
            ).fetchone()
        return row is not None

    def replaced_by(self, record: Record, taken: Collection[int] = ()) -> Entry | None:
        """The entry whose place a record takes: its own with another key, or that of the file that was renamed.

        Args:
            taken: positions that records got which aren't put yet.
        """
        with self._manifest.reading() as connection:
            rows = connection.execute(
                "SELECT position, name, key, shard, row, path FROM entries WHERE output = ?1 AND name = ?2 "
                "UNION ALL SELECT position, name, key, shard, row, path FROM entries "
                "WHERE output = ?1 AND key = ?3 AND name != ?2 AND path IS NOT NULL",
                (self._output, os.fsencode(record.item.name), record.key),
            ).fetchall()
        for position, name, key, shard, row, path in rows:
            if position in taken:
                continue
            if os.fsdecode(name) == record.item.name or not os.path.lexists(os.fsdecode(path)):
                return Entry(position, os.fsdecode(name), key, shard, row)
        return None

    def put(
        self,
        connection: sqlite3.Connection,
        record: Record,
        replaced: Entry | None,
        *,
        shard: int | None = None,
        row: int | None = None,
    ) -> None:
        """Adds an entry, at the place of the one that it replaces. Within a transaction."""
        path = record.item.path
        if replaced is not None:
            connection.execute("DELETE FROM entries WHERE position = ?", (replaced.position,))
        connection.execute(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                None if replaced is None else replaced.position,
                self._output,
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
            "SELECT position, name, entries.key, entries.content, path, metadata, caption FROM entries "
            "JOIN results ON results.key = entries.key WHERE output = ? AND position > ?"
        )
        for _, name, key, content, path, metadata, caption in self._manifest.rows(query, (self._output,)):
            yield _record(name, key, content, path, metadata, caption)


def _record(name: bytes, key: bytes, content: bytes, path: bytes | None, metadata: str, caption: str) -> Record:
    loaded = load_caption(caption)
    where = None if path is None else Path(os.fsdecode(path))
    item = Item(os.fsdecode(name), where or b"", loaded.kind, where, json.loads(metadata))
    return Record(item, key, content, loaded)
