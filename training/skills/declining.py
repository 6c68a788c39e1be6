"""Honest at the edges: on photographs and noise nothing can be told, and questions beyond the world aren't answered.

As often, the same questions are asked of scenes inside the world, where they have answers.
"""

from __future__ import annotations

import random

from training import scenes
from training.language import ask, at, plural
from training.scenes import ALL_PLACES, COLORS, SHAPES, Item, Picture, Split, Unknown
from training.skills.asking import COUNT, THERE
from training.skills.base import Sample, Skill, Turn, conversation, image, picture_for
from training.skills.chat import CANT_TELL, off_topic_turn
from training.skills.describing import CAPTION, COLOR, PLACE, WHAT
from training.skills.reading import READ
from training.skills.structured import AS_JSON

# Of photographs; of which nothing can be told.
PHOTO = (
    "Who [are these people|is in it|is the person]?",
    "What is the [man|woman|child|person] [doing|holding|wearing]?",
    "In which [country|town] was [this|it] taken?",
    "Is it [day or night|summer or winter|inside or outside]?",
    "What [building|place|city|food|car|plant|breed|bird] is [this|that|shown]?",
    "How old is [the man|the woman|this person|this picture]?",
    "[Which|What] [animals|plants|cars|people|faces] do you see?",
    "[Is this|Is that] a [real |]photo[graph|]?",
    "How many [animals|cars|faces|trees] are there?",
    "What is the [mood|season|weather] in this [photo|picture]?",
    "Is there a [person|face|dog|cat|tree|car] in it?",
    "[What|Which] objects are on the [table|wall|floor]?",
    "How many [people|trees] do you see in this [photo|picture]?",
    "What is the name of [the place|this plant|the person]?",
    "Which [season|city] is [shown|it]?",
)


def random_unknown(rng: random.Random, split: Split) -> Unknown:
    """A photograph or noise; outside "train" of photographs that training never showed."""
    seed = rng.randrange(2**31) + (2**31 if split == "combos" else 0)
    return Unknown(*scenes.random_size(rng), rng.choice(("photo", "photo", "photo", "noise")), seed)


def unknown_turn(rng: random.Random, split: Split) -> Turn:
    """Any question about a picture of nothing that is known."""
    shape, color = rng.choice(SHAPES), rng.choice(tuple(COLORS))
    templates, slots = rng.choice((
        (CAPTION, {}), (CAPTION, {}), (CAPTION, {}), (COUNT, {}), (READ, {}), (PHOTO, {}), (PHOTO, {}), (AS_JSON, {}),
        (COLOR, {"name": shape}), (PLACE, {"name": rng.choice((shape, f"{color} {shape}"))}),
        (WHAT, {"place": at(rng.choice(ALL_PLACES))}), (THERE, {"noun": f"a {shape}", "nouns": plural(shape)}),
    ))  # fmt: skip
    return Turn("unknown picture", ask(rng, templates, split, **slots), CANT_TELL)


def beyond_turn(rng: random.Random, picture: Picture, split: Split, about: Item | None = None) -> Turn:
    """A question that a picture of shapes doesn't answer."""
    turn = off_topic_turn(rng, split)
    return Turn("beyond", turn.question, CANT_TELL)


def _unknown_sample(rng: random.Random, split: Split) -> Sample:
    return conversation(rng, [unknown_turn(rng, split)], [image(random_unknown(rng, split))])


def _beyond_sample(rng: random.Random, split: Split) -> Sample:
    picture = picture_for(rng, split, 3)
    return conversation(rng, [beyond_turn(rng, picture, split)], [image(picture)])


TURNS = {"beyond": beyond_turn}
SKILLS = (Skill("unknown picture", _unknown_sample, 95), Skill("beyond", _beyond_sample, 95))
