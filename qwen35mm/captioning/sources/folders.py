"""Lists folders' files in a stable order, with one folder's names in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from qwen35mm.captioning.items import Unreadable
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.records import printable
from qwen35mm.captioning.sources.candidates import Candidate, Container, SourceError, looks_like_medium
from qwen35mm.captioning.sources.folder_metadata import FolderMetadata, find_metadata_file
from qwen35mm.captioning.sources.names import NameFilter, absolute, is_one_of
from qwen35mm.captioning.sources.tars import MAX_TEXT_BYTES, text_beside
from qwen35mm.captioning.sources.zips import is_zip

_BAD_ROWS = (
    "'{}' has {:,} rows that name no file or are not of its form: expected objects (or columns) with a file_name. "
    "Their media are captioned without them."
)


@dataclass(frozen=True)
class _Folder:
    """A folder to list.

    Attributes:
        name: the path below the root with a slash at its end, or empty.
        metadata: its own, or that of a folder above.
        is_shard: whether img2dataset wrote it, with a `.json` beside each picture.
    """

    name: str
    path: Path
    metadata: FolderMetadata | None = None
    is_shard: bool = False


def walk(
    root: Path,
    names: NameFilter,
    manifest: Manifest | None,
    *,
    recursive: bool = True,
    without: Collection[Path] = (),
) -> Iterator[Candidate | Container | Unreadable]:
    """The files of a folder that `names` takes, sorted by name, and then those of its folders, sorted by name.

    In a folder without media of its own, tars and zips are containers, unless a run wrote the tars.

    Skips names that begin with a dot, the folders `without`, and a folder that was already reached under another name.
    Links are followed. A folder that can't be listed is Unreadable. Metadata files are read into the manifest, if there
    is one.
    """
    visited: set[tuple[int, int]] = set()
    pending = [_Folder("", root, is_shard=_is_shard(root))]
    while pending:
        folder = pending.pop()
        try:
            status = folder.path.stat()
            identity = (status.st_dev, status.st_ino)
            if identity in visited:
                continue
            visited.add(identity)
            files, folders = _listed(folder.path)
        except OSError as error:
            name = folder.name.rstrip("/") or absolute(folder.path).name
            reason = "it is gone" if isinstance(error, FileNotFoundError) else "it can't be read"
            message = f"'{printable(folder.path.name)}' could not be listed: {reason}. Check its permissions."
            yield Unreadable(name, "unreadable", f"The folder {message}", folder.path)
            continue
        metadata = folder.metadata
        if manifest is not None and (path := find_metadata_file(folder.path, files)) is not None:
            try:
                found = FolderMetadata(path, manifest)
                # A file without file names isn't metadata of media.
                if found.num_rows:
                    metadata = found
                    if found.num_bad_rows:
                        raise SourceError("damaged", _BAD_ROWS.format(path.name, found.num_bad_rows))
            except SourceError as error:
                yield Unreadable(folder.name + path.name, error.kind, str(error), path)
        may_hold = not any(map(looks_like_medium, files)) and not _was_written(folder.path, manifest)
        for name in files:
            if may_hold and (name.lower().endswith(".tar") or is_zip(name)):
                if names.enters(folder.name + name):
                    yield Container(folder.name + name, folder.path / name)
            elif names.takes(folder.name + name):
                path = folder.path / name
                if metadata is not None:
                    row = partial(metadata.row, path)
                else:
                    row = partial(_json_beside, path) if folder.is_shard else dict
                yield Candidate(folder.name + name, path, row)
        if recursive:
            pending += [
                _Folder(f"{folder.name}{name}/", folder.path / name, metadata, f"{name}_stats.json" in files)
                for name in reversed(folders)
                if names.enters(folder.name + name) and not is_one_of(folder.path / name, without)
            ]


def _was_written(folder: Path, manifest: Manifest | None) -> bool:
    """Whether a run wrote a folder's tars."""
    query = "SELECT 1 FROM entries WHERE output = ? LIMIT 1"
    return manifest is not None and manifest.row(query, manifest.place(folder) + b"/*.tar") is not None


def shard_metadata(path: Path) -> dict[str, Any]:
    """What img2dataset wrote beside a picture; empty for other pictures."""
    return _json_beside(path) if _is_shard(path.parent) else {}


def _is_shard(folder: Path) -> bool:
    """Whether img2dataset wrote a folder: then its statistics lie beside it."""
    folder = absolute(folder)
    return os.path.isfile(folder.with_name(f"{folder.name}_stats.json")) if folder.name else False  # noqa: PTH113


def _json_beside(path: Path) -> dict[str, Any]:
    beside = path.with_suffix(".json")
    try:
        if beside.stat().st_size <= MAX_TEXT_BYTES and beside.is_file():
            return text_beside(beside.read_bytes(), "json")
    except OSError:
        pass
    return {}


def _listed(path: Path) -> tuple[list[str], list[str]]:
    """The names of a folder's files and of its subfolders, sorted. Raises OSError."""
    files: list[str] = []
    folders: list[str] = []
    with os.scandir(path) as entries:
        for entry in entries:
            if not entry.name.startswith("."):
                (folders if _is_folder(entry) else files).append(entry.name)
    return sorted(files), sorted(folders)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # A link to itself, or through a folder that can't be entered.
        return False
