"""Items' names: which are taken, each of them once over all sources of a run, and which shard one falls to."""

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
    """Names that match one of `include` (all, where there is none) and none of `exclude`.

    A name is a path with forward slashes, and a pattern is one of `.gitignore`: `*`, `?` and `[...]` stay within one
    part of it, `**` stands for any number of parts, also none. A pattern without a slash is looked for at any depth;
    one with a slash, also in front, begins at the source. What matches takes along all that lies in it. Unlike there,
    upper and lower case are alike, and `#` and `!` are letters.

    Raises:
        CaptioningError: a pattern has no meaning.
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
        """Whether a folder of this name, whose own parents are entered, can hold something that is wanted."""
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
    # A line end within a name is none for a pattern.
    return name.casefold().replace("\n", "\0")


def shard_of(name: str, num_shards: int) -> int:
    """The shard of an item, from 1 to `num_shards`: by its name without the last suffix, whatever its case.

    Media that could share a caption's file, such as `a.jpg`, `a.png` and `A.JPG`, fall to one shard.
    """
    path = PurePosixPath(name)
    stem = str(path.with_suffix("")) if path.suffix else name
    return int.from_bytes(_digest(stem.casefold())[:8], "big") % num_shards + 1


def absolute(path: Path) -> Path:
    """The path from the root, without `.` and `..`; links keep the names that a person knows them by."""
    return Path(os.path.normpath(path.absolute()))


def is_one_of(folder: Path, folders: Collection[Path]) -> bool:
    """Whether a folder is one of these, also by another name."""
    return bool(folders) and os.path.realpath(folder) in map(os.path.realpath, folders)


class Names:
    """What a run's sources have given so far. It holds up to 200 bytes for each claim.

    A single folder can't give a file or a name twice, so for one `is_needed` is False, and nothing is held.
    """

    def __init__(self, *, is_needed: bool = True) -> None:
        self._is_needed = is_needed
        self._files: set[bytes] = set()
        self._names: set[bytes] = set()

    def for_container(self) -> Names:
        """What claims the names of a container's members, which may be there twice; all begin with its own name."""
        return self if self._is_needed else Names()

    def claim_file(self, path: Path) -> bool:
        """Whether this file is new, however its path is written."""
        if not self._is_needed:
            return True
        try:
            folder = path.parent.stat()
        except OSError:
            # It is gone; that is said when the file is probed.
            return _add(self._files, f"0 0 {path.name}")
        return _add(self._files, f"{folder.st_dev} {folder.st_ino} {path.name}")

    def claim(self, name: str, folder: Path) -> str:
        """The name under which an item is known: `name`, if no other has it yet.

        Else the name of its source's own `folder` comes before it, and more of that folder's path until it is new.
        """
        if not self._is_needed:
            return name
        return next(candidate for candidate in _candidates(name, folder) if _add(self._names, candidate))


def _candidates(name: str, folder: Path) -> Iterator[str]:
    yield name
    for parent in reversed(absolute(folder).parts[1:]):
        name = f"{parent}/{name}"
        yield name
    # Only where a source's own folders are named like the whole path of another.
    yield from (f"{number}/{name}" for number in itertools.count(2))


def _add(digests: set[bytes], text: str) -> bool:
    digest = _digest(text)[:16]
    if digest in digests:
        return False
    digests.add(digest)
    return True


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
