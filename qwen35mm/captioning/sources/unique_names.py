"""Each file once and each name once, over all sources of a run; and which shard a name falls to."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath


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

    def claim_file(self, folder: tuple[int, int], name: str) -> bool:
        """Whether this file is new; `folder` is the device and inode of the folder that it lies in."""
        return not self._is_needed or _add(self._files, f"{folder[0]} {folder[1]} {name}")

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
