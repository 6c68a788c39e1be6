"""Items' names: filtering, uniqueness over all sources of a run, and shards."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath

from pathspec import PathSpec

from qwen35mm.errors import CaptioningError


class NameFilter:
    """Takes names that match one of `include` (all if it is empty) and none of `exclude`.

    A name is a path with forward slashes. A pattern is as in `.gitignore`: `*`, `?` and `[...]` stay within one part,
    and `**` matches any number of parts, including none. A pattern without a slash matches at any depth; one with a
    slash, even in front, begins at the source. A match includes everything below it. Unlike `.gitignore`, case is
    ignored, and `#` and `!` are ordinary characters.

    Raises:
        CaptioningError: a pattern isn't valid.
    """

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        self._include = _compiled(include) if include else None
        self._exclude = _compiled(exclude) if exclude else None

    def takes(self, name: str) -> bool:
        """Whether an item of this name is wanted."""
        if self._include is not None and not self._include.match_file(_folded(name)):
            return False
        if self._exclude is None:
            return True
        parts = name.split("/")
        return all(self.enters("/".join(parts[:length])) for length in range(1, len(parts) + 1))

    def enters(self, name: str) -> bool:
        """Whether a folder of this name can contain wanted items; its parent folders were entered."""
        return self._exclude is None or not self._exclude.match_file(_folded(name))


def _compiled(patterns: Sequence[str]) -> PathSpec:
    folded = [_folded(pattern) for pattern in patterns]
    try:
        return PathSpec.from_lines(
            "gitignore", [f"\\{text}" if text.startswith(("#", "!")) else text for text in folded]
        )
    except (ValueError, re.error) as error:
        raise CaptioningError(f"One of the patterns {', '.join(patterns)} can't be read: {error}.") from error


def _folded(name: str) -> str:
    # To a pattern, a line end in a name is an ordinary character.
    return name.casefold().replace("\n", "\0")


def shard_of(name: str, num_shards: int) -> int:
    """The shard of an item, from 1 to `num_shards`: by its name without the last suffix, ignoring case.

    So media that could share a caption's file, such as `a.jpg`, `a.png` and `A.JPG`, are in one shard.
    """
    path = PurePosixPath(name)
    stem = str(path.with_suffix("")) if path.suffix else name
    return int.from_bytes(_digest(stem.casefold())[:8], "big") % num_shards + 1


def absolute(path: Path) -> Path:
    """The absolute path, without `.` and `..`; links aren't resolved, so names stay familiar."""
    return Path(os.path.normpath(path.absolute()))


def is_one_of(folder: Path, folders: Collection[Path]) -> bool:
    """Whether a folder is one of these, with links resolved."""
    return bool(folders) and os.path.realpath(folder) in map(os.path.realpath, folders)


class Names:
    """The files and names that a run's sources have given so far, with up to 200 bytes of memory per claim.

    A single folder can't give a file or a name twice. Then `is_needed` is False, and nothing is stored.
    """

    def __init__(self, *, is_needed: bool = True) -> None:
        self._is_needed = is_needed
        self._files: set[bytes] = set()
        self._names: set[bytes] = set()

    def for_container(self) -> Names:
        """Claims for the members of a container, which may repeat names; all begin with the container's name."""
        return self if self._is_needed else Names()

    def claim_file(self, path: Path) -> bool:
        """Whether this file is new, however its path is written."""
        if not self._is_needed:
            return True
        try:
            folder = path.parent.stat()
        except OSError:
            # The folder is gone. Probing the file reports that.
            return _add(self._files, f"0 0 {path.name}")
        return _add(self._files, f"{folder.st_dev} {folder.st_ino} {path.name}")

    def claim(self, name: str, folder: Path) -> str:
        """An item's unique name: `name` if no other item has it yet.

        Otherwise the name of its source's `folder` is put before it, and more of that folder's path until it is new.
        """
        if not self._is_needed:
            return name
        return next(candidate for candidate in _candidates(name, folder) if _add(self._names, candidate))


def _candidates(name: str, folder: Path) -> Iterator[str]:
    yield name
    for parent in reversed(absolute(folder).parts[1:]):
        name = f"{parent}/{name}"
        yield name
    # Only if a source's own folders are named like another's whole path.
    yield from (f"{number}/{name}" for number in itertools.count(2))


def _add(digests: set[bytes], text: str) -> bool:
    digest = _digest(text)[:16]
    if digest in digests:
        return False
    digests.add(digest)
    return True


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
