"""A file of records, one JSON object per line. Lines appear as captions finish.

The manifest stores how many bytes of the file are ours, their CRC-32, and the next line before it is written. So a line
that a kill tore is written again when the file is next opened. A file that somebody else changed is detected, moved
aside and written anew from the manifest. The manifest also stores a person's edits, so no later run overwrites them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.manifest.files import (
    crc_of,
    disk_errors,
    is_whole,
    json_text,
    pieces,
    replacing,
    sync,
    sync_folder,
    temporary_for,
)
from qwen35mm.captioning.manifest.manifest import Manifest, file_state
from qwen35mm.captioning.outputs.base import Mode, OutputSettings, Wants
from qwen35mm.captioning.outputs.record_output import ENTRIES, RecordOutput
from qwen35mm.captioning.records import Record, edited, printable
from qwen35mm.errors import CaptioningError

_log = logging.getLogger(__name__)


class JsonLines(RecordOutput):
    """The file at `path`.

    An item whose caption is replaced has two lines until `finish`, which writes the file without the old ones.
    """

    # Before the file's place in the manifest, for files of another form.
    _prefix = b""

    def __init__(self, manifest: Manifest, path: Path, settings: OutputSettings) -> None:
        self._path = Path(os.path.realpath(path))
        self._file: BinaryIO | None = None
        self._length = self._crc = self._head_length = self._num_stale = 0
        # The file's state after our last line; None before the first.
        self._state: tuple[int, int, int] | None = None
        # The copy of the file, and how many edited captions are only there.
        self._copy: Path | None = None
        self._num_replaced = 0
        super().__init__(manifest, path.name, self._prefix + manifest.place(self._path), self._path, settings)

    def write(self, record: Record) -> None:
        """See `Output`."""
        with disk_errors(self.label):
            # Opened before the check: reopening writes a line that an earlier error left unwritten.
            file = self._file or self._open()
            if self._wants(record.item, record.key) is not Wants.CAPTION:
                return
            replaced = self._replaced_by(record)
            theirs, accepted, lost = self._reviewed(replaced, record.key)
            if lost is not None:
                self._keep_edited()
            shown = record if theirs is None else replace(record, caption=edited(record.caption, theirs))

            def put(connection: sqlite3.Connection) -> None:
                self._put(connection, record, replaced, reviewed=(theirs, accepted))

            self._add(file, shown, replaced is not None, put)

    def edit(self, owner: bytes, text: str | None) -> None:
        """Replaces a record's caption with a person's text, durably; None restores the caption.

        Raises:
            ValueError, RecursionError: see `edited` of records.
            OutputError: as `write`.
        """
        with disk_errors(self.label):
            # The page is open for long. A file that somebody else changed meanwhile is moved aside, too.
            if self._file is not None and self._state != _state_of(self._path):
                self._close_file()
            file = self._file or self._open()
            row = self._manifest.row(f"{ENTRIES} AND owner = ?", self._output, owner)
            assert row is not None, "only a run takes records out, and none can run meanwhile"
            record = self._record(*row[1:-2])
            shown = record if text is None else replace(record, caption=edited(record.caption, text))
            statement = "UPDATE entries SET edited = ? WHERE output = ? AND owner = ?"
            self._add(file, shown, True, lambda connection: connection.execute(statement, (text, self._output, owner)))

    def theirs(self, owner: bytes) -> str | None:
        """The person's text that replaces a record's caption; None if there is none. Raises OutputError."""
        row = self._manifest.row("SELECT edited FROM entries WHERE output = ? AND owner = ?", self._output, owner)
        return None if row is None else row[0]

    def medium(self, item: Item) -> Path | None:
        """The file that shows an item to a person; None if it lies in a container."""
        return item.path

    def accept(self, owner: bytes, digest: bytes | None) -> None:
        """Stores, durably, the digest of the text that a person accepted for a record; None for none.

        Raises OutputError.
        """
        statement = "UPDATE entries SET accepted = ? WHERE output = ? AND owner = ?"
        self._manifest.change(statement, digest, self._output, owner, durable=True)

    def entries(self) -> Iterator[tuple[bytes, Record, str | None, bytes | None]]:
        """Every entry in order: owner, record with the model's caption, a person's text, the accepted digest."""
        for _, owner, *row, theirs, accepted in self._rows_of_entries():
            yield owner, self._record(owner, *row), theirs, accepted

    def finish(self) -> None:
        """See `Output`."""
        if self._num_stale:
            self._rewrite()
        if self._copy is not None:
            _log.warning(
                "%s: edited captions were replaced (%d). The file as it was is %s.",
                self.label,
                self._num_replaced,
                printable(str(self._copy)),
            )
            self._copy, self._num_replaced = None, 0

    def close(self) -> None:
        """See `Output`."""
        self._close_file()
        super().close()

    def _drop_entries(self, connection: sqlite3.Connection, positions: Sequence[int]) -> None:
        super()._drop_entries(connection, positions)
        num_stale = self._num_stale + len(positions)
        connection.execute("UPDATE line_files SET num_stale = ? WHERE place = ?", (num_stale, self._output))
        self._num_stale = num_stale

    def _line(self, record: Record) -> bytes:
        """A record as its line, with the newline."""
        return json_text(record.to_dict()).encode() + b"\n"

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _add(
        self, file: BinaryIO, record: Record, replaces: bool, change: Callable[[sqlite3.Connection], object]
    ) -> None:
        """Stores a record's change in the manifest and appends its line."""
        line, num_stale = self._line(record), self._num_stale + replaces
        with self._manifest.writing() as connection:
            change(connection)
            connection.execute(
                "UPDATE line_files SET length = ?, crc = ?, num_stale = ?, intent = ? WHERE place = ?",
                (self._length, self._crc, num_stale, line, self._output),
            )
        self._num_stale = num_stale
        self._append(file, line)

    def _keep_edited(self) -> None:
        """Copies the file before the first edited caption is replaced."""
        self._num_replaced += 1
        if self._copy is None:
            self._copy = self._manifest.backups.copy(self._path)

    def _append(self, file: BinaryIO, line: bytes) -> None:
        try:
            file.seek(self._length)
            file.write(line)
            sync(file)
            self._state = file_state(os.fstat(file.fileno()))
        except BaseException:
            self._close_file()
            raise
        self._length += len(line)
        self._crc = zlib.crc32(line, self._crc)

    def _begin(self, mode: Mode) -> None:
        if self._manifest.row("SELECT 1 FROM line_files WHERE place = ?", self._output) is None:
            self._adopt(mode)
        self._open()

    def _adopt(self, mode: Mode) -> None:
        """Takes over a file that this manifest doesn't know."""
        temporary_for(self._path).unlink(missing_ok=True)
        head_length, crc = 0, 0
        if os.path.lexists(self._path) and (not self._path.is_file() or self._path.stat().st_size > 0):
            if mode == "skip" or not self._path.is_file():
                raise CaptioningError(
                    f"{self._path.name} is there already and was not written by this run. Name another file, or let "
                    "it be moved aside (mode overwrite) or kept in front (mode append)."
                )
            if mode == "overwrite":
                self._move_aside(self._path)
            else:
                with self._path.open("r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":
                        file.write(b"\n")
                        sync(file)
                    head_length = file.tell()
                    file.seek(0)
                    crc = crc_of(file, head_length)
        statement = "INSERT INTO line_files VALUES (?, ?, ?, ?, 0, x'')"
        self._manifest.change(statement, self._output, head_length, crc, head_length, durable=True)

    def _open(self) -> BinaryIO:
        """Opens the file in the manifest's state; repairs it or writes it anew if it differs."""
        row = self._manifest.row(
            "SELECT length, crc, head_length, num_stale, intent FROM line_files WHERE place = ?", self._output
        )
        assert row is not None, "it was adopted"
        self._length, self._crc, self._head_length, self._num_stale, intent = row
        self._end_rewrite()
        if self._path.is_file():
            self._file = file = self._path.open("r+b")
            if crc_of(file, self._length) == self._crc and intent.startswith(tail := file.read(len(intent) + 1)):
                if tail == intent:
                    self._length += len(intent)
                    self._crc = zlib.crc32(intent, self._crc)
                else:
                    self._append(file, intent)
                return file
            self._close_file()
        if os.path.lexists(self._path):
            aside = self._move_aside(self._path)
            _log.warning("%s was changed by somebody else: it is now %s, and is written anew.", self.label, aside)
        elif self._length or intent:
            _log.warning("%s is gone: it is written anew.", self.label)
        self._head_length = 0
        self._rewrite()
        self._file = self._path.open("r+b")
        return self._file

    def _end_rewrite(self) -> None:
        """Renames a rewritten file that a kill left complete; any other temporary file is removed."""
        temporary = temporary_for(self._path)
        if self._num_stale == 0 and is_whole(temporary, self._length, self._crc):
            temporary.replace(self._path)
            sync_folder(self._path.parent)
        else:
            temporary.unlink(missing_ok=True)

    def _rewrite(self) -> None:
        """Writes the whole file anew: the lines from before us, then the manifest's records."""
        self._close_file()
        length, crc = 0, 0

        def remember() -> None:
            statement = (
                "UPDATE line_files SET length = ?, crc = ?, head_length = ?, num_stale = 0, intent = x'' "
                "WHERE place = ?"
            )
            self._manifest.change(statement, length, crc, self._head_length, self._output, durable=True)

        with replacing(self._path, before_rename=remember) as file:
            for piece in self._pieces():
                file.write(piece)
                length += len(piece)
                crc = zlib.crc32(piece, crc)
        self._length, self._crc, self._num_stale = length, crc, 0

    def _pieces(self) -> Iterator[bytes]:
        if self._head_length:
            with self._path.open("rb") as head:
                yield from pieces(head, self._head_length)
        for record in self._records():
            yield self._line(record)


def _state_of(path: Path) -> tuple[int, int, int] | None:
    """See `file_state`; None if there is no file. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        return file_state(path.stat())
    return None
