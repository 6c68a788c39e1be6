"""Names that an output gives to items: inside its folder, never too long, and each to one item for good."""

from __future__ import annotations

import hashlib
import itertools
import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.manifest.files import is_gone
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.records import printable

# What a file's name may have on every common disk.
_MAX_NAME_BYTES = 255
_DIGEST_DIGITS = 8
_DIGEST_BYTES = 32
_FORBIDDEN = frozenset('<>:"\\|?*')
_RESERVED = frozenset({"con", "prn", "aux", "nul"}) | {f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10)}


def fold(name: str) -> str:
    """A name as a disk may see it that doesn't tell cases apart, nor Unicode's ways to write one letter."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def fit(stem: str, suffix: str) -> str:
    """`stem + suffix`, shortened to what a disk takes; a digest of the whole stem then keeps it apart from others."""
    room = _MAX_NAME_BYTES - len(os.fsencode(suffix))
    name = os.fsencode(stem)
    if len(name) <= room:
        return stem + suffix
    end = room - _DIGEST_DIGITS - 1
    while end and name[end] & 0xC0 == 0x80:  # not in the middle of a character
        end -= 1
    return f"{os.fsdecode(name[:end])}-{hashlib.sha256(name).hexdigest()[:_DIGEST_DIGITS]}{suffix}"


def parts_inside(name: str) -> list[str]:
    """The parts of an item's name, none of which leads out of a folder."""
    parts = [part.replace("\x00", "_") for part in name.split("/") if part not in ("", ".")]
    if os.name == "nt":
        return [portable(part) for part in parts] or ["_"]
    return ["__" if part == ".." else fit(part, "") for part in parts] or ["_"]


def portable(part: str) -> str:
    """One part of a name as every system takes it: printable, and neither reserved nor hidden."""
    kept = "".join("_" if c in _FORBIDDEN or not c.isprintable() else c for c in printable(part))
    kept = kept.rstrip(". ")
    if kept.startswith(".") or not kept or kept.split(".")[0].lower() in _RESERVED:
        kept = f"_{kept}"
    return kept


def numbered(stem: str, name: str, suffix: str) -> Iterator[str]:
    """Names for one item, the best first: from its stem, from its whole name, then with a number."""
    yield fit(stem, suffix)
    yield fit(name, suffix)
    for number in itertools.count(2):
        yield fit(f"{name}-{number}", suffix)


def portable_names(name: str, suffix: str, *, dots: bool = True) -> Iterator[str]:
    """Paths for an item of this name in a folder that any system can read, the best first.

    Args:
        dots: whether the last part may have any before the suffix.
    """
    *folders, last = [portable(part) for part in parts_inside(name)]
    stem = PurePosixPath(last).stem
    if not dots:
        stem, last = stem.replace(".", "_"), last.replace(".", "_")
    parents = [fit(part, "") for part in folders]
    return ("/".join([*parents, each]) for each in numbered(stem, last, suffix))


def owner_of(item: Item, manifest: Manifest) -> bytes:
    """What an item is known by in an output: its name, and its file, as two commands may give one name to two files."""
    return os.fsencode(item.name) + (b"" if item.path is None else b"\0" + manifest.place(item.path))


def place_in(owner: bytes, name: bytes) -> bytes | None:
    """The place of the file in what `owner_of` made of an item of this name; None in a container."""
    return owner[len(name) + 1 :] or None


class Claims:
    """The names in one output. A name that an item got stays its own in all later runs.

    Args:
        output: the output's name in the manifest.
        durable: a name is on the disk when it is claimed; else with the manifest's next durable transaction.
    """

    def __init__(self, manifest: Manifest, output: bytes, *, durable: bool = False) -> None:
        self._durable = durable
        self._manifest = manifest
        self._output = output

    def find(self, owner: bytes) -> str | None:
        """The name that `owner` has."""
        row = self._manifest.row("SELECT place FROM claims WHERE output = ? AND owner = ?", self._output, owner)
        return None if row is None else os.fsdecode(row[0])

    def claim(
        self, owner: bytes, names: Iterable[str], *, is_free: Callable[[str], bool], medium: Path | None = None
    ) -> str:
        """The name that `owner` has, or else the first of `names` that nobody has and that is free.

        Args:
            is_free: whether a name that nobody has may be used.
            medium: the item's file; when it is gone, another item may take its name.
        """
        found = self.find(owner)
        if found is not None:
            return found
        place = None if medium is None else self._manifest.place(medium)
        for name in names:
            folded = os.fsencode(fold(name))
            row = self._manifest.row("SELECT medium FROM claims WHERE output = ? AND folded = ?", self._output, folded)
            if is_free(name) if row is None else self._is_gone(row[0]):
                # In place of who had the name.
                values = (self._output, owner, os.fsencode(name), folded, place)
                statement = "INSERT OR REPLACE INTO claims VALUES (?, ?, ?, ?, ?, NULL)"
                self._manifest.change(statement, *values, durable=self._durable)
                return name
        raise AssertionError("the names to choose from have no end")

    def without_entry(self, output: bytes) -> list[tuple[bytes, str]]:
        """The owners that have no entry in the output of records `output`, with their names."""
        query = (
            "SELECT owner, place FROM claims WHERE output = ? AND NOT EXISTS "
            "(SELECT 1 FROM entries WHERE entries.output = ? AND entries.owner = claims.owner)"
        )
        return [(owner, os.fsdecode(place)) for owner, place in self._manifest.rows(query, self._output, output)]

    def of_files(self) -> list[tuple[bytes, bytes]]:
        """The names that items with a file have, with the places of their files."""
        query = "SELECT place, medium FROM claims WHERE output = ? AND medium IS NOT NULL"
        return self._manifest.rows(query, self._output)

    def put(self, owner: bytes) -> tuple[bytes, ...]:
        """The SHA-256 of what is under the owner's name if nobody changed it; none where that isn't known."""
        row = self._manifest.row("SELECT content FROM claims WHERE output = ? AND owner = ?", self._output, owner)
        content = b"" if row is None else row[0] or b""
        return tuple(content[at : at + _DIGEST_BYTES] for at in range(0, len(content), _DIGEST_BYTES))

    def remember_put(self, owner: bytes, *contents: bytes) -> None:
        """Remembers what may be there: what was put before, and what is put next."""
        statement = "UPDATE claims SET content = ? WHERE output = ? AND owner = ?"
        self._manifest.change(statement, b"".join(contents), self._output, owner)

    def release(self, owner: bytes) -> None:
        """Gives a name back."""
        self._manifest.change("DELETE FROM claims WHERE output = ? AND owner = ?", self._output, owner)

    def _is_gone(self, medium: bytes | None) -> bool:
        return medium is not None and is_gone(self._manifest.path_of(medium))
