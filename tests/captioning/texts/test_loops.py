from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.captioning.texts.loops import _prefix_lengths, without_loop


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A dog runs. " + "A cat sits on a mat. " * 9, "A dog runs. A cat sits on a mat."),
        ("A cat sits on a mat. " * 9 + "A cat si", "A cat sits on a mat."),
        # What stands before the loop ends like its round does.
        ("The cat sat. " + "A cat. " * 12 + "A c", "The cat sat. A cat."),
        ("Dog. " + "Cat. " * 20, "Dog. Cat."),
        ("- bat\n" + "- cat\n" * 12 + "- c", "- bat\n- cat"),
        ("Intro\n" + "One. Two.\n" * 8, "Intro\nOne. Two."),
        ("Zero. Two.\n" + "One. Two.\n" * 8, "Zero. Two.\nOne. Two."),
        ("It is" + " very" * 20, "It is very"),
        ("blue" + ", red" * 20, "blue, red"),
        ("cat, dog, " + "red hat, blue hat, " * 8 + "red h", "cat, dog, red hat, blue hat"),
        ("一只狗。" + "一只猫坐着。" * 12 + "一只", "一只狗。一只猫坐着。"),
        ("猫" + "很大的猫" * 20, "猫很大的"),
        ("ha" * 40, "ha"),
        ("!" * 300, "!"),
        ("A wall." + " |" * 150, "A wall. |"),
        ("A cat sits on a mat. " * 4, "A cat sits on a mat."),
    ],
)
def test_one_round_of_a_loop_stays(text: str, expected: str) -> None:
    assert without_loop(text.strip()) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "red, red and blue circles",
        "A red circle, a red circle, a red circle and a blue square on a white table.",
        "A red circle, a red square, a red star, a red heart, a red moon, a red sun",
        # A refrain that was read off a poster.
        "We will rock you. We will rock you. We will rock you.",
        "very, very, very, very old",
        "no no no no no no no no",
        "A form: " + "_" * 100,
        "Total " + "." * 80,
        "0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |",
        "A cat. " * 30 + "The end.",
        "00:00-00:01 He walks\n00:01-00:02 He walks\n00:02-00:03 He walks\n00:03-00:04 He walks\n00:04-00:05 He walks",
    ],
)
def test_what_is_no_loop_at_the_end_stays(text: str) -> None:
    assert without_loop(text.strip()) is None


@given(st.text("ab ,.\n", max_size=30), st.text("abc ,.\n", min_size=1, max_size=20), st.integers(0, 19))
def test_every_loop_goes_wherever_its_last_round_was_cut(before: str, unit: str, cut: int) -> None:
    text = before + unit * (220 // len(unit) + 4) + unit[:cut]
    left = without_loop(text)
    assert left is not None
    assert text.startswith(left)
    assert len(left) <= len(before) + 2 * len(unit)
    # Nothing before the loop is lost, save white space and commas at its end.
    assert len(left) >= len(before.rstrip().rstrip(",").rstrip(" ,")) or before.startswith(left)


@given(st.text("ab", max_size=40))
def test_prefix_lengths_are_those_of_the_naive_twin(text: str) -> None:
    def naive(at: int) -> int:
        length = 0
        while at + length < len(text) and text[length] == text[at + length]:
            length += 1
        return length

    assert _prefix_lengths(text)[1:] == [naive(at) for at in range(1, len(text))]


@pytest.mark.parametrize("unit", ["a", "ab", "a" * 999 + "b", "A cat. "])
def test_its_time_grows_with_the_text_alone(unit: str) -> None:
    text = "x" + (unit * 200_000)[:200_000]
    start = time.process_time()
    without_loop(text)
    # It takes some 0.2 s; a search that were quadratic would take hours.
    assert time.process_time() - start < 20
