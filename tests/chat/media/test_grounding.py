"""Boxes and points in answers: read, however they are written or cut off, and laid on the right picture."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from qwen35mm.chat.media.grounding import MAX_MARKS, Mark, find_marks, ground
from qwen35mm.chat.store.records import Attachment, Node
from tests.chat.helpers import IMAGE_PLAN, VIDEO_PLAN, node, reply

CAT = {"bbox_2d": [10, 20, 300, 400], "label": "cat"}
DOG = {"point_2d": [500, 600], "label": "dog"}
FOUND = [Mark("cat", (10, 20, 300, 400), None), Mark("dog", None, (500, 600))]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([CAT, DOG]),
        f"Here:\n```json\n{json.dumps([CAT, DOG], indent=2)}\n```\nThat is all.",
        f"{json.dumps(CAT)}\n{json.dumps(DOG)}",
        f"A cat {json.dumps(CAT)} and a dog {json.dumps(DOG)}.",
        json.dumps({"objects": [CAT], "others": {"more": [DOG]}}),
        str([CAT, DOG]),
        json.dumps([CAT, DOG])[:-1] + ",",
        json.dumps([{"label": "cat", "bbox_2d": [300, 400, 10, 20]}, DOG]),
        # Cut off in the middle of the next one, whose numbers aren't all there.
        json.dumps([CAT, DOG, CAT])[: json.dumps([CAT, DOG, CAT]).rindex("300") + 3],
    ],
    ids=["list", "fence", "lines", "prose", "nested", "Python", "trailing comma", "other order", "cut off"],
)
def test_every_way_of_writing_is_read(text: str) -> None:
    assert find_marks(text) == FOUND


@pytest.mark.parametrize("label", ["cat", 'a "cat"', "{cat} [1, 2]", "a\\b", "猫"])
def test_what_grows_only_gains_marks(label: str) -> None:
    """While it is written, each mark stays where it is, and its label grows."""
    text = json.dumps([{"bbox_2d": [10, 20, 300, 400], "label": label, "sure": True}, DOG], ensure_ascii=False)
    before: list[Mark] = []
    for length in range(len(text) + 1):
        marks = find_marks(text[:length])
        assert len(marks) >= len(before), text[:length]
        assert [mark.box for mark in marks[: len(before)]] == [mark.box for mark in before]
        before = marks
    assert [mark.label for mark in before] == [label, "dog"]


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        '{"bbox_2d": [1, 2, 3]}',
        '{"bbox_2d": "1, 2, 3, 4"}',
        '{"bbox_2d": [1, 2, 3, 1e400]}',
        '{"bbox_2d": [1, 2, true, 4]}',
        '{"bbox_2d": [[[]]]}',
        '{"bbox_2d": [1, 2, 3, ',
        '{"bbox_2d": ' + "[" * 5000 + "]" * 5000,
        '{"a":' * 5000,
    ],
)
def test_what_is_no_shape_is_none(text: str) -> None:
    assert find_marks(text) == []


def test_several_shapes_details_and_a_limit() -> None:
    many = {"point_2d": [[1, 2], [3, 4]], "label": "dot", "role": "goal", "sure": 0.5, "nested": {"x": 1}}
    assert find_marks(json.dumps(many)) == [
        Mark("dot", None, point, (("role", "goal"), ("sure", "0.5"))) for point in ((1, 2), (3, 4))
    ]
    assert len(find_marks(json.dumps([CAT] * (MAX_MARKS + 1)))) == MAX_MARKS
    (mark,) = find_marks(json.dumps({"bbox_2d": [1, 2, 3, 4], "text_content": "Exit"}))
    assert mark.label == "Exit"


@pytest.mark.parametrize(
    ("time", "seconds"),
    [(1.5, 1.5), ("1.5", 1.5), ("<1.5 seconds>", 1.5), ("01:01.5", 61.5), ("1:00:01", 3601), (-1, None), ("", None)],
)
def test_times(time: Any, seconds: float | None) -> None:
    (mark,) = find_marks(json.dumps({**CAT, "time": time}))
    assert mark.time_s == seconds


def picture(name: str) -> Attachment:
    return Attachment(name[0] * 64, "image", name, 7, IMAGE_PLAN)


FIRST, SECOND = picture("a.png"), picture("b.png")
VIDEO = Attachment("c" * 64, "video", "c.mp4", 7, VIDEO_PLAN)


def asked(*messages: tuple[Attachment, ...], text: str = "Where?") -> list[Node]:
    """Questions with files and their answers, the last one without."""
    path: list[Node] = []
    for files in messages:
        path.append(node(path[-1].id if path else None, text, attachments=files))
        path.append(reply(path[-1].id, "Hm."))
    return path[:-1]


@pytest.mark.parametrize(
    ("messages", "values", "name"),
    [
        ([(FIRST,), (SECOND,), ()], {}, "b.png"),
        ([(FIRST, SECOND)], {"image": 1}, "a.png"),
        ([(FIRST, SECOND)], {"image": "Picture 2"}, "b.png"),
        ([(FIRST, SECOND)], {"image": "a.png"}, "a.png"),
        ([(FIRST,), (SECOND,)], {"image": 1}, "b.png"),
        ([(FIRST,), (SECOND,)], {"image": 2}, "b.png"),
        ([(FIRST, SECOND)], {"image": 9}, "b.png"),
        ([(VIDEO, FIRST)], {}, "a.png"),
        ([(FIRST,), (VIDEO,)], {}, "c.mp4"),
        ([(VIDEO,), (FIRST,)], {"time": 1}, "c.mp4"),
        ([(FIRST,)], {"time": 1}, "a.png"),
    ],
)
def test_the_picture_that_is_meant(messages: list[tuple[Attachment, ...]], values: Any, name: str) -> None:
    (group,) = ground(json.dumps({**CAT, **values}), asked(*messages))
    assert group["name"] == name


def test_a_video_has_the_frames_that_were_shown() -> None:
    times = VIDEO_PLAN.frame_times_s
    assert times is not None
    found = ground(json.dumps([{**CAT, "time": times[1] + 0.01}, {**DOG, "timestamp": "00:00"}]), asked((VIDEO,)))
    assert [(group["time_s"], group["marks"][0]["label"]) for group in found] == [(times[1], "cat"), (times[0], "dog")]
    assert found[0]["size"] == list(VIDEO_PLAN.source_size)
    assert ground(json.dumps(CAT), asked((Attachment("d" * 64, "text", "d.txt", 7),))) == []


LARGE = replace(FIRST, plan=replace(IMAGE_PLAN, source_size=(3000, 4000)))


@pytest.mark.parametrize(
    ("box", "file", "question", "model", "unit"),
    [
        ([0, 0, 1000, 1000], FIRST, "Where?", None, "thousandth"),
        ([0, 0, 90, 60], FIRST, "Where?", None, "thousandth"),
        ([0, 0, 90, 60], FIRST, "Where? In absolute pixel coordinates.", None, "shown pixel"),
        ([0, 0, 90, 60], FIRST, "Where? From 0 to 1000, not in pixels.", None, "thousandth"),
        ([0, 0, 90, 60], FIRST, "Where?", "Qwen2.5-VL-3B-Instruct", "shown pixel"),
        ([0, 0, 1, 1], FIRST, "Where?", None, "thousandth"),
        ([0.1, 0, 1, 1], FIRST, "Where?", None, "whole"),
        ([0, 0, 3900, 2900], LARGE, "Where?", None, "pixel"),
        ([0, 0, 1004, 900], LARGE, "Where?", None, "pixel"),
        ([0, 0, 1004, 900], FIRST, "Where?", None, "thousandth"),
    ],
)
def test_what_the_numbers_count(
    box: list[float], file: Attachment, question: str, model: str | None, unit: str
) -> None:
    (group,) = ground(json.dumps({"bbox_2d": box}), asked((file,), text=question), model)
    assert group["unit"] == unit
    shown = replace(LARGE, plan=replace(IMAGE_PLAN, source_size=(3000, 4000), size=(1504, 2016)))
    (group,) = ground(json.dumps({"bbox_2d": [0, 0, 2000, 1500]}), asked((shown,)))
    assert group["unit"] == "shown pixel"
