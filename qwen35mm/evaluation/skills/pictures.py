"""Two to four pictures in one prompt: which one has it, what is in the second, and what differs."""

from __future__ import annotations

import random
from dataclasses import replace

from qwen35mm.evaluation import scenes
from qwen35mm.evaluation.language import a, ask
from qwen35mm.evaluation.scenes import COLORS, Item, Picture, Split
from qwen35mm.evaluation.skills.base import Sample, Skill, Turn, conversation, image
from qwen35mm.evaluation.skills.describing import caption

ORDINALS = ("first", "second", "third", "fourth")
WHICH = (
    "{noun}, which [one|picture]?", "Which [one |]has {noun}?", "[Picture|Image] with {noun}?",
    "{noun} is in which one?", "Where is {noun}, in which [one|picture]?", "Which [picture|image] with {noun}?",
    "And which one has {noun}?", "Which one is {noun} in?",
    "[Which|What] [picture|image] [has|shows|contains] {noun}?",
    "In [which|what] [picture|image] [is there|do you see] {noun}?",
    "[Which|What] [one|picture] shows {noun}?",
    "Where do you see {noun}, in which [picture|image]?",
    "Which of the [pictures|images] [has|shows] {noun}?",
    "{noun} is in which [picture|image]?",
    "Tell me which [picture|image] [shows|has] {noun}.",
    "In which of [the pictures|them] is {noun}?",
    "Which of [them|the images] contains {noun}?",
    "Tell me in which [picture|image] you see {noun}.",
    "And in which [one|picture] is {noun}?", "{noun} is in which of [them|the pictures]?",
)  # fmt: skip
NTH = (
    "And the {nth}?", "The {nth} [one|picture|image]?", "{nth} [picture|image]?", "{nth} one?",
    "What about the {nth}[ one|]?", "Now the {nth} one.", "What is the {nth} one?",
    "[Describe|Caption] the {nth}[ one|].",
    "What is in the {nth} [picture|image]?",
    "Describe the {nth} [picture|image].",
    "What does the {nth} [picture|image|one] show?",
    "What do you see in the {nth} [picture|image|one]?",
    "And the {nth} one?",
    "Caption the {nth} [picture|image].",
    "Tell me what is in the {nth} [picture|image].",
    "What can be seen in the {nth} [picture|image|one]?",
    "[Can|Could] you describe the {nth} [picture|image|one]?",
    "Tell me what the {nth} [picture|image] shows.",
    "And what is in the {nth} [one|picture]?", "What about the {nth} [picture|image]?",
)  # fmt: skip
DIFFERS = (
    "Difference?", "Differences?", "What changed?", "The difference?", "Changes?", "What is new?",
    "[Find|Spot|Name|Explain] [the difference|what changed|what is different].", "How are they different?",
    "What is different?",
    "What [differs|changed|has changed] [between the two pictures|between them|]?",
    "What is the difference [between the pictures|between the two images|]?",
    "How [do the pictures|do they|do these images] differ?",
    "[Find|Spot] the difference.",
    "Compare the two [pictures|images].",
    "Tell me [what differs|what is different|the difference].",
    "What is different [in the second picture|in the second one]?",
    "Compare [them|these pictures].",
    "Tell me what [changed|has changed].",
    "What is different between [the pictures|them]?",
    "And what changed?", "How is the second one different?",
)  # fmt: skip
SAME = (
    "[The same|Same]?", "Same [picture|image]?", "Is it the same?", "Same or not?", "They are the same, right?",
    "Are the two the same?", "Both the same?",
    "Are [they|the pictures|both pictures] the same?", "Do both [pictures|images] show the same?",
    "Is [it|this] the same [picture|image] twice?", "Are the two images identical?",
    "Are [these|they] identical?", "Do they show the same?", "Are both images the same?",
    "Do the two pictures show the same?",
    "And are they the same?", "They are identical, right?",
)  # fmt: skip
DO_DIFFER = (
    "Any [difference|differences]?", "Any change?", "Did anything change?", "Are the two different?",
    "Different or not?", "Any changes between them?", "Is anything different?",
    "Is there a difference[ between them|]?", "Do [they|the pictures|the images] differ?",
    "Has anything changed?", "Are there any differences?", "Do you see [a|any] difference?",
    "Are they different?", "Do you see any differences between them?",
    "And do they differ?", "Did anything change between them?",
)  # fmt: skip


def pictures_turn(rng: random.Random, pictures: list[Picture], split: Split) -> Turn:
    """A question about one of several pictures, by what is in it or by its number."""
    if rng.random() < 0.55:
        for _ in range(20):
            index = rng.randrange(len(pictures))
            item = rng.choice(pictures[index].items)
            noun = rng.choice((item.name, item.shape, f"{item.color} shape"))
            if sum(any(_is(other, noun) for other in p.items) for p in pictures) == 1:
                question = ask(rng, WHICH, split, noun=a(noun))
                return Turn("which picture", question, f"The {ORDINALS[index]} picture.", grade="exact")
    index = rng.randrange(len(pictures))
    nth = ORDINALS[index] if index < len(pictures) - 1 or rng.random() < 0.6 else "last"
    return Turn("nth picture", ask(rng, NTH, split, nth=nth), caption(pictures[index].items), grade="phrases")


def differing(
    rng: random.Random, split: Split, most: int = 3, largest: int = 300
) -> tuple[list[Picture], str, str | None]:
    """Two pictures, the second as the first but for one thing; what it is, and what became of it (None: nothing).

    They have one to `most` shapes, and up to `largest` pixels a side.
    """
    while True:
        size = scenes.random_size(rng, largest=largest)
        first = scenes.random_picture(rng, size, rng.randint(1, most), split, unique=True)
        item = rng.choice(first.items)
        kind = rng.choice(("color", "shape", "missing", "same"))
        others = tuple(i for i in first.items if i is not item)
        if kind == "same":
            return [first, first], "", None
        if kind == "missing":
            if not others:
                continue
            return [first, replace(first, items=others)], item.shape, None
        if kind == "shape":
            shape = rng.choice([s for s in scenes.SHAPES if all(i.shape != s for i in first.items)])
            new = replace(item, shape=shape)
        else:
            color = rng.choice([c for c in COLORS if all(i.color != c for i in first.items)])
            rgb = scenes.jittered(rng, color)
            if scenes.contrast(rgb, first.background) < 90:
                continue
            new = replace(item, color=color, rgb=rgb)
        if split != "combos" and scenes.is_held_out(new.color, new.shape, new.place):
            continue
        changed = tuple(new if i is item else i for i in first.items)
        return [first, replace(first, items=changed)], kind, new.color if kind == "color" else new.shape


def difference_turn(rng: random.Random, split: Split, most: int = 3, largest: int = 300) -> tuple[list[Picture], Turn]:
    pictures, kind, became = differing(rng, split, most, largest)
    before = pictures[0].items
    changed = next((i for i in before if i not in pictures[1].items), before[0])
    if kind == "color":
        answer = f"The {changed.shape} was {changed.color} and is {became} now."
    elif kind == "shape":
        answer = f"The {changed.color} {changed.shape} became a {became}."
    elif kind:
        answer = f"The {changed.name} is missing in the second picture."
    else:
        answer = "They are the same."
    if rng.random() < 0.25:
        asked = rng.choice((SAME, DO_DIFFER))
        word = "Yes" if (asked is SAME) != bool(kind) else "No"
        return pictures, Turn("difference", ask(rng, asked, split), f"{word}. {answer}")
    return pictures, Turn("difference", ask(rng, DIFFERS, split), answer)


def some_pictures(rng: random.Random, split: Split, most: int = 4, largest: int = 260) -> list[Picture]:
    """Two to `most` pictures of up to two shapes, and of up to `largest` pixels a side."""
    return [
        scenes.random_picture(rng, scenes.random_size(rng, largest=largest), rng.choice((1, 1, 2)), split)
        for _ in range(rng.randint(2, most))
    ]


def _is(item: Item, noun: str) -> bool:
    return noun in (item.name, item.shape, f"{item.color} shape")


def _sample(skill: str):
    def sample(rng: random.Random, split: Split) -> Sample:
        while True:
            pictures = some_pictures(rng, split)
            turn = pictures_turn(rng, pictures, split)
            if turn.skill == skill:
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
