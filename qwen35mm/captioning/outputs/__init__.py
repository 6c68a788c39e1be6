"""Where captions go. Each output writes every item once, even after a crash."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.outputs.base import DEFAULT_SUFFIX, Mode, Output, OutputSettings, Wants
from qwen35mm.captioning.outputs.dataset_folder import DATASET_METADATA, DatasetFolder
from qwen35mm.captioning.outputs.file_names import fold
from qwen35mm.captioning.outputs.json_object import CAPTIONS_JSON, AiToolkitObject, FolderObjects
from qwen35mm.captioning.outputs.jsonl import JsonLines
from qwen35mm.captioning.outputs.sidecar import Sidecars
from qwen35mm.captioning.outputs.trainer_lines import IMAGE_PATH, VIDEO_PATH, TrainerLines
from qwen35mm.captioning.outputs.webdataset import TarShards
from qwen35mm.captioning.texts.templates import new_path
from qwen35mm.errors import CaptioningError

__all__ = [
    "DEFAULT_SUFFIX",
    "Mode",
    "Output",
    "OutputSettings",
    "OutputSpec",
    "Sidecars",
    "Wants",
    "open_outputs",
    "parse_output",
]

_SUFFIX = re.compile(r"\.?[^./\\\x00-\x1f]+(\.[^./\\\x00-\x1f]+)*")
_MAX_SUFFIX_BYTES = 64
# Kinds of text files beside the media.
_BESIDE = ("sidecar", "lines")
_FOLDERS = "diffusion-pipe"
# Kinds that have a file for each of several captions.
_APART = ("sidecar", "images", "videos")


@dataclass(frozen=True)
class OutputSpec:
    """An output as a person named it.

    Attributes:
        kind: one of `parse_output`'s.
        target: its file or folder; a text file's suffix, with its dot.
        style: which of an item's captions it takes, by name; None for all of them together.
    """

    kind: str
    target: str
    style: str | None = None

    @property
    def is_beside(self) -> bool:
        """Whether it is text files beside the media."""
        return self.kind in _BESIDE

    @property
    def is_in_sources(self) -> bool:
        """Whether it is files in the folders of the media, and has no place of its own."""
        return self.is_beside or self.kind == _FOLDERS

    @property
    def path(self) -> Path:
        return Path(self.target)

    @property
    def media_folder(self) -> Path | None:
        """The folder whose content a scan would take for sources; None if there is none."""
        return self.path if _KINDS[self.kind].has_media else None


def parse_output(text: str) -> OutputSpec:
    """Reads an output as a person names it, such as `sidecar`, `sidecar:.caption` or `jsonl:FILE`; see `_KINDS`.

    An existing file or folder is taken as it is; a new name's literal braces are doubled.

    Raises:
        CaptioningError: it has none of these forms, or a name has placeholders.
    """
    kind, _, target = text.partition(":")
    target = new_path(target, "name of an output")
    if kind in _BESIDE:
        suffix = target or DEFAULT_SUFFIX
        if _SUFFIX.fullmatch(suffix) and len(suffix.encode("utf-8", "replace")) <= _MAX_SUFFIX_BYTES:
            return OutputSpec(kind, suffix if suffix.startswith(".") else f".{suffix}")
    elif kind == _FOLDERS and not target:
        return OutputSpec(kind, CAPTIONS_JSON)
    elif kind in _KINDS and kind != _FOLDERS and target and "\x00" not in target:
        return OutputSpec(kind, target)
    forms = ", ".join(kind.form for kind in _KINDS.values())
    raise CaptioningError(f"An output must be one of {forms}; got {text!r}.")


def open_outputs(specs: Sequence[OutputSpec], manifest: Manifest, settings: OutputSettings) -> list[Output]:
    """Opens the outputs and repairs what a killed run left in them.

    Raises:
        CaptioningError: two outputs share a place, another run writes to one, or, in the mode `skip`, another program
            wrote the file.
        MissingExtraError: parquet without the extra `datasets`.
        OutputError: the disk is full, read-only or fails.
    """
    specs = [each for spec in dict.fromkeys(specs) for each in _of_styles(spec, settings.styles)]
    _refuse_shared_places(specs)
    beside = {spec: _of_videos(spec, settings) for spec in specs if spec.is_beside}
    texts = (*(spec.target for spec in beside), *(each for each in beside.values() if each is not None))
    outputs: list[Output] = []
    try:
        for spec in specs:
            if spec.is_beside:
                is_lines, own = spec.kind == "lines", replace(settings, video_suffix=beside[spec])
                sidecars = Sidecars(manifest, spec.target, own, others=texts, is_lines=is_lines)
                sidecars.style = spec.style
                outputs.append(sidecars)
            else:
                outputs.append(_KINDS[spec.kind].open(manifest, spec.path, settings))
                outputs[-1].style = spec.style
    except BaseException:
        for output in outputs:
            output.close()
        raise
    return outputs


def _of_styles(spec: OutputSpec, styles: Sequence[str]) -> list[OutputSpec]:
    """A file for each caption of an item: the first has the plain name, the others their own before its suffix."""
    if spec.kind not in _APART or not styles:
        return [spec]
    first, *others = styles
    named = (f".{name}{spec.target}" if spec.is_beside else _named(spec.path, name) for name in others)
    return [
        replace(spec, style=first),
        *(replace(spec, target=target, style=name) for name, target in zip(others, named, strict=True)),
    ]


def _named(path: Path, name: str) -> str:
    return str(path.with_name(f"{path.stem}.{name}{path.suffix}"))


def _of_videos(spec: OutputSpec, settings: OutputSettings) -> str | None:
    """The suffix of videos' text files, if they have one of their own."""
    is_first = spec.style is None or spec.style == settings.styles[0]
    return (
        settings.video_suffix if is_first or settings.video_suffix is None else f".{spec.style}{settings.video_suffix}"
    )


def _open_parquet(manifest: Manifest, folder: Path, settings: OutputSettings) -> Output:
    from qwen35mm.captioning.outputs.parquet import ParquetShards  # pyarrow loads for a third of a second

    return ParquetShards(manifest, folder, settings)


class _Kind(NamedTuple):
    """One kind of output.

    Attributes:
        form: how a person writes it.
        open: makes it of the manifest, its target and the settings.
        has_media: whether its folder holds copies of media, which no scan takes for sources.
    """

    form: str
    open: Callable[[Manifest, Any, OutputSettings], Output]
    has_media: bool


_KINDS = {
    "sidecar": _Kind("sidecar, sidecar:.caption", Sidecars, has_media=False),
    "lines": _Kind("lines, lines:.caption", Sidecars, has_media=False),
    "jsonl": _Kind("jsonl:FILE", JsonLines, has_media=False),
    "images": _Kind("images:FILE.jsonl", partial(TrainerLines, key=IMAGE_PATH), has_media=False),
    "videos": _Kind("videos:FILE.jsonl", partial(TrainerLines, key=VIDEO_PATH), has_media=False),
    "image-lines": _Kind(
        "image-lines:FILE.jsonl", partial(TrainerLines, key=IMAGE_PATH, is_lines=True), has_media=False
    ),
    _FOLDERS: _Kind(_FOLDERS, FolderObjects, has_media=False),
    "ai-toolkit": _Kind("ai-toolkit:FILE.json", AiToolkitObject, has_media=False),
    "parquet": _Kind("parquet:FOLDER", _open_parquet, has_media=True),
    "dataset": _Kind("dataset:FOLDER", DatasetFolder, has_media=True),
    "webdataset": _Kind("webdataset:FOLDER", TarShards, has_media=True),
}


def _refuse_shared_places(specs: Sequence[OutputSpec]) -> None:
    seen: dict[str, OutputSpec] = {}
    for spec in dict.fromkeys(specs):
        path = spec.path / DATASET_METADATA if spec.kind == "dataset" else spec.path
        place = fold(spec.target if spec.is_in_sources else os.path.realpath(path))
        other = seen.setdefault(place, spec)
        if other != spec:
            raise CaptioningError(
                f"Two outputs would write to {spec.target}: {other.kind} and {spec.kind}. Give each a place of its own."
            )
