"""Which of several pictures is meant, and what differs between two, is so of their shapes."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from qwen35mm.evaluation.scenes import Split, is_held_out
from qwen35mm.evaluation.skills import pictures
from tests.evaluation.claims import captioned, named, seen, the_one

pytestmark = pytest.mark.usefixtures("plainly")
ORDER = ["first", "second", "third", "fourth"]


def test_the_picture_that_is_meant_is_the_only_one() -> None:
    rng = random.Random(0)
    kinds = {"which picture": 0, "nth picture": 0}
    for _ in range(200):
        several = pictures.some_pictures(rng, "seen")
        skill, turn = pictures.pictures_turn(rng, several)
        kinds[skill] += 1
        if skill == "which picture":
            having = [n for n, picture in enumerate(several) if named(picture.items, turn.question)]
            assert turn.answer == f"The {ORDER[having[0]]} picture."
            assert len(having) == 1
        else:
            (word,) = re.findall("first|second|third|fourth|last", turn.question.lower())
            meant = several[-1 if word == "last" else ORDER.index(word)]
            assert captioned(turn.answer) == seen(meant.items)
    assert min(kinds.values()) > 50


@pytest.mark.parametrize("split", ["seen", "combos"])
def test_one_thing_differs_and_is_told(split: Split) -> None:
    rng = random.Random(split)
    kinds: set[str] = set()
    words: set[tuple[str, bool]] = set()
    for _ in range(250):
        (first, second), turn = pictures.difference_turn(rng, split)
        answer = re.sub(r"^(Yes|No)\. ", "", turn.answer)
        if match := re.fullmatch(r"The (\w+) was (\w+) and is (\w+) now\.", answer):
            before, after = the_one(first.items, match[1]), the_one(second.items, match[1])
            assert (before.color, after.color) == (match[2], match[3])
            assert before.color != after.color
            assert replace(after, color=before.color, rgb=before.rgb) == before
        elif match := re.fullmatch(r"The (\w+ (\w+)) became a (\w+)\.", answer):
            before, after = the_one(first.items, match[1]), the_one(second.items, match[3])
            assert replace(after, shape=before.shape) == before
            assert before.shape != after.shape
            assert named(first.items, match[3]) == []
        elif match := re.fullmatch(r"The (\w+ \w+) is missing in the second picture\.", answer):
            gone = the_one(first.items, match[1])
            assert [item for item in first.items if item is not gone] == list(second.items)
        else:
            assert (answer, first) == ("They are the same.", second)
        kinds.add(re.sub(r"^The .* (was|became|missing) .*", r"\1", answer))
        if answer != turn.answer:
            asks_whether_same = bool(re.search("same|identical", turn.question.lower()))
            assert asks_whether_same != bool(re.search("differ|change", turn.question.lower()))
            assert turn.answer.startswith("Yes.") == (asks_whether_same == (first == second)), turn
            words.add((turn.answer.split(".")[0], asks_whether_same))
        if split != "combos":
            assert not any(is_held_out(i.color, i.shape, i.place) for i in (*first.items, *second.items))
    assert kinds == {"was", "became", "missing", "They are the same."}
    assert len(words) == 4
