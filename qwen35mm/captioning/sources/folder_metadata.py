"""`metadata.jsonl` and `metadata.csv` of a Hugging Face imagefolder: a folder's metadata about its media."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qwen35mm.captioning.manifest.manifest import Manifest, file_state, is_settled
from qwen35mm.captioning.sources.candidates import SourceError
from qwen35mm.outside_json import load_json

_NAMES = ("metadata.jsonl", "metadata.csv")
_KEY = "file_name"
_MAX_LINE_CHARS = 2**24
_ROWS_AT_ONCE = 1000


class FolderMetadata:
    """The rows of a metadata file by their `file_name`, a path below the file's own folder.

    The manifest stores them, so a file that hasn't changed since the last run isn't read again.

    Attributes:
        num_rows: rows that name a file.
        num_bad_rows: rows that name no file or have another form.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Raises SourceError if it can't be opened or a CSV file's first line can't be read; OutputError."""
        self._path = path
        self._manifest = manifest
        self._place = manifest.place(path)
        try:
            # A named pipe would block forever.
            self.num_rows, self.num_bad_rows = self._read() if path.is_file() else (0, 0)
        except OSError:
            raise SourceError("unreadable", f"'{path.name}' could not be opened. Check its permissions.") from None
        except csv.Error:
            message = (
                f"The first line of '{path.name}' can't be read: expected the columns' names, and lines that end with "
                f"a line feed. The media are captioned without it."
            )
            raise SourceError("damaged", message) from None

    def row(self, path: Path) -> dict[str, Any]:
        """A file's row without its name; empty if it has none. Raises OutputError."""
        file_name = path.relative_to(self._path.parent).as_posix()
        query = "SELECT content FROM metadata_rows WHERE place = ? AND file_name = ?"
        found = self._manifest.row(query, self._place, _key(file_name))
        return {} if found is None else json.loads(found[0])

    def _read(self) -> tuple[int, int]:
        """Reads the file into the manifest if it isn't there yet; returns the numbers of good and bad rows."""
        state = file_state(self._path.stat())
        query = (
            "SELECT num_rows, num_bad_rows FROM metadata_files "
            "WHERE place = ? AND num_bytes = ? AND mtime_ns = ? AND inode = ?"
        )
        known = self._manifest.row(query, self._place, *state)
        if known is not None:
            num_rows, num_bad_rows = known
            return num_rows, num_bad_rows
        num_rows = num_bad_rows = 0
        rows = _rows(self._path)
        with self._manifest.writing(durable=False) as connection:
            for table in ("metadata_files", "metadata_rows"):
                connection.execute(f"DELETE FROM {table} WHERE place = ?", (self._place,))
        # In batches, so that the run can store captions meanwhile.
        while some := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            good = [row for row in some if row is not None]
            num_rows, num_bad_rows = num_rows + len(good), num_bad_rows + len(some) - len(good)
            with self._manifest.writing(durable=False) as connection:
                connection.executemany(
                    "INSERT OR IGNORE INTO metadata_rows VALUES (?, ?, ?)", [(self._place, *row) for row in good]
                )
        if is_settled(self._path.stat()):
            statement = "INSERT INTO metadata_files VALUES (?, ?, ?, ?, ?, ?)"
            self._manifest.change(statement, self._place, *state, num_rows, num_bad_rows)
        return num_rows, num_bad_rows


def find_metadata_file(folder: Path, names: list[str]) -> Path | None:
    """The metadata file among a folder's `names`."""
    return next((folder / name for name in _NAMES if name in names), None)


def _rows(path: Path) -> Iterator[tuple[bytes, str] | None]:
    """A file's rows for the manifest, name and content; None for a bad row.

    Raises:
        OSError: it can't be read.
        csv.Error: a CSV file's first line can't be read.
    """
    # Only a line feed ends a line: a quoted field may contain other line ends.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
        lines = iter(lambda: file.readline(_MAX_LINE_CHARS), "")
        for row in _json_rows(lines) if path.suffix == ".jsonl" else _csv_rows(lines):
            try:
                yield None if row is None else (_key(row.pop(_KEY)), json.dumps(row))
            except RecursionError:
                yield None


def _json_rows(lines: Iterator[str]) -> Iterator[dict[str, Any] | None]:
    for line in lines:
        if line.strip():
            try:
                row = load_json(line.encode())  # JSON must be UTF-8
            except ValueError:
                row = None
            yield row if isinstance(row, dict) and isinstance(row.get(_KEY), str) and row[_KEY] else None


def _csv_rows(lines: Iterator[str]) -> Iterator[dict[str, Any] | None]:
    reader = csv.reader(lines)
    columns = next(reader, [])
    while True:
        try:
            values = next(reader, None)
        except csv.Error:
            yield None
            continue
        if values is None:
            return
        if values:
            row = dict(zip(columns, values, strict=False))
            yield row if row.get(_KEY) and len(values) == len(columns) else None


def _key(file_name: str) -> bytes:
    # JSON can contain half surrogate pairs, which no file name has.
    return file_name.replace("\\", "/").removeprefix("./").encode("utf-8", "surrogatepass")
