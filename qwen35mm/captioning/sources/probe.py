"""From a file to an item: its kind by its first bytes, or why it can't be one. Nothing is decoded."""

from __future__ import annotations

import io
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from qwen35mm.captioning.items import FileSlice, Item, Unreadable
from qwen35mm.captioning.records import printable
from qwen35mm_preprocess import (
    MediaDecodeError,
    MediaError,
    MediaKind,
    MediaLimitError,
    MediaLimits,
    MediaSourceError,
    describe,
    detect_kind,
)
from qwen35mm_preprocess.formats import GIF, HEAD_BYTES, sniff
from qwen35mm_preprocess.media import read_format

# A file with one of these is meant to be a medium, whatever is in it.
MEDIA_SUFFIXES = frozenset(
    f".{suffix}"
    for suffixes in (
        ("jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "bmp", "dib", "tif", "tiff", "gif"),
        ("avif", "heic", "heif", "hif", "jxl", "jp2"),
        ("mp4", "m4v", "mov", "qt", "webm", "mkv", "avi", "mts", "m2ts"),
        ("mpg", "mpeg", "wmv", "flv", "ogv", "3gp", "3g2"),
    )
    for suffix in suffixes
)


@dataclass(frozen=True)
class Candidate:
    """What may be an item, as a container has it: its name in the container, and where its bytes are.

    Attributes:
        is_expected: it should be a medium, whatever its name.
    """

    name: str
    source: Path | FileSlice | bytes
    metadata: Mapping[str, Any] = field(default_factory=dict)
    is_expected: bool = False


def looks_like_medium(name: str) -> bool:
    """Whether a name has the suffix of an image or a video."""
    return PurePosixPath(name).suffix.lower() in MEDIA_SUFFIXES


def failure_kind(error: MediaError) -> str:
    """How `failures.jsonl` calls what is wrong with a medium."""
    if isinstance(error, MediaSourceError):
        return "unreadable"
    if isinstance(error, MediaDecodeError):
        return "damaged"
    return "too large" if isinstance(error, MediaLimitError) else "unsupported"


def probe(
    name: str,
    source: Path | FileSlice | bytes,
    limits: MediaLimits,
    *,
    metadata: Mapping[str, Any] | None = None,
    expected: bool = False,
) -> Item | Unreadable | None:
    """The item of this name; None where nothing says that it should be one.

    Something that isn't a medium, or can't be opened, is Unreadable if it is `expected` to be one or has a medium's
    suffix; a file that may not be read is Unreadable also without any suffix.
    """
    path = source if isinstance(source, Path) else None
    try:
        if not expected and not looks_like_medium(name) and not _may_be_medium(source):
            return None
        kind = _kind(name, source, limits)
    except MediaError as error:
        return Unreadable(name, failure_kind(error), printable(str(error)), path)
    return Item(name, source, kind, path, metadata or {})


def probe_candidate(name: str, candidate: Candidate, limits: MediaLimits) -> Item | Unreadable | None:
    """The item of a candidate, under the name that it has among all items."""
    return probe(name, candidate.source, limits, metadata=candidate.metadata, expected=candidate.is_expected)


def _may_be_medium(source: Path | FileSlice | bytes) -> bool:
    try:
        # A named pipe or a device could block for ever.
        if isinstance(source, Path) and not stat.S_ISREG(source.stat().st_mode):
            return False
        return sniff(_head(source)) is not None
    except FileNotFoundError:
        return False
    except OSError:
        return isinstance(source, Path) and not source.suffix


def _kind(name: str, source: Path | FileSlice | bytes, limits: MediaLimits) -> MediaKind:
    """Raises MediaError."""
    if isinstance(source, Path):
        return detect_kind(source, limits)
    num_bytes = len(source) if isinstance(source, bytes) else source.num_bytes
    max_bytes = max(limits.max_image_bytes, limits.max_video_bytes)
    own_name = Path(name)
    if num_bytes == 0:
        raise MediaSourceError(f"{describe(own_name)} is empty: it has 0 bytes. Check how its container was written.")
    if num_bytes > max_bytes:
        raise MediaLimitError(
            f"{describe(own_name)} has {num_bytes / 2**20:,.1f} MiB; at most {max_bytes / 2**20:,.1f} MiB are read. "
            f"Make it smaller."
        )
    try:
        found = read_format(io.BytesIO(_head(source)), own_name)
        # Whether a GIF moves is said behind its first picture.
        return detect_kind(_whole(source), limits) if found is GIF else found.kind
    except OSError:
        raise MediaSourceError(
            f"{describe(own_name)} could not be read from its container. Check that the container is still there."
        ) from None


def _head(source: Path | FileSlice | bytes) -> bytes:
    if isinstance(source, bytes):
        return source[:HEAD_BYTES]
    if isinstance(source, FileSlice):
        return _slice(source, min(HEAD_BYTES, source.num_bytes))
    with source.open("rb") as file:
        return file.read(HEAD_BYTES)


def _whole(source: FileSlice | bytes) -> bytes:
    return source if isinstance(source, bytes) else _slice(source, source.num_bytes)


def _slice(source: FileSlice, num_bytes: int) -> bytes:
    with source.path.open("rb") as file:
        file.seek(source.offset)
        return file.read(num_bytes)
