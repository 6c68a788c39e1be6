"""The records of a file that the captioner wrote: JSONL, or a dataset folder's rows.

Locks the file's manifest like a run, since the file's lines come from it and edits are stored in it first. So a run at
the same time is refused, and a later one finds the edits.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from qwen35mm.captioning.manifest.manifest import STATE_FOLDER, Manifest
from qwen35mm.captioning.outputs.base import OutputSettings
from qwen35mm.captioning.outputs.dataset_folder import DATASET_METADATA, DatasetFolder
from qwen35mm.captioning.outputs.jsonl import JsonLines
from qwen35mm.captioning.records import Caption, edited, printable
from qwen35mm.captioning.sources.names import absolute
from qwen35mm.errors import CaptioningError, OutputError, StorageError
from qwen35mm.review.changes import Changes, Text
from qwen35mm.review.collection import Collection, Entry
from qwen35mm.review.journal import Journal
from qwen35mm_preprocess.say import say

# The first records whose media's folders are searched for the manifest.
_LOOKED_AT = 200
# The most searched folders that a message names.
_NAMED = 4
_READ = (0, 0, 0)


@dataclass
class _Known:
    """A record: the model's caption, a person's text in its place, and the digest of the accepted text."""

    number: int
    caption: Caption
    theirs: str | None
    accepted: str | None

    @property
    def text(self) -> Text:
        shown = self.caption.text if self.theirs is None else self.theirs
        content = shown.encode("utf-8", "backslashreplace")
        return Text(content.decode(), hashlib.sha256(content).hexdigest(), content=content)


class _Lines(Changes[bytes]):
    """The captions in the lines of a file, by their items' owners. While it is open, nobody else writes them."""

    def __init__(self, output: JsonLines, known: dict[bytes, _Known], journal: Journal) -> None:
        super().__init__(journal)
        self._output = output
        self._known = known

    def read(self, place: bytes) -> Text:
        return self._known[place].text

    def accepted_digest(self, place: bytes) -> str | None:
        return self._known[place].accepted

    def name(self, place: bytes) -> str:
        return self._output.label

    def _content(self, text: str) -> bytes:
        return text.replace("\r\n", "\n").rstrip("\n").encode("utf-8", "backslashreplace")

    def _write(self, place: bytes, content: bytes) -> Text:
        known, text = self._known[place], content.decode()
        # The model's own text isn't an edit.
        try:
            self._output.edit(place, None if text == known.caption.text else text)
        except (ValueError, RecursionError):
            raise StorageError(say("This caption is JSON, and has to stay JSON: it was not saved.")) from None
        finally:
            # After a disk error, the manifest may have the edit, and the file will get it later.
            known.theirs = self._output.theirs(place)
        return known.text

    def _remove(self, place: bytes) -> None:
        raise AssertionError("a record always had a caption before")

    def _remember(self, accepted: Sequence[tuple[bytes, str | None]]) -> None:
        for place, digest in accepted:
            self._output.accept(place, None if digest is None else bytes.fromhex(digest))
            self._known[place].accepted = digest

    def _named(self, place: bytes) -> Any:
        return os.fsdecode(place)

    def _place(self, named: Any) -> bytes | None:
        place = os.fsencode(named)
        return place if place in self._known else None


class RecordsFile(Collection[bytes]):
    """The records of the file at `path`, in its order. `close` writes the file without replaced lines.

    Args:
        state: the folder of the file's manifest.
        near: without `state`, folders that may contain the manifest's folder. It is also searched for beside the file,
            and in the folders above its media.
        for_page: whether the review page opens it.

    Raises:
        CaptioningError: no manifest knows the file, a run or another page uses it, or it can't be written to.
        OutputError: the disk fails.
    """

    def __init__(
        self, path: Path, *, state: Path | None = None, near: Sequence[Path] = (), for_page: bool = True
    ) -> None:
        real = Path(os.path.realpath(path))
        found, is_dataset = _manifest_of(real, [state] if state is not None else _folders_near(real, near))
        with ExitStack() as opened:
            manifest = opened.enter_context(closing(Manifest.open(found, for_page=for_page)))
            self._output = (
                DatasetFolder(manifest, real.parent, OutputSettings())
                if is_dataset
                else JsonLines(manifest, real, OutputSettings())
            )
            opened.enter_context(closing(self._output))
            self._known: dict[bytes, _Known] = {}
            journal = Journal(found.parent, f"records:{os.path.relpath(real, os.path.realpath(found.parent))}")
            super().__init__(self._output.label, _Lines(self._output, self._known, journal))
            self._load()
            self._opened = opened.pop_all()

    def begin(self) -> None:
        """See `Collection`. The records are locked from the beginning."""

    def close(self) -> None:
        """See `Collection`. Raises OutputError: then the next run or page writes the file anew."""
        super().close()
        with self._opened:
            self._output.finish()

    def look(self) -> list[int]:
        """See `Collection`. Nobody else changes the records meanwhile."""
        with self._lock:
            return list(self._order)

    def _load(self) -> None:
        for owner, record, theirs, accepted in self._output.entries():
            item, number = record.item, len(self._entries)
            medium = self._output.medium(item)
            path = "" if medium is None else str(absolute(medium))
            self._entries.append(Entry(number, item.name, path, item.kind))
            self._known[owner] = _Known(number, record.caption, theirs, None if accepted is None else accepted.hex())
            self._order.append(number)
        self._owners = list(self._known)

    def _place(self, entry: Entry) -> bytes:
        return self._owners[entry.number]

    def _number(self, place: bytes) -> int:
        return self._known[place].number

    def _file(self, entry: Entry) -> Path:
        if not entry.path:
            raise StorageError(say("{name} lies in another file: it can't be shown here.", name=printable(entry.name)))
        return Path(entry.path)

    def _read(self, entry: Entry) -> Entry:
        entry.text, entry.state = self._known[self._place(entry)].text, _READ
        return entry

    def _flags(self, entry: Entry) -> Sequence[str]:
        known = self._known[self._place(entry)]
        return (known.caption if known.theirs is None else edited(known.caption, known.theirs)).flags

    def _made(self, entry: Entry) -> tuple[str, str]:
        caption = self._known[self._place(entry)].caption
        return caption.prompt, caption.model

    def _question(self, entry: Entry) -> str:
        return self._known[self._place(entry)].caption.prompt

    def _holder(self, entry: Entry) -> str:
        return self._output.label


def _manifest_of(path: Path, folders: Iterable[Path]) -> tuple[Path, bool]:
    """The manifest that knows a JSONL file, and whether the file is a dataset folder's. Raises CaptioningError."""
    looked: dict[Path, None] = {}
    for folder in folders:
        for found in sorted(folder.glob("captions*.sqlite")) if folder not in looked else ():
            with Manifest.borrowed(found) as manifest:
                if manifest.row("SELECT 1 FROM line_files WHERE place = ?", manifest.place(path)):
                    output = b"dataset:" + manifest.place(path.parent)
                    of_dataset = manifest.row("SELECT 1 FROM claims WHERE output = ?", output)
                    return found, path.name == DATASET_METADATA and of_dataset is not None
        looked[folder] = None
    where = ", ".join(printable(str(folder)) for folder in islice(looked, _NAMED))
    raise CaptioningError(
        f"No manifest of `qwen35mm caption` knows {printable(path.name)}; looked for in {where}. Only what "
        "--output jsonl:FILE or dataset:FOLDER wrote can be reviewed: name its manifest's folder with --state-dir."
    )


def _folders_near(path: Path, near: Sequence[Path]) -> Iterator[Path]:
    """The folders where a file's manifest may be, the likeliest first. Raises OutputError."""
    yield from (folder / STATE_FOLDER for folder in (*near, path.parent))
    try:
        with path.open("rb") as file:
            lines = list(islice(file, _LOOKED_AT))
    except OSError as error:
        raise OutputError(f"{printable(path.name)} can't be read: {error.strerror}.", error.errno) from error
    for line in lines:
        try:
            medium = json.loads(line)["path"]
        except (ValueError, RecursionError, TypeError, KeyError):
            continue
        if isinstance(medium, str):
            yield from (folder / STATE_FOLDER for folder in absolute(Path(medium)).parents)
