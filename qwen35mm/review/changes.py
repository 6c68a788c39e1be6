"""A person's changes of captions: save, accept and undo, wherever the captions are.

Each change names the digest of the text that it changes. So another person's newer text is shown and never replaced.
Each change is on the disk before it is confirmed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from qwen35mm.errors import StorageError
from qwen35mm_preprocess.say import Said, say, size

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
        editing: the page's name for an edit in progress.
    """

    place: Place
    before: bytes | None
    digest: str | None
    accepted: bool
    editing: str = ""

    @property
    def num_bytes(self) -> int:
        """Its approximate size in memory."""
        return 500 + len(self.before or b"")


class Changes(ABC, Generic[Place]):
    """Captions that a person changes, each at its place. One thread may use it at a time."""

    def __init__(self) -> None:
        self._changes: deque[_Change[Place]] = deque()
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
    def _name(self, place: Place) -> str:
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
    def _remember(self, place: Place, digest: str | None) -> None:
        """Stores, durably, which text is accepted. Raises OutputError."""

    def save(self, place: Place, text: str, digest: str, editing: str = "") -> None:
        """Writes a text, durably.

        Args:
            digest: of the text that it replaces.
            editing: consecutive saves under the same name are one change for `undo`.

        Raises:
            ChangedError: another text is there.
            StorageError: the present text can't be changed, or the new one isn't allowed.
            OutputError: the disk is full, read-only or fails.
        """
        old = self._current(place, digest)
        if text == old.text and old.digest:
            return
        last = self._changes[-1] if self._changes else None
        if last is not None and not (editing and last.editing == editing and last.digest == digest):
            last = None
        if last is not None:
            before, was_accepted = last.before, last.accepted
        else:
            before, was_accepted = old.content if old.digest else None, self.is_accepted(place, old)
        content = self._content(text)
        if len(content) > MAX_TEXT_BYTES:
            raise StorageError(say("A caption has at most {most}.", most=size(MAX_TEXT_BYTES)))
        new = self._write(place, content)
        if last is not None:
            self._pop()
        self._push(_Change(place, before, new.digest, was_accepted, editing))

    def accept(self, place: Place, digest: str, accepted: bool) -> None:
        """Stores, durably, whether a text is accepted. Raises as `save`."""
        text = self._current(place, digest)
        if not text.digest:
            raise StorageError(say("There is no caption to accept."))
        was_accepted = self.is_accepted(place, text)
        if was_accepted != accepted:
            self._remember(place, text.digest if accepted else None)
            self._push(_Change(place, None, None, was_accepted))

    def is_accepted(self, place: Place, text: Text) -> bool:
        """Whether exactly this text was accepted."""
        return bool(text.digest) and self.accepted_digest(place) == text.digest

    def undo(self) -> Place | None:
        """Undoes the last change; returns its place, or None if there is none.

        Raises:
            ChangedError: somebody has changed the text since. The change is dropped; the one before it is next.
            OutputError: as `save`.
        """
        if not self._changes:
            return None
        change = self._pop()
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
            self._remember(change.place, text.digest if change.accepted else None)
        return change.place

    def _push(self, change: _Change[Place]) -> None:
        self._changes.append(change)
        self._undo_bytes += change.num_bytes
        while self._undo_bytes > MAX_UNDO_BYTES:
            self._undo_bytes -= self._changes.popleft().num_bytes

    def _pop(self) -> _Change[Place]:
        change = self._changes.pop()
        self._undo_bytes -= change.num_bytes
        return change

    def _current(self, place: Place, digest: str) -> Text:
        """The text at `place`, which must have this digest."""
        text = self.read(place)
        if text.problem is not None:
            raise StorageError(text.problem)
        if text.digest != digest:
            raise ChangedError(say("{name} was changed meanwhile by somebody else.", name=self._name(place)))
        return text
