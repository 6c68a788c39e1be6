"""Parquet files and arrow streams through pyarrow, a few rows in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen35mm.errors import CaptioningError, MissingExtraError

if TYPE_CHECKING:
    import pyarrow

_ROWS_PER_READ = 16
_BUFFER_BYTES = 2**20


class ShardError(CaptioningError):
    """A shard that can't be read; the message names it."""


def require_pyarrow() -> None:
    """Raises MissingExtraError where pyarrow isn't installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise MissingExtraError("Reading parquet and dataset folders", "datasets") from None


def read_schema(shard: Path) -> pyarrow.Schema:
    """The columns of a shard: an arrow stream by its suffix `.arrow`, else parquet. Raises ShardError."""
    import pyarrow
    import pyarrow.parquet

    with _as_shard_error(shard):
        if shard.suffix != ".arrow":
            return pyarrow.parquet.read_schema(shard)
        with pyarrow.OSFile(str(shard)) as file, pyarrow.ipc.open_stream(file) as stream:
            return stream.schema


def read_rows(shard: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a shard, with some of its columns.

    What is held is one record batch of an arrow stream, and one page of each column of a parquet file.

    Raises:
        ShardError: it is damaged or cut off, after the rows before the damage.
    """
    import pyarrow
    import pyarrow.parquet

    with _as_shard_error(shard):
        if shard.suffix != ".arrow":
            # With a buffer and without reading ahead, a row group isn't held as a whole.
            with pyarrow.parquet.ParquetFile(shard, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
                for batch in file.iter_batches(batch_size=_ROWS_PER_READ, columns=list(columns), use_threads=False):
                    yield from batch.to_pylist()
            return
        # Not mapped into memory: a file that is shortened while it is read would end the process.
        with pyarrow.OSFile(str(shard)) as file:
            with pyarrow.ipc.open_stream(file) as stream:
                wanted = [stream.schema.get_field_index(name) for name in columns]
            file.seek(0)
            options = pyarrow.ipc.IpcReadOptions(included_fields=wanted)
            with pyarrow.ipc.open_stream(file, options=options) as stream:
                for batch in stream:
                    for start in range(0, batch.num_rows, _ROWS_PER_READ):
                        yield from batch.slice(start, _ROWS_PER_READ).to_pylist()


@contextmanager
def _as_shard_error(shard: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        if isinstance(error, PermissionError | FileNotFoundError):
            raise ShardError(f"'{shard.name}' could not be opened. Check its path and permissions.") from None
        if isinstance(error, UnicodeEncodeError):
            raise ShardError(f"The name of '{shard.name}' isn't UTF-8, as it has to be here. Rename it.") from None
        if isinstance(error, UnicodeDecodeError | OverflowError):
            raise ShardError(
                f"'{shard.name}' has a text that isn't UTF-8, or a date beyond the year 9999. Write it anew."
            ) from None
        raise ShardError(
            f"'{shard.name}' is not of its format, or is damaged or cut off. Check that it was downloaded completely."
        ) from None
