"""Sums and comparisons are those of the picture, follow from the thought, and the evaluation balances yes and no."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from qwen35mm.evaluation.skills import SKILLS
from qwen35mm.evaluation.skills.asking import two_counts_turn
from qwen35mm.evaluation.skills.base import picture_for
from tests.evaluation.claims import NUMBERS, named
from tests.evaluation.skills.test_asking import as_shapes

pytestmark = pytest.mark.usefixtures("plainly")


def test_both_numbers_are_true_and_the_answer_follows_from_them() -> None:
    words: Counter[str] = Counter()
    for index in range(400):
        sample = SKILLS["two counts, thinking"].sample(random.Random(index), "combos" if index % 2 else "seen")
        content = sample.messages[0]["content"]
        question = as_shapes(next(p["text"] for p in content if p["type"] == "text").lower())
        picture = next(p["image"] for p in content if p["type"] == "image")
        answer = sample.messages[1]["content"]
        assert sample.thought is not None
        lines = [re.fullmatch(r"The ([\w ]+): (\w+)\.", line) for line in sample.thought.split("\n")]
        nouns, numbers = zip(*[line.groups() for line in lines if line], strict=True)
        assert len(nouns) == 2
        places = [question.find(noun.split()[0].removesuffix("es").removesuffix("s")) for noun in nouns]
        assert 0 <= places[0] < places[1], (question, nouns)  # both are in the question, in this order
        counts = [len(named(picture.items, noun) or ()) for noun in nouns]
        assert numbers == tuple(NUMBERS[count] if count else "none" for count in counts), picture.items
        word = re.split(r"[ ,]", answer)[0]
        words[word] += 1
        if word == "Together":
            assert answer.rstrip(".").split()[-1] == NUMBERS[sum(counts)]
            assert not re.search(r"\bmore\b", question)
        else:
            assert re.search(r"\bmore\b.* than ", question)
            assert (word == "Yes") == (counts[0] > counts[1])
            assert ("as many" in answer) == (counts[0] == counts[1])
            larger = as_shapes(answer).rstrip(".").split(" more ")[-1]
            assert "as many" in answer or larger.split()[0][:4] == nouns[counts[1] > counts[0]].split()[0][:4]
    assert 150 < words["Together"] < 250
    assert abs(words["Yes"] - words["No"]) < 60


def test_without_thinking_the_same_is_asked() -> None:
    for index in range(20):
        thinking = SKILLS["two counts, thinking"].sample(random.Random(index), "seen")
        plain = SKILLS["two counts"].sample(random.Random(index), "seen")
        assert thinking.messages == plain.messages
        assert plain.thought is None


def test_one_of_the_two_may_be_missing_and_mostly_is_not() -> None:
    rng = random.Random(1)
    missing = 0
    for _ in range(300):
        picture = picture_for(rng, "seen", 6, 3)
        missing += "none" in (two_counts_turn(rng, picture).thought or "")
    assert 15 < missing < 150
