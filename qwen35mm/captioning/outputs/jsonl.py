"""A file of records, one JSON object a line. Lines appear as captions are done.

The manifest knows how many bytes of the file are ours, their CRC-32, and the line that comes next, recorded before it
is written. So a line that a kill has torn is cut off and written again when the file is next opened, and a file that
somebody else changed is seen; it is moved aside, and written anew from the manifest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.manifest.files import (
    crc_of,
    disk_errors,
    is_whole,
    json_text,
    lock_for,
    move_aside,
    pieces,
    replacing,
    sync,
    sync_folder,
    temporary_for,
)
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.manifest.run_lock import RunLock
from qwen35mm.captioning.outputs.base import Mode, Wants
from qwen35mm.captioning.outputs.entries import Entries
from qwen35mm.captioning.records import Record
from qwen35mm.errors import CaptioningError

_log = logging.getLogger(__name__)


class JsonLines:
    """The file at `path`.

    An item whose caption is replaced has two lines until `finish`, which writes the file without the old ones.

    Raises:
        CaptioningError: another run writes to the file; or, in the mode `skip`, it is there and this run's manifest
            doesn't know it.
        OutputError: the disk is full, read-only or fails.
    """

    def __init__(self, manifest: Manifest, path: Path, *, mode: Mode = "skip") -> None:
        self.label = path.name
        self._manifest = manifest
        self._path = path = Path(os.path.realpath(path))
        self._place = manifest.place(path)
        self._entries = Entries(manifest, self._place)
        self._lock = threading.RLock()
        self._file: BinaryIO | None = None
        self._length = self._crc = self._head_length = self._num_stale = 0
        with disk_errors(self.label):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._run_lock = RunLock(lock_for(path), f"to {self.label}")
            try:
                with manifest.reading() as connection:
                    known = connection.execute("SELECT 1 FROM line_files WHERE place = ?", (self._place,)).fetchone()
                if known is None:
                    self._adopt(mode)
                self._open()
            except BaseException:
                self.close()
                raise

    def wants(self, item: Item, key: bytes | None) -> Wants:
        """See `Output`."""
        return Wants.DONE if key is not None and self._entries.has(item, key) else Wants.CAPTION

    def write(self, record: Record) -> None:
        """See `Output`."""
        with self._lock, disk_errors(self.label):
            # Before the check: what an error left unwritten is written when the file is opened again.
            file = self._open() if self._file is None else self._file
            if self._entries.has(record.item, record.key):
                return
            line = self.line(record)
            replaced = self._entries.replaced_by(record)
            num_stale = self._num_stale + (replaced is not None)
            with self._manifest.writing() as connection:
                self._entries.put(connection, record, replaced)
                connection.execute(
                    "UPDATE line_files SET length = ?, crc = ?, num_stale = ?, intent = ? WHERE place = ?",
                    (self._length, self._crc, num_stale, line, self._place),
                )
            self._num_stale = num_stale
            self._append(file, line)

    def finish(self) -> None:
        """See `Output`."""
        with self._lock:
            if self._num_stale:
                self._rewrite()

    def close(self) -> None:
        """See `Output`."""
        with self._lock:
            self._close_file()
            self._run_lock.release()

    def line(self, record: Record) -> bytes:
        """A record as its line, with the newline."""
        return json_text(record.to_dict()).encode() + b"\n"

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _append(self, file: BinaryIO, line: bytes) -> None:
        try:
            file.seek(self._length)
            file.write(line)
            sync(file)
        except BaseException:
            self._close_file()
            raise
        self._length += len(line)
        self._crc = zlib.crc32(line, self._crc)

    def _adopt(self, mode: Mode) -> None:
        """Begins with a file that this manifest doesn't know."""
        temporary_for(self._path).unlink(missing_ok=True)
        head_length, crc = 0, 0
        if os.path.lexists(self._path) and (not self._path.is_file() or self._path.stat().st_size > 0):
            if mode == "skip" or not self._path.is_file():
                raise CaptioningError(
                    f"{self._path.name} is there already and was not written by this run. Name another file, or let "
                    "it be moved aside (mode overwrite) or kept in front (mode append)."
                )
            if mode == "overwrite":
                self._move_aside()
            else:
                self._end_last_line()
                head_length = self._path.stat().st_size
                with self._path.open("rb") as file:
                    crc = crc_of(file, head_length)
        with self._manifest.writing() as connection:
            connection.execute(
                "INSERT INTO line_files VALUES (?, ?, ?, ?, 0, x'')", (self._place, head_length, crc, head_length)
            )

    def _end_last_line(self) -> None:
        with self._path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
                sync(file)

    def _open(self) -> BinaryIO:
        """Opens the file as the manifest knows it, mended or written anew where it is otherwise."""
        with self._manifest.reading() as connection:
            row = connection.execute(
                "SELECT length, crc, head_length, num_stale, intent FROM line_files WHERE place = ?", (self._place,)
            ).fetchone()
        self._length, self._crc, self._head_length, self._num_stale, intent = row
        self._finish_rename()
        file = self._mended(intent)
        if file is None:
            if os.path.lexists(self._path):
                aside = self._move_aside()
                _log.warning("%s was changed by somebody else: it is now %s, and is written anew.", self.label, aside)
                self._head_length = 0
            else:
                self._head_length = 0
                if self._length or intent:
                    _log.warning("%s is gone: it is written anew.", self.label)
            self._rewrite()
            file = self._path.open("r+b")
        self._file = file
        return file

    def _finish_rename(self) -> None:
        """A file that was written anew and not yet renamed takes its place now; anything else is a leftover."""
        temporary = temporary_for(self._path)
        if not temporary.exists():
            return
        if self._num_stale == 0 and is_whole(temporary, self._length, self._crc):
            temporary.replace(self._path)
            sync_folder(self._path.parent)
        else:
            temporary.unlink()

    def _mended(self, intent: bytes) -> BinaryIO | None:
        """The open file, with its last line whole; None where it isn't the file that we wrote."""
        if not self._path.is_file():
            return None
        file = self._path.open("r+b")
        try:
            tail = b""
            is_ours = crc_of(file, self._length) == self._crc
            if is_ours:
                tail = file.read(len(intent) + 1)
                is_ours = intent.startswith(tail)
            if not is_ours:
                file.close()
                return None
            if tail != intent:
                file.truncate(self._length)
                self._append(file, intent)
            else:
                self._length += len(intent)
                self._crc = zlib.crc32(intent, self._crc)
        except BaseException:
            file.close()
            raise
        return file

    def _rewrite(self) -> None:
        """Writes the whole file from the manifest, beside and renamed, after the lines that were there before us."""
        self._close_file()
        length, crc = 0, 0

        def remember() -> None:
            with self._manifest.writing() as connection:
                connection.execute(
                    "UPDATE line_files SET length = ?, crc = ?, head_length = ?, num_stale = 0, intent = x'' "
                    "WHERE place = ?",
                    (length, crc, self._head_length, self._place),
                )

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
        for record in self._entries.records():
            yield self.line(record)

    def _move_aside(self) -> str:
        aside = move_aside(self._path, time.strftime("%Y%m%d-%H%M%S"))
        sync_folder(self._path.parent)
        return aside.name
