"""What a process that reads media sends back: no pickle, since a file may have taken the process over.

    b"Q35M", uint32 n, uint64 m     little-endian
    n bytes                         JSON: what it is, the plan, the warnings
    m bytes                         the pixels of the patches, or a server's content parts as JSON

All of it is checked by what was asked for, the lengths before anything of their size is allocated.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np

from qwen35mm.captioning.items import FAILURE_KINDS, Failed, Item
from qwen35mm_preprocess import MediaError, MediaPlan, MediaProcessor, PreparedMedia
from qwen35mm_preprocess.patches import Patches, normalized_values
from qwen35mm_preprocess.say import Saying, is_said
from qwen35mm_preprocess.types import GridTHW

if TYPE_CHECKING:
    from qwen35mm.prompt import EncodedMedium

MediumForm = Literal["pixels", "frames", "video_url"]
"""What a medium is prepared as: the engine's own input, or a part of a server's request with videos as `VideoMode`."""

_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"Q35M"
_MAX_JSON_BYTES = 16 << 20
_MAX_MESSAGE = 4000
# Of a plan's fields, those of each type, and which may be None; that they fit together is the plan's to check.
_TEXTS = ("kind", "processing", "color", "digest")
_WHOLE = ("num_tokens", "num_prompt_tokens", "cache_bytes", "source_frames")
_NUMBERS = ("duration_s", "similar_difference")
_MANY = {
    **{"size": int, "source_size": int, "grid_thw": int, "frame_indices": int, "similar_indices": int},
    **{"frame_times_s": float, "timestamps_s": float, "unit_digests": str},
}
_OPTIONAL = {field.name for field in fields(MediaPlan) if field.default is None}


@dataclass(frozen=True)
class Inspected:
    """What an item is; `digest` and `plan` where they were asked for.

    Attributes:
        status: of the file before its bytes were read, None for what isn't a file; not the reading process's to say.
    """

    digest: bytes | None
    plan: MediaPlan | None
    status: os.stat_result | None = None


@dataclass(frozen=True, eq=False)
class Prepared:
    """A medium as a backend takes it, and what it looks like; see `similar`."""

    medium: PreparedMedia | EncodedMedium
    similarity: int | None = None


Answer = Inspected | Prepared | Failed


def write_answer(stream: BinaryIO, answer: Answer) -> None:
    """Sends an answer."""
    data: Any = b""
    if isinstance(answer, Failed):
        values: dict[str, Any] = {"failed": answer.kind, "message": answer.message[:_MAX_MESSAGE]}
    elif isinstance(answer, Inspected):
        digest = None if answer.digest is None else answer.digest.hex()
        values = {"digest": digest, "plan": None if answer.plan is None else asdict(answer.plan)}
    else:
        medium = answer.medium
        values = {"plan": asdict(medium.plan), "warnings": medium.warnings, "similarity": None}
        if answer.similarity is not None:
            values["similarity"] = f"{answer.similarity:x}"
        if isinstance(medium, PreparedMedia):
            data = np.ascontiguousarray(medium.patches.pixels).reshape(-1).data
        else:
            data = json.dumps(medium.parts).encode()
    text = json.dumps(values).encode()
    stream.write(_HEAD.pack(_MAGIC, len(text), len(data)))
    stream.write(text)
    stream.write(data)
    stream.flush()


def read_answer(stream: BinaryIO, item: Item, processor: MediaProcessor, form: MediumForm | None) -> Answer:
    """The answer to a question about an item.

    Args:
        form: what it was to be prepared as; None where it was to be inspected.

    Raises:
        EOFError: the process has ended.
        ValueError: it can't be an answer to that.
    """
    magic, num_text, num_data = _HEAD.unpack(_exactly(stream, bytearray(_HEAD.size)))
    _require(magic == _MAGIC and num_text <= _MAX_JSON_BYTES, "no answer")
    try:
        values = json.loads(_exactly(stream, bytearray(num_text)))
        _require(isinstance(values, dict), "no object")
        if "failed" in values:
            kind, message = values["failed"], values.get("message")
            _require(num_data == 0 and kind in FAILURE_KINDS and isinstance(message, str), "no failure")
            _require(len(message) <= _MAX_MESSAGE, "a long message")
            return Failed(kind, message)
        plan = None if values["plan"] is None else _plan(values["plan"], item, processor)
        if form is None:
            _require(num_data == 0, "data of an inspection")
            digest = values["digest"]
            _require(digest is None or (isinstance(digest, str) and len(digest) == 64), "no digest")
            return Inspected(None if digest is None else bytes.fromhex(digest), plan)
        if plan is None:
            raise ValueError("no plan")
        similarity = values["similarity"]
        _require(similarity is None or (isinstance(similarity, str) and len(similarity) < 1024), "no similarity")
        warnings = tuple(_said(warning) for warning in _list(values["warnings"]))
        if form == "pixels":
            medium = PreparedMedia(plan, _patches(stream, num_data, plan, processor), warnings)
        else:
            # A video as it is, or its frames; base64 makes four characters of three bytes.
            num_pixels = plan.num_tokens * processor.image_processing.factor**2
            _require(num_data <= 2 * processor.limits.max_bytes(plan.kind) + 8 * num_pixels, "too many bytes")
            parts = _list(json.loads(_exactly(stream, bytearray(num_data))))
            _require(all(map(_is_part, parts)), "parts of a request that are none")
            from qwen35mm.prompt import EncodedMedium

            medium = EncodedMedium(tuple(parts), plan, warnings)
        return Prepared(medium, None if similarity is None else int(similarity, 16))
    except (MediaError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _patches(stream: BinaryIO, num_data: int, plan: MediaPlan, processor: MediaProcessor) -> Patches:
    is_image = plan.kind == "image"
    processing = processor.image_processing if is_image else processor.video_processing
    temporal = processing.temporal_patch_size
    shape = (plan.grid_thw.num_patches, 3, 1 if is_image else temporal, processing.patch_size**2)
    _require(num_data == math.prod(shape), "pixels of another shape")
    pixels = np.empty(shape, np.uint8)
    _exactly(stream, pixels.reshape(-1).data)
    return Patches(pixels, normalized_values(processing), temporal)


def _plan(values: Any, item: Item, processor: MediaProcessor) -> MediaPlan:
    """The plan, which could be one of the item. Raises MediaError and what wrong types lead to."""
    _require(values.keys() == {each.name for each in fields(MediaPlan)}, "other fields")
    read = dict(values)
    for names, kind in ((_TEXTS, str), (_WHOLE, int), (_NUMBERS, float)):
        for name in names:
            _require(_is(values[name], kind) or (values[name] is None and name in _OPTIONAL), name)
    for name, kind in _MANY.items():
        if values[name] is not None or name not in _OPTIONAL:
            _require(all(_is(each, kind) for each in _list(values[name])), name)
            read[name] = tuple(values[name])
    _require(len(read["size"]) == len(read["source_size"]) == 2, "sizes")
    read |= {"grid_thw": GridTHW(*read["grid_thw"]), "notes": tuple(_said(note) for note in _list(values["notes"]))}
    plan = MediaPlan(**read)
    _require(plan.kind == item.kind, "another kind")
    processor.check(plan, Path(item.name))
    budget = processor.budget
    most = budget.max_image_tokens if plan.kind == "image" else budget.max_video_tokens
    _require(most is None or plan.num_prompt_tokens <= most, "more tokens than the budget has")
    most = budget.max_frames or processor.video_processing.max_frames
    _require(len(plan.frame_indices or ()) <= most, "more frames than the budget has")
    return plan


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and not isinstance(value, bool)


def _list(values: Any) -> list[Any]:
    _require(isinstance(values, list), "no list")
    return values


def _said(words: Any) -> Any:
    _require(is_said(words), "words of another form")
    return Saying(words) if isinstance(words, dict) else words


def _is_part(part: Any) -> bool:
    """A text, or a medium with its bytes in it: an address would be fetched by the server."""
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    if kind == "text":
        return part.keys() == {"type", "text"} and isinstance(part["text"], str)
    if kind not in ("image_url", "video_url") or part.keys() != {"type", kind} or not isinstance(part[kind], Mapping):
        return False
    url = part[kind].get("url")
    return part[kind].keys() == {"url"} and isinstance(url, str) and url.startswith("data:")


def _exactly(stream: BinaryIO, into: Any) -> Any:
    view = memoryview(into)
    while len(view):
        num_read = stream.readinto(view)  # pyright: ignore[reportAttributeAccessIssue] - files in binary have it
        if not num_read:
            raise EOFError
        view = view[num_read:]
    return into


def _require(ok: bool, what: str) -> None:
    if not ok:
        raise ValueError(what)
