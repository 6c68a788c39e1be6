"""Left of, right of, above, below, between, and the largest and smallest.

A shape is left of another if its column of the 3 x 3 places is further left, so the answer never depends on a pixel.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from qwen35mm.evaluation.language import a, ask, capital
from qwen35mm.evaluation.scenes import PLACES, Item, Picture
from qwen35mm.evaluation.skills.base import Skill, Turn, about_a_picture
from qwen35mm.evaluation.skills.describing import any_name

_CELLS = {name: (row, column) for row, names in enumerate(PLACES) for column, name in enumerate(names)}


@dataclass(frozen=True)
class Relation:
    """`asked`: its words in questions; `said`: in answers; `holds(first, second)` compares (row, column)."""

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
    "Would you say that the {first} is {relation} the {second}?",
    "Do you see that the {first} is {relation} the {second}?", "So is the {first} {relation} the {second}?",
    "And the {first}, is it {relation} the {second}?",
)  # fmt: skip
WHAT = (
    "Tell me what you see {relation} the {second}.", "Which [things|shapes] do you see {relation} the {second}?",
    "And what is {relation} the {second}?", "Anything there {relation} the {second}?",
)  # fmt: skip
WHERE = (
    "Compared [to|with] the {second}, where is the {first}?", "The {first} is where, relative to the {second}?",
    "And where is the {first}, seen from the {second}?",
)  # fmt: skip
BETWEEN = (
    "Between the {first} and the {second}, what do you see?", "And what is between the {first} and the {second}?",
)  # fmt: skip
EXTREME = (
    "Which of the [shapes|things] is the {most}?", "Of the [shapes|things], which is the {most}?",
    "And which one is the {most}?", "The {most} one is which?",
)  # fmt: skip
_MOST = {True: "[largest|biggest]", False: "[smallest|tiniest]"}


def relation_turn(rng: random.Random, picture: Picture) -> Turn | None:
    """A question about two or three shapes, or None if the picture has no answer to it."""
    items = picture.items
    kind = rng.choices(("is", "what", "where", "between"), (4, 4, 2, 2))[0]
    if kind == "between":
        turn = _between(rng, picture)
        if turn is not None:
            return turn
    first, second = rng.sample(items, 2)
    names = {"first": any_name(rng, items, first), "second": any_name(rng, items, second)}
    if kind == "where":
        holding = [r.said for r in RELATIONS if r.between(first, second)]
        answer = f"The {first.name} is {' and '.join(reversed(holding))} the {second.name}."
        return Turn(ask(rng, WHERE, **names), answer, first)
    relation = rng.choice(RELATIONS)
    if kind == "what":
        found = [item for item in items if relation.between(item, second)]
        # Otherwise "Nothing." would be the best guess.
        if len(found) > 2 or (not found and rng.random() < 0.7):
            return None
        question = ask(rng, _put(WHAT, relation), **names)
        answer = f"{capital(', '.join(a(i.name) for i in found))}." if found else "Nothing."
        return Turn(question, answer, found[0] if len(found) == 1 else None, "phrases")
    truth = rng.random() < 0.5
    pairs = [(x, y) for x in items for y in items if x is not y and relation.between(x, y) == truth]
    if not pairs:
        return None
    first, second = rng.choice(pairs)
    names = {"first": any_name(rng, items, first), "second": any_name(rng, items, second)}
    claim = f"the {first.name} is {'' if truth else 'not '}{relation.said} the {second.name}"
    question = ask(rng, _put(IS_IT, relation), **names)
    return Turn(question, f"{'Yes' if truth else 'No'}, {claim}.", first, "first_word")


def extreme_turn(rng: random.Random, picture: Picture) -> Turn | None:
    """The largest or smallest shape, if its radius differs by a quarter from the next one's."""
    big = rng.random() < 0.5
    items = sorted(picture.items, key=lambda item: item.radius, reverse=big)
    if not (items[0].radius > 1.25 * items[1].radius or 1.25 * items[0].radius < items[1].radius):
        return None
    question = ask(rng, tuple(t.replace("{most}", _MOST[big]) for t in EXTREME))
    return Turn(question, f"The {items[0].name} is the {'largest' if big else 'smallest'}.", items[0])


def _between(rng: random.Random, picture: Picture) -> Turn | None:
    """The middle shape of three in one row or column of places."""
    by_cell = {_CELLS[item.place]: item for item in picture.items}
    lines = [[(i, j) for j in range(3)] for i in range(3)] + [[(i, j) for i in range(3)] for j in range(3)]
    full = [[by_cell[cell] for cell in line] for line in lines if all(cell in by_cell for cell in line)]
    if not full:
        return None
    first, middle, last = rng.choice(full)
    names = [any_name(rng, picture.items, each) for each in rng.sample((first, last), 2)]
    return Turn(ask(rng, BETWEEN, first=names[0], second=names[1]), f"{capital(a(middle.name))}.", middle)


def _put(templates: tuple[str, ...], relation: Relation) -> tuple[str, ...]:
    return tuple(template.replace("{relation}", relation.asked) for template in templates)


SKILLS = (
    Skill("relation", about_a_picture(relation_turn, 5, 2), 92),
    Skill("extreme", about_a_picture(extreme_turn, 5, 2), 92),
)
