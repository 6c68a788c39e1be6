"""What every output can do, and what is said to all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.records import Record

Mode = Literal["skip", "overwrite", "append", "prepend"]
DEFAULT_SUFFIX = ".txt"


@dataclass(frozen=True)
class OutputSettings:
    """How outputs are written.

    Attributes:
        mode: what happens where somebody else's captions are: left alone, replaced (files of records are moved
            aside), or kept after or before ours.
        folder: where sidecars go, under their items' names; None puts them beside their media.
        one_line: sidecars have one line: many trainers read no more.
        separator: between a person's text and ours in a sidecar; None is a line end, or a space in one line.
        link_media: dataset folders have links to media where the disk can, and no copies.
        embed_media: parquet holds the pictures too.
        records_per_shard: of parquet files and tars.
        judged: records may have judgements.
        compact: shards that aren't full are merged at the run's end.
    """

    mode: Mode = "skip"
    folder: Path | None = None
    one_line: bool = False
    separator: str | None = None
    link_media: bool = False
    embed_media: bool = False
    records_per_shard: int = 1000
    compact: bool = False
    judged: bool = False


class Wants(Enum):
    """What an output has for an item.

    CAPTION: the caption must be written. DONE: it is there as it should be. KEPT: somebody else's text stands there
    and stays.
    """

    CAPTION = "caption"
    DONE = "done"
    KEPT = "kept"


class Output(ABC):
    """Something that captions are written to. One thread uses it at a time."""

    @abstractmethod
    def wants(self, item: Item, key: bytes | None) -> Wants:
        """Whether the caption of this work must be written.

        Args:
            key: None before the medium was read; then the answer is KEPT or CAPTION, as far as it can be known.

        Raises:
            OutputError: the disk fails, or the manifest can't be read.
        """

    @abstractmethod
    def write(self, record: Record) -> None:
        """Writes a record whose result the manifest has. A record that is there already, or that isn't wanted, isn't
        written again, so after a kill it may be called for everything once more.

        What was written is on the disk when it returns; shards, which are written whole, are so when they are full,
        and until then a later run is asked for their records again.

        Raises:
            OutputError: the disk is full, read-only or fails; what was there stays. The run should end with `close`.
            CaptioningError: this item's caption can't be written: its medium has changed or gone, its name is too long
                for the disk, its folder can't be written to, or its text file isn't UTF-8. Other items can.
        """

    @abstractmethod
    def gone(self) -> set[Path]:
        """The files of media whose captions of ours are here, and which are there no more. Raises OutputError."""

    @abstractmethod
    def prune(self, media: Collection[Path]) -> None:
        """Takes the captions of media out, unless somebody has changed them; the manifest keeps them. For media that
        are `gone`, after `finish`; whatever ends it, it may be called again. Raises OutputError."""

    def finish(self) -> None:  # noqa: B027 - most have nothing that waits
        """The run's end, also after Ctrl-C: writes what waits for it, and drops what was replaced. May be called once.

        Raises:
            OutputError: as `write`.
        """

    def close(self) -> None:  # noqa: B027 - nor files that are open
        """Gives its files back. Without `finish` before, what waited is left to the next run."""
