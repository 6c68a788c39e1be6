"""Names that an output gives to items: inside its folder, never too long, and permanently one per item."""

from __future__ import annotations

import hashlib
import itertools
import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.records import printable

# The longest file name on every common disk.
_MAX_NAME_BYTES = 255
_DIGEST_DIGITS = 8
_DIGEST_BYTES = 32
_FORBIDDEN = frozenset('<>:"\\|?*')
_RESERVED = frozenset({"con", "prn", "aux", "nul"}) | {f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10)}


def fold(name: str) -> str:
    """A name as seen by a disk that ignores case and Unicode normalization."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def fit(stem: str, suffix: str) -> str:
    """`stem + suffix`, shortened to the longest file name; then a digest of the whole stem keeps it unique."""
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
    """One part of a name as every system accepts it: printable, and neither reserved nor hidden."""
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
    """Paths for an item of this name in a folder, readable on any system, the best first.

    Args:
        dots: whether the last part may contain dots before the suffix.
    """
    *folders, last = [portable(part) for part in parts_inside(name)]
    stem = PurePosixPath(last).stem
    if not dots:
        stem, last = stem.replace(".", "_"), last.replace(".", "_")
    parents = [fit(part, "") for part in folders]
    return ("/".join([*parents, each]) for each in numbered(stem, last, suffix))


def owner_of(item: Item, manifest: Manifest) -> bytes:
    """Identifies an item in an output: its name and its file, since two commands may give one name to two files."""
    return os.fsencode(item.name) + (b"" if item.path is None else b"\0" + manifest.place(item.path))


def place_in(owner: bytes, name: bytes) -> bytes | None:
    """The file's place in the result of `owner_of` for an item of this name; None for an item of a container."""
    return owner[len(name) + 1 :] or None


class Claims:
    """The names in one output. An item keeps its name in all later runs.

    Args:
        output: the output's name in the manifest; also an attribute.
        durable: whether a claim is on the disk at once; otherwise with the manifest's next durable transaction.
    """

    def __init__(self, manifest: Manifest, output: bytes, *, durable: bool = False) -> None:
        self._durable = durable
        self._manifest = manifest
        self.output = output

    def find(self, owner: bytes) -> str | None:
        """The name that `owner` has."""
        row = self._manifest.row("SELECT place FROM claims WHERE output = ? AND owner = ?", self.output, owner)
        return None if row is None else os.fsdecode(row[0])

    def is_claimed(self, name: str) -> bool:
        """Whether an item has a name."""
        query = "SELECT 1 FROM claims WHERE output = ? AND folded = ?"
        return self._manifest.row(query, self.output, os.fsencode(fold(name))) is not None

    def claim(
        self, owner: bytes, names: Iterable[str], *, is_free: Callable[[str], bool], medium: Path | None = None
    ) -> str:
        """The owner's name; if it has none, claims the first of `names` that is unclaimed and free.

        Args:
            is_free: whether an unclaimed name may be used.
            medium: the item's file; once it is deleted, another item may take its name.
        """
        found = self.find(owner)
        if found is not None:
            return found
        place = None if medium is None else self._manifest.place(medium)
        for name in names:
            folded = os.fsencode(fold(name))
            row = self._manifest.row("SELECT medium FROM claims WHERE output = ? AND folded = ?", self.output, folded)
            if is_free(name) if row is None else self._is_gone(row[0]):
                # Replaces the name's earlier owner, if any.
                values = (self.output, owner, os.fsencode(name), folded, place)
                statement = "INSERT OR REPLACE INTO claims VALUES (?, ?, ?, ?, ?, NULL)"
                self._manifest.change(statement, *values, durable=self._durable)
                return name
        raise AssertionError("the names to choose from have no end")

    def without_entry(self, output: bytes) -> list[tuple[bytes, str]]:
        """The owners without an entry in `output`, an output of records, with their names."""
        query = (
            "SELECT owner, place FROM claims WHERE output = ? AND NOT EXISTS "
            "(SELECT 1 FROM entries WHERE entries.output = ? AND entries.owner = claims.owner)"
        )
        return [(owner, os.fsdecode(place)) for owner, place in self._manifest.rows(query, self.output, output)]

    def of_files(self) -> list[tuple[bytes, bytes, bytes]]:
        """Owner, name and place of the file of each item that has a file."""
        query = "SELECT owner, place, medium FROM claims WHERE output = ? AND medium IS NOT NULL"
        return self._manifest.rows(query, self.output)

    def put(self, owner: bytes) -> tuple[bytes, ...]:
        """The possible SHA-256 digests of the file under the owner's name if nobody changed it; empty if unknown."""
        row = self._manifest.row("SELECT content FROM claims WHERE output = ? AND owner = ?", self.output, owner)
        content = b"" if row is None else row[0] or b""
        return tuple(content[at : at + _DIGEST_BYTES] for at in range(0, len(content), _DIGEST_BYTES))

    def remember_put(self, owner: bytes, *contents: bytes) -> None:
        """Stores the digests of what may be there: the earlier content and the next."""
        statement = "UPDATE claims SET content = ? WHERE output = ? AND owner = ?"
        self._manifest.change(statement, b"".join(contents), self.output, owner)

    def release(self, owner: bytes) -> None:
        """Frees a name."""
        self._manifest.change("DELETE FROM claims WHERE output = ? AND owner = ?", self.output, owner)

    def _is_gone(self, medium: bytes | None) -> bool:
        return medium is not None and self._manifest.is_gone(medium)
