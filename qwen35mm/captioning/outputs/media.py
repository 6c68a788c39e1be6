"""A record's medium, for outputs that hold media: its bytes, checked, and the suffix that fits them."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from qwen35mm.captioning.items import FileSlice, Item
from qwen35mm.captioning.manifest.files import pieces
from qwen35mm.captioning.records import Record, printable
from qwen35mm.errors import CaptioningError
from qwen35mm_preprocess.formats import HEAD_BYTES, sniff

# By the format's name; the first is given to media that have none of them.
_SUFFIXES = {
    "JPEG": (".jpg", ".jpeg"),
    "PNG": (".png",),
    "WebP": (".webp",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "AVIF": (".avif",),
    "GIF": (".gif",),
    "MP4/MOV": (".mp4", ".mov", ".m4v"),
    "WebM/MKV": (".webm", ".mkv"),
    "AVI": (".avi",),
    "MPEG-TS": (".ts", ".m2ts", ".mts"),
}


def suffix_of(item: Item) -> str:
    """The suffix that the medium's content asks for, in lower case; its own where it fits. Raises CaptioningError."""
    try:
        with _open(item)[0] as file:
            found = sniff(file.read(HEAD_BYTES))
    except OSError as error:
        raise _gone(item) from error
    own = PurePosixPath(item.name).suffix.lower()
    known = _SUFFIXES.get(found.name, ()) if found is not None else ()
    return own if own in known or not known else known[0]


def num_bytes_of(item: Item) -> int:
    """The medium's size. Raises CaptioningError where it is gone."""
    try:
        file, num_bytes = _open(item)
        file.close()
    except OSError as error:
        raise _gone(item) from error
    return num_bytes


def pieces_of(record: Record) -> Iterator[bytes]:
    """The medium's bytes, in pieces. Raises CaptioningError, at their end where they aren't what was captioned."""
    sha256 = hashlib.sha256()
    try:
        file, num_bytes = _open(record.item)
        with file:
            for piece in pieces(file, num_bytes):
                sha256.update(piece)
                yield piece
    except OSError as error:
        raise _gone(record.item) from error
    if sha256.digest() != record.content:
        raise CaptioningError(f"{printable(record.item.name)} was changed after it was captioned. Run again.")


def has_content(path: Path, content: bytes) -> bool:
    """Whether a file with this SHA-256 is at `path`."""
    try:
        with path.open("rb") as file:
            sha256 = hashlib.sha256()
            for piece in pieces(file):
                sha256.update(piece)
    except OSError:
        return False
    return sha256.digest() == content


def _open(item: Item) -> tuple[BinaryIO, int]:
    """The medium as an open file at its beginning, and its number of bytes."""
    if isinstance(item.source, bytes):
        return io.BytesIO(item.source), len(item.source)
    if isinstance(item.source, FileSlice):
        file = item.source.path.open("rb")
        file.seek(item.source.offset)
        return file, item.source.num_bytes
    file = item.source.open("rb")
    return file, os.fstat(file.fileno()).st_size


def _gone(item: Item) -> CaptioningError:
    return CaptioningError(
        f"{printable(item.name)} can't be read any more: it was moved, removed or locked. Run again."
    )
