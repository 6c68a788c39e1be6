"""The interface of all outputs, and their settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
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
        mode: what happens to other people's captions. `skip` leaves them alone, `overwrite` replaces them (files of
            records are moved aside), `append` and `prepend` put ours after or before them.
        folder: the folder of sidecars, under their items' names; None puts them beside their media.
        video_suffix: the suffix of videos' sidecars, with its dot; None for that of images.
        one_line: writes sidecars as one line, since many trainers read only one.
        separator: between a person's text and ours in a sidecar; None for a line end, or a space with `one_line`.
        keep_tokens: how many tags of a person's text stay in front of ours with `prepend`.
        link_media: dataset folders link to media instead of copying, if the disk can.
        embed_media: parquet files contain the media.
        records_per_shard: of parquet files and tars.
        compact: merges shards that aren't full at the run's end.
        judged: records may have judgements.
        parts: records may be of parts of videos.
        has_both: whether the sources have images and videos; asked once for a new dataset folder.
        styles: the names of the captions that each item gets; empty for one without a name.
    """

    mode: Mode = "skip"
    folder: Path | None = None
    video_suffix: str | None = None
    one_line: bool = False
    separator: str | None = None
    keep_tokens: int = 0
    link_media: bool = False
    embed_media: bool = False
    records_per_shard: int = 1000
    compact: bool = False
    judged: bool = False
    parts: bool = False
    has_both: Callable[[], bool] = bool
    styles: tuple[str, ...] = ()


class Wants(Enum):
    """What an output wants for an item.

    CAPTION: the caption must be written. DONE: it is already there. KEPT: another person's text is there and stays.
    """

    CAPTION = "caption"
    DONE = "done"
    KEPT = "kept"


# Says of an item, by its name and its file's place, whether another split made it. The name may be unknown.
IsOld = Callable[[str | None, bytes | None], bool]


class Output(ABC):
    """A place that captions are written to. One thread uses it at a time.

    Attributes:
        style: which of an item's captions it takes, by name; None for all of them together.
    """

    style: str | None = None

    @abstractmethod
    def wants(self, item: Item, key: bytes | None) -> Wants:
        """Whether the caption of this work must be written.

        Args:
            key: None before the medium was read; then the answer is KEPT or CAPTION, as far as known.

        Raises:
            OutputError: the disk fails, or the manifest can't be read.
        """

    @abstractmethod
    def write(self, record: Record) -> None:
        """Writes a record whose caption the manifest has, unless it is already there or isn't wanted.

        So after a kill it may be called again for every record. When it returns, the record is on the disk. Only shards
        wait until they are full; until then, a later run writes their records again.

        Raises:
            OutputError: the disk is full, read-only or fails; the earlier content stays. The run should end with
                `close`.
            CaptioningError: only this item's caption can't be written: its medium was changed or deleted, its name is
                too long for the disk, its folder isn't writable, or its text file isn't UTF-8.
        """

    @abstractmethod
    def gone(self) -> set[Path]:
        """The deleted media files whose captions of ours are still here. Raises OutputError."""

    @abstractmethod
    def prune(self, media: Collection[Path]) -> None:
        """Removes the captions of `gone` media, unless a person has changed them; the manifest keeps them.

        Call it after `finish`. It may be called again after any error. Raises OutputError.
        """

    @abstractmethod
    def of_other_splits(self, is_old: IsOld, *, removes: bool) -> int:
        """How many captions of ours are of items that another split made, unless a person has changed them.

        Args:
            is_old: whether that holds for an item.
            removes: removes them as well, like `prune`.

        Raises:
            OutputError: as `prune`.
        """

    def finish(self) -> None:  # noqa: B027 - most outputs have nothing to do
        """Ends the run, also after Ctrl-C: writes pending records and drops replaced ones. May be called once.

        Raises:
            OutputError: as `write`.
        """

    def close(self) -> None:  # noqa: B027 - most outputs have no open files
        """Closes its files. Without an earlier `finish`, the next run writes the pending records."""
