"""Parquet shards: one row per record, the same columns in every shard, and the media themselves on request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from qwen35mm.captioning.manifest.files import json_text
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.outputs.base import OutputSettings
from qwen35mm.captioning.outputs.shards import Shards
from qwen35mm.captioning.records import Record, caption_field, printable, still_there
from qwen35mm.errors import MissingExtraError

try:
    import pyarrow
    import pyarrow.parquet
except ImportError as error:
    raise MissingExtraError("Writing parquet", "datasets") from error

# The most of a row group, which is in memory at once.
_ROWS_AT_ONCE = 64
_BYTES_AT_ONCE = 32 << 20
_JSON_COLUMNS = ("data", "metadata")
# A larger medium isn't embedded.
_MOST_EMBEDDED_BYTES = 256 << 20
_VALUES = {pyarrow.string(): "string", pyarrow.int64(): "int64", pyarrow.float64(): "float64"}


class ParquetShards(Shards):
    """The parquet files in `folder`; errors are those of `Shards`.

    `data` and `metadata` contain JSON text. The column `judged` exists from the first judging run on, `part`,
    `start_s` and `end_s` from the first run that splits videos, and `caption_NAME` from the first run with such
    captions. With `embed_media`, `image` or `video` contain a medium's bytes and name, like Hugging Face's `Image` and
    `Video`. The schema's metadata describe this for its `datasets`.
    """

    suffix = ".parquet"

    def __init__(self, manifest: Manifest, folder: Path, settings: OutputSettings) -> None:
        super().__init__(manifest, folder, settings)
        names = {name for number, *_ in self._known()[-1:] for name in _names(self._path(number))}
        styles = dict.fromkeys((*map(caption_field, settings.styles[1:]), *sorted(filter(_is_of_style, names))))
        self._further: dict[str, Any] = {
            "judged": settings.judged or "judged" in names,
            "parts": settings.parts or "part" in names,
            "styles": tuple(styles),
        }
        self._schema = _schema(embed_media=settings.embed_media, **self._further)

    def _form(self, path: Path) -> Any:
        form = pyarrow.parquet.read_schema(path)
        return _schema(embed_media="image" in form.names, **self._further) if self._is_outdated(path) else form

    def _is_outdated(self, path: Path) -> bool:
        # Readers of a folder want the same columns in every file.
        further = {name for name in self._schema.names if name in ("judged", "part") or _is_of_style(name)}
        return not further <= _names(path)

    def _start(self, file: BinaryIO, form: Any) -> None:
        self._writer = pyarrow.parquet.ParquetWriter(pyarrow.PythonFile(file, mode="w"), form or self._schema)
        self._rows: list[dict[str, Any]] = []
        self._num_bytes = 0

    def _add(self, file: BinaryIO, record: Record) -> None:
        row = record.to_dict()
        for name in _JSON_COLUMNS:
            row[name] = json_text(row[name]) if name in row else None
        kind = record.caption.kind
        if kind in self._writer.schema.names and _num_bytes(record) <= _MOST_EMBEDDED_BYTES:
            medium = b"".join(record.pieces())
            row[kind] = {"bytes": medium, "path": printable(record.item.file_name)}
            self._num_bytes += len(medium)
        self._rows.append(row)
        if len(self._rows) >= _ROWS_AT_ONCE or self._num_bytes >= _BYTES_AT_ONCE:
            self._flush()

    def _copy(self, file: BinaryIO, path: Path, rows: Sequence[int]) -> None:
        wanted, first = set(rows), 0
        with pyarrow.parquet.ParquetFile(path) as old:
            for batch in old.iter_batches(batch_size=_ROWS_AT_ONCE, use_threads=False):
                taken = [row - first for row in range(first, first + len(batch)) if row in wanted]
                if taken:
                    rows_taken = batch.take(pyarrow.array(taken))
                    columns = [
                        rows_taken[each.name]
                        if each.name in batch.schema.names
                        else pyarrow.nulls(len(taken), each.type)
                        for each in self._writer.schema
                    ]
                    self._writer.write_batch(pyarrow.RecordBatch.from_arrays(columns, schema=self._writer.schema))
                first += len(batch)

    def _end(self, file: BinaryIO) -> None:
        self._flush()
        self._writer.close()

    def _drop(self) -> None:
        # Otherwise the writer would write a footer when it is garbage-collected.
        self._writer.is_open = False

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pyarrow.Table.from_pylist(self._rows, schema=self._writer.schema))
        self._rows, self._num_bytes = [], 0


def _names(path: Path) -> set[str]:
    return set(pyarrow.parquet.read_schema(path).names)


def _is_of_style(name: str) -> bool:
    return name.startswith(caption_field(""))


def _schema(*, embed_media: bool, judged: bool, parts: bool, styles: Sequence[str] = ()) -> Any:
    text, whole, real = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    columns = {
        "name": text,
        "path": text,
        **({"part": whole, "start_s": real, "end_s": real} if parts else {}),
        "caption": text,
        **dict.fromkeys(styles, text),
        "data": text,
        "kind": text,
        "width": whole,
        "height": whole,
        "duration_s": real,
        "sharpness": real,
        "letterbox": real,
        "prompt": text,
        "model": text,
        "flags": pyarrow.list_(text),
        **({"judged": pyarrow.list_(pyarrow.struct({"sentence": text, "score": real}))} if judged else {}),
        "shared_from": text,
        "num_prompt_tokens": whole,
        "num_generated_tokens": whole,
        "sha256": text,
        "metadata": text,
    }
    features = {name: _feature(kind) for name, kind in columns.items()}
    if embed_media:
        columns |= dict.fromkeys(("image", "video"), pyarrow.struct({"bytes": pyarrow.binary(), "path": text}))
        features |= {"image": {"_type": "Image"}, "video": {"_type": "Video"}}
    told = json_text({"info": {"features": features}})
    return pyarrow.schema(list(columns.items()), metadata={"huggingface": told})


def _feature(kind: Any) -> Any:
    """A column's type as Hugging Face's `datasets` describes it."""
    if pyarrow.types.is_list(kind):
        # Every version of `datasets` reads this form as a list.
        return [_feature(kind.value_type)]
    if pyarrow.types.is_struct(kind):
        return {field.name: _feature(field.type) for field in kind}
    return {"_type": "Value", "dtype": _VALUES[kind]}


def _num_bytes(record: Record) -> int:
    with still_there(record.item):
        return record.item.num_bytes
