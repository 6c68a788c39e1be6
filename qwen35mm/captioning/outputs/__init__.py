"""Where captions go. Each output writes an item once, whatever happens on the way."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.outputs.base import Mode, Output, OutputSpec, Wants, parse_output
from qwen35mm.captioning.outputs.dataset_folder import DATASET_METADATA, DatasetFolder
from qwen35mm.captioning.outputs.file_names import fold
from qwen35mm.captioning.outputs.jsonl import JsonLines
from qwen35mm.captioning.outputs.sidecar import Sidecars
from qwen35mm.captioning.outputs.webdataset import TarShards
from qwen35mm.errors import CaptioningError

__all__ = ["Mode", "Output", "OutputSpec", "Sidecars", "Wants", "open_outputs", "parse_output"]


def open_outputs(
    specs: Sequence[OutputSpec],
    manifest: Manifest,
    *,
    folder: Path | None,
    mode: Mode,
    embed_media: bool,
    records_per_shard: int = 1000,
    compact: bool = False,
    separator: str = "\n",
) -> list[Output]:
    """Opens the outputs, and mends what a killed run left in them.

    Args:
        folder: where sidecars go, under their items' names; None puts them beside their media.
        mode: what happens where somebody else's captions are: left alone, replaced (files of records are moved
            aside), or kept after or before ours.
        embed_media: parquet holds the pictures too.
        compact: shards that aren't full are merged at the run's end.
        separator: between a person's text and ours in a sidecar.

    Raises:
        CaptioningError: two outputs at one place, one that another run writes to, or, in the mode `skip`, a file that
            another program wrote.
        MissingExtraError: parquet without the extra `datasets`.
        OutputError: the disk is full, read-only or fails.
    """
    _refuse_shared_places(specs)
    outputs: list[Output] = []
    try:
        for spec in dict.fromkeys(specs):
            if spec.kind == "sidecar":
                outputs.append(Sidecars(manifest, spec.target, folder=folder, mode=mode, separator=separator))
            elif spec.kind == "jsonl":
                outputs.append(JsonLines(manifest, spec.path, mode=mode))
            elif spec.kind == "dataset":
                outputs.append(DatasetFolder(manifest, spec.path, mode=mode))
            elif spec.kind == "parquet":
                from qwen35mm.captioning.outputs.parquet import ParquetShards  # pyarrow loads for a third of a second

                outputs.append(
                    ParquetShards(
                        manifest, spec.path, records_per_shard, mode=mode, compact=compact, embed_media=embed_media
                    )
                )
            else:
                outputs.append(TarShards(manifest, spec.path, records_per_shard, mode=mode, compact=compact))
    except BaseException:
        for output in outputs:
            output.close()
        raise
    return outputs


def _refuse_shared_places(specs: Sequence[OutputSpec]) -> None:
    seen: dict[str, OutputSpec] = {}
    for spec in dict.fromkeys(specs):
        path = spec.path / DATASET_METADATA if spec.kind == "dataset" else spec.path
        place = fold(spec.target if spec.kind == "sidecar" else os.path.realpath(path))
        other = seen.setdefault(place, spec)
        if other != spec:
            raise CaptioningError(
                f"Two outputs would write to {spec.target}: {other.kind} and {spec.kind}. Give each a place of its own."
            )
