"""Opens captions by how a person names them: a folder, a file of records, or an output."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qwen35mm.captioning.outputs import parse_output
from qwen35mm.captioning.outputs.dataset_folder import DATASET_METADATA
from qwen35mm.errors import CaptioningError
from qwen35mm.review.collection import Collection
from qwen35mm.review.folder import Folder
from qwen35mm.review.records import RecordsFile


def open_captions(
    sources: Sequence[Path], output: str, *, texts: Path | None = None, state: Path | None = None, for_page: bool = True
) -> list[Collection[Any]]:
    """The captions of each source, or those of an output that all sources share. The caller closes them.

    Args:
        sources: folders of media, or files of records.
        output: `sidecar`, `sidecar:.EXT`, `jsonl:FILE` or `dataset:FOLDER`.
        texts: the folder of the text files; None if they lie beside the media.
        for_page: whether the review page opens them. Otherwise text files aren't locked yet; see `Collection.begin`.

    Raises:
        CaptioningError, OutputError: the captions can't be opened; then none are.
    """
    spec = parse_output(output)
    near = [each if each.is_dir() else each.parent for each in sources] if texts is None else [texts]
    if spec.kind == "jsonl":
        return [RecordsFile(spec.path, state=state, near=near, for_page=for_page)]
    if spec.kind == "dataset":
        return [RecordsFile(spec.path / DATASET_METADATA, state=state, near=near, for_page=for_page)]
    if not spec.is_beside:
        raise CaptioningError(
            "Only captions in text files, JSONL and dataset folders can be changed: sidecar, sidecar:.EXT, jsonl:FILE "
            f"or dataset:FOLDER; got {output!r}."
        )
    opened: list[Collection[Any]] = []
    try:
        for source in sources:
            if source.is_file():
                near_it = [source.parent] if texts is None else [texts]
                opened.append(RecordsFile(source, state=state, near=near_it, for_page=for_page))
            else:
                opened.append(Folder(source, suffix=spec.target, texts=texts, state=state, for_page=for_page))
    except BaseException:
        for each in opened:
            each.close()
        raise
    return opened
