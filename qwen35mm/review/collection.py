"""Media with their captions as a person goes through them, wherever the captions are: all of them at once, those that
fit a search, and one of them with all that is known of it.
"""

from __future__ import annotations

import hashlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal

from qwen35mm.captioning.records import printable
from qwen35mm.errors import NotFoundError, StorageError
from qwen35mm.review.changes import Changes, Place, Text
from qwen35mm.review.similar import Similar
from qwen35mm_preprocess import MediaKind, MediaLimits
from qwen35mm_preprocess.say import say


@dataclass
class Entry:
    """One medium.

    Attributes:
        number: its own for as long as the program runs.
        name: its path below its source.
        path: its file; empty where it lies in a container.
        text: as it was read last.
        state: by which it is known whether that is still so; None where it wasn't read.
    """

    number: int
    name: str
    path: str
    kind: MediaKind
    text: Text = field(default_factory=Text)
    state: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Search:
    """What is looked for: all of it has to hold.

    Attributes:
        words: each occurs in the caption or in the name, whatever their case.
        show: those with a caption that nobody accepted, that somebody did, without one, near-duplicates side by side.
        flag: one of the caption's.
        min_chars, max_chars: of the caption.
    """

    words: str = ""
    show: Literal["all", "open", "accepted", "empty", "similar"] = "all"
    flag: str = ""
    min_chars: int | None = None
    max_chars: int | None = None


class Collection(ABC, Generic[Place]):
    """Media and captions. Usable from all threads.

    Args:
        title: what a person calls it.
        changes: the captions; one thread at a time uses them, under `_lock`.
    """

    def __init__(self, title: str, changes: Changes[Place]) -> None:
        self.title = title
        self._changes = changes
        self._entries: list[Entry] = []
        self._order: list[int] = []
        self._lock = threading.RLock()
        self._similar = Similar()

    def close(self) -> None:
        """Lets others go through it."""
        self._similar.stop()

    @abstractmethod
    def look(self) -> list[int]:
        """Lists it anew; the numbers of what is there, in its order. Raises CaptioningError."""

    @abstractmethod
    def _place(self, entry: Entry) -> Place:
        """Where an entry's caption is."""

    @abstractmethod
    def _number(self, place: Place) -> int:
        """The entry whose caption is there."""

    @abstractmethod
    def _file(self, entry: Entry) -> Path:
        """The file that may be read for an entry. Raises StorageError."""

    @abstractmethod
    def _read(self, entry: Entry) -> Entry:
        """The entry with its text as it is now."""

    @abstractmethod
    def _flags(self, entry: Entry) -> Sequence[str]:
        """The flags of a text that was read; `edited` where a person has changed what a model wrote."""

    @abstractmethod
    def _made(self, entry: Entry) -> tuple[str, str] | None:
        """The prompt and the model that a caption is of, as far as that is known."""

    @abstractmethod
    def _holder(self, entry: Entry) -> str:
        """The name of the file that has an entry's caption."""

    def entry(self, number: int) -> Entry:
        """Raises NotFoundError."""
        with self._lock:
            if not 0 <= number < len(self._entries):
                raise NotFoundError(say("There is no such picture or clip. Load the page again."))
            return self._entries[number]

    def version(self, number: int) -> str:
        """What a browser may keep a medium under: another file, or the same one changed, has another. Empty where it
        is gone."""
        path = self.entry(number).path
        try:
            status = os.stat(path)  # noqa: PTH116 - a hundred thousand paths are strings
        except OSError:
            return ""
        seen = f"{path} {status.st_size} {status.st_mtime_ns}"
        return hashlib.sha256(os.fsencode(seen)).hexdigest()[:16]

    def medium(self, number: int) -> tuple[Entry, Path]:
        """An entry, and the file that may be read for it.

        Raises:
            NotFoundError: there is none any more.
            StorageError: it may not be read, or is too large.
        """
        entry = self.entry(number)
        path, name = self._file(entry), printable(entry.name)
        if not path.is_file():
            raise NotFoundError(say("{name} is not there any more.", name=name))
        if path.stat().st_size > MediaLimits().max_bytes(entry.kind):
            raise StorageError(say("{name} is too large to be shown.", name=name))
        return entry, path

    def describe(self, numbers: Iterable[int]) -> list[dict[str, Any]]:
        """All that is known of some, as JSON values; captions as they are on the disk now."""
        with self._lock:
            return [self._described(self._read(self.entry(number))) for number in numbers]

    def find(self, search: Search) -> dict[str, Any]:
        """The `numbers` of what fits, in the listing's order or, near-duplicates, side by side; how many items there
        are for each of the `flags`, and how many pictures `unread` still have to be compared."""
        words = search.words.casefold().split()
        with self._lock:
            entries = [self._entries[number] for number in self._order]
        unread = 0
        if search.show == "similar":
            self._similar.begin(entries, lambda number: self.medium(number)[1])
            entries, unread = self._similar.among(entries)
        flags: dict[str, int] = {}
        numbers: list[int] = []
        for entry in entries:
            # Not for all of them at once: others ask for what they see meanwhile.
            with self._lock:
                self._read(entry)
                for flag in self._flags(entry):
                    flags[flag] = flags.get(flag, 0) + 1
                if self._fits(entry, search, words):
                    numbers.append(entry.number)
        return {"numbers": numbers, "flags": flags, "unread": unread, "counts": self.counts()}

    def counts(self) -> dict[str, int]:
        """How many there are, how many of them were accepted, and how many changes can be taken back."""
        with self._lock:
            accepted = sum(self._is_accepted(self._entries[number]) for number in self._order)
            return {"all": len(self._order), "accepted": accepted, "changes": self._changes.num_changes}

    def save(self, number: int, text: str, digest: str, editing: str) -> dict[str, Any]:
        """See `Changes.save`."""
        with self._lock:
            entry = self.entry(number)
            self._changes.save(self._place(entry), text, digest, editing)
            return self._described(self._read(entry))

    def accept(self, number: int, digest: str, accepted: bool) -> dict[str, Any]:
        """See `Changes.accept`."""
        with self._lock:
            entry = self.entry(number)
            self._changes.accept(self._place(entry), digest, accepted)
            return self._described(self._read(entry))

    def undo(self) -> int | None:
        """See `Changes.undo`; the item's number."""
        with self._lock:
            place = self._changes.undo()
            return None if place is None else self._number(place)

    def _is_accepted(self, entry: Entry) -> bool:
        """Of a text that wasn't read yet, what was remembered holds."""
        digest = self._changes.accepted_digest(self._place(entry))
        return digest is not None and (entry.state is None or digest == entry.text.digest)

    def _fits(self, entry: Entry, search: Search, words: Sequence[str]) -> bool:
        text = entry.text.text
        fits_show = {
            "all": True,
            "similar": True,
            "open": bool(text) and not self._is_accepted(entry),
            "accepted": self._is_accepted(entry),
            "empty": not text,
        }[search.show]
        if not fits_show or (search.flag and search.flag not in self._flags(entry)):
            return False
        if not (search.min_chars or 0) <= len(text) or (search.max_chars is not None and len(text) > search.max_chars):
            return False
        if not words:
            return True
        within = f"{entry.name}\n{text}".casefold()
        return all(word in within for word in words)

    def _described(self, entry: Entry) -> dict[str, Any]:
        prompt, model = self._made(entry) or (None, None)
        return {
            "number": entry.number,
            "name": printable(entry.name),
            "kind": entry.kind,
            "version": self.version(entry.number),
            "file": printable(self._holder(entry)),
            "text": entry.text.text,
            "digest": entry.text.digest,
            "problem": entry.text.problem,
            "accepted": self._is_accepted(entry),
            "flags": [printable(flag) for flag in self._flags(entry)],
            "prompt": prompt,
            "model": model,
        }
