"""What a person changes of captions: saved, accepted, and taken back, wherever they are.

Each change names the digest of the text that it is a change of, so that what somebody else wrote meanwhile is shown and
never replaced; and each is on the disk when it is answered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from qwen35mm.errors import StorageError
from qwen35mm_preprocess.say import Said, say, size

MAX_TEXT_BYTES = 1 << 20
# Of the texts that `undo` can put back: the oldest go first.
MAX_UNDO_BYTES = 64 << 20

Place = TypeVar("Place")


class ChangedError(StorageError):
    """A text isn't the one any more that was to be changed."""


@dataclass(frozen=True)
class Text:
    """A caption as it is on the disk.

    Attributes:
        text: empty where there is none.
        digest: SHA-256 of its bytes in hexadecimal digits; empty where there is none.
        problem: why it can't be shown and changed here; None where it can.
        content: its bytes; a text file's own.
    """

    text: str = ""
    digest: str = ""
    problem: Said | None = None
    content: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class _Change(Generic[Place]):
    """What `undo` takes back.

    Attributes:
        before: the bytes that were there; None where there were none.
        digest: of what was written; None where the text wasn't changed.
        accepted: whether that text was accepted.
        editing: the page's name for a text that is being written on.
    """

    place: Place
    before: bytes | None
    digest: str | None
    accepted: bool
    editing: str = ""

    @property
    def num_bytes(self) -> int:
        """What it takes, about."""
        return 500 + len(self.before or b"")


class Changes(ABC, Generic[Place]):
    """Captions that a person changes, each at its place. Usable by one thread at a time."""

    def __init__(self) -> None:
        self._changes: deque[_Change[Place]] = deque()
        self._undo_bytes = 0

    @property
    def num_changes(self) -> int:
        """How many changes can be taken back."""
        return len(self._changes)

    @abstractmethod
    def read(self, place: Place) -> Text:
        """The caption as it is now."""

    @abstractmethod
    def accepted_digest(self, place: Place) -> str | None:
        """The digest of the text that was accepted there."""

    @abstractmethod
    def _name(self, place: Place) -> str:
        """What holds the caption, in messages."""

    @abstractmethod
    def _content(self, text: str) -> bytes:
        """The bytes of a text that a person wrote."""

    @abstractmethod
    def _write(self, place: Place, content: bytes) -> Text:
        """Writes a caption, durably. Raises OutputError and StorageError."""

    @abstractmethod
    def _remove(self, place: Place) -> None:
        """Leaves no caption there. Raises OutputError."""

    @abstractmethod
    def _remember(self, place: Place, digest: str | None) -> None:
        """Remembers, durably, which text is accepted. Raises OutputError."""

    def save(self, place: Place, text: str, digest: str, editing: str = "") -> None:
        """Writes a text, durably.

        Args:
            digest: of the text that it takes the place of.
            editing: what is saved under one such name, one after the other, is one change for `undo`.

        Raises:
            ChangedError: another text is there.
            StorageError: it is no text that can be changed, or can't be one.
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
        """Remembers, durably, whether a text is as it should be. Raises as `save`."""
        text = self._current(place, digest)
        if not text.digest:
            raise StorageError(say("There is no caption to accept."))
        was_accepted = self.is_accepted(place, text)
        if was_accepted != accepted:
            self._remember(place, text.digest if accepted else None)
            self._push(_Change(place, None, None, was_accepted))

    def is_accepted(self, place: Place, text: Text) -> bool:
        """Whether this very text was accepted."""
        return bool(text.digest) and self.accepted_digest(place) == text.digest

    def undo(self) -> Place | None:
        """Takes the last change back; where it was, None where there is none.

        Raises:
            ChangedError: somebody has changed the text since; then the change before it is the last one.
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
        """The text at `place`, which has to be this one."""
        text = self.read(place)
        if text.problem is not None:
            raise StorageError(text.problem)
        if text.digest != digest:
            raise ChangedError(say("{name} was changed meanwhile by somebody else.", name=self._name(place)))
        return text
