"""Honest at the edges: on photographs and noise nothing can be told, and questions beyond the world aren't answered.

As often, the same questions are asked of scenes inside the world, where they have answers.
"""

from __future__ import annotations

import random

from qwen35mm.evaluation import scenes
from qwen35mm.evaluation.language import a, ask, at, plural
from qwen35mm.evaluation.scenes import ALL_PLACES, COLORS, SHAPES, Item, Picture, Split, Unknown
from qwen35mm.evaluation.skills.asking import COUNT, COUNT_OF, THERE
from qwen35mm.evaluation.skills.base import Sample, Skill, Turn, conversation, image, picture_for
from qwen35mm.evaluation.skills.chat import CANT_TELL, off_topic_turn
from qwen35mm.evaluation.skills.describing import CAPTION, COLOR, COLOR_IT, PLACE, SHAPE, SHAPE_AT, SIZE, WHAT
from qwen35mm.evaluation.skills.reading import READ
from qwen35mm.evaluation.skills.structured import AS_JSON

# Of photographs; of which nothing can be told.
PHOTO = (
    "Who is [this|it|he|she]?", "Who are they?",
    "[What|Which] [animal|dog|bird|plant|car|food|fruit] is [that|this|it]?",
    "How many [animals|faces|cars|trees]?",
    "How many [people|men|women|children] are [there|in it|in this picture|here]?",
    "[Any|Are there any] [people|animals|cars|trees|faces|kids|buildings] [here|in it|]?",
    "Is [this|that|it] a [man|woman|dog|cat|cow|house|beach|city]?",
    "Is there [a|any] [person|dog|cat|tree|car|house|sky] [here|]?",
    "What [building|city|country|room|street|mountain] is [this|that|it]?", "Where is [this|that]?",
    "[Animal|Breed|City|Country|Season]?", "What are they [doing|eating|wearing|looking at]?",
    "What is [he|she] [doing|holding|wearing|looking at]?",
    "What is the [man|woman|child|person|dog] [doing|holding|wearing|looking at]?",
    "[Do you know|You know] [this person|this place|these people]?", "Is [he|she] [happy|sad|old|young]?",
    "What time of [day|year] is it?", "Is it [raining|sunny|snowing|dark|cold] there?",
    "Who [took|made|painted] [this|it|that]?", "What is in the [background|foreground|back|front]?",
    "What [brand|make|kind of car] is it?", "[Is this|Is that] [real|AI|a painting|a selfie|edited]?",
    "[Name|Identify|Recognize] the [person|animal|plant|place|building].",
    "[Read|What is on] the [poster|license plate|label]?", "How is the weather here?",
    "Who [are these people|is in it|is the person]?", "What is the [man|woman|child|person] [doing|holding|wearing]?",
    "In which [country|town] was [this|it] taken?", "Is it [day or night|summer or winter|inside or outside]?",
    "What [building|place|city|food|car|plant|breed|bird] is [this|that|shown]?",
    "How old is [the man|the woman|this person|this picture]?",
    "[Which|What] [animals|plants|cars|people|faces] do you see?", "[Is this|Is that] a [real |]photo[graph|]?",
    "How many [animals|cars|faces|trees] are there?", "What is the [mood|season|weather] in this [photo|picture]?",
    "Is there a [person|face|dog|cat|tree|car] in it?", "[What|Which] objects are on the [table|wall|floor]?",
    "How many [people|trees] do you see in this [photo|picture]?",
    "What is the name of [the place|this plant|the person]?", "Which [season|city] is [shown|it]?",
    "Which animal do you see?", "How many people can you count in it?", "Is this person [young|old]?",
    "What is this animal doing?", "What is that person looking at?", "Do you know which place this is?",
)  # fmt: skip


def random_unknown(rng: random.Random, split: Split) -> Unknown:
    """A photograph, noise, or in training a page; outside "train" of photographs that training never showed."""
    seed = rng.randrange(2**31) + (2**31 if split == "combos" else 0)
    kinds = ("photo", "photo", "photo", "noise", *(("page",) if split == "train" else ()))
    return Unknown(*scenes.random_size(rng), rng.choice(kinds), seed)


def unknown_turn(rng: random.Random, split: Split) -> Turn:
    """Any question about a picture of nothing that is known."""
    shape, color, spot = rng.choice(SHAPES), rng.choice(tuple(COLORS)), rng.choice(ALL_PLACES)
    thing = rng.choice((shape, f"{color} {shape}", f"{color} one"))
    slots = {"name": thing, "color": color, "place": at(spot), "spot": spot, "noun": a(thing), "nouns": plural(thing)}
    templates = rng.choice((
        *((CAPTION, PHOTO) * 4), COUNT, COUNT_OF, READ,
        AS_JSON, COLOR, COLOR_IT, SHAPE, SHAPE_AT, SIZE, PLACE, WHAT, THERE,
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
