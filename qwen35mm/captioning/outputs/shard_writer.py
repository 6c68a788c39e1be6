"""How one shard is written, whatever its format."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import BinaryIO

from qwen35mm.captioning.records import Record


class SummedFile:
    """A new file that is written from its beginning to its end, with the CRC-32 of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.crc = 0
        self.num_bytes = 0
        self.closed = False
        self._is_abandoned = False

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        if self._is_abandoned:
            return view.nbytes
        self._file.write(data)
        self.crc = zlib.crc32(view, self.crc)
        self.num_bytes += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """A writer may close it; the file itself is closed by whoever opened it."""

    def abandon(self) -> None:
        """What comes now is dropped: pyarrow's writer writes a file's end also when it is collected."""
        self._is_abandoned = True

    def back_to(self, num_bytes: int, crc: int) -> None:
        """Takes back what was written after this moment."""
        self._file.flush()
        self._file.seek(num_bytes)
        self._file.truncate()
        self.num_bytes, self.crc = num_bytes, crc


class ShardWriter(ABC):
    """Writes one shard's format."""

    @abstractmethod
    def add(self, record: Record) -> None:
        """Adds a record, or nothing of it after an exception. Raises OSError, CaptioningError."""

    @abstractmethod
    def copy(self, path: Path, rows: list[int]) -> None:
        """Adds these rows, in rising order, of another shard."""

    @abstractmethod
    def end(self) -> None:
        """Writes what the format has at its end."""
