"""Grounding: finds boxes and points in an answer's JSON, and the picture or frame that each lies on.

Qwen writes objects with `bbox_2d`, `point_2d` and `label`, alone or in lists, with or without a code fence. Qwen3-VL
and Qwen3.5 give thousandths of the picture's sides, Qwen2.5-VL pixels of the picture as resized for the model.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qwen35mm.chat.store.records import Attachment, Node

MAX_MARKS = 500
MAX_LABEL_CHARS = 200
_MAX_DETAILS = 8
# How many braces before a mark's numbers are tried as the start of its object.
_MAX_BRACES = 8
_MAX_OBJECT_CHARS = 2000
_DECODER = json.JSONDecoder()

_BOX, _POINT = "bbox_2d", "point_2d"
_SHAPE = re.compile(r"""["'](bbox_2d|point_2d)["']\s*:\s*(\[[-+\d.eE,\s\[\]]*\])""")
# Fields with a text or a number, in an object that is cut off or not quite JSON.
_FIELD = re.compile(r"""["'](\w+)["']\s*:\s*(?:["'](.*?)(?:["'](?=\s*[,}\]])|$)|(-?\d+(?:\.\d+)?)(?=[\s,}\]]))""")
_LABELS = ("label", "text_content", "text", "name", "object", "category")
_IMAGES = ("image", "image_index", "image_id", "picture")
_TIMES = ("time", "timestamp", "time_s")

# The unit of a coordinate: a thousandth of the picture's side, the whole side, a pixel of the picture as resized for
# the model, or a pixel of the file.
Unit = Literal["thousandth", "whole", "shown pixel", "pixel"]
_THOUSANDTHS_ASKED = re.compile(r"\b1[,.]?000\b|\brelative\b|\bnormali[sz]ed\b|归一化|相对坐标", re.IGNORECASE)
_PIXELS_ASKED = re.compile(r"\babsolute\b|\bp[ií]xel\w*|像素|绝对坐标", re.IGNORECASE)
_PIXEL_MODELS = re.compile(r"qwen-?2[._]5-?vl", re.IGNORECASE)


@dataclass(frozen=True)
class Mark:
    """One object that an answer marks.

    box         left, top, right and bottom in the answer's unit; or None
    point       x and y in the answer's unit; or None
    details     names and values of the other fields in the answer
    image       the answer's name or number of the picture; or None
    time_s      the frame's time from the first one; or None
    """

    label: str
    box: tuple[float, float, float, float] | None
    point: tuple[float, float] | None
    details: tuple[tuple[str, str], ...] = ()
    image: str | None = None
    time_s: float | None = None


def may_have_marks(text: str) -> bool:
    """A quick check: most answers have no marks, and each is checked 15 times a second."""
    return _BOX in text or _POINT in text


def find_marks(text: str) -> list[Mark]:
    """The marks of an answer in order, even if it is cut off in the middle of an object."""
    marks: list[Mark] = []
    for fields in _objects(text):
        marks += _marks_of(fields)
        if len(marks) >= MAX_MARKS:
            break
    return marks[:MAX_MARKS]


def ground(text: str, path: Sequence[Node], model: str | None = None) -> list[dict[str, Any]]:
    """The marks of an answer, grouped by picture and frame, as JSON values for the page.

    Args:
        path: the messages of the answer's prompt.
        model: name of the model that wrote the answer.
    """
    marks = find_marks(text) if may_have_marks(text) else []
    shown = [(node, [file for file in node.attachments if file.kind != "text"]) for node in path]
    shown = [(node, files) for node, files in shown if files]
    if not marks or not shown:
        return []
    groups: dict[tuple[str, float | None], tuple[Attachment, list[Mark]]] = {}
    for mark in marks:
        file = _meant(mark, [files for _, files in shown])
        time_s = _frame_time(file, mark.time_s) if file.kind == "video" else None
        groups.setdefault((file.digest, time_s), (file, []))[1].append(mark)
    asked = next(node.text for node in reversed(path) if node.role == "user")
    unit = _unit(list(groups.values()), asked, model or "")
    return [
        {
            "digest": digest,
            "kind": file.kind,
            "name": file.name,
            "time_s": time_s,
            "size": list(file.plan.source_size) if file.plan is not None else None,
            "shown_size": list(file.plan.size) if file.plan is not None else None,
            "unit": unit,
            "marks": [
                {"label": mark.label, "box": mark.box, "point": mark.point, "details": mark.details} for mark in found
            ],
        }
        for (digest, time_s), (file, found) in groups.items()
    ]


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects with coordinates, each once; the readable fields of a damaged one."""
    last = end = 0
    for shape in _SHAPE.finditer(text):
        # A limit, so that endlessly nested braces can't block the server. No real object is longer.
        low = max(shape.start() - _MAX_OBJECT_CHARS, 0)
        piece, at = text[low : shape.end() + _MAX_OBJECT_CHARS], shape.start() - low
        found = _object_around(piece, at, shape[1])
        if found is not None:
            start, fields, stop = found
            if low + start >= last:
                yield fields
            last, end = low + start + 1, max(end, low + stop)
            continue
        # From the brace before it, or the end of the last object, to the next brace.
        start = max(piece.rfind("{", 0, at), end - low, 0)
        after = shape.end() - low
        stop = min(
            (brace for brace in (piece.find("{", after), piece.find("}", after)) if brace >= 0), default=len(piece)
        )
        read = {name: words or number for name, words, number in _FIELD.findall(piece[start : stop + 1])}
        with contextlib.suppress(ValueError, RecursionError):
            yield {**read, shape[1]: json.loads(shape[2])}


def _object_around(text: str, at: int, name: str) -> tuple[int, dict[str, Any], int] | None:
    """The innermost complete object with the field at `at`: its start, its fields and its end."""
    start = at
    for _ in range(_MAX_BRACES):
        start = text.rfind("{", 0, start)
        if start < 0:
            return None
        with contextlib.suppress(ValueError, RecursionError):
            fields, stop = _DECODER.raw_decode(text, start)
            if stop > at and isinstance(fields, dict) and name in fields:
                return start, fields, stop
    return None


def _marks_of(fields: dict[str, Any]) -> Iterator[Mark]:
    label = next((str(fields[name]) for name in _LABELS if fields.get(name) not in (None, "")), "")
    known = {_BOX, _POINT, *_LABELS, *_IMAGES, *_TIMES}
    details = tuple(
        (str(name)[:MAX_LABEL_CHARS], str(value)[:MAX_LABEL_CHARS])
        for name, value in fields.items()
        if name not in known and isinstance(value, (str, int, float))
    )[:_MAX_DETAILS]
    image = next((str(fields[name]) for name in _IMAGES if isinstance(fields.get(name), (str, int))), None)
    time_s = next((_seconds(fields[name]) for name in _TIMES if name in fields), None)
    about = (label[:MAX_LABEL_CHARS], details, image, time_s)
    boxes = [shape for name in (_BOX, _POINT) for shape in _shapes(fields.get(name)) if len(shape) == 4]
    points = [shape for name in (_BOX, _POINT) for shape in _shapes(fields.get(name)) if len(shape) == 2]
    for at in range(max(len(boxes), len(points))):
        box = boxes[at] if at < len(boxes) else None
        point = points[at] if at < len(points) else None
        if box is not None:
            box = (min(box[0], box[2]), min(box[1], box[3]), max(box[0], box[2]), max(box[1], box[3]))
        yield Mark(about[0], box, None if point is None else (point[0], point[1]), *about[1:])


def _shapes(value: Any) -> list[list[float]]:
    """The lists of two or four numbers in a value."""
    if not isinstance(value, list):
        return []
    if value and all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in value):
        # JSON numbers may be too large for a float.
        return [value] if len(value) in (2, 4) and all(abs(each) < 1e9 for each in value) else []
    return [shape for each in value if isinstance(each, list) for shape in _shapes(each)]


def _seconds(value: Any) -> float | None:
    """The seconds in 12.5, "12.5", "<12.5 seconds>" or "01:23.5"."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if 0 <= value < 1e9 else None
    found = re.search(r"(?:(\d{1,3}):)?(?:(\d{1,3}):)?(\d{1,9}(?:\.\d+)?)", value) if isinstance(value, str) else None
    if found is None:
        return None
    seconds = 0.0
    for part in filter(None, found.groups()):
        seconds = 60 * seconds + float(part)
    return seconds


def _meant(mark: Mark, shown: Sequence[Sequence[Attachment]]) -> Attachment:
    """The picture or video that a mark refers to; `shown` has the files of each message."""
    everything = [file for files in shown for file in files]
    if mark.image is not None:
        named = [file for file in everything if file.name == mark.image]
        if named:
            return named[-1]
        number = re.search(r"\d{1,4}", mark.image)
        # Counts in the last message with enough pictures, else in all messages.
        for files in (*reversed(shown), everything):
            pictures = [file for file in files if file.kind == "image"]
            if number and 0 < int(number[0]) <= len(pictures):
                return pictures[int(number[0]) - 1]
    wanted = "image" if mark.time_s is None else "video"
    for files in reversed(shown):
        found = [file for file in files if file.kind == wanted]
        if found:
            return found[-1]
        # A mark without a time refers to a video that came after the last picture.
        if mark.time_s is None:
            break
    return shown[-1][-1]


def _frame_time(video: Attachment, time_s: float | None) -> float:
    """The time of the sampled frame nearest to `time_s`."""
    times = (video.plan.frame_times_s if video.plan is not None else None) or (time_s or 0.0,)
    return min(times, key=lambda each: abs(each - (time_s or 0.0)))


def _unit(groups: Sequence[tuple[Attachment, list[Mark]]], asked: str, model: str) -> Unit:
    """The most likely unit of the numbers, by their size, the question and the model."""
    shapes = [
        (file, shape)
        for file, marks in groups
        for mark in marks
        for shape in (mark.box, mark.point)
        if shape is not None
    ]
    numbers = [number for _, shape in shapes for number in shape]
    if max(numbers) <= 1 and not all(number == int(number) for number in numbers):
        return "whole"
    # Larger numbers that fit no picture as pixels are thousandths, too (below): errors of the model.
    if max(numbers) <= 1000:
        says_thousandths = _THOUSANDTHS_ASKED.search(asked) is not None
        says_pixels = _PIXELS_ASKED.search(asked) is not None or _PIXEL_MODELS.search(model) is not None
        return "shown pixel" if says_pixels and not says_thousandths else "thousandth"
    for unit in ("shown pixel", "pixel"):
        if all(_holds(file, shape, unit) for file, shape in shapes):
            return unit
    return "thousandth"


def _holds(file: Attachment, shape: Sequence[float], unit: Unit) -> bool:
    """Whether a shape in pixels lies in the picture, with 2 % tolerance at the edges."""
    if file.plan is None:
        return unit == "pixel"
    height, width = file.plan.size if unit == "shown pixel" else file.plan.source_size
    return max(shape[::2]) <= math.ceil(1.02 * width) and max(shape[1::2]) <= math.ceil(1.02 * height)
