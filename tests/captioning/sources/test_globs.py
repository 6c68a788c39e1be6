"""Include and exclude, against a twin that is one regular expression for a whole name."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.captioning.sources.globs import NameFilter


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("*.jpg", ["a.jpg", "cats/a.jpg", "a/b/c.JPG"], ["a.png", "jpg"]),
        ("cats/*.jpg", ["cats/a.jpg"], ["a.jpg", "cats/b/a.jpg", "x/cats/a.jpg"]),
        ("/a.jpg", ["a.jpg"], ["cats/a.jpg"]),
        ("**/cats/*", ["cats/a", "x/y/cats/a"], ["cats", "cats/b/c"]),
        ("cats/**", ["cats/a.jpg", "cats/b/c.jpg"], ["dogs/cats.jpg"]),
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


def test_many_stars_are_quick() -> None:
    assert not NameFilter(include=["**/a/" * 25 + "x"]).takes("/".join("a" * 60))


parts = st.text("ab.", min_size=1, max_size=3)
paths = st.lists(parts, min_size=1, max_size=4).map("/".join)
patterns = st.lists(st.one_of(parts, st.sampled_from(["*", "?", "**", "a*", "*.b", "[ab]"])), min_size=1, max_size=4)


@given(paths, st.lists(patterns, max_size=2), st.lists(patterns, max_size=2))
def test_as_the_twin(name: str, include: list[list[str]], exclude: list[list[str]]) -> None:
    if any("." in pattern for pattern in include + exclude):
        return
    names = NameFilter(["/".join(pattern) for pattern in include], ["/".join(pattern) for pattern in exclude])
    above = [name[: match.start()] for match in re.finditer("/", name)]
    taken = not include or any(twin(pattern, name) for pattern in include)
    left_out = any(twin(pattern, part) for pattern in exclude for part in [*above, name])
    assert names.takes(name) == (taken and not left_out)


def twin(pattern: list[str], name: str) -> bool:
    """The pattern as one expression over the name with a slash at each end of each part."""
    each = {"*": "[^/]*", "?": "[^/]", "[": "[", "]": "]"}
    expression = "(?:/[^/]+)*" if len(pattern) == 1 else ""
    for part in pattern:
        expression += "(?:/[^/]+)*" if part == "**" else "/" + "".join(each.get(c, re.escape(c)) for c in part)
    return re.fullmatch(expression, f"/{name}", re.IGNORECASE) is not None
