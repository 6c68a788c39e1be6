"""A person's changes of captions: save, accept and undo, wherever the captions are.

Each change names the digest of the text that it changes. So another person's newer text is shown and never replaced.
Each change is on the disk before it is confirmed.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from qwen35mm.errors import StorageError
from qwen35mm.review.journal import Journal, Run, Step
from qwen35mm_preprocess.say import Said, said_of, say, size

MAX_TEXT_BYTES = 1 << 20
# The most bytes of texts that `undo` can restore; the oldest are dropped first.
MAX_UNDO_BYTES = 64 << 20

Place = TypeVar("Place")


class ChangedError(StorageError):
    """The text to change was changed meanwhile."""


@dataclass(frozen=True)
class Text:
    """A caption as it is on the disk.

    Attributes:
        text: empty if there is none.
        digest: SHA-256 of its bytes in hexadecimal digits; empty if there is none.
        problem: why it can't be shown and changed here; None if it can.
        content: its bytes, as in the text file.
    """

    text: str = ""
    digest: str = ""
    problem: Said | None = None
    content: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class _Change(Generic[Place]):
    """A change that `undo` can revert.

    Attributes:
        before: the bytes before the change; None if there were none.
        digest: of the text after the change; None if the text wasn't changed.
        accepted: whether the text before the change was accepted.
        name: the page's name for an edit in progress; several tabs may be editing.
    """

    place: Place
    before: bytes | None
    digest: str | None
    accepted: bool
    name: str = ""


@dataclass(frozen=True)
class Refused(Generic[Place]):
    """A caption that a run couldn't change, and why."""

    place: Place
    why: Said


@dataclass(frozen=True)
class Undone(Generic[Place]):
    """What `undo` undid.

    Attributes:
        places: the captions that are as before.
        kept: captions that somebody has changed since: they stay as they are.
        is_run: whether it was a run, which may have changed many captions.
    """

    places: Sequence[Place]
    kept: Sequence[Place] = field(default_factory=list)
    is_run: bool = False


class Changes(ABC, Generic[Place]):
    """Captions that a person changes, each at its place. One thread may use it at a time.

    A run changes many captions at once. It is in the journal, so that a later program can take it back too.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._changes: deque[_Change[Place] | Run] = deque()
        self._undo_bytes = 0

    @property
    def num_changes(self) -> int:
        """How many changes can be undone."""
        return len(self._changes)

    @abstractmethod
    def read(self, place: Place) -> Text:
        """The caption as it is now."""

    @abstractmethod
    def accepted_digest(self, place: Place) -> str | None:
        """The digest of the accepted text there."""

    @abstractmethod
    def name(self, place: Place) -> str:
        """The name of the caption's file, for messages."""

    @abstractmethod
    def _content(self, text: str) -> bytes:
        """The bytes of a person's text."""

    @abstractmethod
    def _write(self, place: Place, content: bytes) -> Text:
        """Writes a caption, durably. Raises OutputError and StorageError."""

    @abstractmethod
    def _remove(self, place: Place) -> None:
        """Removes the caption. Raises OutputError."""

    @abstractmethod
    def _remember(self, accepted: Sequence[tuple[Place, str | None]]) -> None:
        """Stores, durably, which texts are accepted. Raises OutputError."""

    @abstractmethod
    def _named(self, place: Place) -> Any:
        """A place as JSON, for the journal."""

    @abstractmethod
    def _place(self, named: Any) -> Place | None:
        """The place of `_named`; None if there is no such caption any more."""

    def save(self, place: Place, text: str, digest: str, editing: str = "") -> None:
        """Writes a text, durably.

        Args:
            digest: of the text that it replaces.
            editing: saves of a place under the same name are one change for `undo`, until another changes that place.

        Raises:
            ChangedError: another text is there.
            StorageError: the present text can't be changed, or the new one isn't allowed.
            OutputError: the disk is full, read-only or fails.
        """
        old = self._current(place, digest)
        if text == old.text and old.digest:
            return
        change = _Change(place, old.content if old.digest else None, "", self.is_accepted(place, old), editing)
        last = self._newest(lambda change: isinstance(change, _Change) and change.place == place)
        new = self._write(place, self._checked(text))
        if isinstance(last, _Change) and editing and (last.name, last.digest) == (editing, digest):
            self._drop(last)
            change = last
        self._push(replace(change, digest=new.digest))

    def accept(self, place: Place, digest: str, accepted: bool) -> None:
        """Stores, durably, whether a text is accepted. Raises as `save`."""
        text = self._current(place, digest)
        if not text.digest:
            raise StorageError(say("There is no caption to accept."))
        was_accepted = self.is_accepted(place, text)
        if was_accepted != accepted:
            self._remember([(place, text.digest if accepted else None)])
            self._push(_Change(place, None, None, was_accepted))

    def save_many(self, run: Run, wanted: Sequence[tuple[Place, str, str]]) -> list[Refused[Place]]:
        """Writes texts as a part of a run: `wanted` has places, texts, and the digests that they replace.

        Returns what couldn't be written. Raises OutputError: the disk is full, read-only or fails; then some are
        written, and the run can be undone.
        """
        refused: list[Refused[Place]] = []
        steps: list[Step] = []
        contents: list[tuple[Place, bytes]] = []
        for place, text, digest in wanted:
            try:
                old, content = self._current(place, digest), self._checked(text)
            except StorageError as error:
                refused.append(Refused(place, said_of(error)))
                continue
            before = old.content.decode() if old.digest else None
            steps.append(Step(self._named(place), before, _digest(content)))
            contents.append((place, content))
        if steps:
            run.add(steps)
        for place, content in contents:
            try:
                self._write(place, content)
            except StorageError as error:
                refused.append(Refused(place, said_of(error)))
        return refused

    def accept_many(self, run: Run, wanted: Sequence[tuple[Place, str]], accepted: bool) -> list[Refused[Place]]:
        """Stores as a part of a run whether texts are accepted: `wanted` has places and the texts' digests.

        Returns what was changed meanwhile or is no caption. Raises OutputError.
        """
        refused: list[Refused[Place]] = []
        steps: list[Step] = []
        remembered: list[tuple[Place, str | None]] = []
        for place, digest in wanted:
            try:
                text = self._current(place, digest)
                if not text.digest:
                    raise StorageError(say("There is no caption to accept."))
            except StorageError as error:
                refused.append(Refused(place, said_of(error)))
                continue
            before, after = self.accepted_digest(place), text.digest if accepted else None
            if self.is_accepted(place, text) != accepted:
                steps.append(Step(self._named(place), accepted=(before, after)))
                remembered.append((place, after))
        if steps:
            run.add(steps)
            self._remember(remembered)
        return refused

    def end(self, run: Run) -> None:
        """Makes a run the last change that `undo` undoes."""
        self._push(run)

    def undo_run(self, run: Run) -> Undone[Place]:
        """Undoes a run of this program or an earlier one. After a kill it may be called again. Raises OutputError."""
        done: list[Place] = []
        kept: list[Place] = []
        remembered: list[tuple[Place, str | None]] = []
        for step in run.steps():
            place = self._place(step.at)
            if place is None:
                continue
            if step.accepted is not None:
                before, after = step.accepted
                now = self.accepted_digest(place)
                if now == after:
                    remembered.append((place, before))
                (done if now in (before, after) else kept).append(place)
            else:
                (done if self._restore(place, step) else kept).append(place)
        if remembered:
            self._remember(remembered)
        run.mark_undone()
        return Undone(done, kept, is_run=True)

    def _restore(self, place: Place, step: Step) -> bool:
        """Whether the text is as before a step; a text that somebody has changed since isn't."""
        text = self.read(place)
        before = "" if step.before is None else _digest(step.before.encode())
        if text.problem is not None or text.digest not in (before, step.after):
            return False
        try:
            if text.digest == before:
                pass
            elif step.before is None:
                self._remove(place)
            else:
                self._write(place, step.before.encode())
        except StorageError:
            return False
        return True

    def is_accepted(self, place: Place, text: Text) -> bool:
        """Whether exactly this text was accepted."""
        return bool(text.digest) and self.accepted_digest(place) == text.digest

    def undo(self, name: str = "") -> Undone[Place] | None:
        """Undoes the last change or run, or the last with this name; None if there is none.

        Raises:
            ChangedError: somebody has changed the text since. The change is dropped; the one before it is next.
            OutputError: as `save`.
        """
        change = self._newest(lambda change: name in ("", change.name))
        if change is None:
            return None
        self._drop(change)
        if isinstance(change, Run):
            return self.undo_run(change)
        if change.digest is None:
            text = self.read(change.place)
        else:
            self._current(change.place, change.digest)
            if change.before is None:
                text = Text()
                self._remove(change.place)
            else:
                text = self._write(change.place, change.before)
        if change.accepted != self.is_accepted(change.place, text):
            self._remember([(change.place, text.digest if change.accepted else None)])
        return Undone([change.place])

    def _push(self, change: _Change[Place] | Run) -> None:
        self._changes.append(change)
        self._undo_bytes += _bytes_of(change)
        while self._undo_bytes > MAX_UNDO_BYTES:
            self._undo_bytes -= _bytes_of(self._changes.popleft())

    def _newest(self, fits: Callable[[_Change[Place] | Run], bool]) -> _Change[Place] | Run | None:
        return next(filter(fits, reversed(self._changes)), None)

    def _drop(self, change: _Change[Place] | Run) -> None:
        del self._changes[next(at for at, each in enumerate(self._changes) if each is change)]
        self._undo_bytes -= _bytes_of(change)

    def _checked(self, text: str) -> bytes:
        """A person's text as bytes. Raises StorageError: it is too long."""
        content = self._content(text)
        if len(content) > MAX_TEXT_BYTES:
            raise StorageError(say("A caption has at most {most}.", most=size(MAX_TEXT_BYTES)))
        return content

    def _current(self, place: Place, digest: str) -> Text:
        """The text at `place`, which must have this digest."""
        text = self.read(place)
        if text.problem is not None:
            raise StorageError(text.problem)
        if text.digest != digest:
            raise ChangedError(say("{name} was changed meanwhile by somebody else.", name=self.name(place)))
        return text


def _bytes_of(change: _Change[Any] | Run) -> int:
    """A change's approximate size in memory; a run is on the disk."""
    return 500 if isinstance(change, Run) else 500 + len(change.before or b"")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
