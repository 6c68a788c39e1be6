"""`metadata.jsonl` and `metadata.csv` of a Hugging Face imagefolder: what a folder says of the media in it."""

from __future__ import annotations

import csv
import hashlib
import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from qwen35mm.captioning.items import Unreadable

_NAMES = ("metadata.jsonl", "metadata.csv")
_KEY = "file_name"
_MAX_FIELD = 2**24


class FolderMetadata:
    """The rows of a metadata file, found by their `file_name`, a path below the file's own folder.

    16 bytes are held for each row: a hash of its file's name and where the row begins. The row itself is read again
    when it is asked for.

    Attributes:
        name: the file's own.
        num_bad_rows: rows that aren't of the file's form or name no file.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError, and csv.Error where a CSV file's first line isn't one."""
        self._path = path
        self.name = path.name
        self._columns: list[str] = []
        self.num_bad_rows = 0
        hashes, offsets = array("Q"), array("Q")
        with path.open("rb") as file:
            for offset, row in self._rows(file):
                if row is None:
                    self.num_bad_rows += 1
                else:
                    hashes.append(_hash(row[_KEY]))
                    offsets.append(offset)
        order = np.argsort(np.frombuffer(hashes, np.uint64), kind="stable") if hashes else np.zeros(0, np.int64)
        self._hashes = np.frombuffer(hashes, np.uint64)[order] if hashes else np.zeros(0, np.uint64)
        self._offsets = np.frombuffer(offsets, np.uint64)[order] if offsets else np.zeros(0, np.uint64)

    def __len__(self) -> int:
        return len(self._hashes)

    def row(self, file_name: str) -> dict[str, Any]:
        """What is said of a file, without its name; empty where it isn't in the metadata, or the file has changed."""
        wanted = np.uint64(_hash(file_name))
        first, last = (int(np.searchsorted(self._hashes, wanted, side=side)) for side in ("left", "right"))
        try:
            for index in range(first, last):
                with self._path.open("rb") as file:
                    file.seek(int(self._offsets[index]))
                    _, row = next(self._rows(file, self._columns), (0, None))
                    if row is not None and _normal(row[_KEY]) == file_name:
                        return {name: value for name, value in row.items() if name != _KEY}
        except OSError:
            return {}
        return {}

    def _rows(self, file: BinaryIO, columns: list[str] | None = None) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Each row with its offset; None for a bad one. `columns` are a CSV file's, where its first line is passed."""
        if self._path.suffix == ".jsonl":
            yield from _json_rows(file)
            return
        lines = _Lines(file)
        reader = csv.reader(lines)
        if columns is None:
            self._columns = columns = next(reader, [])
        while True:
            offset = lines.offset
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error:
                yield offset, None
                continue
            if values:
                row = dict(zip(columns, values, strict=False))
                yield offset, row if row.get(_KEY) and len(values) == len(columns) else None


class _Lines:
    """A file's lines as text, and the offset up to which they have been given."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.offset = file.tell()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline(_MAX_FIELD)
        if not line:
            raise StopIteration
        text = line.decode("utf-8-sig" if self.offset == 0 else "utf-8", "surrogateescape")
        self.offset += len(line)
        return text


def _json_rows(file: BinaryIO) -> Iterator[tuple[int, dict[str, Any] | None]]:
    offset = file.tell()
    while line := file.readline(_MAX_FIELD):
        if line.strip():
            try:
                row = json.loads(line.decode("utf-8-sig" if offset == 0 else "utf-8"))
            except (ValueError, RecursionError):
                row = None
            good = isinstance(row, dict) and isinstance(row.get(_KEY), str) and bool(row[_KEY])
            yield offset, row if good else None
        offset += len(line)


def read_folder_metadata(folder: Path, names: list[str]) -> FolderMetadata | Unreadable | None:
    """The metadata file among a folder's `names`; None where there is none, or it names no files.

    Unreadable, under the file's own name, where it can't be opened.
    """
    for name in _NAMES:
        if name in names:
            try:
                # A named pipe would block for ever.
                found = FolderMetadata(folder / name) if (folder / name).is_file() else ()
            except OSError:
                message = f"'{name}' could not be opened. Check its permissions."
                return Unreadable(name, "unreadable", message, folder / name)
            except csv.Error:
                message = (
                    f"The first line of '{name}' can't be read: expected the columns' names, and lines that end with "
                    f"a line feed. The media are captioned without it."
                )
                return Unreadable(name, "damaged", message, folder / name)
            return found or None
    return None


def _normal(file_name: str) -> str:
    return file_name.replace("\\", "/").removeprefix("./")


def _hash(file_name: str) -> int:
    # JSON can spell halves of surrogate pairs, which no file's name has.
    data = _normal(file_name).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
