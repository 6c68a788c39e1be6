"""What every output can do, and how a person names one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal, Protocol, get_args

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.records import Record
from qwen35mm.errors import CaptioningError

Mode = Literal["skip", "overwrite", "append", "prepend"]
OutputKind = Literal["sidecar", "jsonl", "parquet", "dataset", "webdataset"]

DEFAULT_SUFFIX = ".txt"
_SUFFIX = re.compile(r"\.?[^./\\\x00-\x1f]+(\.[^./\\\x00-\x1f]+)*")
_MAX_SUFFIX_BYTES = 64
_FORMS = "sidecar, sidecar:.caption, jsonl:FILE, parquet:FOLDER, dataset:FOLDER or webdataset:FOLDER"


class Wants(Enum):
    """What an output has for an item.

    CAPTION: the caption must be written. DONE: it is there as it should be. KEPT: somebody else's text stands there
    and stays.
    """

    CAPTION = "caption"
    DONE = "done"
    KEPT = "kept"


class Output(Protocol):
    """Something that captions are written to. Its methods may be called from several threads.

    label    for messages, such as `captions.jsonl` or `.txt files`
    """

    label: str

    def wants(self, item: Item, key: bytes | None) -> Wants:
        """Whether the caption of this work must be written.

        Args:
            key: None before the medium was read; then the answer is KEPT or CAPTION, as far as it can be known.

        Raises:
            OutputError: the disk fails, or the manifest can't be read.
        """
        ...

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
        ...

    def finish(self) -> None:
        """The run's end, also after Ctrl-C: writes what waits for it, and drops what was replaced. May be called once.

        Raises:
            OutputError: as `write`.
        """
        ...

    def close(self) -> None:
        """Gives its files back. Without `finish` before, what waited is left to the next run."""
        ...


@dataclass(frozen=True)
class OutputSpec:
    """An output as a person named it.

    Attributes:
        target: its file or folder; a sidecar's suffix, with its dot.
    """

    kind: OutputKind
    target: str

    @property
    def path(self) -> Path:
        return Path(self.target)


def parse_output(text: str) -> OutputSpec:
    """Reads `sidecar`, `sidecar:.caption`, `jsonl:FILE`, `parquet:FOLDER`, `dataset:FOLDER` or `webdataset:FOLDER`.

    Raises:
        CaptioningError: it has none of these forms.
    """
    kind, _, target = text.partition(":")
    for known in get_args(OutputKind):
        if kind == known == "sidecar":
            suffix = target or DEFAULT_SUFFIX
            if not _SUFFIX.fullmatch(suffix) or len(suffix.encode("utf-8", "replace")) > _MAX_SUFFIX_BYTES:
                break
            return OutputSpec("sidecar", suffix if suffix.startswith(".") else f".{suffix}")
        if kind == known and target and "\x00" not in target:
            return OutputSpec(known, target)
    raise CaptioningError(f"An output must be {_FORMS}; got {text!r}.")
