"""Zip files: their media, with the texts of the same name."""

from __future__ import annotations

import contextlib
import struct
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from qwen35mm.captioning.items import FileSlice, Unreadable
from qwen35mm.captioning.records import printable
from qwen35mm.captioning.sources.candidates import Candidate, SourceError, looks_like_medium
from qwen35mm.captioning.sources.tars import MAX_TEXT_BYTES, clean, text_beside
from qwen35mm_preprocess.formats import HEAD_BYTES, sniff

_MAGIC = b"PK\x03\x04"
# Office documents and programs are zips, too.
_SUFFIXES = (".zip", ".cbz")
_ENCRYPTED = 1
_LOCAL_HEADER = struct.Struct("<26xHH")
_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, IndexError, struct.error, NotImplementedError)


def is_zip(name: str, head: bytes = _MAGIC) -> bool:
    """Whether a file of this name that starts with `head` is a zip of files, not a document or a program."""
    return head.startswith(_MAGIC) and name.lower().endswith(_SUFFIXES)


def zip_members(path: Path, most_bytes: int) -> Iterator[Candidate | Unreadable]:
    """The members that may be media, with their names, sorted by name.

    An uncompressed member is read in place; any other is unpacked when its turn comes. A `.json` or `.txt` with a
    medium's name is its metadata, as in `tar_members`. Folders and names that begin with a dot are skipped.

    Args:
        most_bytes: a compressed medium that would be larger isn't unpacked, and is Unreadable.

    Raises:
        SourceError: it isn't a zip, or is damaged.
        OSError: it can't be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            named = [(clean(member.filename), member) for member in archive.infolist() if not member.is_dir()]
            members = dict(named)
            # A zip that was added to may have a name twice.
            for name, member in sorted(named, key=lambda each: each[0]):
                if PurePosixPath(name).name.startswith("."):
                    continue
                if looks_like_medium(name) or _is_medium(archive, member):
                    yield _member(archive, path, name, member, members, most_bytes)
    except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError):
        message = f"'{printable(path.name)}' is no zip, or is damaged or cut off. Check that it is there completely."
        raise SourceError("damaged", message) from None


def _member(
    archive: zipfile.ZipFile,
    path: Path,
    name: str,
    member: zipfile.ZipInfo,
    members: dict[str, zipfile.ZipInfo],
    most_bytes: int,
) -> Candidate | Unreadable:
    last = printable(PurePosixPath(name).name)
    if member.flag_bits & _ENCRYPTED:
        return Unreadable(name, "unsupported", f"'{last}' is encrypted, which is not read here. Unpack it first.")
    stem = name.removesuffix(PurePosixPath(name).suffix)
    beside = [(suffix, found) for suffix in ("json", "txt") if (found := members.get(f"{stem}.{suffix}")) is not None]
    metadata = partial(_beside, archive, beside)
    try:
        if member.compress_type == zipfile.ZIP_STORED:
            return Candidate(name, FileSlice(path, _offset(path, member), member.file_size), metadata)
        if member.file_size > most_bytes:
            message = f"'{last}' has {member.file_size:,} bytes; at most {most_bytes:,} are unpacked. Unpack it first."
            return Unreadable(name, "too large", message)
        with archive.open(member) as file:
            return Candidate(name, file.read(most_bytes), metadata)
    except _ERRORS:
        message = f"'{last}' is damaged in its zip, or compressed as is not read here. Unpack it first."
        return Unreadable(name, "damaged", message)


def _is_medium(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(member) as file:
            return sniff(file.read(HEAD_BYTES)) is not None
    except (*_ERRORS, RuntimeError):  # encrypted
        return False


def _offset(path: Path, member: zipfile.ZipInfo) -> int:
    """The offset of a member's bytes. Raises struct.error, OSError."""
    with path.open("rb") as file:
        file.seek(member.header_offset)
        sizes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return member.header_offset + _LOCAL_HEADER.size + sum(sizes)


def _beside(archive: zipfile.ZipFile, found: list[tuple[str, zipfile.ZipInfo]]) -> dict[str, Any]:
    """The metadata from a sample's texts; called while the archive is open."""
    metadata: dict[str, Any] = {}
    for suffix, member in found:
        if member.file_size <= MAX_TEXT_BYTES:
            with contextlib.suppress(*_ERRORS, RuntimeError):
                metadata |= text_beside(archive.read(member), suffix)
    return metadata
