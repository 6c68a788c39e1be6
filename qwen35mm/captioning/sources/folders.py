"""Folders: their files in a stable order, one folder's names in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from qwen35mm.captioning.items import Unreadable
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.records import printable
from qwen35mm.captioning.sources.candidates import Candidate, SourceError
from qwen35mm.captioning.sources.folder_metadata import FolderMetadata, find_metadata_file
from qwen35mm.captioning.sources.names import NameFilter, absolute, is_one_of

_BAD_ROWS = (
    "'{}' has {:,} rows that name no file or are not of its form: expected objects (or columns) with a file_name. "
    "Their media are captioned without them."
)


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
) -> Iterator[Candidate | Unreadable]:
    """The files of a folder that `names` takes, sorted by name, and then those of its folders, sorted by name.

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
            name = folder.name.rstrip("/") or absolute(folder.path).name
            reason = "it is gone" if isinstance(error, FileNotFoundError) else "it can't be read"
            message = f"'{printable(folder.path.name)}' could not be listed: {reason}. Check its permissions."
            yield Unreadable(name, "unreadable", f"The folder {message}", folder.path)
            continue
        metadata = folder.metadata
        if manifest is not None and (path := find_metadata_file(folder.path, files)) is not None:
            try:
                found = FolderMetadata(path, manifest)
                # One that names no files is something else.
                if found.num_rows:
                    metadata = found
                    if found.num_bad_rows:
                        raise SourceError("damaged", _BAD_ROWS.format(path.name, found.num_bad_rows))
            except SourceError as error:
                yield Unreadable(folder.name + path.name, error.kind, str(error), path)
        for name in files:
            if names.takes(folder.name + name):
                path = folder.path / name
                yield Candidate(folder.name + name, path, dict if metadata is None else partial(metadata.row, path))
        if recursive:
            pending += [
                _Folder(f"{folder.name}{name}/", folder.path / name, metadata)
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
