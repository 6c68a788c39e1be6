"""Templates: choices, slots and slips."""

from __future__ import annotations

import random
import re

from qwen35mm.evaluation.language import a, filled, loosened, plural, slipped, there_are


def test_choices_are_made_and_slots_filled() -> None:
    rng = random.Random(0)
    found = {filled(rng, "[what|which [small|big]] {noun} [is it|]?", noun="shape") for _ in range(200)}
    assert found == {f"{w} shape{e}?" for w in ("What", "Which small", "Which big") for e in (" is it", "")}


def test_the_words_of_answers() -> None:
    assert [a("orange star"), a("red star")] == ["an orange star", "a red star"]
    assert [plural("cross"), plural("star")] == ["crosses", "stars"]
    assert [there_are(n, "cross") for n in (0, 1, 2)] == [
        "There are no crosses.", "There is one cross.", "There are two crosses.",
    ]  # fmt: skip


def test_questions_are_loosened_in_thousands_of_ways() -> None:
    rng = random.Random(0)
    texts = {loosened(rng, "What is the color of the square?") for _ in range(3000)}
    assert len(texts) > 200
    shouted, typed = "WHAT IS THE COLOR OF THE SQUARE?", "what is the color of the square"
    assert {"What's the color of the square?", shouted, typed} <= texts
    assert all(text and text == text.strip() for text in texts)
    # A slip leaves all words but one.
    for _ in range(300):
        question = "where is the purple triangle in this picture"
        pairs = zip(slipped(rng, question).split(), question.split(), strict=True)
        assert sum(slip != word for slip, word in pairs) <= 1


def test_what_is_copied_stays_as_it_is_however_hurried_the_question() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        assert re.search(r"\b0\W*$", loosened(rng, "Repeat after me: 0."))  # what stands for the words
        assert re.match(r"0\. \w", loosened(rng, "0. Say that."))
        asked = loosened(rng, "What is the weather in Willow And Are?").lower()
        assert re.search(r"willow and are\b", asked), asked
        # Of a number no other one is made.
        assert {*re.findall(r"\b(?:\d+|two|three|four|five)\b", loosened(rng, "Are there four?").lower())} <= {
            "four",
            "4",
        }
    first, second = ([loosened(random.Random(seed), "Where is it?") for seed in range(200)] for _ in range(2))
    assert first == second
