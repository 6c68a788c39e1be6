"""A dataset's columns: which one holds the media, and the others as JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qwen35mm.captioning.sources.probe import looks_like_medium
from qwen35mm.errors import CaptioningError
from qwen35mm_preprocess.media import sniff

if TYPE_CHECKING:
    import pyarrow


def find_image_column(
    first_rows: Sequence[Mapping[str, Any]], columns: Sequence[str], name: str, wanted: str | None
) -> str | None:
    """The column that holds media: in its bytes, as `{"bytes", "path"}` or `bytes`; else as a path in a text.

    None where none of the first rows has a medium. `name` is the shard's, for messages.

    Raises:
        CaptioningError: there is no column `wanted`, or several hold media and none is wanted.
    """
    if wanted is not None:
        if wanted not in columns:
            raise CaptioningError(
                f"'{name}' has no column '{wanted}'. Its columns are {', '.join(columns)}. Name one of these."
            )
        return wanted
    for holds in (_holds_medium, _holds_path):
        found = [column for column in columns if any(holds(row[column]) for row in first_rows)]
        if len(found) > 1:
            raise CaptioningError(
                f"'{name}' has several columns with media: {', '.join(found)}. Choose one with --image-column."
            )
        if found:
            return found[0]
    return None


def is_heavy(kind: pyarrow.DataType) -> bool:
    """Whether a column is bytes, or media as the `datasets` library keeps them."""
    import pyarrow.types as types

    if types.is_struct(kind):
        return any(is_heavy(kind.field(index).type) for index in range(kind.num_fields))
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)


def json_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's values as JSON has them: bytes and empty values left out, what JSON doesn't know as text."""
    return {name: _json_value(value) for name, value in row.items() if not _is_left_out(value)}


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


def _is_left_out(value: Any) -> bool:
    return value is None or isinstance(value, bytes)


def _holds_medium(value: Any) -> bool:
    if isinstance(value, Mapping):
        path = value.get("path")
        return _holds_medium(value.get("bytes")) or (isinstance(path, str) and "bytes" in value and _holds_path(path))
    return isinstance(value, bytes) and sniff(value) is not None


def _holds_path(value: Any) -> bool:
    return isinstance(value, str) and looks_like_medium(value)
