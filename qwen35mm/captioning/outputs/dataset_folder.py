"""A Hugging Face dataset folder: media, and beside them `metadata.jsonl` with `file_name` and `text`, and a card.

Hugging Face's `datasets` reads a folder of one kind of media. Where there are both, each has a copy of its rows.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

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

DATASET_METADATA = "metadata.jsonl"
# What a record may lack, and a column may not.
_ALWAYS = {"data": "", "judged": "", "shared_from": ""}


class DatasetFolder(JsonLines):
    """The folder `folder`. A medium on the same disk is linked (a hard link takes no room), any other one copied.

    Errors are those of `JsonLines`, for `metadata.jsonl`.
    """

    def __init__(self, manifest: Manifest, folder: Path, settings: OutputSettings) -> None:
        self._folder = folder
        self._claims = Claims(manifest, b"dataset:" + manifest.place(folder), durable=True)
        super().__init__(manifest, folder / DATASET_METADATA, settings)
        self.label = folder.name
        for found in [folder, *(path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink())]:
            remove_leftovers(found)

    def wants(self, item: Item, key: bytes | None) -> Wants:
        """See `Output`. A medium that was taken out of the folder is put there again."""
        if super().wants(item, key) is Wants.DONE and (self._folder / self._file_name(item)).is_file():
            return Wants.DONE
        return Wants.CAPTION

    def write(self, record: Record) -> None:
        """See `Output`."""
        self._put_medium(record, self._folder / self._claim(record.item))
        super().write(record)

    def finish(self) -> None:
        """See `Output`. Media that no line names any more are removed."""
        super().finish()
        with disk_errors(self.label):
            self._describe()
        for owner, name in self._claims.without_entry(self._output):
            with disk_errors(self.label):
                (self._folder / name).unlink(missing_ok=True)
            self._claims.release(owner)

    def _line(self, record: Record) -> bytes:
        values = record.to_dict()
        values.pop("path", None)
        row = {"file_name": self._file_name(record.item), "text": values.pop("caption"), **_ALWAYS, **values}
        # `datasets` wants one type of a column in every row: what a list or an object holds is JSON text.
        row = {name: json_text(value) if isinstance(value, list | dict) else value for name, value in row.items()}
        return json_text(row).encode() + b"\n"

    def _describe(self) -> None:
        """Writes the card, and each kind's rows where there are two, unless it is newer than they. Raises OSError."""
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
        """The lines that name a file, with its kind and its suffix; those of others may have any form."""
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
        return self._claims.claim(
            owner_of(item, self._manifest),
            portable_names(item.name, suffix),
            is_free=lambda name: name != DATASET_METADATA and not os.path.lexists(self._folder / name),
        )

    def _put_medium(self, record: Record, path: Path) -> None:
        """Puts the medium at its place, whole and checked."""
        if _has_content(path, record.content):
            return
        with disk_errors(self.label):
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(record.item.source, Path) and _link(record.item.source, path, record.content):
                return
        with replacing(path) as file:
            for piece in record.pieces():
                file.write(piece)


def _has_content(path: Path, content: bytes) -> bool:
    """Whether a file with this SHA-256 is at `path`."""
    with contextlib.suppress(OSError):
        return Medium(path.name, path).digest() == content
    return False


def _link(source: Path, path: Path, content: bytes) -> bool:
    """Links a medium, where the disk can; False where it must be copied."""
    temporary = temporary_for(path)
    temporary.unlink(missing_ok=True)
    try:
        os.link(os.path.realpath(source), temporary)
    except OSError:
        return False
    if not _has_content(temporary, content):
        temporary.unlink()
        return False
    temporary.replace(path)
    sync_folder(path.parent)
    return True
