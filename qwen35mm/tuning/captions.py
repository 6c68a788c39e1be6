"""Captions as samples: text files beside their media, JSONL, dataset folders, parquet files and tars.

It reads what `qwen35mm caption` and `qwen35mm review` write, and the same of other programs. Nothing is locked or
changed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from qwen35mm.captioning.items import Item, Medium, Part, Unreadable
from qwen35mm.captioning.outputs.dataset_folder import DATASET_METADATA
from qwen35mm.captioning.records import printable
from qwen35mm.captioning.sources.scan import ScanOptions, scan
from qwen35mm.captioning.texts.prompts import Question
from qwen35mm.contract import Image, Message, Text, Video
from qwen35mm.errors import ConfigError
from qwen35mm.review.opening import open_captions
from qwen35mm.tuning.samples import Found, Sample
from qwen35mm_preprocess import MediaError, MediaKind, VideoClip, detect_kind

# Where records have the caption: of `caption`'s outputs first.
_CAPTION_FIELDS = ("caption", "text", "txt")
_RECORDS = (".jsonl",)


@dataclass(frozen=True)
class CaptionSource:
    """Where captions are, and what the model is asked for them.

    Attributes:
        path: a folder or a file.
        question: for captions whose prompt isn't known.
        prompt: for all captions, whatever they were made with; empty for their own.
        output: of text files: `sidecar` or `sidecar:.EXT`.
        texts: the folder of the text files; None if they lie beside the media.
        accepted: whether to take only captions that a person accepted.
    """

    path: Path
    question: Question
    prompt: str = ""
    system: str = ""
    output: str = "sidecar"
    texts: Path | None = None
    accepted: bool = False


def read_captions(source: CaptionSource) -> Found:
    """The samples of a source.

    Raises:
        CaptioningError, OutputError: there is no such source, or it can't be read.
        ConfigError: it has no captions, or doesn't store which are accepted.
        MissingExtraError: it needs pyarrow.
    """
    path = source.path
    if path.suffix.lower() in _RECORDS and path.is_file():
        found = _Reader(source).records(path)
    elif path.is_dir() and (path / DATASET_METADATA).is_file():
        found = _Reader(source).records(path / DATASET_METADATA)
    else:
        found = _Reader(source).texts() if path.is_dir() else Found()
        if not found.samples and not found.num_bare:
            found = _Reader(source).items()
    if not found.samples:
        why = "of its media has an accepted caption" if source.accepted else "of its media has a caption"
        raise ConfigError(
            f"There is nothing to learn from in '{printable(path.name)}': none {why}. Write captions with `qwen35mm "
            "caption`, or put text files beside the media."
        )
    return found


class _Reader:
    def __init__(self, source: CaptionSource) -> None:
        self._source = source
        self._found = Found()

    def texts(self) -> Found:
        """Text files beside the media of a folder."""
        source = self._source
        (opened,) = open_captions([source.path], source.output, texts=source.texts, for_page=False)
        with closing(opened):
            for described in (each for number in opened.look() for each in opened.describe([number])):
                number, text = described["number"], described["text"].strip()
                name = described["name"]
                if described["problem"] is not None:
                    self._found.skipped.append((name, str(described["problem"])))
                elif not text or (source.accepted and not described["accepted"]):
                    self._found.num_bare += 1
                else:
                    _, path = opened.medium(number)
                    how = {"edited": "edited" in described["flags"], "asked": opened.question(number)}
                    self._add(name, path, text, digest=partial(Medium(name, path).digest), **how)
        return self._found

    def records(self, path: Path) -> Found:
        """The lines of a JSONL file; of several with one name and medium, as `caption` writes them, the last counts."""
        self._refuse_accepted(path)
        rows: dict[object, tuple[str, Path | None, Mapping[str, Any]]] = {}
        for number, line in enumerate(_lines(path), start=1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                medium, name = _medium_of(row, path.parent), row.get("name")
                key = (str(name), medium and medium.resolve(), str(row.get("part"))) if name else number
                rows[key] = str(name or row.get("file_name") or row.get("path") or number), medium, row
            elif line.strip():
                self._found.skipped.append((f"{path.name}, line {number}", "It isn't a JSON object."))
        for name, medium, row in rows.values():
            if medium is None:
                self._found.skipped.append((printable(name), "Its file is not there: name it in path or file_name."))
                continue
            self._record(name, medium, row, partial(Medium(name, medium).digest), clip=_clip_of(row, medium))
        return self._found

    def items(self) -> Found:
        """The rows of parquet files, and the samples of tars and zips."""
        self._refuse_accepted(self._source.path)
        for entry in scan([self._source.path], ScanOptions()):
            if isinstance(entry, Unreadable):
                self._found.skipped.append((printable(entry.name), entry.message))
            else:
                self._record(entry.name, entry.read(), entry.metadata, entry.digest, item=entry)
        return self._found

    def _refuse_accepted(self, path: Path) -> None:
        if self._source.accepted:
            raise ConfigError(
                f"--accepted is for text files: '{printable(path.name)}' doesn't say which of its captions are "
                "accepted. Leave it out, or caption into text files."
            )

    def _record(
        self,
        name: str,
        medium: Path | bytes,
        row: Mapping[str, Any],
        digest: Any,
        clip: VideoClip | None = None,
        item: Item | None = None,
    ) -> None:
        text = next((row[each] for each in _CAPTION_FIELDS if isinstance(row.get(each), str)), "").strip()
        if not text:
            self._found.num_bare += 1
            return
        flags = row.get("flags")
        # Parquet holds them as JSON text.
        with contextlib.suppress(ValueError, RecursionError):
            flags = json.loads(flags) if isinstance(flags, str) else flags
        asked = row.get("prompt")
        self._add(
            printable(name),
            medium,
            text,
            digest=digest,
            edited=isinstance(flags, list) and "edited" in flags,
            asked=asked if isinstance(asked, str) and asked else None,
            clip=clip,
            kind=None if item is None else item.kind,
        )

    def _add(
        self,
        name: str,
        medium: Path | bytes,
        text: str,
        *,
        digest: Any,
        edited: bool,
        asked: str | None,
        clip: VideoClip | None = None,
        kind: MediaKind | None = None,
    ) -> None:
        source = self._source
        try:
            kind, group = kind or detect_kind(medium), digest()
        except (MediaError, OSError) as error:
            why = f"It can't be read: {error.strerror}." if isinstance(error, OSError) else str(error)
            self._found.skipped.append((name, why))
            return
        part = Image(medium) if kind == "image" else Video(medium, clip=clip)
        question = source.prompt or asked or source.question.wording(kind)
        messages = [Message("system", (Text(source.system),))] if source.system else []
        messages.append(Message("user", (part, Text(question))))
        self._found.samples.append(Sample(name, tuple(messages), text, group, edited=edited))


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise ConfigError(f"'{printable(path.name)}' can't be read: {error.strerror}.") from error


def _medium_of(row: Mapping[str, Any], folder: Path) -> Path | None:
    """The file of a record's medium: below the records' folder, or as its path says."""
    for name in ("file_name", "path"):
        if isinstance(value := row.get(name), str) and value:
            for path in (folder / value, Path(value)):
                if os.path.isfile(path):  # noqa: PTH113 - a path may be none at all
                    return path
    return None


def _clip_of(row: Mapping[str, Any], medium: Path) -> VideoClip | None:
    """The range of a record about a part of a video; None if the part is a file of its own."""
    number, start_s, end_s = (row.get(name) for name in ("part", "start_s", "end_s"))
    if not isinstance(number, int) or not isinstance(start_s, int | float) or not isinstance(end_s, int | float):
        return None
    whole = PurePosixPath(str(row.get("name", ""))).parent.name
    return Part(number, start_s, end_s, is_clip=medium.name != whole).clip
