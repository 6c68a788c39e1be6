"""What is captioned: one medium, wherever it lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from qwen35mm_preprocess import MediaKind


@dataclass(frozen=True)
class FileSlice:
    """A medium inside a larger file that isn't compressed, as in a tar: `num_bytes` from `offset` on."""

    path: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Item:
    """One medium. It pickles, so that a worker process can read it.

    Attributes:
        name: its own among all items of a run: the path below its source, with forward slashes, such as
            `cats/a.jpg`; in a container, the container's name and its own, such as `train.parquet/000017.png`. A file
            name that isn't UTF-8 has surrogates in it, as `os.fsdecode` makes them.
        source: a file, a part of one, or the medium's bytes.
        kind: by its content.
        path: its file, also where a container's row only names it; None where the bytes lie in a container.
        metadata: what its source says of it besides; JSON values.
    """

    name: str
    source: Path | FileSlice | bytes
    kind: MediaKind
    path: Path | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        """The last part of the name without its suffix."""
        return PurePosixPath(self.name).stem

    @property
    def folder(self) -> str:
        """The name of the folder that it lies in; empty at the top."""
        return PurePosixPath(self.name).parent.name

    def read(self) -> Path | bytes:
        """What `MediaProcessor` reads: the file, or the medium's bytes.

        Raises:
            OSError: the file that holds it can't be read.
        """
        if not isinstance(self.source, FileSlice):
            return self.source
        with self.source.path.open("rb") as file:
            file.seek(self.source.offset)
            return file.read(self.source.num_bytes)


@dataclass(frozen=True)
class Unreadable:
    """Something in a source that should have been an item, and can't be read.

    Attributes:
        name: as an item's.
        kind: the failure's kind in `failures.jsonl`, such as `unreadable`, `damaged` or `unsupported`.
        message: for a person: what was expected, what came, what to do.
        path: its file, folder or container; None for a row or a member of a container.
    """

    name: str
    kind: str
    message: str
    path: Path | None = None
