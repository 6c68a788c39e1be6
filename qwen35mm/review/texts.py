"""Captions in text files under review: reads them, writes them, and stores which are accepted.

The file on the disk counts. A later run of `qwen35mm caption` sees by the file's digest that a person has changed it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qwen35mm.captioning.manifest.files import RunLock, disk_errors, replacing, temporary_for
from qwen35mm.errors import StorageError
from qwen35mm.review.changes import MAX_TEXT_BYTES, Changes, Text
from qwen35mm.review.journal import Journal, Step
from qwen35mm_preprocess.say import said_of, say, size


class TextPlace(NamedTuple):
    """The place of a caption: its medium's name, and its file."""

    name: str
    path: Path


def inside(path: Path, root: Path) -> Path:
    """The file that a path leads to.

    Args:
        root: the folder that must contain it, without links in its own path.

    Raises:
        StorageError: it lies elsewhere.
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


class Texts(Changes[TextPlace]):
    """The captions below a folder, in text files. `close` unlocks the folder.

    Until `begin`, nothing is written, and another program may change them.

    Args:
        folder: the folder of the text files.
        suffix: of the text files.
        state: the folder that stores which texts are accepted.

    Raises:
        OutputError: the disk fails.
    """

    def __init__(self, folder: Path, suffix: str, state: Path) -> None:
        self._folder = folder
        self._root = Path(os.path.realpath(folder))
        # Relative, so that the folder can move.
        super().__init__(Journal(state, f"sidecar:{suffix}:{os.path.relpath(self._root, os.path.realpath(state))}"))
        self._path = state / "review.jsonl"
        self._lock: RunLock | None = None
        self._accepted = self._load()[0]

    def begin(self, *, for_page: bool = False) -> None:
        """Locks the captions for changes, and creates the state folder.

        Args:
            for_page: whether the review page makes them.

        Raises:
            CaptioningError: another program reviews them, or the folder can't be written to.
            OutputError: the disk fails.
        """
        state = self._path.parent
        with disk_errors(state.name):
            state.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(state / "review.lock", "what is accepted in this folder", for_page=for_page)
        try:
            self._accepted, is_compact = self._load()
            if not is_compact:
                with replacing(self._path) as file:
                    file.writelines(_line(name, digest) for name, digest in self._accepted.items())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets other programs review the folder."""
        if self._lock is not None:
            self._lock.release()

    def accepted_digest(self, place: TextPlace) -> str | None:
        """See `Changes`."""
        return self._accepted.get(place.name)

    def read(self, place: TextPlace) -> Text:
        """See `read_text`."""
        return read_text(place.path, self._root)

    def name(self, place: TextPlace) -> str:
        return place.path.name

    def _content(self, text: str) -> bytes:
        # Line ends as the captioner writes them, with one at the end.
        return text.replace("\r\n", "\n").rstrip("\n").encode("utf-8", "backslashreplace") + b"\n"

    def _write(self, place: TextPlace, content: bytes) -> Text:
        path = place.path
        with disk_errors(path.name):
            path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(inside(path, self._root)) as file:
            file.write(content)
        return _text(content)

    def _remove(self, place: TextPlace) -> None:
        with disk_errors(place.path.name):
            inside(place.path, self._root).unlink()

    def _restore(self, place: TextPlace, step: Step) -> bool:
        # A kill may have left it.
        with contextlib.suppress(OSError, StorageError):
            temporary_for(inside(place.path, self._root)).unlink()
        return super()._restore(place, step)

    def _named(self, place: TextPlace) -> Any:
        return [place.name, os.path.relpath(place.path, self._folder)]

    def _place(self, named: Any) -> TextPlace:
        name, path = named
        return TextPlace(name, self._folder / path)

    def _load(self) -> tuple[dict[str, str], bool]:
        """The accepted digests by name, and whether no line of the file is torn and few are outdated."""
        accepted: dict[str, str] = {}
        num_lines, is_whole = 0, True
        with disk_errors(self._path.name):
            try:
                content = self._path.read_bytes()
            except FileNotFoundError:
                return accepted, True
        for line in content.splitlines(keepends=True):
            row = _row(line)
            num_lines += 1
            is_whole &= row is not None
            if row is not None and row[1] is not None:
                accepted[row[0]] = row[1]
            elif row is not None:
                accepted.pop(row[0], None)
        return accepted, is_whole and num_lines <= 2 * len(accepted) + 100

    def _remember(self, accepted: Sequence[tuple[TextPlace, str | None]]) -> None:
        with disk_errors(self._path.name), self._path.open("ab", buffering=0) as file:
            end, line = file.tell(), b"".join(_line(place.name, digest) for place, digest in accepted)
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise
        for place, digest in accepted:
            if digest is None:
                self._accepted.pop(place.name, None)
            else:
                self._accepted[place.name] = digest


def _text(content: bytes) -> Text:
    """Raises UnicodeDecodeError."""
    text = content.decode("utf-8-sig").rstrip("\r\n")
    return Text(text, hashlib.sha256(content).hexdigest(), content=content)


def _line(name: str, digest: str | None) -> bytes:
    return json.dumps({"name": name, "accepted": digest}).encode() + b"\n"


def _row(line: bytes) -> tuple[str, str | None] | None:
    """A line's name and digest; None if it is torn or has another form."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
        name, digest = row["name"], row["accepted"]  # pyright: ignore[reportOptionalSubscript]
    except (ValueError, TypeError, KeyError):
        return None
    return (name, digest) if isinstance(name, str) and isinstance(digest, str | None) else None
