"""A folder's media with their captions in text files.

Listing opens no file. Captions are read when a search or a page needs them, and cached until their file changes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from qwen35mm.captioning.manifest.manifest import STATE_FOLDER, Manifest
from qwen35mm.captioning.outputs.file_names import fold, numbered, parts_inside
from qwen35mm.captioning.records import printable
from qwen35mm.captioning.sources.candidates import MEDIA_SUFFIXES
from qwen35mm.captioning.sources.names import absolute
from qwen35mm.errors import CaptioningError
from qwen35mm.review.collection import Collection, Entry
from qwen35mm.review.texts import TextPlace, Texts, inside
from qwen35mm_preprocess.formats import suffixes_of

_KEY_BYTES = 32
_CLIPS = suffixes_of("video")


@dataclass(frozen=True)
class _Written:
    """The manifest's data about a text file: the digest of the captioner's text, and the caption as JSON."""

    digest: str
    caption: str


class Folder(Collection[TextPlace]):
    """The media of a folder, recognized by their names.

    Args:
        texts: the folder of the captions, under their media's names; None if they lie beside the media.
        state: the folder of the captioner's manifests (which may be missing) and of the accepted texts; None for the
            default in `texts` or in the folder.
        for_page: whether to lock the captions at once, for the review page; otherwise call `begin` before the first
            change.

    Raises:
        CaptioningError: there is no such folder, another program reviews it, or it can't be written to.
    """

    def __init__(
        self,
        path: Path,
        *,
        suffix: str,
        texts: Path | None = None,
        state: Path | None = None,
        for_page: bool = True,
    ) -> None:
        if not path.is_dir():
            raise CaptioningError(
                f"There is no folder {printable(str(path))}, nor a file of records. Name the folder of the media, or a "
                "JSONL file that `qwen35mm caption` wrote."
            )
        self._folder = absolute(path)
        self.root = Path(os.path.realpath(path))
        self.suffix = suffix
        self._texts_folder = None if texts is None else absolute(texts)
        self._state = state or (texts or path) / STATE_FOLDER
        self._numbers: dict[str, int] = {}
        # The path of each entry's caption, even if it doesn't exist.
        self._caption_paths: list[str] = []
        self._written: dict[str, _Written] = {}
        self._texts = Texts(self._texts_folder or self._folder, suffix, self._state)
        super().__init__(self.root.name, self._texts)
        if for_page:
            self._texts.begin(for_page=True)

    def begin(self) -> None:
        """See `Collection`."""
        self._texts.begin()

    def close(self) -> None:
        """See `Collection`."""
        super().close()
        self._texts.close()

    def look(self) -> list[int]:
        """See `Collection`."""
        found = list(_media(str(self._folder)))
        places, written = self._known(found)
        with self._lock:
            self._order = []
            for (name, path), caption_path in zip(found, places, strict=True):
                number = self._numbers.setdefault(name, len(self._entries))
                if number == len(self._entries):
                    kind = "video" if _suffix(name) in _CLIPS else "image"
                    self._entries.append(Entry(number, name, path, kind))
                    self._caption_paths.append(caption_path)
                if self._caption_paths[number] != caption_path:
                    self._caption_paths[number], self._entries[number].state = caption_path, None
                self._order.append(number)
            self._written = written
            return list(self._order)

    def _known(self, found: Sequence[tuple[str, str]]) -> tuple[list[str], dict[str, _Written]]:
        """The paths of the media's captions, and the manifests' data about them; each shard has its own manifest."""
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
        """The paths where the captioner would write the captions: see `Sidecars`."""
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

    def _place(self, entry: Entry) -> TextPlace:
        return TextPlace(entry.name, Path(self._caption_paths[entry.number]))

    def _number(self, place: TextPlace) -> int | None:
        return self._numbers.get(place.name)

    def _file(self, entry: Entry) -> Path:
        return inside(Path(entry.path), self.root)

    def _read(self, entry: Entry) -> Entry:
        try:
            status = os.stat(self._caption_paths[entry.number])  # noqa: PTH116
            state = (status.st_size, status.st_mtime_ns, status.st_ino)
        except OSError:
            state = (-1, 0, 0)
        if entry.state != state or entry.text.problem is not None:
            entry.text, entry.state = self._texts.read(self._place(entry)), state
        return entry

    def _flags(self, entry: Entry) -> Sequence[str]:
        known = self._written.get(self._caption_paths[entry.number])
        if known is None or not entry.text.digest:
            return []
        return ["edited"] if known.digest != entry.text.digest else json.loads(known.caption)["flags"]

    def _made(self, entry: Entry) -> tuple[str, str] | None:
        known = self._written.get(self._caption_paths[entry.number])
        if known is None or known.digest != entry.text.digest:
            return None
        caption = json.loads(known.caption)
        return caption["prompt"], caption["model"]

    def _question(self, entry: Entry) -> str | None:
        known = self._written.get(self._caption_paths[entry.number])
        return None if known is None else json.loads(known.caption)["prompt"]

    def _holder(self, entry: Entry) -> str:
        return os.path.basename(self._caption_paths[entry.number])  # noqa: PTH119


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()  # noqa: PTH122


def _media(root: str) -> Iterator[tuple[str, str]]:
    """The names and paths of files with a medium's suffix below a folder, in the order of `walk`.

    Uses only strings, which takes a fraction of the time.
    """
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
                # For a link to itself, `entry.is_dir` would raise.
                if entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path)):  # noqa: PTH112
                    folders.append(f"{folder}{entry.name}/")
                elif _suffix(entry.name) in MEDIA_SUFFIXES:
                    names.append(entry.name)
        yield from ((f"{folder}{name}", f"{root}{os.sep}{folder}{name}") for name in sorted(names))
        pending += sorted(folders, reverse=True)
