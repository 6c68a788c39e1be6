"""Texts apart from their values: in English, and whether what comes from elsewhere is of their form."""

from __future__ import annotations

from typing import Any

import pytest

from qwen35mm_preprocess import MediaLimitError
from qwen35mm_preprocess.say import MAX_DEPTH, Said, decimal, english, is_said, percent, renamed, said_of, say, size


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (say("{n} {n|frame|frames}", n=1), "1 frame"),
        (say("{n} {n|frame|frames} in {name}", n=1200, name="a|b {n}"), "1,200 frames in a|b {n}"),
        (say("{share} of {what}", share=percent(0.5), what=say("{n} MiB", n=decimal(1.5, 1))), "50% of 1.5 MiB"),
        (say("{a}, {b}, {c}", a=decimal(40.0), b=decimal(0.125), c=decimal(1234.5)), "40, 0.125, 1,234.5"),
        (size(1536), "1.5 KiB"),
        ("as it is {n}", "as it is {n}"),
    ],
)
def test_english(words: Said, written: str) -> None:
    assert english(words) == written


def test_an_error_is_english_for_a_log_and_a_text_with_values_for_a_page() -> None:
    words = say("{name} has {n} {n|frame|frames}.", name="a.mp4", n=2)
    error = MediaLimitError(words)
    assert str(error) == f"{words}" == "a.mp4 has 2 frames."
    assert said_of(error) == {"text": words["text"], "values": {"name": "a.mp4", "n": 2}}
    assert said_of(MediaLimitError("Cut it.")) == "Cut it."
    assert len({words, say("{name} has {n} {n|frame|frames}.", name="a.mp4", n=2)}) == 1


def test_names_are_changed_wherever_they_are() -> None:
    words = say("{n} of {what}", n=3, what=say("{name}, {s}", name="'ab12'", s=size(1)))
    assert english(renamed(words, lambda text: text.replace("ab12", "a.png"))) == "3 of 'a.png', 1 byte"


def nested(depth: int) -> Any:
    words: Any = "x"
    for _ in range(depth):
        words = say("{a}", a=words)
    return words


@pytest.mark.parametrize(
    ("words", "is_it"),
    [
        ("a name", True),
        (3, True),
        (nested(MAX_DEPTH), True),
        (percent(0.5), True),
        (decimal(2.5, 1), True),
        (nested(MAX_DEPTH + 1), False),
        (True, False),
        (None, False),
        ([], False),
        ({}, False),
        ({"text": "{n}", "values": {}}, False),
        ({"text": 3, "values": {}}, False),
        ({"text": "a", "values": []}, False),
        ({"text": "a", "values": {}, "more": 1}, False),
        ({"share": "much"}, False),
        ({"bytes": float("inf")}, False),
        ({"number": 1.0, "digits": 99}, False),
        ("x" * 20_001, False),
    ],
)
def test_what_comes_from_elsewhere_is_of_the_form_or_not(words: Any, is_it: bool) -> None:
    assert is_said(words) is is_it
