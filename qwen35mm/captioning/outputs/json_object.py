"""Files of one JSON object with a member for each item, as trainers read several captions of a medium.

An object has an end, so nothing can be added to its file. It is written whole at the end of a run, from the manifest.
"""

from __future__ import annotations

import json
import logging
import os
from abc import abstractmethod
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from qwen35mm.captioning.items import Item
from qwen35mm.captioning.manifest.files import disk_errors, is_whole
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.outputs.base import IsOld, Mode, Output, OutputSettings, Wants
from qwen35mm.captioning.outputs.jsonl import JsonLines
from qwen35mm.captioning.outputs.trainer_lines import own_file, shown_texts
from qwen35mm.captioning.records import Record, printable
from qwen35mm.captioning.sources.names import absolute
from qwen35mm.errors import CaptioningError

_log = logging.getLogger(__name__)

CAPTIONS_JSON = "captions.json"
_SHORT = "short"


class JsonObject(JsonLines):
    """The file at `path`. A kill leaves it as it was before the run; the next run writes it."""

    def __init__(self, manifest: Manifest, path: Path, settings: OutputSettings) -> None:
        self._one_line = settings.one_line
        super().__init__(manifest, path, settings)

    @abstractmethod
    def _member(self, record: Record) -> tuple[str, Any]:
        """A record's name and value in the object."""

    def write(self, record: Record) -> None:
        """See `Output`."""
        with disk_errors(self.label):
            if self._wants(record.item, record.key) is not Wants.CAPTION:
                return
            replaced = self._replaced_by(record)
            with self._manifest.writing() as connection:
                self._put(connection, record, replaced)
                self._mark_stale(connection)
            self._num_stale += 1

    def _wants(self, item: Item, key: bytes | None) -> Wants:
        own_file(item)
        return super()._wants(item, key)

    def _begin(self, mode: Mode) -> None:
        if self._manifest.row("SELECT 1 FROM line_files WHERE place = ?", self._output) is None:
            _refuse_others(self._path, mode)
            if os.path.lexists(self._path):
                self._move_aside(self._path)
            self._manifest.change("INSERT INTO line_files VALUES (?, 0, 0, 0, 0, x'')", self._output, durable=True)
        row = self._manifest.row("SELECT length, crc, num_stale FROM line_files WHERE place = ?", self._output)
        assert row is not None, "it was added"
        self._length, self._crc, self._num_stale = row
        self._end_rewrite()
        if not self._length or is_whole(self._path, self._length, self._crc):
            return
        if os.path.lexists(self._path):
            aside = self._move_aside(self._path)
            _log.warning("%s was changed by somebody else: it is now %s, and is written anew.", self.label, aside)
        else:
            _log.warning("%s is gone: it is written anew.", self.label)
        with self._manifest.writing() as connection:
            self._mark_stale(connection)
        self._num_stale += 1

    def _mark_stale(self, connection: Any) -> None:
        connection.execute("UPDATE line_files SET num_stale = num_stale + 1 WHERE place = ?", (self._output,))

    def _pieces(self) -> Iterator[bytes]:
        before = b"{\n"
        for record in self._records():
            name, value = self._member(record)
            # In ASCII: trainers read the file in the system's encoding.
            yield before + f"{json.dumps(name)}: {json.dumps(value)}".encode()
            before = b",\n"
        yield b"\n}\n" if before == b",\n" else b"{}\n"


class AiToolkitObject(JsonObject):
    """ai-toolkit's `dataset_path`: by the absolute path, the caption, and the one that is named `short` beside it.

    Raises:
        CaptioningError: none of several captions is named so, there are over two, or the name doesn't end in .json.
    """

    _prefix = b"ai-toolkit:"

    def __init__(self, manifest: Manifest, path: Path, settings: OutputSettings) -> None:
        if path.suffix != ".json":
            raise CaptioningError(f"ai-toolkit reads a JSON file: expected a name that ends in .json, got {path.name}.")
        if settings.styles and (_SHORT not in settings.styles or len(settings.styles) > 2):
            raise CaptioningError(
                "ai-toolkit reads a caption and, as a second one, its short one: ask two prompts and name one of them "
                f"{_SHORT!r}, or ask one prompt; got {', '.join(settings.styles)}."
            )
        self._styles = settings.styles
        super().__init__(manifest, path, settings)

    def _member(self, record: Record) -> tuple[str, Any]:
        texts = dict(zip(self._styles or ("",), shown_texts(record.caption, one_line=self._one_line), strict=False))
        short = texts.pop(_SHORT, None)
        captions = [*texts.values(), *([] if short is None else [short])]
        value = {"caption": captions[0], **({} if short is None else {"caption_short": short})}
        return printable(str(absolute(own_file(record.item)))), value


class _FolderObject(JsonObject):
    """diffusion-pipe's `captions.json`: by the name of a file beside it, the list of its captions."""

    _prefix = b"diffusion-pipe:"

    def _member(self, record: Record) -> tuple[str, Any]:
        return printable(own_file(record.item).name), shown_texts(record.caption, one_line=self._one_line)


class FolderObjects(Output):
    """A `captions.json` in each folder with media, for diffusion-pipe.

    Each is locked only while it is opened: there may be more folders than a program may have open files.
    """

    def __init__(self, manifest: Manifest, _: Path, settings: OutputSettings) -> None:
        self._manifest = manifest
        self._settings = settings
        self._by_folder: dict[Path, _FolderObject] = {}
        self._real: dict[Path, Path] = {}
        prefix, query = _FolderObject._prefix, "SELECT place FROM line_files WHERE substr(place, 1, ?) = ?"
        for (place,) in manifest.rows(query, len(prefix), prefix):
            folder = manifest.path_of(place.removeprefix(prefix)).parent
            if folder.is_dir():
                self._in(Path(os.path.realpath(folder)))

    def wants(self, item: Item, key: bytes | None) -> Wants:
        """See `Output`. Raises CaptioningError for a folder with a captions.json of somebody else."""
        folder = self._folder_of(item)
        if folder in self._by_folder:
            return self._by_folder[folder].wants(item, key)
        _refuse_others(folder / CAPTIONS_JSON, self._settings.mode)
        return Wants.CAPTION

    def write(self, record: Record) -> None:
        """See `Output`."""
        self._in(self._folder_of(record.item)).write(record)

    def gone(self) -> set[Path]:
        """See `Output`."""
        return set[Path]().union(*(each.gone() for each in self._by_folder.values()))

    def prune(self, media: Collection[Path]) -> None:
        """See `Output`."""
        for each in self._by_folder.values():
            each.prune(media)

    def of_other_splits(self, is_old: IsOld, *, removes: bool) -> int:
        """See `Output`."""
        return sum(each.of_other_splits(is_old, removes=removes) for each in self._by_folder.values())

    def finish(self) -> None:
        """See `Output`."""
        for each in self._by_folder.values():
            with disk_errors(each.label):
                each.finish()

    def _folder_of(self, item: Item) -> Path:
        """The folder of an item's file, without links."""
        named = own_file(item).parent
        if named not in self._real:
            self._real[named] = Path(os.path.realpath(named))
        return self._real[named]

    def _in(self, folder: Path) -> _FolderObject:
        found = self._by_folder.get(folder)
        if found is None:
            found = self._by_folder[folder] = _FolderObject(self._manifest, folder / CAPTIONS_JSON, self._settings)
            found.close()
        return found


def _refuse_others(path: Path, mode: Mode) -> None:
    """Raises CaptioningError for what is there, unless it may be moved aside."""
    if os.path.lexists(path) and (mode != "overwrite" or not path.is_file()):
        raise CaptioningError(
            f"{path.name} is there already and was not written by this run. Move it away, or let it be moved aside "
            "(mode overwrite)."
        )
