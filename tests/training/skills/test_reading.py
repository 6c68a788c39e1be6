"""Signs say what is drawn on them, in words and fonts that training never showed where they are asked for."""

from __future__ import annotations

import random
import re

import pytest

from qwen35mm.evaluation import drawing, words
from qwen35mm.evaluation.scenes import Split
from qwen35mm.evaluation.skills import reading
from training.data import END_SPELL, SPELL, plain

pytestmark = pytest.mark.usefixtures("plainly")


@pytest.mark.parametrize("split", ["train", "seen", "combos"])
def test_words_are_told_from_top_to_bottom(split: Split) -> None:
    rng = random.Random(split)
    for _ in range(80):
        sign = reading.random_sign(rng, split)
        turn = reading.read_turn(rng, sign, split)
        lines = sorted(sign.words, key=lambda word: word.y)
        assert re.findall('"([^"]+)"', plain(turn.answer)) == [word.text for word in lines]
        # What is read is spelled: it has no tokens of its own.
        assert re.findall(f'"{SPELL}([^"]+){END_SPELL}"', turn.answer) == [word.text for word in lines]
        assert turn.grade == "letters"
        assert all(words.is_held_out(word.text) == (split != "train") for word in lines)
        assert all((word.font >= drawing.NUM_FONTS) == (split == "combos") for word in lines)
        assert all(len(word.text) <= words.MOST_LETTERS for word in lines)
        assert reading.num_words_turn(rng, sign, split).answer.split()[2] == ("one", "two", "three")[len(lines) - 1]
        color = reading.text_color_turn(rng, sign, split)
        assert (color is None) == (len(lines) > 1)
        assert color is None or color.answer == f"It is {lines[0].color}."


def test_half_of_all_letters_can_be_any_so_that_reading_is_no_guessing() -> None:
    rng = random.Random(0)
    texts = [words.random_word(rng) for _ in range(3000)]
    assert len(set(texts)) > 2000
    assert not any(words.is_held_out(text) for text in texts)
    held_out = [words.is_held_out("".join(rng.choices("abcdefghij0123456789", k=5))) for _ in range(3000)]
    assert 0.07 < sum(held_out) / len(held_out) < 0.13
    assert {len(text) for text in texts} == set(range(1, 9))
