"""Left of, right of, above, below, between, and the largest and smallest.

A shape is left of another where its column of the 3 x 3 places is, so that nothing hangs on a pixel.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from qwen35mm.evaluation.language import a, ask, capital, listed
from qwen35mm.evaluation.scenes import PLACES, Item, Picture, Split
from qwen35mm.evaluation.skills.base import Sample, Skill, Turn, conversation, image, picture_for
from qwen35mm.evaluation.skills.describing import any_name

_CELLS = {name: (row, column) for row, names in enumerate(PLACES) for column, name in enumerate(names)}


@dataclass(frozen=True)
class Relation:
    """`asked`: how questions put it; `said`: how answers do; `holds(first, second)` by their (row, column)."""

    asked: str
    said: str
    holds: Callable[[tuple[int, int], tuple[int, int]], bool]

    def between(self, first: Item, second: Item) -> bool:
        return self.holds(_CELLS[first.place], _CELLS[second.place])


RELATIONS = (
    Relation("[to the left of|left of|on the left of]", "left of", lambda a, b: a[1] < b[1]),
    Relation("[to the right of|right of|on the right of]", "right of", lambda a, b: a[1] > b[1]),
    Relation("[above|over|higher than]", "above", lambda a, b: a[0] < b[0]),
    Relation("[below|under|lower than]", "below", lambda a, b: a[0] > b[0]),
)
IS_IT = (
    "{first} {relation} the {second}?", "So the {first} is {relation} the {second}?",
    "The {first} {relation} the {second}?", "The {first} is {relation} the {second}?",
    "And is the {first} {relation} the {second}?", "The {first} is {relation} the {second}, yes or no?",
    "The {first}, is it {relation} the {second}?", "The {first} is {relation} the {second}, correct?",
    "Is the {first} {relation} the {second}?",
    "Is the {first} {relation} the {second}?",
    "The {first} is {relation} the {second}, [right|isn't it]?",
    "Would you say the {first} is {relation} the {second}?",
    "Do you see the {first} {relation} the {second}?",
    "Is it true that the {first} is {relation} the {second}?",
    "Can you see [if|whether] the {first} is {relation} the {second}?",
    "The {first}: is it {relation} the {second}?",
    "Would you say that the {first} is {relation} the {second}?",
    "Do you see that the {first} is {relation} the {second}?",
    "So is the {first} {relation} the {second}?", "And the {first}, is it {relation} the {second}?",
)  # fmt: skip
WHAT = (
    "{relation} the {second}?", "And {relation} the {second}?", "Anything {relation} the {second}?",
    "Shapes {relation} the {second}?", "What is there {relation} the {second}?", "What {relation} the {second}?",
    "[Which|What] shapes {relation} the {second}?", "Everything {relation} the {second}?",
    "[What|Which shape|Which thing] is {relation} the {second}?",
    "What do you see {relation} the {second}?",
    "What can be seen {relation} the {second}?",
    "Which shapes are {relation} the {second}?",
    "Name what is {relation} the {second}.",
    "What can you see {relation} the {second}?",
    "Tell me what is {relation} the {second}.",
    "[Which|What] is the [shape|thing] {relation} the {second}?",
    "Tell me what you see {relation} the {second}.",
    "Which [things|shapes] do you see {relation} the {second}?",
    "And what is {relation} the {second}?", "Anything there {relation} the {second}?",
)  # fmt: skip
WHERE = (
    "Which side of the {second} is the {first} on?", "From the {second}, where is the {first}?",
    "Where is the {first} from the {second}?", "The {first}, seen from the {second}?",
    "Position of the {first} relative to the {second}?", "The {first} is where, seen from the {second}?",
    "And relative to the {second}, where is the {first}?",
    "Where is the {first} compared [to|with] the {second}?",
    "Where is the {first} relative to the {second}?",
    "On which side of the {second} is the {first}?",
    "Seen from the {second}, where is the {first}?",
    "Relative to the {second}, where is the {first}?",
    "Where is the {first}, seen from the {second}?",
    "Tell me where the {first} is relative to the {second}.",
    "How does the {first} lie to the {second}?",
    "Compared [to|with] the {second}, where is the {first}?",
    "The {first} is where, relative to the {second}?", "And where is the {first}, seen from the {second}?",
)  # fmt: skip
BETWEEN = (
    "Between the {first} and the {second}?", "What lies between the {first} and the {second}?",
    "And between the {first} and the {second}?", "Anything between the {first} and the {second}?",
    "Which one is between the {first} and the {second}?",
    "[What|Which shape|Which thing] is between the {first} and the {second}?",
    "What do you see between the {first} and the {second}?",
    "What [lies|stands] between the {first} and the {second}?",
    "Between the {first} and the {second}, what is there?",
    "Tell me what is between the {first} and the {second}.",
    "[Which shape|Which thing] do you see between the {first} and the {second}?",
    "Between the {first} and the {second}, what do you see?",
    "And what is between the {first} and the {second}?",
)  # fmt: skip
EXTREME = (
    "{most}?", "{most} [one|thing]?", "The {most}?", "The {most} [shape|one|thing]?", "What is {most}?",
    "Which is {most}?", "And the {most}[ one|]?", "[Which|What] one is {most}?",
    "[What|Which] is the {most} [shape|one|thing|object]?",
    "[Which|What] shape is the {most}?",
    "Which one is the {most}?",
    "Which of them is the {most}?",
    "[Find|Name] the {most} [shape|object].",
    "Of all shapes, which one is the {most}?",
    "Tell me which [shape|one] is the {most}.",
    "Of [them|all of them], which is the {most}?",
    "Which of the [shapes|things] is the {most}?",
    "Of the [shapes|things], which is the {most}?",
    "And which one is the {most}?", "The {most} one is which?",
)  # fmt: skip
_MOST = {True: "[largest|biggest]", False: "[smallest|tiniest]"}


def relation_turn(rng: random.Random, picture: Picture, split: Split, about: Item | None = None) -> Turn | None:
    """A question about two or three shapes, or None where the picture has no two."""
    items = picture.items
    if len(items) < 2:
        return None
    kind = rng.choices(("is", "what", "where", "between"), (4, 4, 2, 2))[0]
    if kind == "between":
        turn = _between(rng, picture, split)
        if turn is not None:
            return turn
    first, second = rng.sample(items, 2)
    names = {"first": any_name(rng, items, first), "second": any_name(rng, items, second)}
    said = f"the {first.name}", f"the {second.name}"
    if kind == "where":
        holding = [r.said for r in RELATIONS if r.between(first, second)]
        answer = capital(f"{said[0]} is {' and '.join(reversed(holding))} {said[1]}.")
        return Turn("relation", ask(rng, WHERE, split, **names), answer, first)
    relation = rng.choice(RELATIONS)
    if kind == "what":
        found = [item for item in items if relation.between(item, second)]
        # Mostly nothing is on that side: then that would be the answer to bet on.
        if len(found) > 2 or (not found and rng.random() < 0.7):
            return None
        question = ask(rng, _put(WHAT, relation), split, **names)
        answer = f"{capital(listed([a(i.name) for i in found]))}." if found else "Nothing."
        return Turn("relation", question, answer, found[0] if len(found) == 1 else None, "phrases")
    truth = rng.random() < 0.5
    pairs = [(x, y) for x in items for y in items if x is not y and relation.between(x, y) == truth]
    if not pairs:
        return None
    first, second = rng.choice(pairs)
    names = {"first": any_name(rng, items, first), "second": any_name(rng, items, second)}
    said = f"the {first.name}", f"the {second.name}"
    claim = f"{said[0]} is {'' if truth else 'not '}{relation.said} {said[1]}"
    question = ask(rng, _put(IS_IT, relation), split, **names)
    return Turn("relation", question, f"{'Yes' if truth else 'No'}, {claim}.", first, "first_word")


def extreme_turn(rng: random.Random, picture: Picture, split: Split, about: Item | None = None) -> Turn | None:
    """The largest or smallest, where it is a quarter larger or smaller than the next."""
    big = rng.random() < 0.5
    items = sorted(picture.items, key=lambda item: item.radius, reverse=big)
    if len(items) < 2 or not (items[0].radius > 1.25 * items[1].radius or 1.25 * items[0].radius < items[1].radius):
        return None
    question = ask(rng, tuple(t.replace("{most}", _MOST[big]) for t in EXTREME), split)
    answer = f"The {items[0].name} is the {'largest' if big else 'smallest'}."
    return Turn("extreme", question, answer, items[0])


def _between(rng: random.Random, picture: Picture, split: Split) -> Turn | None:
    """The shape in the middle of three in one row or column of places."""
    by_cell = {_CELLS[item.place]: item for item in picture.items}
    lines = [[(i, j) for j in range(3)] for i in range(3)] + [[(i, j) for i in range(3)] for j in range(3)]
    full = [[by_cell[cell] for cell in line] for line in lines if all(cell in by_cell for cell in line)]
    if not full:
        return None
    first, middle, last = rng.choice(full)
    names = [any_name(rng, picture.items, each) for each in rng.sample((first, last), 2)]
    question = ask(rng, BETWEEN, split, first=names[0], second=names[1])
    return Turn("relation", question, f"{capital(a(middle.name))}.", middle)


def _put(templates: tuple[str, ...], relation: Relation) -> tuple[str, ...]:
    return tuple(template.replace("{relation}", relation.asked) for template in templates)


def _sample(turn):
    def sample(rng: random.Random, split: Split) -> Sample:
        while True:
            picture = picture_for(rng, split, 5, 2)
            found = turn(rng, picture, split)
            if found is not None:
                return conversation(rng, [found], [image(picture)])

    return sample


TURNS = {"relation": relation_turn, "extreme": extreme_turn}
SKILLS = (Skill("relation", _sample(relation_turn), 92), Skill("extreme", _sample(extreme_turn), 92))
