"""Relations are those of the coordinates' thirds."""

from __future__ import annotations

import re

import pytest

from tests.evaluation.claims import holds, side_holds, the_one
from tests.evaluation.skills.test_describing import turns

pytestmark = pytest.mark.usefixtures("plainly")
_SIDES = {
    "left of": "left of|on the left of",
    "right of": "right of|on the right of",
    "above": "above|over|higher than",
    "below": "below|under|lower than",
}


def asked_side(question: str) -> str | None:
    return next((side for side, words in _SIDES.items() if re.search(rf"\b({words})\b", question)), None)


def test_relations_are_true() -> None:
    kinds = {"between": 0, "claim": 0, "what": 0, "nothing": 0}
    for picture, _, turn in turns("relation", 250):
        items, question = picture.items, turn.question.lower()
        answer = turn.answer.rstrip(".")
        if "between the" in question:
            first, second = re.search(r"between the (.+) and the ([\w ]+)", question).groups()  # type: ignore[union-attr]
            ends = [the_one(items, each) for each in (first, second)]
            middle = the_one(items, answer)
            cells = [(int(3 * i.y), int(3 * i.x)) for i in (ends[0], middle, ends[1])]
            assert any(
                len({cell[line] for cell in cells}) == 1
                and [cell[1 - line] for cell in cells] in ([0, 1, 2], [2, 1, 0])
                for line in (0, 1)
            )
            kinds["between"] += 1
        elif answer.startswith(("Yes", "No, ")):
            word, claim = answer.split(", ", 1)
            assert holds(picture, claim, None), turn
            assert (word == "No") == (" not " in claim)
            side = asked_side(question)
            assert side is not None
            assert side in claim
            kinds["claim"] += 1
        elif answer.startswith("The "):
            assert holds(picture, answer, None), turn
            first, second = (the_one(items, part) for part in re.split(r" is .+ (?=the )", answer[4:]))
            told = set(re.findall("above|below|left of|right of", answer))
            assert told == {side for side in _SIDES if side_holds(side, first, second)}
        else:
            side = asked_side(question)
            assert side is not None
            second = the_one(items, question.rsplit(" the ", 1)[1])
            there = {item.name for item in items if side_holds(side, item, second)}
            told = [the_one(items, part) for part in re.split(" and |, ", answer) if part != "Nothing"]
            assert {item.name for item in told} == there
            kinds["nothing" if not told else "what"] += 1
    assert min(kinds.values()) > 5, kinds


def test_the_extreme_stands_out() -> None:
    for picture, _, turn in turns("extreme", 60):
        assert holds(picture, turn.answer, None), (turn, [i.radius for i in picture.items])
        big = "largest" in turn.answer
        assert bool(re.search("largest|biggest", turn.question.lower())) == big
        assert bool(re.search("smallest|tiniest", turn.question.lower())) != big
