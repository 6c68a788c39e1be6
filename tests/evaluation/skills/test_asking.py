"""Yes and no, and numbers, are true; both are asked for as often."""

from __future__ import annotations

import random
import re

import pytest

from qwen35mm.evaluation.language import at, plural
from qwen35mm.evaluation.scenes import COLORS, SHAPES, random_picture
from qwen35mm.evaluation.skills import SKILLS, asking
from tests.evaluation.claims import holds, named
from tests.evaluation.skills.test_describing import turns

pytestmark = pytest.mark.usefixtures("plainly")


def as_shapes(question: str) -> str:
    """'red shapes' of 'red ones' and 'red things'."""
    return re.sub(r"\b(one|thing)(s?)\b", r"shape\2", question)


def test_yes_and_no_are_true_and_as_frequent() -> None:
    found = turns("yes no", 200)
    for picture, about, turn in found:
        word, claim = turn.answer.split(", ", 1)
        it = about or (picture.items[0] if len(picture.items) == 1 else None)
        assert holds(picture, claim, it), (turn, picture.items)
        # A claim that is in the question is granted, another one corrects it.
        question = turn.question.lower()
        shown = as_shapes(question)
        if claim.startswith("there is no "):
            assert word == "No"
            noun = claim[len("there is no ") :].rstrip(".")
            assert noun in shown.replace("crosses", "cross")
        elif claim.startswith("there is a"):
            assert word == "Yes"
            assert claim.split(" ", 3)[3].rstrip(".") in shown
        elif claim.startswith("there"):
            number = claim.split()[2]
            assert (word == "Yes") == (number in question.rstrip("?").split())
        else:
            value = claim.split(" is ", 1)[1].rstrip(".")
            said = re.search(rf"\b{value}\b(?! left| right)", question)  # "at the top" isn't "at the top left"
            assert (word == "Yes") == (said is not None), turn
    share = sum(turn.answer.startswith("Yes") for _, _, turn in found) / len(found)
    assert 0.4 < share < 0.6


def test_nothing_is_denied_that_is_there() -> None:
    """With all six shapes in the picture, none of them can be missing."""
    rng = random.Random(0)
    picture = random_picture(rng, (400, 400), 6, unique=True)
    for _ in range(300):
        _, claim = asking.yes_no_turn(rng, picture).answer.split(", ", 1)
        if claim.startswith("there"):
            assert holds(picture, claim, None)


def test_counts_are_true_and_the_thought_goes_through_all_shapes_one_by_one() -> None:
    zeros = 0
    for picture, _, turn in turns("count", 100):
        assert holds(picture, turn.answer, None), (turn, picture.items)
        noun = turn.answer.rstrip(".").split(" ", 3)[3]
        general = noun in ("shape", "shapes")
        counted = list(picture.items) if general else named(picture.items, noun) or []
        first, text = (turn.thought or "").split("\n")
        assert first == f"I count the {noun if len(counted) != 1 else plural(noun)}."
        for item, part in zip(picture.items, text.removesuffix(".").split(", "), strict=True):
            assert re.fullmatch(rf"An? {item.size} ?{item.color} {item.shape} {at(item.place)}", part, re.IGNORECASE)
        # What is counted in the thought's own words is the answer.
        kind = next((name for name in (*COLORS, *SHAPES) if name in noun), None)
        assert (len(re.findall(rf"\b{kind}\b", text)) if kind else len(text.split(", "))) == len(counted)
        zeros += not counted
        if not general:
            assert noun.removesuffix("es").removesuffix("s") in as_shapes(turn.question.lower()).replace(
                "crosses", "cros"
            )
    assert 5 < zeros < 40


def test_thinking_is_asked_for_by_its_skill_only() -> None:
    rng = random.Random(0)
    assert SKILLS["count, thinking"].sample(rng, "seen").thought
    assert SKILLS["count"].sample(rng, "seen").thought is None
