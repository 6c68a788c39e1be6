"""How many there are of two kinds together, and whether there are more of one: what thinking is for.

Without it both counts and what becomes of them have to come out of one look. A thought says one count behind the other,
each after what is counted; what is left is to add or to compare two numbers that stand there.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from qwen35mm.evaluation.language import NUMBERS, ask, plural
from qwen35mm.evaluation.scenes import COLORS, SHAPES, Picture, Split
from qwen35mm.evaluation.skills.asking import loose
from qwen35mm.evaluation.skills.base import Sample, Skill, Turn, alike, conversation, image, picture_for

SUM = (
    "How many {one} and {other} are there together?", "How many {one} and {other} [together|in all]?",
    "{one} and {other} together, how many?", "Count the {one} and the {other} together.", "{one} plus {other}?",
    "How many {one} or {other} [are there|do you see|can you see]?", "How many are {one} or {other}?",
    "What is the number of {one} and {other} together?", "How many [shapes|things] are {one} or {other}?",
    "[Tell me|Say] how many {one} and {other} there are together.", "Together, how many {one} and {other} are there?",
    "How many {one} and {other} altogether?", "The total of {one} and {other}[, please|]?",
    "How many {one} plus {other} [do you see|are there]?", "Number of {one} and {other} together?",
    "How many {one} and {other} do you see together?", "What is the total of {one} and {other}?",
    "Count the {one} plus the {other}.",
)  # fmt: skip
MORE = (
    "Are there more {one} than {other}?", "More {one} than {other}?", "Do you see more {one} than {other}?",
    "Does [the picture|the image|it] [show|have|contain] more {one} than {other}?",
    "There are more {one} than {other}, right?", "So there are more {one} than {other}?",
    "Would you say there are more {one} than {other}?", "Is it true that there are more {one} than {other}?",
    "Tell me [if|whether] there are more {one} than {other}.", "Can you see more {one} than {other}?",
    "And are there more {one} than {other}?", "Are there more {one} than there are {other}?",
    "In the picture, are there more {one} than {other}?", "More {one} than {other}, yes or no?",
    "Can you tell me [if|whether] there are more {one} than {other}?",
    "Would you say that there are more {one} than {other}?", "So are there more {one} than {other}?",
    "Do you see more {one} than {other} in the picture?",
)  # fmt: skip


def two_counts_turn(rng: random.Random, picture: Picture, split: Split, about: object = None) -> Turn:
    """Two shapes' numbers or two colours': their sum, or which is larger; of one of the two there may be none."""
    of_shapes = rng.random() < 0.55
    counts = Counter(item.shape if of_shapes else item.color for item in picture.items)
    absent = [each for each in (SHAPES if of_shapes else COLORS) if each not in counts]
    # Mostly both are there, and more than one of either: then neither number is the answer.
    known = [*counts, *rng.sample(absent, min(len(absent), max(2 - len(counts), int(rng.random() < 0.2))))]
    nouns = {each: each if of_shapes else f"{each} shape" for each in known}
    pairs = [(one, other) for one in known for other in known if one != other]
    if rng.random() < 0.5:
        one, other = _pair(rng, pairs, counts)
        total = counts[one] + counts[other]
        templates, answer = SUM, f"Together there {'is' if total == 1 else 'are'} {_number(total)}."
    else:
        wanted = rng.choice((1, 1, 0, -1))  # yes as often as no
        fitting = [pair for pair in pairs if _sign(counts[pair[0]] - counts[pair[1]]) == wanted]
        one, other = _pair(rng, fitting or pairs, counts)
        templates, answer = MORE, _compared(counts[one] - counts[other], plural(nouns[one]), plural(nouns[other]))
    asked = loose(rng, f"{plural(nouns[one])}|{plural(nouns[other])}").split("|")
    thought = "\n".join(f"The {plural(nouns[each])}: {_number(counts[each])}." for each in (one, other))
    return Turn("two counts", ask(rng, templates, split, one=asked[0], other=asked[1]), answer, thought=thought)


def _pair(rng: random.Random, pairs: list[tuple[str, str]], counts: Counter[str]) -> tuple[str, str]:
    """One of the pairs, mostly of what there is much of."""
    return rng.choices(pairs, [1 + (counts[one] + counts[other]) ** 2 for one, other in pairs])[0]


def _number(count: int) -> str:
    return NUMBERS[count] if count else "none"


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def _compared(difference: int, nouns: str, other_nouns: str) -> str:
    if difference > 0:
        return f"Yes, there are more {nouns}."
    return f"No, there are {'as many' if difference == 0 else 'more'} {other_nouns}."


def _sample(thinking: bool):
    def sample(rng: random.Random, split: Split) -> Sample:
        picture = alike([picture_for(rng, split, 6, 3) for _ in range(6)])
        turn = two_counts_turn(rng, picture, split)
        return conversation(rng, [turn if thinking else replace(turn, thought=None)], [image(picture)])

    return sample


SKILLS = (Skill("two counts", _sample(False)), Skill("two counts, thinking", _sample(True)))
