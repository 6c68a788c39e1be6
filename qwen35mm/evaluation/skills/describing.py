"""Captions; the colour, kind, size and place of a shape; what is at a place; the background."""

from __future__ import annotations

import random

from qwen35mm.evaluation.language import a, ask, at, capital, sized
from qwen35mm.evaluation.scenes import COLORS, SHAPES, Item, Picture
from qwen35mm.evaluation.skills.base import Skill, Turn, about_a_picture

CAPTION = (
    "[Could|Can] you tell me what you see in [this|the] [picture|image]?",
    "Write a short description of [this|the] [picture|image].",
    "I would like a list of all [shapes|objects] in [this|the] [picture|image].",
    "Describe what is shown [here|in the image].", "[Can|Could] you list all the [shapes|objects] that you see?",
    "What can you tell me about [this|the] [picture|image]?", "And what do you see in [this|it]?",
    "What do we see here?", "Describe all [objects|things] in [it|this picture].", "In short, what is [in it|this]?",
)  # fmt: skip
COLOR = (
    "[Could|Can] you say [what|which] [color|colour] the {name} has?",
    "[Could|Can] you say the [color|colour] of the {name}?", "Say the [color|colour] of the {name}.",
    "And [what|which] [color|colour] does the {name} have?", "And what is the [color|colour] of the {name}?",
)  # fmt: skip
COLOR_AT = (
    "Tell me the [color|colour] of the [one|object|thing] {place}.",
    "Say [what|which] [color|colour] the [object|thing] {place} is.",
    "[What|Which] [color|colour] has the [one|thing] {place}?",
    "The [shape|thing] {place} has [what|which] [color|colour]?",
)  # fmt: skip
COLOR_IT = (
    "Could you tell me [which|what] [color|colour] it has?", "Tell me [which|what] its [color|colour] is.",
    "And what is its [color|colour]?", "The [color|colour], please?",
)  # fmt: skip
SHAPE = (
    "Tell me what the {color} [object|shape] is.", "[Can|Could] you name the {color} [thing|object]?",
    "And what is the {color} [one|thing]?", "The shape of the {color} [one|thing]?",
)  # fmt: skip
SHAPE_AT = (
    "[What|Which] shape can you see {place}?", "Tell me the shape of the [thing|object] {place}.",
    "And the shape {place}?", "[What|Which] shape has the [one|thing] {place}?",
)  # fmt: skip
SHAPE_IT = (
    "What kind of shape does it have?", "[What|Which] shape is that?", "And what is its shape?", "The shape, please?",
)  # fmt: skip
PLACE = (
    "Tell me [in which part|on which side] the {name} is.", "Where can you see the {name}[ in the picture|]?",
    "[Can|Could] you find the {name}?", "And where do you see the {name}?", "The [place|position] of the {name}?",
    "And in which part is the {name}?",
)  # fmt: skip
PLACE_IT = ("Where can you see it?", "In which part is it?", "And where do you see it?", "Where exactly is it?")
SIZE = (
    "[Can|Could] you tell me [how large|how big] the {name} is?", "Tell me what size the {name} has.",
    "And what size is the {name}?", "The size of the {name}?",
)  # fmt: skip
SIZE_IT = ("And how [big|large] is it?", "And what is its size?", "And what size is it?")
WHAT = (
    "Tell me what can be found {place}.", "{place}, what can you see?", "Tell me what [you see|there is] {place}.",
    "And what do you see {place}?", "Which one is {place}?", "And what can you see {place}?",
)  # fmt: skip
BACKGROUND = (
    "Tell me [what|which] [color|colour] the background is.", "[What|Which] [color|colour] is behind the shape?",
    "And the [color|colour] of the background?", "[What|Which] [color|colour] is it [behind|in the background]?",
)  # fmt: skip
# One of the two named values is right.
EITHER = ("What is the {name}, {first} or {second}?", "Which is the {name}, {first} or {second}?")
EITHER_IT = ("What is it, {first} or {second}?", "Which is it, {first} or {second}?")
SIZE_WORDS = {"small": "small", "": "medium-sized", "big": "big"}


def caption(items: tuple[Item, ...]) -> str:
    """'A big red circle at the top left, a blue star in the center, a green cross on the right.'"""
    return capital(", ".join(f"{a(sized(item))} {at(item.place)}" for item in items)) + "."


def any_name(rng: random.Random, items: tuple[Item, ...], item: Item) -> str:
    """A name that fits this item and no other."""
    found = [item.name]
    if sum(other.shape == item.shape for other in items) == 1:
        found += [item.shape] * 2
    if sum(other.color == item.color for other in items) == 1:
        found += [f"{item.color} {noun}" for noun in ("shape", "one", "thing")]
    return rng.choice(found)


def caption_turn(rng: random.Random, picture: Picture, about: Item | None = None) -> Turn:
    items = picture.items
    return Turn(ask(rng, CAPTION), caption(items), items[0] if len(items) == 1 else None, "phrases")


def color_turn(rng: random.Random, picture: Picture, about: Item | None = None) -> Turn:
    item, by_pronoun = _choose(rng, picture, about)
    either = _two(rng, item.color, tuple(COLORS)) if rng.random() < 0.12 else {}
    if by_pronoun:
        return Turn(ask(rng, EITHER_IT if either else COLOR_IT, **either), f"It is {item.color}.", item)
    if rng.random() < 0.35 or sum(other.shape == item.shape for other in picture.items) > 1:
        return Turn(ask(rng, COLOR_AT, place=at(item.place), spot=item.place), f"It is {item.color}.", item)
    question = ask(rng, EITHER if either else COLOR, name=item.shape, **either)
    return Turn(question, f"The {item.shape} is {item.color}.", item)


def shape_turn(rng: random.Random, picture: Picture, about: Item | None = None) -> Turn:
    item, by_pronoun = _choose(rng, picture, about)
    either = _two(rng, a(item.shape), tuple(map(a, SHAPES))) if rng.random() < 0.12 else {}
    if by_pronoun:
        return Turn(ask(rng, EITHER_IT if either else SHAPE_IT, **either), f"It is a {item.shape}.", item)
    if rng.random() < 0.35 or sum(other.color == item.color for other in picture.items) > 1:
        return Turn(ask(rng, SHAPE_AT, place=at(item.place), spot=item.place), f"It is a {item.shape}.", item)
    name = f"{item.color} {rng.choice(('shape', 'one', 'thing'))}"
    question = ask(rng, EITHER if either else SHAPE, color=item.color, name=name, **either)
    return Turn(question, f"The {item.color} shape is a {item.shape}.", item)


def place_turn(rng: random.Random, picture: Picture, about: Item | None = None) -> Turn:
    item, by_pronoun = _choose(rng, picture, about)
    if by_pronoun:
        return Turn(ask(rng, PLACE_IT), f"It is {at(item.place)}.", item)
    question = ask(rng, PLACE, name=any_name(rng, picture.items, item))
    return Turn(question, f"The {item.name} is {at(item.place)}.", item)


def size_turn(rng: random.Random, picture: Picture, about: Item | None = None) -> Turn:
    item, by_pronoun = _choose(rng, picture, about)
    if by_pronoun:
        return Turn(ask(rng, SIZE_IT), f"It is {SIZE_WORDS[item.size]}.", item)
    question = ask(rng, SIZE, name=any_name(rng, picture.items, item))
    return Turn(question, f"The {item.name} is {SIZE_WORDS[item.size]}.", item)


def what_turn(rng: random.Random, picture: Picture) -> Turn:
    """What is at a place; sometimes nothing."""
    item = rng.choice(picture.items)
    empty = [p for p in ("left", "right", "center", "top", "bottom") if all(i.place != p for i in picture.items)]
    if rng.random() < 0.12 and empty:
        spot = rng.choice(empty)
        return Turn(ask(rng, WHAT, place=at(spot), spot=spot), f"There is nothing {at(spot)}.")
    answer = capital(f"{a(sized(item))} is {at(item.place)}.")
    return Turn(ask(rng, WHAT, place=at(item.place), spot=item.place), answer, item)


def background_turn(rng: random.Random, picture: Picture) -> Turn:
    return Turn(ask(rng, BACKGROUND), f"The background is {picture.background.name}.")


def _two(rng: random.Random, right: str, values: tuple[str, ...]) -> dict[str, str]:
    """The right value and a wrong one, in either order."""
    wrong = rng.choice([value for value in values if value != right])
    first, second = rng.sample((right, wrong), 2)
    return {"first": first, "second": second}


def _choose(rng: random.Random, picture: Picture, about: Item | None) -> tuple[Item, bool]:
    """An item, and whether the question calls it "it": the previous turn's item, or the picture's only one."""
    if about is None and len(picture.items) == 1:
        about = picture.items[0]
    if about is not None and rng.random() < 0.6:
        return about, True
    return rng.choice(picture.items), False


SKILLS = (
    Skill("caption 1-3", about_a_picture(caption_turn, 3)),
    Skill("caption 4-6", about_a_picture(caption_turn, 6, 4)),
    Skill("color", about_a_picture(color_turn)),
    Skill("shape", about_a_picture(shape_turn)),
    Skill("place", about_a_picture(place_turn)),
    Skill("size", about_a_picture(size_turn)),
    Skill("what", about_a_picture(what_turn)),
    Skill("background", about_a_picture(background_turn)),
)
