"""Include and exclude."""

from __future__ import annotations

import pytest

from qwen35mm.captioning.sources.names import NameFilter
from qwen35mm.errors import CaptioningError


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("*.jpg", ["a.jpg", "cats/a.jpg", "a/b/c.JPG"], ["a.png", "jpg"]),
        ("cats/*.jpg", ["cats/a.jpg"], ["a.jpg", "cats/b/a.jpg", "x/cats/a.jpg"]),
        ("/a.jpg", ["a.jpg"], ["cats/a.jpg"]),
        ("**/cats/*", ["cats/a", "x/y/cats/a"], ["cats", "cats/b/c"]),
        ("cats/**", ["cats/a.jpg", "cats/b/c.jpg"], ["dogs/cats.jpg"]),
        ("cats", ["cats/a.jpg", "x/cats/b/c.jpg"], ["cats.jpg"]),
        ("#1*", ["#1.png"], ["1.png"]),
        ("!a", ["!a/b.png"], ["a/b.png"]),
        ("a/**/z.png", ["a/z.png", "a/b/c/z.png"], ["z.png", "b/a/z.png"]),
        ("img_[0-9]?.png", ["img_12.png", "x/img_1a.png"], ["img_a1.png", "img_1.png"]),
        ("[!a]*", ["b.png"], ["a.png"]),
        ("a\n*", ["a\nb.png"], ["a b.png"]),
        ("\udcff*", ["\udcff.png"], ["a.png"]),
    ],
)
def test_include(pattern: str, matching: list[str], others: list[str]) -> None:
    names = NameFilter(include=[pattern])
    assert [name for name in matching + others if names.takes(name)] == matching


@pytest.mark.parametrize(
    ("pattern", "excluded", "others"),
    [
        ("thumbs", ["thumbs/a.jpg", "x/thumbs/y/a.jpg", "thumbs"], ["thumbs.jpg", "my thumbs/a.jpg"]),
        ("thumbs/", ["thumbs/a.jpg"], ["thumbs.jpg"]),
        ("cats/*", ["cats/a.jpg", "cats/b/c.jpg"], ["cats.jpg", "x/cats/a.jpg"]),
        ("*.png", ["a.png", "x/a.PNG"], ["a.jpg"]),
    ],
)
def test_exclude_takes_along_what_lies_in_a_folder(pattern: str, excluded: list[str], others: list[str]) -> None:
    names = NameFilter(exclude=[pattern])
    assert [name for name in excluded + others if not names.takes(name)] == excluded


def test_exclude_wins() -> None:
    names = NameFilter(include=["*.jpg", "*.png"], exclude=["b.*"])
    assert [name for name in ("a.jpg", "b.jpg", "c.gif", "d.png") if names.takes(name)] == ["a.jpg", "d.png"]


def test_an_excluded_folder_is_not_entered() -> None:
    names = NameFilter(include=["*.jpg"], exclude=["cats", "x/y"])
    assert [name for name in ("cats", "dogs", "x", "x/y", "x/cats") if not names.enters(name)] == [
        "cats",
        "x/y",
        "x/cats",
    ]


@pytest.mark.parametrize("pattern", ["\\", "[z-a]"])
def test_a_pattern_without_a_meaning_is_refused(pattern: str) -> None:
    with pytest.raises(CaptioningError, match="can't be read"):
        NameFilter(include=[pattern])
