"""Two to four pictures in one prompt: which one shows a shape, what one of them shows, and what differs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from qwen35mm.evaluation import scenes
from qwen35mm.evaluation.language import a, ask
from qwen35mm.evaluation.scenes import COLORS, Item, Picture, Split
from qwen35mm.evaluation.skills.base import Sample, Skill, Turn, conversation, image
from qwen35mm.evaluation.skills.describing import caption

ORDINALS = ("first", "second", "third", "fourth")
WHICH = (
    "Which of [them|the images] contains {noun}?", "Tell me in which [picture|image] you see {noun}.",
    "And in which [one|picture] is {noun}?", "{noun} is in which of [them|the pictures]?",
)  # fmt: skip
NTH = (
    "[Can|Could] you describe the {nth} [picture|image|one]?", "Tell me what the {nth} [picture|image] shows.",
    "And what is in the {nth} [one|picture]?", "What about the {nth} [picture|image]?",
)  # fmt: skip
DIFFERS = (
    "Tell me what [changed|has changed].", "What is different between [the pictures|them]?", "And what changed?",
    "How is the second one different?",
)  # fmt: skip
SAME = ("Do the two pictures show the same?", "And are they the same?", "They are identical, right?")
DO_DIFFER = ("Do you see any differences between them?", "And do they differ?", "Did anything change between them?")


def some_pictures(rng: random.Random, split: Split) -> list[Picture]:
    """Two to four small pictures of one or two shapes."""
    return [
        scenes.random_picture(rng, scenes.random_size(rng, largest=260), rng.choice((1, 1, 2)), split)
        for _ in range(rng.randint(2, 4))
    ]


def pictures_turn(rng: random.Random, pictures: list[Picture]) -> tuple[str, Turn]:
    """A skill and its question: which picture shows a shape, or what one of them shows."""
    if rng.random() < 0.55:
        for _ in range(20):
            index = rng.randrange(len(pictures))
            item = rng.choice(pictures[index].items)
            noun = rng.choice((item.name, item.shape, f"{item.color} shape"))
            if sum(any(_is(other, noun) for other in p.items) for p in pictures) == 1:
                return "which picture", Turn(ask(rng, WHICH, noun=a(noun)), f"The {ORDINALS[index]} picture.")
    index = rng.randrange(len(pictures))
    nth = ORDINALS[index] if index < len(pictures) - 1 or rng.random() < 0.6 else "last"
    return "nth picture", Turn(ask(rng, NTH, nth=nth), caption(pictures[index].items), grade="phrases")


def _is(item: Item, noun: str) -> bool:
    return noun in (item.name, item.shape, f"{item.color} shape")


def differing(rng: random.Random, split: Split) -> tuple[list[Picture], str]:
    """Two pictures, equal or with one difference, and the sentence that says so."""
    while True:
        size = scenes.random_size(rng, largest=300)
        first = scenes.random_picture(rng, size, rng.randint(1, 3), split, unique=True)
        item = rng.choice(first.items)
        kind = rng.choice(("color", "shape", "missing", "same"))
        others = tuple(i for i in first.items if i is not item)
        if kind == "same":
            return [first, first], "They are the same."
        if kind == "missing":
            if not others:
                continue
            return [first, replace(first, items=others)], f"The {item.name} is missing in the second picture."
        if kind == "shape":
            shape = rng.choice([s for s in scenes.SHAPES if all(i.shape != s for i in first.items)])
            new = replace(item, shape=shape)
            answer = f"The {item.name} became a {shape}."
        else:
            color = rng.choice([c for c in COLORS if all(i.color != c for i in first.items)])
            rgb = scenes.jittered(rng, color)
            if scenes.contrast(rgb, first.background) < scenes.MIN_CONTRAST:
                continue
            new = replace(item, color=color, rgb=rgb)
            answer = f"The {item.shape} was {item.color} and is {color} now."
        if split != "combos" and scenes.is_held_out(new.color, new.shape, new.place):
            continue
        changed = tuple(new if i is item else i for i in first.items)
        return [first, replace(first, items=changed)], answer


def difference_turn(rng: random.Random, split: Split) -> tuple[list[Picture], Turn]:
    pictures, answer = differing(rng, split)
    if rng.random() < 0.25:
        asked = rng.choice((SAME, DO_DIFFER))
        word = "Yes" if (asked is SAME) == (pictures[0] is pictures[1]) else "No"
        return pictures, Turn(ask(rng, asked), f"{word}. {answer}")
    return pictures, Turn(ask(rng, DIFFERS), answer)


def _sample(wanted: str) -> Callable[[random.Random, Split], Sample]:
    def sample(rng: random.Random, split: Split) -> Sample:
        while True:
            pictures = some_pictures(rng, split)
            skill, turn = pictures_turn(rng, pictures)
            if skill == wanted:
                return conversation(rng, [turn], [image(p) for p in pictures])

    return sample


def _difference_sample(rng: random.Random, split: Split) -> Sample:
    pictures, turn = difference_turn(rng, split)
    return conversation(rng, [turn], [image(p) for p in pictures])


SKILLS = (
    Skill("which picture", _sample("which picture"), 92),
    Skill("nth picture", _sample("nth picture"), 92),
    Skill("difference", _difference_sample, 92),
)
