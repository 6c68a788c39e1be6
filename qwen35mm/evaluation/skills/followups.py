"""Up to six questions about one picture, the later ones about "it"; and a second picture in the middle of a chat."""

from __future__ import annotations

import random

from qwen35mm.evaluation.language import a, ask, at, capital, plural, sized, there_are
from qwen35mm.evaluation.scenes import COLORS, SHAPES, Item, Picture, Split
from qwen35mm.evaluation.skills import asking, describing
from qwen35mm.evaluation.skills.base import Sample, Skill, Turn, conversation, image, picture_for

# The same once more, of another: only what is new is said.
AGAIN = (
    "And {other}?", "What about {other}?", "And {other}, please?", "{other}?", "How about {other}?", "Now {other}.",
    "And what about {other}?", "Then {other}?", "And now {other}?", "Now {other}, please.",
)  # fmt: skip
_ABOUT_IT = (describing.color_turn, describing.shape_turn, describing.place_turn, describing.size_turn,
             asking.yes_no_turn)  # fmt: skip


def _sample(rng: random.Random, split: Split) -> Sample:
    """The last question says "it", and means what the one before was about."""
    picture = picture_for(rng, split, 4, 2)
    while True:
        turns: list[Turn] = [describing.what_turn(rng, picture, split)]
        if turns[0].about is None:
            continue
        for _ in range(rng.randint(1, 5)):
            turn = rng.choice(_ABOUT_IT)(rng, picture, split, turns[-1].about)
            if turn.about is not None:
                turns.append(turn)
        if len(turns) > 1 and " it" in f" {turns[-1].question.lower()}" and turns[-1].about == turns[-2].about:
            return conversation(rng, turns, [image(picture)])


def again_turns(rng: random.Random, picture: Picture, split: Split) -> list[Turn]:
    """A question about one shape, place or kind, and "And the star?": the same of others, up to three times."""
    items = rng.sample(picture.items, len(picture.items))
    kind = rng.choice(("color", "place", "size", "what", "count", "there"))
    if kind in ("color", "place", "size"):
        once = [i for i in items if sum(other.shape == i.shape for other in items) == 1]
        asked = [(_of(kind, item), f"the {item.shape}", item) for item in once]
        templates = {"color": describing.COLOR, "place": describing.PLACE, "size": describing.SIZE}[kind]
        first = [{"name": item.shape} for item in once]
    elif kind == "what":
        asked = [(_of(kind, item), at(item.place), item) for item in items]
        templates = describing.WHAT
        first = [{"place": at(item.place), "spot": item.place} for item in items]
    else:
        nouns = rng.sample([*SHAPES, *(f"{color} shape" for color in COLORS)], 4)
        asked = [(_counted(kind, picture, noun), plural(noun) if kind == "count" else a(noun), None) for noun in nouns]
        templates = asking.COUNT_OF if kind == "count" else asking.THERE
        first = [{"noun": a(noun), "nouns": plural(noun)} for noun in nouns]
    skill, grade = {"there": ("yes no", "first_word")}.get(kind, (kind, "exact"))
    return [
        Turn(skill, ask(rng, AGAIN, split, other=other) if index else ask(rng, templates, split, **first[0]), answer,
             about, grade)
        for index, (answer, other, about) in enumerate(asked[: rng.randint(2, 4)])
    ]  # fmt: skip


def _of(kind: str, item: Item) -> str:
    """What is right of an item, as the questions that name it are answered."""
    if kind == "what":
        return capital(f"{a(sized(item))} is {at(item.place)}.")
    if kind == "color":
        return f"The {item.shape} is {item.color}."
    return f"The {item.name} is {at(item.place) if kind == 'place' else describing.SIZE_WORDS[item.size]}."


def _counted(kind: str, picture: Picture, noun: str) -> str:
    count = sum(noun in (item.shape, f"{item.color} shape") for item in picture.items)
    if kind == "count":
        return there_are(count, noun)
    return f"Yes, there is {a(noun)}." if count else f"No, there is no {noun}."


def again_sample(rng: random.Random, split: Split) -> Sample:
    """Ends with a question that says only what is new in it."""
    while True:
        picture = picture_for(rng, split, 5, 2)
        turns = again_turns(rng, picture, split)
        if len(turns) > 1:
            return conversation(rng, turns, [image(picture)])


def _second_sample(rng: random.Random, split: Split) -> Sample:
    """A question about the newest picture, after an answer about another."""
    first, second = picture_for(rng, split, 3), picture_for(rng, split, 3)
    before = conversation(rng, [describing.caption_turn(rng, first, split)], [image(first)])
    turn = rng.choice((describing.caption_turn, describing.place_turn, asking.yes_no_turn))(rng, second, split)
    then = conversation(rng, [turn], [image(second)])
    return Sample(turn.skill, before.messages + then.messages, before.skills + then.skills, turn.grade)


SKILLS = (Skill("follow-up", _sample), Skill("second picture", _second_sample))
