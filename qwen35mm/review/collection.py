"""Media and captions under review, wherever the captions are: the list, searches, and the details of one."""

from __future__ import annotations

import hashlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal

from qwen35mm.captioning.records import printable
from qwen35mm.errors import NotFoundError, StorageError
from qwen35mm.review.changes import Changes, Place, Refused, Text, Undone
from qwen35mm.review.edits import Edit
from qwen35mm.review.journal import Run
from qwen35mm.review.similar import Similar
from qwen35mm_preprocess import MediaKind, MediaLimits
from qwen35mm_preprocess.say import Said, say

# Captions that a run changes between two other requests.
_AT_ONCE = 200


@dataclass
class Entry:
    """One medium.

    Attributes:
        number: permanent while the program runs.
        name: its path below its source.
        path: its file; empty if it lies in a container.
        text: as last read.
        state: the state of the text's file then, to see changes; None if it wasn't read yet.
    """

    number: int
    name: str
    path: str
    kind: MediaKind
    text: Text = field(default_factory=Text)
    state: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Search:
    """A search; all conditions must hold.

    Attributes:
        words: each occurs in the caption or the name, ignoring case; the caption lacks one with `-` in front.
        show: `open` has a caption that isn't accepted, `accepted` an accepted one, `empty` none; `similar` shows groups
            of near-duplicates.
        flag: a flag of the caption.
        min_chars, max_chars: of the caption.
    """

    words: str = ""
    show: Literal["all", "open", "accepted", "empty", "similar"] = "all"
    flag: str = ""
    min_chars: int | None = None
    max_chars: int | None = None


@dataclass(frozen=True)
class Planned:
    """A caption's change by an edit.

    Attributes:
        digest: of the text `before`.
    """

    number: int
    name: str
    digest: str
    before: str
    after: str


@dataclass(frozen=True)
class Plan:
    """What an edit would change.

    Attributes:
        label: what the edit does, in a person's words.
        num_captions: captions that were looked at.
        num_others: captions that the edit isn't for: sentences, where it is for tags.
    """

    label: str
    changes: Sequence[Planned]
    num_captions: int
    num_others: int = 0


@dataclass(frozen=True)
class Changed:
    """What a run did: how many captions it changed, and which it couldn't change and why, by their files' names.

    Attributes:
        name: of the run, for `undo`.
    """

    num: int
    refused: Sequence[tuple[str, Said]]
    name: str = field(default="", compare=False)


class Collection(ABC, Generic[Place]):
    """Media and captions. Usable from all threads.

    Args:
        title: its name on the page.
        changes: the captions; only used under `_lock`.

    Attributes:
        limits: of the media that are shown.
    """

    limits = MediaLimits()

    def __init__(self, title: str, changes: Changes[Place]) -> None:
        self.title = title
        self._changes = changes
        self._entries: list[Entry] = []
        self._order: list[int] = []
        self._lock = threading.RLock()
        self._similar = Similar()

    @abstractmethod
    def begin(self) -> None:
        """Locks it for changes. Raises CaptioningError, OutputError."""

    def close(self) -> None:
        """Lets other programs review it."""
        self._similar.stop()

    @abstractmethod
    def look(self) -> list[int]:
        """Lists the media again; returns their numbers, in order. Raises CaptioningError."""

    @abstractmethod
    def _place(self, entry: Entry) -> Place:
        """The place of an entry's caption."""

    @abstractmethod
    def _number(self, place: Place) -> int | None:
        """The number of the entry whose caption is there; None if its medium is gone."""

    @abstractmethod
    def _file(self, entry: Entry) -> Path:
        """The file that may be read for an entry. Raises StorageError."""

    @abstractmethod
    def _read(self, entry: Entry) -> Entry:
        """The entry with its text as it is now."""

    @abstractmethod
    def _flags(self, entry: Entry) -> Sequence[str]:
        """The flags of a text that was read; `edited` if a person has changed the model's text."""

    @abstractmethod
    def _made(self, entry: Entry) -> tuple[str, str] | None:
        """The prompt and the model of a caption; None if unknown."""

    @abstractmethod
    def _question(self, entry: Entry) -> str | None:
        """What the model was asked for a caption, also if a person has changed it since; None if unknown."""

    @abstractmethod
    def _holder(self, entry: Entry) -> str:
        """The name of the file with an entry's caption."""

    def entry(self, number: int) -> Entry:
        """Raises NotFoundError."""
        with self._lock:
            if not 0 <= number < len(self._entries):
                raise NotFoundError(say("There is no such picture or clip. Load the page again."))
            return self._entries[number]

    def version(self, number: int) -> str:
        """A medium's version for browser caches; a changed or different file has another. Empty if it is gone."""
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
            NotFoundError: the file doesn't exist any more.
            StorageError: it may not be read, or is too large.
        """
        entry = self.entry(number)
        path, name = self._file(entry), printable(entry.name)
        if not path.is_file():
            raise NotFoundError(say("{name} is not there any more.", name=name))
        if path.stat().st_size > self.limits.max_bytes(entry.kind):
            raise StorageError(say("{name} is too large to be shown.", name=name))
        return entry, path

    def question(self, number: int) -> str | None:
        """What the model was asked for a caption, also if a person has changed it since; None if unknown."""
        with self._lock:
            return self._question(self.entry(number))

    def describe(self, numbers: Iterable[int]) -> list[dict[str, Any]]:
        """The details of some entries, as JSON values; captions as they are on the disk now."""
        with self._lock:
            return [self._described(self._read(self.entry(number))) for number in numbers]

    def find(self, search: Search) -> dict[str, Any]:
        """Runs a search.

        `numbers` are the matches, in the list's order or in groups of near-duplicates. `flags` counts the entries of
        each flag. `unread` counts the pictures that have yet to be compared. `counts` is as in `counts`.
        """
        words = search.words.casefold().split()
        with self._lock:
            listed = list(self._order)
        unread = 0
        if search.show == "similar":
            self._similar.begin(listed, lambda number: self.medium(number)[1], self.limits)
            listed, unread = self._similar.among(listed)
        flags: dict[str, int] = {}
        numbers: list[int] = []
        for number in listed:
            # Locked per entry, so that other requests can run meanwhile.
            with self._lock:
                entry = self._entries[number]
                self._read(entry)
                for flag in self._flags(entry):
                    flags[flag] = flags.get(flag, 0) + 1
                if self._fits(entry, search, words):
                    numbers.append(number)
        return {"numbers": numbers, "flags": flags, "unread": unread, "counts": self.counts()}

    def counts(self) -> dict[str, int]:
        """How many entries there are, how many are accepted, and how many changes can be undone."""
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

    def texts(self, numbers: Iterable[int]) -> Iterator[tuple[str, str]]:
        """The names and texts of these entries, as they are now."""
        for number in numbers:
            with self._lock:
                entry = self._read(self.entry(number))
            yield entry.name, entry.text.text

    def captions(self, numbers: Iterable[int]) -> Iterator[Planned]:
        """The captions that can be changed among these entries, unchanged."""
        for number in numbers:
            with self._lock:
                entry = self._read(self.entry(number))
                text = entry.text
            if text.digest and text.problem is None:
                yield Planned(number, entry.name, text.digest, text.text, text.text)

    def plan(self, numbers: Iterable[int], edit: Edit) -> Plan:
        """What an edit would change among these entries. Entries without a caption have nothing to edit."""
        planned: list[Planned] = []
        num_captions = num_others = 0
        for caption in self.captions(numbers):
            num_captions += 1
            after = edit.change(caption.before)
            num_others += after is None
            if after is not None and after != caption.before:
                planned.append(replace(caption, after=after))
        return Plan(edit.label, planned, num_captions, num_others)

    def carry_out(self, plan: Plan, run: Run | None = None) -> Changed:
        """Makes a plan's changes, as one run of the journal and one change for `undo`.

        A caption that somebody has changed since it was planned is left alone.

        Args:
            run: a run of `start` that these changes belong to.

        Raises:
            OutputError: the disk is full, read-only or fails. What was changed by then can be undone.
        """
        texts = {each.number: (each.after, each.digest) for each in plan.changes}

        def change(run: Run, numbers: Sequence[int]) -> Sequence[Refused[Place]]:
            entries = [self.entry(number) for number in numbers]
            refused = self._changes.save_many(run, [(self._place(each), *texts[each.number]) for each in entries])
            for entry in entries:
                self._read(entry)
            return refused

        if run is not None:
            return self._changed(run, list(texts), change)
        return self._run(plan.label, list(texts), change)

    def start(self, label: str, made: float | None = None) -> Run:
        """Starts a run of the journal; runs of several collections with the same `made` are one for a person.

        Raises OutputError.
        """
        return self._changes.journal.begin(label, made)

    def accept_many(self, numbers: Sequence[int], accepted: bool) -> Changed:
        """Accepts the captions as they were last read, or withdraws it; one change for `undo`. Raises OutputError."""

        def change(run: Run, numbers: Sequence[int]) -> Sequence[Refused[Place]]:
            entries = [self.entry(number) for number in numbers]
            wanted = [(self._place(entry), entry.text.digest) for entry in entries]
            return self._changes.accept_many(run, wanted, accepted)

        with self._lock:
            entries = [self.entry(number) for number in numbers]
            read = [entry if entry.state is not None else self._read(entry) for entry in entries]
            captions = [entry.number for entry in read if entry.text.digest]
        return self._run("accept" if accepted else "withdraw", captions, change)

    def undo(self, name: str = "") -> Undone[int] | None:
        """See `Changes.undo`; with the items' numbers."""
        with self._lock:
            undone = self._changes.undo(name)
            if undone is None:
                return None
            done, kept = (
                [number for place in places if (number := self._number(place)) is not None]
                for places in (undone.places, undone.kept)
            )
            return Undone(done, kept, undone.is_run)

    def undo_run(self, run: Run) -> Undone[str]:
        """See `Changes.undo_run`; with the items' names."""
        with self._lock:
            undone = self._changes.undo_run(run)
            return Undone([*map(self._title, undone.places)], [*map(self._title, undone.kept)], is_run=True)

    def runs(self) -> list[Run]:
        """The runs that can be undone, the latest first. Raises OutputError."""
        return self._changes.journal.runs()

    def _run(
        self, label: str, numbers: Sequence[int], change: Callable[[Run, Sequence[int]], Sequence[Refused[Place]]]
    ) -> Changed:
        """Changes entries as a run of its own."""
        if not numbers:
            return Changed(0, [])
        run = self.start(label)
        try:
            return self._changed(run, numbers, change)
        finally:
            with self._lock:
                self._changes.end(run)

    def _changed(
        self, run: Run, numbers: Sequence[int], change: Callable[[Run, Sequence[int]], Sequence[Refused[Place]]]
    ) -> Changed:
        """Changes entries in parts, so that other requests can run meanwhile."""
        refused: list[tuple[str, Said]] = []
        for start in range(0, len(numbers), _AT_ONCE):
            with self._lock:
                found = change(run, numbers[start : start + _AT_ONCE])
                refused += [(self._title(each.place), each.why) for each in found]
        return Changed(len(numbers) - len(refused), refused, run.name)

    def _title(self, place: Place) -> str:
        """The name of the item whose caption is there or, if its medium is gone, of the caption's file."""
        number = self._number(place)
        return printable(self._changes.name(place) if number is None else self.entry(number).name)

    def _is_accepted(self, entry: Entry) -> bool:
        """Whether an entry's text is accepted. For a text that wasn't read yet, the stored state counts."""
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
        return all(_occurs(word, within, text.casefold()) for word in words)

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


def _occurs(word: str, within: str, text: str) -> bool:
    """Whether a word of a search fits: `-word` is one that the caption lacks."""
    return word[1:] not in text if word.startswith("-") and len(word) > 1 else word in within
