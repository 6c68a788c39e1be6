"""A folder's media with their captions: all of them at once, those that fit a search, and one of them with all that is
known of it.

A listing opens no file. Captions are read when a search or a page asks for them, and kept until their file changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from qwen35mm.captioning.manifest.manifest import STATE_FOLDER, Manifest
from qwen35mm.captioning.outputs.file_names import fold, numbered, parts_inside
from qwen35mm.captioning.records import printable
from qwen35mm.captioning.sources.candidates import MEDIA_SUFFIXES
from qwen35mm.captioning.sources.names import absolute
from qwen35mm.errors import CaptioningError, NotFoundError, StorageError
from qwen35mm.review.similar import Similar
from qwen35mm.review.texts import Text, Texts, inside
from qwen35mm_preprocess import MediaLimits
from qwen35mm_preprocess.say import say

_KEY_BYTES = 32
_CLIPS = frozenset({".mp4", ".m4v", ".mov", ".qt", ".webm", ".mkv", ".avi", ".mts", ".m2ts", ".ts", ".mpg", ".mpeg"})
_CLIPS |= {".wmv", ".flv", ".ogv", ".3gp", ".3g2", ".vob", ".dv", ".mxf"}


@dataclass
class Entry:
    """One medium.

    Attributes:
        number: its own for as long as the program runs.
        name: its path below the folder.
        caption_path: where its caption is, or would be.
        text: as it was read last, with the file's state then.
    """

    number: int
    name: str
    path: str
    caption_path: str
    text: Text = field(default_factory=Text)
    state: tuple[int, int, int] | None = None

    @property
    def kind(self) -> Literal["image", "video"]:
        """As its name has it."""
        return "video" if _suffix(self.name) in _CLIPS else "image"


@dataclass(frozen=True)
class Search:
    """What is looked for: all of it has to hold.

    Attributes:
        words: each occurs in the caption or in the name, whatever their case.
        show: those with a caption that nobody accepted, that somebody did, without one, near-duplicates side by side.
        flag: one of the caption's.
        min_chars, max_chars: of the caption.
    """

    words: str = ""
    show: Literal["all", "open", "accepted", "empty", "similar"] = "all"
    flag: str = ""
    min_chars: int | None = None
    max_chars: int | None = None


@dataclass(frozen=True)
class _Written:
    """What the manifest knows of a text file: the digest of what was written to it, and the caption as JSON."""

    digest: str
    caption: str


class Folder:
    """The media of a folder. Usable from all threads.

    Args:
        texts: the folder of the captions, under their media's names; None where they lie beside them.
        state: the folder of the captioner's manifests, which need not be there, and of what was accepted; None for
            the one in `texts` or in the folder.

    Raises:
        CaptioningError: there is no such folder, somebody else goes through it, or it can't be written to.
    """

    def __init__(self, path: Path, *, suffix: str, texts: Path | None = None, state: Path | None = None) -> None:
        if not path.is_dir():
            raise CaptioningError(f"There is no folder {printable(str(path))}. Name the folder of the media.")
        self._folder = absolute(path)
        self.root = Path(os.path.realpath(path))
        self.suffix = suffix
        self._texts_folder = None if texts is None else absolute(texts)
        self._state = state or (texts or path) / STATE_FOLDER
        self._entries: list[Entry] = []
        self._numbers: dict[str, int] = {}
        self._order: list[int] = []
        self._written: dict[str, _Written] = {}
        self._lock = threading.RLock()
        self._texts = Texts(self.root if texts is None else Path(os.path.realpath(texts)), self._state)
        self._similar = Similar()

    def close(self) -> None:
        """Lets others go through it."""
        self._similar.stop()
        self._texts.close()

    def look(self) -> list[int]:
        """Lists the folder anew; the numbers of what is there, in its order. Raises CaptioningError."""
        found = list(_media(str(self._folder)))
        places, written = self._known(found)
        with self._lock:
            self._order = []
            for (name, path), caption_path in zip(found, places, strict=True):
                number = self._numbers.setdefault(name, len(self._entries))
                if number == len(self._entries):
                    self._entries.append(Entry(number, name, path, caption_path))
                entry = self._entries[number]
                if entry.caption_path != caption_path:
                    entry.caption_path, entry.state = caption_path, None
                self._order.append(number)
            self._written = written
            return list(self._order)

    def entry(self, number: int) -> Entry:
        """Raises NotFoundError."""
        with self._lock:
            if not 0 <= number < len(self._entries):
                raise NotFoundError(say("There is no such picture or clip. Load the page again."))
            return self._entries[number]

    def version(self, number: int) -> str:
        """What a browser may keep a medium under: another file, or the same one changed, has another. Empty where it
        is gone."""
        path = self.entry(number).path
        try:
            status = os.stat(path)  # noqa: PTH116 - a hundred thousand paths are strings
        except OSError:
            return ""
        seen = f"{path} {status.st_size} {status.st_mtime_ns}"
        return hashlib.sha256(os.fsencode(seen)).hexdigest()[:16]

    def medium(self, number: int) -> tuple[Entry, Path]:
        """An entry, and the file that may be read for it.

        Raises:
            NotFoundError: there is none any more.
            StorageError: it lies outside the folder, or is too large.
        """
        entry = self.entry(number)
        path, name = inside(Path(entry.path), self.root), printable(entry.name)
        if not path.is_file():
            raise NotFoundError(say("{name} is not there any more.", name=name))
        if path.stat().st_size > MediaLimits().max_bytes(entry.kind):
            raise StorageError(say("{name} is too large to be shown.", name=name))
        return entry, path

    def describe(self, numbers: Iterable[int]) -> list[dict[str, Any]]:
        """All that is known of some, as JSON values; captions as they are on the disk now."""
        with self._lock:
            return [self._described(self._read(self.entry(number))) for number in numbers]

    def find(self, search: Search) -> dict[str, Any]:
        """The `numbers` of what fits, in the listing's order or, near-duplicates, side by side; how many items there
        are for each of the `flags`, and how many pictures `unread` still have to be compared."""
        words = search.words.casefold().split()
        with self._lock:
            entries = [self._entries[number] for number in self._order]
        unread = 0
        if search.show == "similar":
            self._similar.begin(entries, lambda number: self.medium(number)[1])
            entries, unread = self._similar.among(entries)
        flags: dict[str, int] = {}
        numbers: list[int] = []
        for entry in entries:
            # Not for all of them at once: others ask for what they see meanwhile.
            with self._lock:
                self._read(entry)
                for flag in self._flags(entry):
                    flags[flag] = flags.get(flag, 0) + 1
                if self._fits(entry, search, words):
                    numbers.append(entry.number)
        return {"numbers": numbers, "flags": flags, "unread": unread, "counts": self.counts()}

    def counts(self) -> dict[str, int]:
        """How many there are, how many of them were accepted, and how many changes can be taken back."""
        with self._lock:
            accepted = sum(self._is_accepted(self._entries[number]) for number in self._order)
            return {"all": len(self._order), "accepted": accepted, "changes": self._texts.num_changes}

    def save(self, number: int, text: str, digest: str, editing: str) -> dict[str, Any]:
        """See `Texts.save`."""
        with self._lock:
            entry = self.entry(number)
            self._texts.save(entry.name, Path(entry.caption_path), text, digest, editing)
            return self._described(self._read(entry))

    def accept(self, number: int, digest: str, accepted: bool) -> dict[str, Any]:
        """See `Texts.accept`."""
        with self._lock:
            entry = self.entry(number)
            self._texts.accept(entry.name, Path(entry.caption_path), digest, accepted)
            return self._described(self._read(entry))

    def undo(self) -> int | None:
        """See `Texts.undo`; the item's number."""
        with self._lock:
            name = self._texts.undo()
            return None if name is None else self._numbers[name]

    def _known(self, found: Sequence[tuple[str, str]]) -> tuple[list[str], dict[str, _Written]]:
        """Where the captions of media are, and what the manifests know of them; each shard of a run has its own."""
        folder = self._texts_folder
        claims: dict[str, str] = {}
        written: dict[str, _Written] = {}
        for path in sorted(self._state.glob("captions*.sqlite")):
            with Manifest.borrowed(path) as manifest:
                output = os.fsencode(f"sidecar:{self.suffix}:") + (b"" if folder is None else manifest.place(folder))
                rows = manifest.rows("SELECT owner, place FROM claims WHERE output = ?", output)
                claimed = {owner: str(manifest.path_of(place)) for owner, place in rows}
                for name, medium in found if claimed else ():
                    place = manifest.place(medium)
                    owner = place if folder is None else os.fsencode(name) + b"\0" + place
                    if owner in claimed:
                        claims[name] = claimed[owner]
                query = (
                    "SELECT place, written, caption FROM sidecars "
                    f"JOIN results ON results.key = substr(keys_written, -{_KEY_BYTES})"
                )
                for place, digest, caption in manifest.rows(query):
                    written[str(manifest.path_of(place))] = _Written(digest.hex(), caption)
        return list(self._places(found, claims)), written

    def _places(self, found: Sequence[tuple[str, str]], claims: dict[str, str]) -> Iterator[str]:
        """Where the captioner would write each caption: see `Sidecars`."""
        taken = set(map(fold, claims.values()))
        for name, path in found:
            if name in claims:
                yield claims[name]
                continue
            if self._texts_folder is None:
                directory, own = os.path.split(path)
            else:
                *folders, own = parts_inside(name)
                directory = str(self._texts_folder.joinpath(*folders))
            for candidate in numbered(own[: -len(_suffix(own))], own, self.suffix):
                caption_path = f"{directory}{os.sep}{candidate}"
                if (folded := fold(caption_path)) not in taken:
                    taken.add(folded)
                    yield caption_path
                    break

    def _read(self, entry: Entry) -> Entry:
        """The entry with its text as it is on the disk."""
        try:
            status = os.stat(entry.caption_path)  # noqa: PTH116
            state = (status.st_size, status.st_mtime_ns, status.st_ino)
        except OSError:
            state = (-1, 0, 0)
        if entry.state != state or entry.text.problem is not None:
            entry.text, entry.state = self._texts.read(Path(entry.caption_path)), state
        return entry

    def _is_accepted(self, entry: Entry) -> bool:
        """Of a text that wasn't read yet, what was remembered holds."""
        digest = self._texts.accepted_digest(entry.name)
        return digest is not None and (entry.state is None or digest == entry.text.digest)

    def _caption(self, entry: Entry) -> dict[str, Any] | None:
        """What the manifest knows of a caption that is as the model's was written."""
        known = self._written.get(entry.caption_path)
        return json.loads(known.caption) if known is not None and known.digest == entry.text.digest else None

    def _flags(self, entry: Entry) -> list[str]:
        known = self._written.get(entry.caption_path)
        if known is None or not entry.text.digest:
            return []
        return ["edited"] if known.digest != entry.text.digest else json.loads(known.caption)["flags"]

    def _fits(self, entry: Entry, search: Search, words: Sequence[str]) -> bool:
        text = entry.text.text
        fits_show = {
            "all": True,
            "similar": True,
            "open": bool(text) and not self._is_accepted(entry),
            "accepted": self._is_accepted(entry),
            "empty": not text,
        }[search.show]
        if not fits_show or (search.flag and search.flag not in self._flags(entry)):
            return False
        if not (search.min_chars or 0) <= len(text) or (search.max_chars is not None and len(text) > search.max_chars):
            return False
        if not words:
            return True
        within = f"{entry.name}\n{text}".casefold()
        return all(word in within for word in words)

    def _described(self, entry: Entry) -> dict[str, Any]:
        caption = self._caption(entry) or {}
        return {
            "number": entry.number,
            "name": printable(entry.name),
            "kind": entry.kind,
            "version": self.version(entry.number),
            "file": printable(os.path.basename(entry.caption_path)),  # noqa: PTH119
            "text": entry.text.text,
            "digest": entry.text.digest,
            "problem": entry.text.problem,
            "accepted": self._is_accepted(entry),
            "flags": [printable(flag) for flag in self._flags(entry)],
            "prompt": caption.get("prompt"),
            "model": caption.get("model"),
        }


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()  # noqa: PTH122


def _media(root: str) -> Iterator[tuple[str, str]]:
    """The names and the paths of what has a medium's suffix below a folder, in the order of `walk`: by strings alone,
    which takes a fraction of its time."""
    visited: set[tuple[int, int]] = set()
    pending = [""]
    while pending:
        folder = pending.pop()
        names: list[str] = []
        folders: list[str] = []
        with contextlib.suppress(OSError), os.scandir(f"{root}{os.sep}{folder}") as entries:
            status = os.stat(f"{root}{os.sep}{folder}")  # noqa: PTH116
            if (identity := (status.st_dev, status.st_ino)) in visited:
                continue
            visited.add(identity)
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                # A link may lead to itself.
                if entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path)):  # noqa: PTH112
                    folders.append(f"{folder}{entry.name}/")
                elif _suffix(entry.name) in MEDIA_SUFFIXES:
                    names.append(entry.name)
        yield from ((f"{folder}{name}", f"{root}{os.sep}{folder}{name}") for name in sorted(names))
        pending += sorted(folders, reverse=True)
