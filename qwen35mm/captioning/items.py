"""Items: the media to caption, wherever they lie."""

from __future__ import annotations

import hashlib
import stat
import sys
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from qwen35mm.captioning.manifest.files import PIECE_BYTES, pieces
from qwen35mm.errors import (
    ContextTooLongError,
    DecoderCrashError,
    DecoderTimeoutError,
    EngineError,
    RefusedError,
    RequestError,
)
from qwen35mm_preprocess import (
    MediaBudgetError,
    MediaDecodeError,
    MediaError,
    MediaKind,
    MediaLimitError,
    MediaPlanError,
    MediaSourceError,
    VideoClip,
)
from qwen35mm_preprocess.formats import HEAD_BYTES, MediaFormat, sniff
from qwen35mm_preprocess.media import NamedBytes


@dataclass(frozen=True)
class FileSlice:
    """A medium in a larger uncompressed file, such as a tar: `num_bytes` from `offset` on."""

    path: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Medium:
    """The bytes of an image or a video. Every method raises OSError if they can't be read.

    Attributes:
        source: a file, a part of one, or the bytes themselves.
    """

    name: str
    source: Path | FileSlice | bytes

    def pieces(self, piece_bytes: int = PIECE_BYTES) -> Generator[bytes]:
        """The medium's bytes in chunks."""
        if isinstance(self.source, bytes):
            yield self.source
            return
        part = self.source if isinstance(self.source, FileSlice) else FileSlice(self.source, 0, sys.maxsize)
        with part.path.open("rb") as file:
            file.seek(part.offset)
            yield from pieces(file, part.num_bytes, piece_bytes)

    def read(self, most_bytes: int = 0) -> Path | NamedBytes:
        """The source for `MediaProcessor`: the medium's bytes, or the path of a file with more than `most_bytes`."""
        if isinstance(self.source, Path):
            status = self.source.stat()
            # A named pipe could block forever.
            if not stat.S_ISREG(status.st_mode) or status.st_size > most_bytes:
                return self.source
        data = NamedBytes(b"".join(self.pieces()))
        data.name = PurePosixPath(self.name).name
        return data

    def head(self) -> bytes:
        """Its first bytes, which show its format."""
        with closing(self.pieces(HEAD_BYTES)) as first:
            return next(first, b"")[:HEAD_BYTES]

    def sniff(self) -> MediaFormat | None:
        """Its format."""
        return sniff(self.head())

    def digest(self) -> bytes:
        """SHA-256 of its bytes."""
        sha256 = hashlib.sha256()
        for piece in self.pieces():
            sha256.update(piece)
        return sha256.digest()

    @property
    def num_bytes(self) -> int:
        """Its size in bytes."""
        if isinstance(self.source, Path):
            return self.source.stat().st_size
        return len(self.source) if isinstance(self.source, bytes) else self.source.num_bytes


# Between two frames of the fastest video, so that a part has no frame of the next one.
_BEFORE_NEXT_S = 2e-3


@dataclass(frozen=True)
class Part:
    """A part of a video.

    Attributes:
        number: from 1.
        start_s, end_s: seconds from the video's first frame; `end_s` is the start of the frame after the part.
        is_clip: whether the part is a file of its own.
    """

    number: int
    start_s: float
    end_s: float
    is_clip: bool = False

    @property
    def clip(self) -> VideoClip | None:
        """The range of the item's file to read; None for the whole file."""
        return None if self.is_clip else VideoClip(self.start_s, max(self.start_s, self.end_s - _BEFORE_NEXT_S))


@dataclass(frozen=True)
class Item(Medium):
    """One medium of a run. It pickles, so that a worker process can read it.

    Attributes:
        name: unique in a run: the path below its source, with forward slashes, such as `cats/a.jpg`; in a container,
            the container's name and its own, such as `train.parquet/000017.png`; for a part of a video, the video's
            name and the part's number, such as `clip.mp4/0003`. A name that isn't UTF-8 contains surrogates, as from
            `os.fsdecode`.
        kind: by its content.
        path: its file, also if a container's row names it; None if the bytes lie in a container.
        metadata: further values from its source, as JSON values.
        part: which part of a video it is; None for a whole medium.
        num_parts: of its medium's path below its source. The name has more if another source has the same. 0 if all
            are its own.
    """

    kind: MediaKind
    path: Path | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    part: Part | None = None
    num_parts: int = field(default=0, compare=False)

    @property
    def medium_name(self) -> str:
        """The name; for a part, that of its video."""
        return self.name if self.part is None else self.name.rpartition("/")[0]

    @property
    def file_name(self) -> str:
        """The name for files made from it: of part 3 of `a/clip.mp4`, `a/clip.0003.mp4`."""
        if self.part is None:
            return self.name
        folders, slash, last = self.medium_name.rpartition("/")
        stem, suffix = PurePosixPath(last).stem, PurePosixPath(last).suffix
        return f"{folders}{slash}{stem}.{self.part.number:04}{suffix}"

    @property
    def stem(self) -> str:
        """The last part of the medium's name without its suffix."""
        return PurePosixPath(self.medium_name).stem

    @property
    def below(self) -> PurePosixPath:
        """The medium's path below its source."""
        return PurePosixPath(*PurePosixPath(self.medium_name).parts[-self.num_parts :])

    @property
    def folder(self) -> str:
        """The name of its folder; empty at the top of its source."""
        return self.below.parent.name

    def suffix(self) -> str:
        """Its own suffix if that fits its content, otherwise one that does; in lower case. Raises OSError."""
        found, own = self.sniff(), PurePosixPath(self.medium_name).suffix.lower()
        known = found.suffixes if found is not None else ()
        return own if own in known or not known else known[0]


@dataclass(frozen=True)
class Failed:
    """What went wrong with an item: `kind` as in `failures.jsonl`, `message` for a person."""

    kind: str
    message: str


@dataclass(frozen=True)
class Unreadable:
    """Something in a source that should be an item but can't be read.

    Attributes:
        name: as an item's.
        kind: the failure's kind in `failures.jsonl`, such as `unreadable`, `damaged` or `unsupported`.
        message: for a person: what was expected, what was found, what to do.
        path: its file, folder or container; None for a row or a member of a container.
    """

    name: str
    kind: str
    message: str
    path: Path | None = None


# Kinds of failures of media that nobody may be able to read; see also `broken_medium`.
BROKEN: Final = frozenset({"crash", "damaged", "unsupported"})

_FAILURE_KINDS: Mapping[type[Exception], str] = {
    DecoderCrashError: "crash",
    DecoderTimeoutError: "timeout",
    MediaSourceError: "unreadable",
    MediaDecodeError: "damaged",
    MediaLimitError: "too large",
    MediaBudgetError: "too large",
    MediaPlanError: "changed",
    MediaError: "unsupported",
    ContextTooLongError: "too long",
    RefusedError: "refused",
    EngineError: "engine",
    RequestError: "engine",
}


def failure_kind(error: Exception) -> str:
    """The kind of a failure in `failures.jsonl`; `prompt` for any other error."""
    return next((kind for each, kind in _FAILURE_KINDS.items() if isinstance(error, each)), "prompt")
