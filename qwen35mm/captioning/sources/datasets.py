"""Parquet files and Hugging Face dataset folders: their shards, and the media in their rows.

pyarrow reads the shards, a few rows in memory at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen35mm.captioning.items import Unreadable
from qwen35mm.captioning.records import printable
from qwen35mm.captioning.sources.candidates import Candidate, SourceError, looks_like_medium
from qwen35mm.captioning.sources.names import NameFilter, is_one_of
from qwen35mm.errors import CaptioningError, MissingExtraError
from qwen35mm.outside_json import read_json
from qwen35mm_preprocess.formats import sniff
from qwen35mm_preprocess.media import is_data_uri

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

PARQUET_MAGIC = b"PAR1"
_NUM_FIRST_ROWS = 16
_ROWS_PER_READ = 16
_BUFFER_BYTES = 2**20
_ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://|data:", re.IGNORECASE)

_OUTSIDE = "{} outside of the dataset, which is not read. Put {} into the dataset."


@dataclass(frozen=True)
class Dataset:
    """Shards with one column of media.

    Attributes:
        root: the folder of the shards; a single shard is its own root.
        image_column: None if no shard's first rows could be read.
    """

    root: Path
    shards: Sequence[Path]
    image_column: str | None

    def rows(self, shard: Path) -> Iterator[Candidate | Unreadable]:
        """The rows as `SHARD/000017`, or `000017` in a single shard, followed by the last part of a medium's path.

        With the path `cats/a.png`: `SHARD/000017-a.png`.

        Raises:
            SourceError: the shard is damaged. The rows before the damage come first.
        """
        folder = "" if shard == self.root else f"{shard.relative_to(self.root).as_posix()}/"
        with _open_shard(shard) as (schema, read_rows):
            image_column = self.image_column
            if image_column is None:
                # The first rows couldn't be read. Reading them again raises the reason.
                next(read_rows(schema.names), None)
            if image_column is None or image_column not in schema.names:
                message = f"'{shard.name}' has no column '{image_column}', as the first shard has."
                raise SourceError("damaged", message)
            columns = [field.name for field in schema if field.name == image_column or not _is_heavy(field.type)]
            for index, row in enumerate(read_rows(columns)):
                medium = row.pop(image_column)
                yield self._row(f"{folder}{index:06d}", medium, partial(_json_values, row), shard)

    def _row(
        self, name: str, medium: Any, metadata: Callable[[], Mapping[str, Any]], shard: Path
    ) -> Candidate | Unreadable:
        data, path = (medium.get("bytes"), medium.get("path")) if isinstance(medium, dict) else (medium, medium)
        if isinstance(path, str) and not is_data_uri(path):
            last = path.replace("\\", "/").rstrip("/").rpartition("/")[2]
            name = f"{name}-{last}" if last else name
        if isinstance(data, bytes):
            return Candidate(name, data, metadata, is_expected=True)
        if not isinstance(path, str) or not path:
            return Unreadable(name, "unreadable", f"The row has no medium in its column '{self.image_column}'.")
        if _ADDRESS.match(path):
            message = "The medium is an address, which is not opened here. Download it first, or put its bytes there."
            return Unreadable(name, "unsupported", message)
        # Beside the shard, or below the dataset's folder if the shards have their own folder.
        beside = shard.parent / path
        below = self.root / path
        source = below if _is_there(below) and not _is_there(beside) else beside
        # A dataset must not read other files of this machine.
        if not _is_within(self.root, source):
            return Unreadable(name, "unsupported", _OUTSIDE.format("The row names a file", "its bytes"))
        return Candidate(name, source, metadata, is_expected=True)


def open_parquet(path: Path, image_column: str | None = None) -> Dataset:
    """A single parquet file.

    Raises:
        CaptioningError: it has no column of media, or several, or no column `image_column`.
        MissingExtraError: pyarrow isn't installed.
    """
    try:
        found = _find_image_column(path, image_column)
    except SourceError:
        return Dataset(path, [path], None)
    if found is None:
        raise CaptioningError(
            f"'{path.name}' has no column with images or videos in its first rows. Name one with --image-column. Media "
            "behind addresses are not opened: download them first."
        )
    return Dataset(path, [path], found)


def open_dataset_folder(
    folder: Path, names: NameFilter, image_column: str | None = None, *, without: Collection[Path] = ()
) -> Dataset | None:
    """A folder as a dataset, or None for a folder of files.

    A dataset was written by `save_to_disk`: arrow shards with a `state.json`, or a `dataset_dict.json` with one for
    each split. Or it has parquet files with media in their rows, at the top or in `data`, and no media beside them.

    Args:
        without: folders whose parquet files are ignored.

    Raises:
        CaptioningError: the column of media isn't known, or a shard lies outside of the folder.
        MissingExtraError: pyarrow isn't installed.
    """
    saved = _saved_shards(folder)
    candidates = saved or [path for path in _parquet_shards(folder) if not is_one_of(path.parent, without)]
    shards = [path for path in candidates if names.enters(path.relative_to(folder).as_posix())]
    for shard in shards:
        # An unreadable shard is reported when it is scanned; the next one may have the columns.
        with contextlib.suppress(SourceError):
            if (found := _find_image_column(shard, image_column)) is not None:
                return Dataset(folder, shards, found)
    return Dataset(folder, shards, None) if saved and shards else None


def _saved_shards(folder: Path) -> list[Path]:
    """The arrow shards of a saved dataset, in order; empty if it isn't one."""
    splits = _read_json(folder / "dataset_dict.json").get("splits")
    parts = [folder / str(split) for split in splits] if isinstance(splits, list) else [folder]
    shards: list[Path] = []
    for part in parts:
        files = _read_json(part / "state.json").get("_data_files")
        if isinstance(files, list):
            shards += [part / str(file["filename"]) for file in files if isinstance(file, dict) and "filename" in file]
    if not all(_is_within(folder, shard) for shard in shards):
        raise CaptioningError(_OUTSIDE.format(f"'{printable(folder.name)}' names a shard", "the shard"))
    return shards


def _parquet_shards(folder: Path) -> list[Path]:
    try:
        names = os.listdir(folder)  # noqa: PTH208 - a folder may have a hundred thousand files
        if any(looks_like_medium(name) for name in names):
            return []
        below = sorted((folder / "data").glob("*.parquet")) if "data" in names else []
    except OSError:
        return []
    found = [folder / name for name in sorted(names) if name.endswith(".parquet")] + below
    return [path for path in found if path.is_file()]


def _read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object; empty if there is none."""
    try:
        value = read_json(path) if path.is_file() else {}
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_within(root: Path, path: Path) -> bool:
    """Whether a path, with its links resolved, lies in a dataset; `root` is as in `Dataset`."""
    base = Path(os.path.realpath(root if root.is_dir() else root.parent))
    # In the Hugging Face cache, a dataset's files are links to blobs beside its snapshots.
    homes = [base, *(parent.parent / "blobs" for parent in base.parents if parent.name == "snapshots")]
    try:
        found = Path(os.path.realpath(path))
    except (OSError, ValueError):
        # Too long, or not a path: opening it reports that.
        return os.pardir not in path.parts and path.is_relative_to(root if root.is_dir() else root.parent)
    return any(found.is_relative_to(home) for home in homes)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        # Too long, or in a folder that can't be entered: probing it reports that.
        return False


def _find_image_column(shard: Path, wanted: str | None) -> str | None:
    """The column of media: as bytes or `{"bytes", "path"}`; if there is none, as a path in a text.

    None if none of the first rows has a medium.

    Raises:
        SourceError: the shard can't be read.
        CaptioningError: there is no column `wanted`, or several have media and none is wanted.
    """
    columns: list[str] = []
    first_rows: list[dict[str, Any]] = []
    try:
        with _open_shard(shard) as (schema, read_rows):
            columns = schema.names
            first_rows.extend(itertools.islice(read_rows(columns), _NUM_FIRST_ROWS))
    except SourceError:
        if not columns or (not first_rows and wanted is None):
            raise
    if wanted is not None:
        if wanted not in columns:
            raise CaptioningError(
                f"'{shard.name}' has no column '{wanted}'. Its columns are {', '.join(columns)}. Name one of these."
            )
        return wanted
    for holds in (_holds_medium, _holds_path):
        found = [column for column in columns if any(holds(row[column]) for row in first_rows)]
        if len(found) > 1:
            raise CaptioningError(
                f"'{shard.name}' has several columns with media: {', '.join(found)}. Choose one with --image-column."
            )
        if found:
            return found[0]
    return None


def _holds_medium(value: Any) -> bool:
    if isinstance(value, Mapping):
        path = value.get("path")
        return _holds_medium(value.get("bytes")) or (isinstance(path, str) and "bytes" in value and _holds_path(path))
    return isinstance(value, bytes) and sniff(value) is not None


def _holds_path(value: Any) -> bool:
    return isinstance(value, str) and looks_like_medium(value) and not _ADDRESS.match(value)


def _is_heavy(kind: pyarrow.DataType) -> bool:
    """Whether a column contains bytes, or media as the `datasets` library stores them."""
    import pyarrow.types as types

    if types.is_struct(kind):
        return any(_is_heavy(kind.field(index).type) for index in range(kind.num_fields))
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)


def _json_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's values for JSON: without bytes and empty values, and with other types as text."""
    return {name: _json_value(value) for name, value in row.items() if value is not None and type(value) is not bytes}


def _json_value(value: Any) -> Any:
    if value is None or isinstance(value, str | int | bool):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items() if not isinstance(item, bytes)}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value if not isinstance(item, bytes)]
    return str(value)


_ReadRows = Callable[[Sequence[str]], Iterator[dict[str, Any]]]


@contextlib.contextmanager
def _open_shard(shard: Path) -> Iterator[tuple[pyarrow.Schema, _ReadRows]]:
    """A shard's schema, and a function that reads the rows of some columns; arrow by its suffix `.arrow`, or parquet.

    In memory is one record batch of an arrow stream, or one page of each column of a parquet file.

    Raises:
        SourceError: it is damaged or cut off; also while the rows are read.
        MissingExtraError: pyarrow isn't installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("Reading parquet and dataset folders", "datasets") from None
    try:
        if shard.suffix == ".arrow":
            # Not memory-mapped: if the file were truncated meanwhile, the process would crash.
            with pyarrow.OSFile(str(shard)) as file:
                with pyarrow.ipc.open_stream(file) as stream:
                    schema = stream.schema
                yield schema, partial(_stream_rows, file, schema)
        else:
            # With a buffer and without reading ahead, a row group is never in memory as a whole.
            with pyarrow.parquet.ParquetFile(shard, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
                yield file.schema_arrow, partial(_parquet_rows, file)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        if isinstance(error, PermissionError | FileNotFoundError):
            message = f"'{shard.name}' could not be opened. Check its path and permissions."
        elif isinstance(error, UnicodeEncodeError):
            message = f"The name of '{shard.name}' isn't UTF-8, as it has to be here. Rename it."
        elif isinstance(error, UnicodeDecodeError | OverflowError):
            message = f"'{shard.name}' has a text that isn't UTF-8, or a date beyond the year 9999. Write it anew."
        else:
            message = (
                f"'{shard.name}' is not of its format, or is damaged or cut off. Check that it was downloaded "
                f"completely."
            )
        raise SourceError("damaged", message) from None


def _parquet_rows(file: pyarrow.parquet.ParquetFile, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    for batch in file.iter_batches(batch_size=_ROWS_PER_READ, columns=list(columns), use_threads=False):
        yield from batch.to_pylist()


def _stream_rows(file: pyarrow.OSFile, schema: pyarrow.Schema, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    import pyarrow

    file.seek(0)
    options = pyarrow.ipc.IpcReadOptions(included_fields=[schema.get_field_index(name) for name in columns])
    with pyarrow.ipc.open_stream(file, options=options) as stream:
        for batch in stream:
            for start in range(0, batch.num_rows, _ROWS_PER_READ):
                yield from batch.slice(start, _ROWS_PER_READ).to_pylist()
