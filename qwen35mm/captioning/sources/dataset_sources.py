"""Parquet files and Hugging Face dataset folders: which shards there are, and the media in their rows."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen35mm.captioning.items import Unreadable
from qwen35mm.captioning.sources.arrow_shards import ShardError, read_rows, read_schema, require_pyarrow
from qwen35mm.captioning.sources.dataset_columns import find_image_column, is_heavy, json_values
from qwen35mm.captioning.sources.globs import NameFilter
from qwen35mm.captioning.sources.probe import Candidate, looks_like_medium
from qwen35mm.captioning.sources.unique_names import is_one_of
from qwen35mm.errors import CaptioningError

PARQUET_MAGIC = b"PAR1"
_NUM_FIRST_ROWS = 16
_ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://|data:")


@dataclass(frozen=True)
class Dataset:
    """Shards with one column of media among theirs.

    Attributes:
        root: the folder that the shards lie in; a shard by itself is its own root.
    """

    root: Path
    shards: Sequence[Path]
    image_column: str

    def rows(self) -> Iterator[Candidate | Unreadable]:
        """The rows as `SHARD/000017`, and `000017` in a shard by itself; the last part of a medium's own path follows.

        With a path `cats/a.png` that makes `SHARD/000017-a.png`.
        A shard that is damaged is Unreadable, after the rows before the damage.
        """
        for shard in self.shards:
            name = "" if shard == self.root else f"{shard.relative_to(self.root).as_posix()}/"
            try:
                yield from self._shard_rows(shard, name)
            except ShardError as error:
                yield Unreadable(name.rstrip("/"), "damaged", str(error), shard)

    def _shard_rows(self, shard: Path, name: str) -> Iterator[Candidate | Unreadable]:
        schema = read_schema(shard)
        if not self.image_column:
            # No first rows could be read; reading them again says why.
            next(read_rows(shard, schema.names), None)
        if self.image_column not in schema.names:
            raise ShardError(f"'{shard.name}' has no column '{self.image_column}', as the first shard has.")
        columns = [field.name for field in schema if field.name == self.image_column or not is_heavy(field.type)]
        for index, row in enumerate(read_rows(shard, columns)):
            medium = row.pop(self.image_column)
            if isinstance(medium, str):
                medium = {"path": medium}
            elif isinstance(medium, bytes):
                medium = {"bytes": medium}
            yield self._row(f"{name}{index:06d}", medium, json_values(row), shard)

    def _row(self, name: str, medium: Any, metadata: dict[str, Any], shard: Path) -> Candidate | Unreadable:
        data, path = (medium.get("bytes"), medium.get("path")) if isinstance(medium, dict) else (None, None)
        if isinstance(path, str) and not path.startswith("data:"):
            last = path.replace("\\", "/").rstrip("/").rpartition("/")[2]
            name = f"{name}-{last}" if last else name
        if isinstance(data, bytes):
            return Candidate(name, data, metadata, is_expected=True)
        if not isinstance(path, str) or not path:
            return Unreadable(name, "unreadable", f"The row has no medium in its column '{self.image_column}'.")
        if _ADDRESS.match(path):
            message = "The medium is an address, which is not opened here. Download it first, or put its bytes there."
            return Unreadable(name, "unsupported", message)
        # Beside the shard, or, where the shards have a folder of their own, below the dataset.
        beside = shard.parent / path
        below = self.root / path
        source = below if _is_there(below) and not _is_there(beside) else beside
        return Candidate(name, source, metadata, is_expected=True)


def open_parquet(path: Path, image_column: str | None = None) -> Dataset:
    """A parquet file by itself; if it is damaged, its only row is Unreadable.

    Raises:
        CaptioningError: it has no column of media, or several, or none that is named `image_column`.
        MissingExtraError: pyarrow isn't installed.
    """
    require_pyarrow()
    try:
        found = _image_column(path, image_column)
    except ShardError:
        found = ""
    if found is None:
        raise _no_column(path)
    return Dataset(path, [path], found)


def open_dataset_folder(
    folder: Path, names: NameFilter, image_column: str | None = None, *, without: Collection[Path] = ()
) -> Dataset | None:
    """The dataset that a folder is, or None for a folder of files.

    A dataset was written by `save_to_disk` (a `state.json`, or a `dataset_dict.json` over one for each split, and
    arrow shards), or has parquet files with media in their rows, at the top or in `data`, and no media beside them.

    Args:
        without: folders whose parquet files aren't looked at.

    Raises:
        CaptioningError: the column of media isn't known, or a shard is missing.
        MissingExtraError: pyarrow isn't installed.
    """
    saved = _saved_shards(folder)
    candidates = saved or [path for path in _parquet_shards(folder) if not is_one_of(path.parent, without)]
    shards = [path for path in candidates if names.enters(path.relative_to(folder).as_posix())]
    if not shards:
        return None
    require_pyarrow()
    for shard in shards:
        try:
            found = _image_column(shard, image_column)
        except ShardError:
            # The next one may say what the columns are; this one is reported when its turn comes.
            continue
        if found is not None:
            return Dataset(folder, shards, found)
    return Dataset(folder, shards, "") if saved else None


def _saved_shards(folder: Path) -> list[Path]:
    """The arrow shards of a saved dataset, in their order; none where it isn't one."""
    splits = _read_json(folder / "dataset_dict.json").get("splits")
    parts = [folder / str(split) for split in splits] if isinstance(splits, list) else [folder]
    shards: list[Path] = []
    for part in parts:
        files = _read_json(part / "state.json").get("_data_files")
        if isinstance(files, list):
            shards += [part / str(file["filename"]) for file in files if isinstance(file, dict) and "filename" in file]
    return shards


def _parquet_shards(folder: Path) -> list[Path]:
    try:
        names = sorted(path.name for path in folder.iterdir())
        if any(looks_like_medium(name) for name in names):
            return []
        below = sorted((folder / "data").glob("*.parquet")) if "data" in names else []
    except OSError:
        return []
    found = [folder / name for name in names if name.endswith(".parquet")] + below
    return [path for path in found if path.is_file()]


def _image_column(shard: Path, wanted: str | None) -> str | None:
    """Raises ShardError, or CaptioningError as `find_image_column`."""
    columns = read_schema(shard).names
    first_rows: list[dict[str, Any]] = []
    try:
        first_rows.extend(itertools.islice(read_rows(shard, columns), _NUM_FIRST_ROWS))
    except ShardError:
        if not first_rows and wanted is None:
            raise
    return find_image_column(first_rows, columns, shard.name, wanted)


def _no_column(shard: Path) -> CaptioningError:
    return CaptioningError(
        f"'{shard.name}' has no column with images or videos in its first rows. Name one with --image-column."
    )


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        # Too long, or in a folder that may not be entered: that is said when it is probed.
        return False


def _read_json(path: Path) -> dict[str, Any]:
    """An object in a file; empty where there is none."""
    try:
        value = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
