"""A Hugging Face dataset folder: media, a `metadata.jsonl` with `file_name` and `text`, and a card.

Hugging Face's `datasets` and trainers read one kind of media per folder. With images and videos, each kind has a folder
and a copy of its rows.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from qwen35mm.captioning.items import Item, Medium
from qwen35mm.captioning.manifest.files import (
    disk_errors,
    json_text,
    remove_leftovers,
    replacing,
    sync_folder,
    temporary_for,
)
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.outputs.base import OutputSettings, Wants
from qwen35mm.captioning.outputs.dataset_card import CARD, card, rows_file, write_card
from qwen35mm.captioning.outputs.file_names import Claims, owner_of, portable_names
from qwen35mm.captioning.outputs.jsonl import JsonLines
from qwen35mm.captioning.records import Record, still_there
from qwen35mm_preprocess import MediaKind
from qwen35mm_preprocess.formats import suffixes_of

_log = logging.getLogger(__name__)

DATASET_METADATA = "metadata.jsonl"
# A record may lack these, but a column needs a value in every row.
_ALWAYS = {"data": "", "judged": "", "shared_from": ""}
_CLIPS = suffixes_of("video")
# Linux's request for a copy that takes no space until either file changes (linux/fs.h).
_FICLONE = 0x40049409


class DatasetFolder(JsonLines):
    """The folder `folder`. If there are images and videos, they go to `images` and `videos` in it; a kind that is at
    the top already stays there. Media are copied, without taking space if the disk can, or linked on request.

    A medium that a person changed in the folder stays as it is. Errors are those of `JsonLines`, for `metadata.jsonl`.
    """

    def __init__(self, manifest: Manifest, folder: Path, settings: OutputSettings) -> None:
        self._folder = folder
        self._links = settings.link_media
        self._has_both = settings.has_both
        # The folder of each kind, with a slash; empty for the top.
        self._kind_folders: dict[MediaKind, str] = {}
        self._num_changed = 0
        self._claims = Claims(manifest, b"dataset:" + manifest.place(folder), durable=True)
        super().__init__(manifest, folder / DATASET_METADATA, settings)
        self.label = folder.name
        for found in [folder, *(path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink())]:
            remove_leftovers(found)

    def wants(self, item: Item, key: bytes | None) -> Wants:
        """See `Output`. A medium that was removed from the folder is put there again."""
        wants = super().wants(item, key)
        is_there = wants is Wants.CAPTION or (self._folder / self._file_name(item)).is_file()
        return wants if is_there else Wants.CAPTION

    def write(self, record: Record) -> None:
        """See `Output`."""
        self._put_medium(record, self._folder / self._claim(record.item))
        super().write(record)

    def medium(self, item: Item) -> Path:
        """See `JsonLines`: the folder's own file, which a person may have cropped."""
        return self._folder / self._file_name(item)

    def finish(self) -> None:
        """See `Output`. Removes media that no line names any more; one that a person changed is moved aside."""
        super().finish()
        with disk_errors(self.label):
            self._describe()
        for owner, name in self._claims.without_entry(self._output):
            path = self._folder / name
            with disk_errors(self.label):
                if _digest(path) in self._claims.put(owner):
                    path.unlink(missing_ok=True)
                elif os.path.lexists(path):
                    # Readers want a line for each medium.
                    _log.warning("%s was changed, and its line is gone: it is now %s.", name, self._move_aside(path))
            self._claims.release(owner)
        if self._num_changed:
            _log.warning(
                "%s: %d media that were changed in this folder stay as they are. To have the original again, remove "
                "yours.",
                self.label,
                self._num_changed,
            )
            self._num_changed = 0

    def _line(self, record: Record) -> bytes:
        values = record.to_dict()
        values.pop("path", None)
        row = {"file_name": self._file_name(record.item), "text": values.pop("caption"), **_ALWAYS, **values}
        # `datasets` wants one type per column, so lists and objects become JSON text.
        row = {name: json_text(value) if isinstance(value, list | dict) else value for name, value in row.items()}
        return json_text(row).encode() + b"\n"

    def _describe(self) -> None:
        """Writes the card, and each kind's rows if there are two, unless the card is newer. Raises OSError."""
        card_path = self._folder / CARD
        if not self._path.stat().st_size:
            return
        if card_path.exists() and card_path.stat().st_mtime_ns >= self._path.stat().st_mtime_ns:
            return
        suffixes: dict[str, set[str]] = {}
        for _, kind, suffix in self._rows():
            suffixes.setdefault(kind, set()).add(suffix)
        for kind in ("image", "video"):
            path = self._folder / rows_file(kind)
            if len(suffixes) > 1:
                with replacing(path) as file:
                    file.writelines(line for line, of, _ in self._rows() if of == kind)
            else:
                path.unlink(missing_ok=True)
        if suffixes:
            write_card(self._folder, card(suffixes))

    def _rows(self) -> Iterator[tuple[bytes, str, str]]:
        """The lines that name a file, with its kind and its suffix. Lines that we didn't write may have any form."""
        with self._path.open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError, RecursionError, AttributeError):
                    row = json.loads(line)
                    if isinstance(name := row.get("file_name"), str):
                        kind = "video" if row.get("kind") == "video" else "image"
                        yield line.removesuffix(b"\n") + b"\n", kind, PurePosixPath(name).suffix

    def _file_name(self, item: Item) -> str:
        found = self._claims.find(owner_of(item, self._manifest))
        assert found is not None, "every item's file name is claimed before its entry is made"
        return found

    def _claim(self, item: Item) -> str:
        with still_there(item):
            suffix = item.suffix()
        folder = self._folder_of(item.kind)
        return self._claims.claim(
            owner_of(item, self._manifest),
            (folder + name for name in portable_names(item.file_name, suffix)),
            is_free=lambda name: name != DATASET_METADATA and not os.path.lexists(self._folder / name),
        )

    def _folder_of(self, kind: MediaKind) -> str:
        """The folder of media of a kind: where they are already; by themselves if there are others, too."""
        if not self._kind_folders:
            for name, of in self._claimed():
                own = f"{of}s/"
                # One medium at the top decides.
                self._kind_folders[of] = own if self._kind_folders.get(of, own) and name.startswith(own) else ""
        if kind not in self._kind_folders:
            is_apart = bool(self._kind_folders) or self._has_both()
            self._kind_folders[kind] = f"{kind}s/" if is_apart else ""
        return self._kind_folders[kind]

    def _claimed(self) -> Iterator[tuple[str, MediaKind]]:
        """The names in the folder with their kinds; by their suffixes where a kill left no line."""
        query = (
            "SELECT claims.place, json_extract(caption, '$.kind') FROM claims "
            "LEFT JOIN entries ON entries.output = ? AND entries.owner = claims.owner "
            "LEFT JOIN results ON results.key = entries.key WHERE claims.output = ?"
        )
        for place, kind in self._manifest.rows(query, self._output, self._claims.output):
            name = os.fsdecode(place)
            yield name, kind or ("video" if PurePosixPath(name).suffix in _CLIPS else "image")

    def _put_medium(self, record: Record, path: Path) -> None:
        """Puts the medium at its place, complete and checked, unless a person changed the one that is there."""
        owner, found = owner_of(record.item, self._manifest), _digest(path)
        put = self._claims.put(owner)
        if found is not None and put and found not in put and found != record.content:
            self._num_changed += 1
            return
        if put[-1:] != (record.content,):
            self._claims.remember_put(owner, *put[-1:], record.content)
        if found == record.content:
            return
        source = record.item.source
        with disk_errors(self.label):
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._links and isinstance(source, Path) and _link(source, path, record.content):
                return
        with replacing(path) as file:
            is_clone = isinstance(source, Path) and _clone(source, file)
            for piece in record.pieces():
                if not is_clone:
                    file.write(piece)


def _digest(path: Path) -> bytes | None:
    """The SHA-256 of the file at `path`; None if there is none or it can't be read."""
    with contextlib.suppress(OSError):
        return Medium(path.name, path).digest()
    return None


def _clone(source: Path, file: BinaryIO) -> bool:
    """Turns an empty file into a copy that shares the source's blocks on the disk; False if that isn't possible."""
    if sys.platform != "linux":
        return False
    import fcntl  # not on Windows

    with contextlib.suppress(OSError), source.open("rb") as old:
        fcntl.ioctl(file.fileno(), _FICLONE, old.fileno())
        return True
    return False


def _link(source: Path, path: Path, content: bytes) -> bool:
    """Links a medium if the disk can; False if it must be copied."""
    temporary = temporary_for(path)
    temporary.unlink(missing_ok=True)
    try:
        os.link(os.path.realpath(source), temporary)
    except OSError:
        return False
    if _digest(temporary) != content:
        temporary.unlink()
        return False
    temporary.replace(path)
    sync_folder(path.parent)
    return True
