"""Captions in text files as a person goes through them: read, changed, and what was accepted of them.

The file on the disk is what counts. Each change names the digest of the text that it is a change of, so that what
somebody else wrote meanwhile is shown and never replaced; and each is on the disk when it is answered. A later run of
`qwen35mm caption` sees by the file's digest that a person was at it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from qwen35mm.captioning.manifest.files import RunLock, disk_errors, replacing
from qwen35mm.errors import StorageError
from qwen35mm_preprocess.say import Said, said_of, say, size

MAX_TEXT_BYTES = 1 << 20


class ChangedError(StorageError):
    """A text isn't the one any more that was to be changed."""


@dataclass(frozen=True)
class Text:
    """A caption as it is on the disk.

    Attributes:
        text: empty where there is none.
        digest: SHA-256 of the file's bytes in hexadecimal digits; empty where there is no file.
        problem: why it can't be shown and changed here; None where it can.
        content: the file's bytes.
    """

    text: str = ""
    digest: str = ""
    problem: Said | None = None
    content: bytes = field(default=b"", repr=False)


def inside(path: Path, root: Path) -> Path:
    """The file that a path leads to.

    Args:
        root: the folder that it must lie in, without links in its own path.

    Raises:
        StorageError: it lies elsewhere, or can't be followed.
    """
    try:
        real = Path(os.path.realpath(path))
    except OSError:
        real = path
    if not real.is_relative_to(root):
        raise StorageError(say("{name} is a link that leads out of the folder.", name=path.name))
    return real


def read_text(path: Path, root: Path) -> Text:
    """The caption in a file; never waits for a pipe."""
    try:
        status = inside(path, root).stat()
        if not stat.S_ISREG(status.st_mode):
            return Text(problem=say("{name} isn't a text file.", name=path.name))
        if status.st_size > MAX_TEXT_BYTES:
            most = size(MAX_TEXT_BYTES)
            return Text(problem=say("{name} is larger than {most}: it isn't a caption.", name=path.name, most=most))
        content = path.read_bytes()
        return _text(content)
    except StorageError as error:
        return Text(problem=said_of(error))
    except UnicodeDecodeError:
        return Text(problem=say("{name} isn't UTF-8. Save it as UTF-8 first.", name=path.name))
    except FileNotFoundError:
        return Text()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        return Text(problem=say("{name} can't be read: {reason}.", name=path.name, reason=reason))


@dataclass(frozen=True)
class _Change:
    """What `undo` takes back.

    Attributes:
        before: the file's bytes; None where there was no file.
        digest: of what was written; None where the text wasn't changed.
        accepted: whether that text was accepted.
        editing: the page's name for a text that is being written on.
    """

    name: str
    path: Path
    before: bytes | None
    digest: str | None
    accepted: bool
    editing: str = ""


class Texts:
    """The captions below a folder. Usable by one thread at a time; `close` gives the folder back.

    Args:
        root: the folder of the text files, without links in its path.
        state: the folder that remembers what was accepted; it is made.

    Raises:
        CaptioningError: somebody else goes through them at this moment, or the folder can't be written to.
        OutputError: the disk fails.
    """

    def __init__(self, root: Path, state: Path) -> None:
        self._root = root
        self._path = state / "review.jsonl"
        with disk_errors(state.name):
            state.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(state / "review.lock", "what is accepted in this folder")
        try:
            self._accepted = self._load()
        except BaseException:
            self._lock.release()
            raise
        self._changes: list[_Change] = []

    def close(self) -> None:
        """Lets others go through the folder."""
        self._lock.release()

    @property
    def num_changes(self) -> int:
        """How many changes can be taken back."""
        return len(self._changes)

    def accepted_digest(self, name: str) -> str | None:
        """The digest of the text that was accepted for an item of this name."""
        return self._accepted.get(name)

    def read(self, path: Path) -> Text:
        """See `read_text`."""
        return read_text(path, self._root)

    def save(self, name: str, path: Path, text: str, digest: str, editing: str = "") -> Text:
        """Writes a text, durably.

        Args:
            digest: of the text that it takes the place of.
            editing: what is saved under one such name, one after the other, is one change for `undo`.

        Raises:
            ChangedError: another text is there.
            StorageError: it is no text that can be changed.
            OutputError: the disk is full, read-only or fails.
        """
        old = self._current(path, digest)
        if text == old.text and old.digest:
            return old
        last = self._changes[-1] if self._changes else None
        if last is not None and editing and last.editing == editing and last.digest == digest:
            self._changes.pop()
            before, was_accepted = last.before, last.accepted
        else:
            before, was_accepted = old.content if old.digest else None, self.is_accepted(name, old)
        # Line ends as the captioner writes them, one at the end.
        content = text.replace("\r\n", "\n").rstrip("\n").encode("utf-8", "backslashreplace") + b"\n"
        new = self._write(path, content)
        self._changes.append(_Change(name, path, before, new.digest, was_accepted, editing))
        return new

    def accept(self, name: str, path: Path, digest: str, accepted: bool) -> Text:
        """Remembers, durably, whether a text is as it should be. Raises as `save`."""
        text = self._current(path, digest)
        if not text.digest:
            raise StorageError(say("There is no caption to accept."))
        was_accepted = self.is_accepted(name, text)
        if was_accepted != accepted:
            self._remember(name, text.digest if accepted else None)
            self._changes.append(_Change(name, path, None, None, was_accepted))
        return text

    def is_accepted(self, name: str, text: Text) -> bool:
        """Whether this very text was accepted."""
        return bool(text.digest) and self._accepted.get(name) == text.digest

    def undo(self) -> str | None:
        """Takes the last change back; its item's name, None where there is none.

        Raises:
            ChangedError: somebody has changed the text since; then the change before it is the last one.
            OutputError: as `save`.
        """
        if not self._changes:
            return None
        change = self._changes.pop()
        if change.digest is None:
            text = self.read(change.path)
        else:
            self._current(change.path, change.digest)
            if change.before is None:
                text = Text()
                with disk_errors(change.path.name):
                    inside(change.path, self._root).unlink()
            else:
                text = self._write(change.path, change.before)
        if change.accepted != self.is_accepted(change.name, text):
            self._remember(change.name, text.digest if change.accepted else None)
        return change.name

    def _current(self, path: Path, digest: str) -> Text:
        """The text at `path`, which has to be this one."""
        text = self.read(path)
        if text.problem is not None:
            raise StorageError(text.problem)
        if text.digest != digest:
            raise ChangedError(say("{name} was changed meanwhile by somebody else.", name=path.name))
        return text

    def _write(self, path: Path, content: bytes) -> Text:
        if len(content) > MAX_TEXT_BYTES:
            raise StorageError(say("A caption has at most {most}.", most=size(MAX_TEXT_BYTES)))
        with disk_errors(path.name):
            path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(inside(path, self._root)) as file:
            file.write(content)
        return _text(content)

    def _load(self) -> dict[str, str]:
        """What was accepted; the file is written anew where a line was torn, or most are no longer true."""
        accepted: dict[str, str] = {}
        num_lines, is_whole = 0, True
        with disk_errors(self._path.name):
            try:
                content = self._path.read_bytes()
            except FileNotFoundError:
                return accepted
        for line in content.splitlines(keepends=True):
            row = _row(line)
            num_lines += 1
            is_whole &= row is not None
            if row is not None and row[1] is not None:
                accepted[row[0]] = row[1]
            elif row is not None:
                accepted.pop(row[0], None)
        if not is_whole or num_lines > 2 * len(accepted) + 100:
            with replacing(self._path) as file:
                file.writelines(_line(name, digest) for name, digest in accepted.items())
        return accepted

    def _remember(self, name: str, digest: str | None) -> None:
        with disk_errors(self._path.name), self._path.open("ab", buffering=0) as file:
            end, line = file.tell(), _line(name, digest)
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise
        if digest is None:
            self._accepted.pop(name, None)
        else:
            self._accepted[name] = digest


def _text(content: bytes) -> Text:
    """Raises UnicodeDecodeError."""
    text = content.decode("utf-8-sig").rstrip("\r\n")
    return Text(text, hashlib.sha256(content).hexdigest(), content=content)


def _line(name: str, digest: str | None) -> bytes:
    return json.dumps({"name": name, "accepted": digest}).encode() + b"\n"


def _row(line: bytes) -> tuple[str, str | None] | None:
    """A line's name and digest; None where it isn't one, or is torn."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
        name, digest = row["name"], row["accepted"]  # pyright: ignore[reportOptionalSubscript]
    except (ValueError, TypeError, KeyError):
        return None
    return (name, digest) if isinstance(name, str) and isinstance(digest, str | None) else None
