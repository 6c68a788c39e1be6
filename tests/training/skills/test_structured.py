"""Boxes are those of the drawn pixels, points lie on their shapes, and JSON says what is there."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from qwen35mm.evaluation.drawing import render_picture
from qwen35mm.evaluation.scenes import Background, Item, Picture
from qwen35mm.evaluation.skills import SKILLS, structured
from qwen35mm.evaluation.skills.base import picture_for
from qwen35mm.evaluation.skills.graders import GRADERS
from tests.training.claims import named, place_of, the_one

pytestmark = pytest.mark.usefixtures("plainly")


def drawn_box(picture: Picture, item: Item) -> list[float]:
    """In thousandths, of the pixels that differ where the shape is drawn alone."""
    ground = Background("white", (255, 255, 255), (255, 255, 255), "plain", 0.0, 0)
    alone = replace(picture, background=ground, items=(replace(item, rgb=(0, 0, 0)),), jpeg=None)
    rows, columns = np.nonzero(np.asarray(render_picture(alone)).min(-1) < 128)
    height, width = picture.height / 1000, picture.width / 1000
    return [columns.min() / width, rows.min() / height, (columns.max() + 1) / width, (rows.max() + 1) / height]


def test_boxes_are_those_of_the_pixels() -> None:
    rng = random.Random(0)
    several = 0
    for _ in range(200):
        picture = picture_for(rng, "train", 5)
        turn = structured.box_turn(rng, picture, "train")
        found = json.loads(turn.answer)
        labels = [each["label"] for each in found]
        if turn.about is None:
            noun = next(
                n for n in ("circle", "square", "triangle", "star", "diamond", "cross", "") if n in turn.question
            )
            wanted = [item.name for item in picture.items if noun in item.shape]
            several += len(wanted) > 1
        else:
            wanted = [the_one(picture.items, turn.question.replace("of the center", "")).name]
        assert labels == wanted
        for each in found:
            item = the_one(picture.items, each["label"])
            # A pixel more or less, and the edges' halves of one.
            slack = 2000 / min(picture.width, picture.height)
            assert each["bbox_2d"] == pytest.approx(drawn_box(picture, item), abs=slack)
    assert several > 5


def test_points_lie_on_their_shapes() -> None:
    rng = random.Random(0)
    for _ in range(60):
        picture = picture_for(rng, "train", 4)
        turn = structured.point_turn(rng, picture, "train")
        ((x, y), label) = json.loads(turn.answer)[0].values()
        assert the_one(picture.items, turn.question.replace("point", "").replace("center", "")).name == label
        pixels = np.asarray(render_picture(replace(picture, jpeg=None)))
        at = pixels[
            min(picture.height - 1, y * picture.height // 1000), min(picture.width - 1, x * picture.width // 1000)
        ]
        assert tuple(at) == the_one(picture.items, label).rgb
        assert GRADERS["point"](turn.answer, structured._boxes([the_one(picture.items, label)], picture))


def test_json_says_what_is_there() -> None:
    rng = random.Random(0)
    lists = 0
    for _ in range(100):
        picture = picture_for(rng, "train", 5)
        turn = structured.json_turn(rng, picture, "train")
        found = json.loads(turn.answer)
        lists += isinstance(found, list)
        wanted = (
            picture.items if isinstance(found, list) else named(picture.items, turn.question.split("color, shape")[0])
        )
        if not isinstance(found, list) and len(wanted or ()) != 1:
            wanted = [the_one(picture.items, turn.question.split("place", 1)[1].replace(" into", ""))]
        told = found if isinstance(found, list) else [found]
        assert told == [{"color": i.color, "shape": i.shape, "place": place_of(i)} for i in wanted or ()]
    assert 10 < lists < 90


def test_the_evaluation_asks_for_a_point_and_knows_the_box() -> None:
    sample = SKILLS["point"].sample(random.Random(0), "seen")
    (box,) = json.loads(sample.messages[-1]["content"])
    assert set(box) == {"bbox_2d", "label"}
    assert sample.grade == "point"
