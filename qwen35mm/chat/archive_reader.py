"""Reads a ZIP file that anybody may have made: nothing in it is trusted, and nothing of it is unpacked by its name."""

from __future__ import annotations

import contextlib
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast

from qwen35mm.errors import ArchiveError

MAX_FILES = 20_000
MAX_JSON_BYTES = 64 << 20
# The list of 20,000 files takes half of this. zipfile reads the list in one piece.
_MAX_READ_BYTES = 8 << 20
_PIECE_BYTES = 1 << 20

_CONVERSATION = re.compile(r"conversations/[0-9a-f]{32}\.json")
_MEDIA = re.compile(r"media/([0-9a-f]{64})\.[a-z0-9]{1,8}")
_READABLE = re.compile(r"[^/\\]+\.md")
_FOLDERS = ("conversations/", "media/")
_IS_ENCRYPTED = 1

# What zipfile raises for damaged archives, and for what it doesn't support.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    OSError,
    OverflowError,
    ValueError,
)


class ArchiveReader:
    """The files of an archive, listed and checked by their names and declared sizes.

    conversations   names of the JSON files, in the order of the archive
    media           names of the media files by digest

    Raises:
        ArchiveError: no ZIP file, a file of a foreign name or kind, two of one name, more than `max_bytes` unpacked.
    """

    def __init__(self, stream: BinaryIO, *, max_bytes: int) -> None:
        with _damage_in_words("The archive"):
            # The directory is read at once; an explicit close would only close the caller's stream.
            self._zip = zipfile.ZipFile(cast(BinaryIO, _Bounded(stream)))
        self.conversations: list[str] = []
        self.media: dict[str, str] = {}
        names: set[str] = set()
        num_bytes = 0
        if len(self._zip.infolist()) > MAX_FILES:
            raise ArchiveError(f"The archive has {len(self._zip.infolist()):,} files; up to {MAX_FILES:,} are read.")
        for info in self._zip.infolist():
            if info.filename in names:
                raise ArchiveError(f"The archive has two files named {shown(info.filename)}.")
            names.add(info.filename)
            num_bytes += info.file_size
            self._sort_in(info)
        if num_bytes > max_bytes:
            raise ArchiveError(
                f"The archive has {num_bytes / 2**20:,.1f} MiB when unpacked; {max_bytes / 2**20:,.1f} are allowed."
            )

    def num_bytes(self, name: str) -> int:
        """The declared length of a file; no more than this is ever read of it."""
        return self._zip.getinfo(name).file_size

    def read(self, name: str) -> bytes:
        """A whole JSON file. Raises ArchiveError where it is damaged."""
        with self.open(name) as file:
            return b"".join(iter(lambda: file.read(_PIECE_BYTES), b""))

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """A file for reading in pieces; its `read` raises ArchiveError where it is damaged."""
        with _damage_in_words(shown(name)):
            file = self._zip.open(name)
        with file:
            yield cast(BinaryIO, _Member(cast(BinaryIO, file), shown(name)))

    def _sort_in(self, info: zipfile.ZipInfo) -> None:
        name = info.filename
        if name in _FOLDERS and info.file_size == 0:
            return
        if info.flag_bits & _IS_ENCRYPTED or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ArchiveError(f"{shown(name)} in the archive is encrypted, or compressed in a way that isn't read.")
        if _CONVERSATION.fullmatch(name):
            if info.file_size > MAX_JSON_BYTES:
                raise ArchiveError(f"{shown(name)} is larger than the {MAX_JSON_BYTES >> 20} MiB that are read.")
            self.conversations.append(name)
        elif media := _MEDIA.fullmatch(name):
            if media[1] in self.media:
                raise ArchiveError(f"The archive has one media file twice: {shown(name)}.")
            self.media[media[1]] = name
        elif not _READABLE.fullmatch(name):
            raise ArchiveError(
                f"The archive has a file that no export makes: {shown(name)}. Choose a ZIP file that was exported here."
            )


class _Bounded:
    """A stream that never gives a large piece, so that a list of files can't fill the memory."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.seek, self.tell, self.seekable = stream.seek, stream.tell, stream.seekable

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size if 0 <= size <= _MAX_READ_BYTES else _MAX_READ_BYTES + 1)
        if len(data) > _MAX_READ_BYTES:
            raise ArchiveError("The archive's list of files is damaged or too long.")
        return data


class _Member:
    """A file of an archive while it is read, its damage in words."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name

    def read(self, size: int = -1) -> bytes:
        with _damage_in_words(self._name):
            return self._file.read(size)


def shown(name: str) -> str:
    """A name from an archive, fit for a message."""
    return repr(name if len(name) <= 80 else f"{name[:40]}…{name[-39:]}")


@contextlib.contextmanager
def _damage_in_words(what: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise ArchiveError(f"{what} is damaged, or it is no ZIP file that was exported here.") from error
