"""Folders: their files in a stable order, one folder's names in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwen35mm.captioning.items import Unreadable
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.records import printable
from qwen35mm.captioning.sources.folder_metadata import FolderMetadata, read_folder_metadata
from qwen35mm.captioning.sources.globs import NameFilter
from qwen35mm.captioning.sources.unique_names import absolute, is_one_of


@dataclass(frozen=True)
class FolderFile:
    """A name in a folder that isn't a folder itself; it has not been opened.

    Attributes:
        name: below the walk's root, with forward slashes.
        folder: device and inode of the folder that it lies in.
    """

    name: str
    path: Path
    folder: tuple[int, int]
    metadata_file: FolderMetadata | None

    def metadata(self) -> Mapping[str, Any]:
        """What the nearest metadata file above says of it."""
        return {} if self.metadata_file is None else self.metadata_file.row(self.path)


@dataclass(frozen=True)
class _Folder:
    """`name` is that below the root and ends with a slash, or is empty; `metadata` is of it or a folder above."""

    name: str
    path: Path
    metadata: FolderMetadata | None = None


def walk(
    root: Path,
    names: NameFilter,
    manifest: Manifest | None,
    *,
    recursive: bool = True,
    without: Collection[Path] = (),
) -> Iterator[FolderFile | Unreadable]:
    """The files of a folder, sorted by name, and then those of its folders, sorted by name.

    Names that begin with a dot are passed over. Links are followed; a folder that was reached under another name is
    passed over, and so are the folders `without`. A folder that can't be listed is Unreadable. Metadata files are read
    into the manifest, where there is one.
    """
    visited: set[tuple[int, int]] = set()
    pending = [_Folder("", root)]
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
            yield _unlistable(folder, error)
            continue
        found = None if manifest is None else read_folder_metadata(folder.path, files, manifest)
        if isinstance(found, FolderMetadata):
            folder = _Folder(folder.name, folder.path, found)
            if found.num_bad_rows:
                yield _bad_rows(folder, found)
        elif found is not None:
            yield replace(found, name=folder.name + found.name)
        for name in files:
            if names.takes(folder.name + name):
                yield FolderFile(folder.name + name, folder.path / name, identity, folder.metadata)
        if recursive:
            pending += [
                _Folder(f"{folder.name}{name}/", folder.path / name, folder.metadata)
                for name in reversed(folders)
                if names.enters(folder.name + name) and not is_one_of(folder.path / name, without)
            ]


def _listed(path: Path) -> tuple[list[str], list[str]]:
    """The names of a folder's files and of its folders, sorted. Raises OSError."""
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
        # A link that leads to itself, or through a folder that may not be entered.
        return False


def _unlistable(folder: _Folder, error: OSError) -> Unreadable:
    name = folder.name.rstrip("/") or absolute(folder.path).name
    reason = "it is gone" if isinstance(error, FileNotFoundError) else "it can't be read"
    message = f"The folder '{printable(folder.path.name)}' could not be listed: {reason}. Check its permissions."
    return Unreadable(name, "unreadable", message, folder.path)


def _bad_rows(folder: _Folder, metadata: FolderMetadata) -> Unreadable:
    return Unreadable(
        folder.name + metadata.name,
        "damaged",
        f"'{metadata.name}' has {metadata.num_bad_rows:,} rows that name no file or are not of its form: expected "
        f"objects (or columns) with a file_name. Their media are captioned without them.",
        folder.path / metadata.name,
    )
