"""Answers for programs: boxes and points (0 to 1,000, as the family gives them), and JSON of what is in a picture."""

from __future__ import annotations

import json
import random

from qwen35mm.evaluation.drawing import item_box
from qwen35mm.evaluation.language import ask, plural
from qwen35mm.evaluation.scenes import Item, Picture, Split
from qwen35mm.evaluation.skills.base import Sample, Skill, Turn, conversation, image, picture_for
from qwen35mm.evaluation.skills.describing import any_name

BOX = (
    "{name} [bbox|bounding box].", "[Bbox|Bounding box] of the {name}.", "Box [for|around] the {name}.",
    "Coordinates of the {name}?", "{name}, bounding box?", "Bbox, {name}.", "The {name} as a box.",
    "[Bbox|Bounding box] for the {name}[, please|]?",
    "[Find|Locate|Detect] the {name} [and give|and return|: give] its [bounding box|box].",
    "[Give|Show|Return] the [bounding box|box|bbox] of the {name}.",
    "[Locate|Find] the {name} [with a box|, output its bbox coordinates|as a bounding box in JSON].",
    "What is the [bounding box|box] of the {name}?",
    "Where [exactly |]is the {name}? [Answer|Reply] with a [box|bounding box].",
    "[Draw|Put] a box around the {name}.",
    "Box the {name}.",
    "I [need|want] the box [coordinates |]of the {name}.",
    "[Output|Return] the [coordinates|bbox coordinates] of the {name}.",
    "Give me [a|the] box around the {name}.",
    "I need the [bounding box|bbox] of the {name}.",
    "[Show|Output] a bounding box around the {name}.",
    "And the box of the {name}?", "Box the {name}, please.",
)  # fmt: skip
BOXES = (
    "All {nouns} as boxes.", "Boxes of all {nouns}[, please|].", "[Bboxes|Bounding boxes] of all {nouns}.",
    "Boxes around the {nouns}.", "Box all {nouns}.", "Box every {noun}.", "All {nouns}, bounding boxes?",
    "[Find|Locate|Detect] all {nouns} [and give their boxes|with boxes|and return their bounding boxes].",
    "[Give|Return] the [bounding boxes|boxes] of all {nouns}.",
    "Detect [every {noun}|all {nouns}] and [output|report] the bbox coordinates in JSON.",
    "Boxes of all {nouns}, please.",
    "I want a box around every {noun}.",
    "[Draw|Put] [boxes|bounding boxes] around all {nouns}.",
    "Find every {noun} and give its box.",
    "I want the boxes of all {nouns}.",
    "Locate every {noun} with a [box|bounding box].",
    "Boxes around all {nouns}, please.", "Boxes for every {noun}.",
)  # fmt: skip
POINT = (
    "Click the {name}.", "[Click on|Tap|Tap on] the {name}.", "{name} point.", "Point, {name}.",
    "Center of the {name}?", "Center point of the {name}?", "The {name} as a point.", "Mark the {name}.",
    "[Point to|Point at] the {name}.",
    "Give the [point|center point|coordinates of the center] of the {name}.",
    "[Where|At which point] is the {name}? [Answer|Reply] with a point.",
    "Click on the {name}.",
    "Mark the {name} with a point.",
    "Where is the center of the {name}? Give a point.",
    "[Put|Set] a point on the {name}.",
    "What is the [point|center point] of the {name}?",
    "Mark the center of the {name}[ with a point|].",
    "Tap the center of the {name}.", "The point of the {name}, please.",
)  # fmt: skip
AS_JSON = (
    "JSON.", "JSON, please.", "As JSON.", "In JSON.", "Shapes as JSON.", "All [shapes |]as JSON.",
    "JSON of [it|it all|the shapes].", "[I need|Give me] [the |]JSON[ of the shapes|].",
    "[Describe|List] [the shapes|the picture|all shapes] [as|in] JSON with color, shape and place.",
    "[Give|Return] [me |]JSON: [every|each] shape with color, shape and place.",
    "[Answer|Reply] in JSON. [Which|What] shapes are there? Use color, shape and place.",
    "Output a JSON list with the color, shape and place of [every|each] shape.",
    "As JSON, with the keys color, shape and place: what is in the picture?",
    "JSON with color, shape and place of all shapes[, please|].",
    "[Return|Output] the shapes as JSON[ with color, shape and place|, keys color, shape, place].",
    "What is in the picture? [Reply|Answer] in JSON with color, shape and place.",
    "Give me a JSON list of all shapes with color, shape and place.",
    "The shapes as JSON, please.", "I need it all in JSON.",
)  # fmt: skip
ONE_AS_JSON = (
    "{name} as JSON.", "JSON of the {name}.", "The {name} in JSON.", "JSON, just the {name}.",
    "JSON for the {name}[, please|].", "I need the {name} as JSON.",
    "[Describe|Give] the {name} as JSON with color, shape and place.",
    "JSON with color, shape and place of the {name}[, please|].",
    "[Answer|Reply] in JSON with color, shape and place: what is the {name}?",
    "Put color, shape and place of the {name} into JSON.",
    "[Return|Output] color, shape and place of the {name} as JSON.",
    "The {name} as JSON[, please|]: color, shape and place.",
    "Give the {name} in JSON: color, shape and place.",
    "The {name} as JSON, please.",
)  # fmt: skip


def thousandths(item: Item, picture: Picture) -> list[int]:
    """The box around an item, [left, top, right, bottom] in thousandths."""
    return [round(1000 * edge) for edge in item_box(item, (picture.width, picture.height))]


def as_json(item: Item) -> dict[str, str]:
    return {"color": item.color, "shape": item.shape, "place": item.place}


def box_turn(rng: random.Random, picture: Picture, split: Split, about: Item | None = None) -> Turn:
    items = picture.items
    if len(items) > 1 and rng.random() < 0.25:
        shapes = sorted({i.shape for i in items})  # a set's own order is another one in each process
        few = rng.choice([s for s in shapes if sum(i.shape == s for i in items) < 4] or ["shape"])
        found = [i for i in items if few in ("shape", i.shape)]
        if len(found) < 4:
            return Turn("box", ask(rng, BOXES, split, noun=few, nouns=plural(few)), _boxes(found, picture), grade="box")
    item = rng.choice(items)
    question = ask(rng, BOX, split, name=any_name(rng, items, item))
    return Turn("box", question, _boxes([item], picture), item, "box")


def point_turn(rng: random.Random, picture: Picture, split: Split, about: Item | None = None) -> Turn:
    item = rng.choice(picture.items)
    point = [round(1000 * item.x), round(1000 * item.y)]
    answer = json.dumps([{"point_2d": point, "label": item.name}])
    return Turn("point", ask(rng, POINT, split, name=any_name(rng, picture.items, item)), answer, item, "point")


def json_turn(rng: random.Random, picture: Picture, split: Split, about: Item | None = None) -> Turn:
    items = picture.items
    if len(items) > 3 or rng.random() < 0.4:
        item = rng.choice(items)
        question = ask(rng, ONE_AS_JSON, split, name=any_name(rng, items, item))
        return Turn("json", question, json.dumps(as_json(item)), item, "same_json")
    return Turn("json", ask(rng, AS_JSON, split), json.dumps([as_json(i) for i in items]), grade="same_json")


def _boxes(items: list[Item], picture: Picture) -> str:
    return json.dumps([{"bbox_2d": thousandths(item, picture), "label": item.name} for item in items])


def _sample(turn):
    def sample(rng: random.Random, split: Split) -> Sample:
        picture = picture_for(rng, split, 4)
        return conversation(rng, [turn(rng, picture, split)], [image(picture)])

    return sample


def _point_sample(rng: random.Random, split: Split) -> Sample:
    """The right answer has the box that the point must lie in."""
    picture = picture_for(rng, split, 4)
    turn = point_turn(rng, picture, split)
    assert turn.about is not None
    right = Turn(turn.skill, turn.question, _boxes([turn.about], picture), turn.about, turn.grade)
    return conversation(rng, [right], [image(picture)])


TURNS = {"box": box_turn, "point": point_turn, "json": json_turn}
SKILLS = (
    Skill("box", _sample(box_turn), 92),
    Skill("point", _point_sample, 92),
    Skill("json", _sample(json_turn), 95),
)
