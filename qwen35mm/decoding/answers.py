"""What a process that reads media sends back. Not pickles: a malicious file may have taken over the process.

    b"Q35M", uint32 n, uint64 m     little-endian
    n bytes                         JSON: progress, an error, or the answer's values
    m bytes                         data of the answer: pixels, pictures

Everything is checked against the request, lengths before anything of their size is allocated.
"""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, BinaryIO, TypeVar

import numpy as np

import qwen35mm_preprocess.errors
from qwen35mm_preprocess import MediaError, MediaKind, MediaPlan, MediaProcessor
from qwen35mm_preprocess.patches import Patches, normalized_values
from qwen35mm_preprocess.say import Said, Saying, is_said, said_of
from qwen35mm_preprocess.types import GridTHW, Progress

T = TypeVar("T")

_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"Q35M"
_MAX_JSON_BYTES = 16 << 20
_MAX_ERROR_BYTES = 1 << 16
_MAX_STEPS = 1_000_000
# The errors that a child may raise, by name: errors of media.
_ERRORS = {
    name: each
    for name, each in vars(qwen35mm_preprocess.errors).items()
    if isinstance(each, type) and issubclass(each, MediaError)
}
# A plan's fields by type, and those that may be None. The plan itself checks that they fit together.
_TEXTS = ("kind", "processing", "color", "digest")
_WHOLE = ("num_tokens", "num_prompt_tokens", "cache_bytes", "source_frames")
_NUMBERS = ("duration_s", "similar_difference")
_MANY = {
    **{"size": int, "source_size": int, "grid_thw": int, "frame_indices": int, "similar_indices": int},
    **{"frame_times_s": float, "timestamps_s": float, "unit_digests": str},
}
_OPTIONAL = {field.name for field in fields(MediaPlan) if field.default is None}


class NonsenseError(Exception):
    """The answer doesn't fit the request."""


class AnswerError(Exception):
    """The answer is an error: `error`."""

    def __init__(self, error: MediaError) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True, eq=False)
class Answer:
    """What a child makes of a medium: JSON values, followed by bytes in chunks."""

    values: Any = None
    data: Sequence[Any] = ()


class Data:
    """The bytes of an answer, not yet read."""

    def __init__(self, stream: BinaryIO, num_bytes: int) -> None:
        self._stream = stream
        self.num_bytes = num_bytes

    def into(self, buffer: Any) -> None:
        """Reads all of it into a buffer. Raises NonsenseError if the size differs."""
        require(len(buffer) == self.num_bytes, "data of another size")
        _exactly(self._stream, buffer)
        self.num_bytes = 0

    def take(self, most: int) -> bytes:
        """Reads all of it. Raises NonsenseError if it has more than `most` bytes."""
        require(self.num_bytes <= most, "too many bytes")
        data = bytearray(self.num_bytes)
        self.into(data)
        return bytes(data)


# Turns an answer's values and data into a result. Raises NonsenseError, or errors of wrong types.
Reads = Callable[[Any, Data], T]


def send_answer(stream: BinaryIO, answer: Answer) -> None:
    """Sends an answer."""
    _send(stream, {"values": answer.values}, answer.data)


def send_error(stream: BinaryIO, error: MediaError) -> None:
    """Sends an error instead of an answer."""
    kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in _ERRORS)
    _send(stream, {"error": kind, "words": said_of(error)})


def send_progress(stream: BinaryIO, done: int, total: int) -> None:
    """Sends how much is done."""
    _send(stream, {"progress": [done, total]})


def _send(stream: BinaryIO, message: dict[str, Any], data: Sequence[Any] = ()) -> None:
    text = json.dumps(message).encode()
    pieces = [memoryview(piece).cast("B") for piece in data]
    stream.write(_HEAD.pack(_MAGIC, len(text), sum(map(len, pieces))))
    stream.write(text)
    for piece in pieces:
        stream.write(piece)
    stream.flush()


def receive(stream: BinaryIO, read: Reads[T], progress: Progress | None = None) -> T:
    """Reads the next answer and applies `read` to it.

    Raises:
        EOFError: the process ended.
        NonsenseError: the answer doesn't fit the request.
        AnswerError: the answer is an error.
    """
    before = -1
    while True:
        magic, num_text, num_data = _HEAD.unpack(_exactly(stream, bytearray(_HEAD.size)))
        require(magic == _MAGIC and num_text <= _MAX_JSON_BYTES, "no answer")
        try:
            message = json.loads(_exactly(stream, bytearray(num_text)))
        except (ValueError, RecursionError) as error:
            raise NonsenseError("no JSON") from error
        require(isinstance(message, dict), "no object")
        if message.keys() == {"progress"}:
            steps = message["progress"]
            require(num_data == 0 and isinstance(steps, list) and len(steps) == 2, "no progress")
            require(
                all(_is(each, int) for each in steps) and before < steps[0] <= steps[1] <= _MAX_STEPS, "no progress"
            )
            before = steps[0]
            if progress is not None:
                progress(*steps)
        elif message.keys() == {"error", "words"}:
            kind, words = message["error"], message["words"]
            require(num_data == 0 and num_text <= _MAX_ERROR_BYTES and isinstance(kind, str), "no error")
            require(kind in _ERRORS, "another error")
            raise AnswerError(_ERRORS[kind](read_said(words)))
        else:
            require(message.keys() == {"values"}, "no values")
            return read_with(read, message["values"], Data(stream, num_data))


def read_with(read: Reads[T], values: Any, data: Data) -> T:
    """Applies `read` to an answer. Raises NonsenseError, EOFError."""
    try:
        result = read(values, data)
    # MediaErrors are among these: an impossible plan.
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise NonsenseError(f"{type(error).__name__}: {error}") from error
    require(data.num_bytes == 0, "data that nobody asked for")
    return result


def read_here(read: Reads[T], answer: Answer) -> T:
    """Applies `read` to an answer made in this process."""
    data = b"".join(answer.data)
    return read_with(read, answer.values, Data(io.BytesIO(data), len(data)))


def plan_values(plan: MediaPlan) -> dict[str, Any]:
    """A plan as JSON values."""
    return asdict(plan)


def read_plan(
    values: Any, processor: MediaProcessor, kind: MediaKind | None = None, given: MediaPlan | None = None
) -> MediaPlan:
    """A plan that fits the medium.

    Args:
        kind: the medium's, if known.
        given: the plan that it was read by; None if the child made a new one.

    Raises:
        NonsenseError, MediaError, errors of wrong types: the plan can't fit.
    """
    require(values.keys() == {each.name for each in fields(MediaPlan)}, "other fields")
    read = dict(values)
    for names, each in ((_TEXTS, str), (_WHOLE, int), (_NUMBERS, float)):
        for name in names:
            require(_is(values[name], each) or (values[name] is None and name in _OPTIONAL), name)
    for name, each in _MANY.items():
        if values[name] is not None or name not in _OPTIONAL:
            require(all(_is(value, each) for value in read_list(values[name])), name)
            read[name] = tuple(values[name])
    require(len(read["size"]) == len(read["source_size"]) == 2, "sizes")
    notes = tuple(read_said(note) for note in read_list(values["notes"]))
    plan = MediaPlan(**read | {"grid_thw": GridTHW(*read["grid_thw"]), "notes": notes})
    require(kind is None or plan.kind == kind, "another kind")
    if given is not None:
        _check_within(plan, given)
        return plan
    processor.check(plan, "a medium")
    budget = processor.budget
    most = budget.max_image_tokens if plan.kind == "image" else budget.max_video_tokens
    require(most is None or plan.num_prompt_tokens <= most, "more tokens than the budget has")
    most = budget.max_frames or processor.video_processing.max_frames
    require(len(plan.frame_indices or ()) <= most, "more frames than the budget has")
    return plan


def _check_within(plan: MediaPlan, given: MediaPlan) -> None:
    """Raises NonsenseError unless the plan is the given one, perhaps with fewer frames."""
    if given.digest is not None:
        require(plan == given, "another plan")
        return
    for name in ("kind", "size", "source_size", "processing", "color", "source_frames", "duration_s"):
        require(getattr(plan, name) == getattr(given, name), name)
    require(plan.grid_thw[1:] == given.grid_thw[1:] and plan.grid_thw.t <= given.grid_thw.t, "another grid")
    require(plan.num_tokens <= given.num_tokens and plan.cache_bytes <= given.cache_bytes, "higher costs")
    require(plan.num_prompt_tokens <= given.num_prompt_tokens, "higher costs")
    frames = {*(plan.frame_indices or ()), *plan.similar_indices}
    require(frames <= set(given.frame_indices or ()), "other frames")


def read_patches(data: Data, plan: MediaPlan, processor: MediaProcessor) -> Patches:
    """The patches of a medium read by `plan`. Raises NonsenseError."""
    is_image = plan.kind == "image"
    processing = processor.image_processing if is_image else processor.video_processing
    temporal = processing.temporal_patch_size
    shape = (plan.grid_thw.num_patches, 3, 1 if is_image else temporal, processing.patch_size**2)
    require(data.num_bytes == math.prod(shape), "pixels of another shape")
    pixels = np.empty(shape, np.uint8)
    data.into(pixels.reshape(-1).data)
    return Patches(pixels, normalized_values(processing), temporal)


def read_list(values: Any) -> list[Any]:
    """Checks for a list or tuple. Raises NonsenseError."""
    require(isinstance(values, list | tuple), "no list")
    return values


def read_said(words: Any) -> Said:
    """A text for a person. Raises NonsenseError."""
    require(is_said(words), "words of another form")
    return Saying(words) if isinstance(words, dict) else words


def require(ok: bool, what: str) -> None:
    """Raises NonsenseError with `what` unless `ok`."""
    if not ok:
        raise NonsenseError(what)


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and not isinstance(value, bool)


def _exactly(stream: BinaryIO, into: Any) -> Any:
    view = memoryview(into)
    while len(view):
        num_read = stream.readinto(view)  # pyright: ignore[reportAttributeAccessIssue] - files in binary have it
        if not num_read:
            raise EOFError
        view = view[num_read:]
    return into
