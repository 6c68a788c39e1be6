"""Candidates from sources: each becomes an item by its first bytes, or a reason why not. Nothing is decoded."""

from __future__ import annotations

import io
import logging
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from qwen35mm.captioning.items import Item, Medium, Unreadable, failure_kind
from qwen35mm.captioning.records import printable
from qwen35mm.errors import CaptioningError, OutputError
from qwen35mm_preprocess import MediaError, MediaKind, MediaLimits, MediaSourceError, describe, detect_kind
from qwen35mm_preprocess.formats import AMBIGUOUS_SUFFIXES, may_be_animated, suffixes_of
from qwen35mm_preprocess.media import check_num_bytes, read_format

logger = logging.getLogger(__name__)

# A file with one of these suffixes should be a medium, whatever its content.
MEDIA_SUFFIXES = (suffixes_of("image") | suffixes_of("video")) - AMBIGUOUS_SUFFIXES


class SourceError(CaptioningError):
    """A source, or one of its shards, can't be read further; `kind` is as in `failures.jsonl`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Candidate(Medium):
    """A possible item. Its name is the one in its folder or container.

    Attributes:
        metadata: returns further values from its source, as JSON values; only called for items.
        is_expected: whether it should be a medium, whatever its name, such as a dataset's row.
    """

    metadata: Callable[[], Mapping[str, Any]] = dict
    is_expected: bool = False


@dataclass(frozen=True)
class Container:
    """A tar or a zip in a folder; its members are candidates, as `NAME/MEMBER`."""

    name: str
    path: Path


def looks_like_medium(name: str) -> bool:
    """Whether a name has the suffix of an image or a video."""
    return os.path.splitext(name)[1].lower() in MEDIA_SUFFIXES  # noqa: PTH122 - called for every file in a folder


def probe(candidate: Candidate, name: str, limits: MediaLimits) -> Item | Unreadable | None:
    """The item of this name, whose path below its source is the candidate's; None if nothing suggests that it is one.

    A candidate that isn't a medium, or can't be opened, is Unreadable if it is expected to be a medium or has a
    medium's suffix. A file without a suffix is Unreadable if reading isn't permitted.
    """
    path = candidate.source if isinstance(candidate.source, Path) else None
    try:
        if not candidate.is_expected and not looks_like_medium(name) and not _may_be_medium(candidate):
            return None
        kind = _kind(candidate, name, limits)
        num_parts = len(PurePosixPath(candidate.name).parts)
        return Item(name, candidate.source, kind, path, candidate.metadata(), num_parts=num_parts)
    except MediaError as error:
        return Unreadable(name, failure_kind(error), printable(str(error)), path)
    except (OutputError, SourceError):
        raise
    # A library's error about hostile bytes affects only this entry; the next one is still read.
    except Exception as error:
        logger.warning("%s could not be looked at.", printable(name), exc_info=True)
        message = f"'{printable(PurePosixPath(name).name)}' could not be looked at ({type(error).__name__}). Check it."
        return Unreadable(name, "damaged", message, path)


def _may_be_medium(candidate: Candidate) -> bool:
    source = candidate.source
    try:
        # A named pipe or a device could block forever.
        if isinstance(source, Path) and not stat.S_ISREG(source.stat().st_mode):
            return False
        return candidate.sniff() is not None
    except FileNotFoundError:
        return False
    except OSError:
        return isinstance(source, Path) and not source.suffix


def _kind(candidate: Candidate, name: str, limits: MediaLimits) -> MediaKind:
    """Raises MediaError."""
    if isinstance(candidate.source, Path):
        return detect_kind(candidate.source, limits)
    own_name = Path(name)
    check_num_bytes(candidate.num_bytes, limits.max_bytes(None), own_name)
    try:
        head = candidate.head()
        found = read_format(io.BytesIO(head), own_name)
        return detect_kind(candidate.read(), limits) if may_be_animated(found, head) else found.kind
    except OSError:
        raise MediaSourceError(
            f"{describe(own_name)} could not be read from its container. Check that the container is still there."
        ) from None
