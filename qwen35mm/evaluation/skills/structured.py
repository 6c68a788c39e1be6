"""Answers for programs: boxes and points in thousandths, in Qwen's form, JSON, and the text of signs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace

from qwen35mm.evaluation import scenes, words
from qwen35mm.evaluation.drawing import NUM_ALL_FONTS, NUM_FONTS, item_box
from qwen35mm.evaluation.language import ask, plural
from qwen35mm.evaluation.scenes import Item, Picture, Split
from qwen35mm.evaluation.skills.base import Sample, Skill, Turn, about_a_picture, conversation, image
from qwen35mm.evaluation.skills.describing import any_name

BOX = (
    "I need the [bounding box|bbox] of the {name}.", "[Show|Output] a bounding box around the {name}.",
    "And the box of the {name}?", "Box the {name}, please.",
)  # fmt: skip
BOXES = (
    "Locate every {noun} with a [box|bounding box].", "Boxes around all {nouns}, please.", "Boxes for every {noun}.",
)  # fmt: skip
POINT = (
    "Mark the center of the {name}[ with a point|].", "Tap the center of the {name}.",
    "The point of the {name}, please.",
)  # fmt: skip
AS_JSON = (
    "Give me a JSON list of all shapes with color, shape and place.", "The shapes as JSON, please.",
    "I need it all in JSON.",
)  # fmt: skip
ONE_AS_JSON = ("Give the {name} in JSON: color, shape and place.", "The {name} as JSON, please.")
READ = (
    "Tell me what you can read.", "[Can|Could] you [transcribe|spell out] [it|the word]?",
    "What [word|text] is written [there|on the sign]?", "And what does it say?", "The sign reads what?",
    "Read out what you see.",
)  # fmt: skip
TEXT_COLOR = (
    "In [what|which] [color|colour] are the letters written?", "And [what|which] [color|colour] is the text?",
    "The [color|colour] of the [letters|word]?",
)  # fmt: skip


def box_turn(rng: random.Random, picture: Picture) -> Turn:
    items = picture.items
    if len(items) > 1 and rng.random() < 0.25:
        shapes = sorted({i.shape for i in items})
        few = rng.choice([s for s in shapes if sum(i.shape == s for i in items) < 4] or ["shape"])
        found = [i for i in items if few in ("shape", i.shape)]
        if len(found) < 4:
            return Turn(ask(rng, BOXES, noun=few, nouns=plural(few)), _boxes(found, picture), grade="box")
    item = rng.choice(items)
    question = ask(rng, BOX, name=any_name(rng, items, item))
    return Turn(question, _boxes([item], picture), item, "box")


def point_turn(rng: random.Random, picture: Picture) -> Turn:
    """The right answer is the box that must contain the point."""
    item = rng.choice(picture.items)
    question = ask(rng, POINT, name=any_name(rng, picture.items, item))
    return Turn(question, _boxes([item], picture), item, "point")


def json_turn(rng: random.Random, picture: Picture) -> Turn:
    items = picture.items
    if len(items) > 3 or rng.random() < 0.4:
        item = rng.choice(items)
        question = ask(rng, ONE_AS_JSON, name=any_name(rng, items, item))
        return Turn(question, json.dumps(_as_json(item)), item, "same_json")
    return Turn(ask(rng, AS_JSON), json.dumps([_as_json(i) for i in items]), grade="same_json")


def random_sign(rng: random.Random, split: Split, most: int = words.MOST_LETTERS, lines: int | None = None) -> Picture:
    """A sign of one to three words of up to `most` letters; "combos" uses fonts that training never used."""
    texts = words.random_words(rng, most)[:lines]
    sign = scenes.random_sign(rng, scenes.random_size(rng), texts, NUM_FONTS)
    if split == "combos":
        font = rng.randrange(NUM_FONTS, NUM_ALL_FONTS)
        return replace(sign, words=tuple(replace(word, font=font) for word in sign.words))
    return sign


def _as_json(item: Item) -> dict[str, str]:
    return {"color": item.color, "shape": item.shape, "place": item.place}


def _boxes(items: list[Item], picture: Picture) -> str:
    size = picture.width, picture.height
    boxes = [{"bbox_2d": [round(1000 * edge) for edge in item_box(i, size)], "label": i.name} for i in items]
    return json.dumps(boxes)


def _reading(most: int, lines: int | None = None) -> Callable[[random.Random, Split], Sample]:
    def sample(rng: random.Random, split: Split) -> Sample:
        sign = random_sign(rng, split, most, lines)
        said = ", ".join(f'"{word.text}"' for word in sign.words)
        return conversation(rng, [Turn(ask(rng, READ), f"It says {said}.", grade="letters")], [image(sign)])

    return sample


def _text_color_sample(rng: random.Random, split: Split) -> Sample:
    sign = random_sign(rng, split, lines=1)
    return conversation(rng, [Turn(ask(rng, TEXT_COLOR), f"It is {sign.words[0].color}.")], [image(sign)])


SKILLS = (
    Skill("box", about_a_picture(box_turn, 4), 92),
    Skill("point", about_a_picture(point_turn, 4), 92),
    Skill("json", about_a_picture(json_turn, 4), 95),
    Skill("reading up to 5", _reading(5, 1), 92),
    Skill("reading up to 8", _reading(8), 92),
    Skill("text color", _text_color_sample),
)
