"""The expression of `--where`."""

from __future__ import annotations

from typing import Any

import pytest

from qwen35mm.captioning.where import Where, size_facts
from qwen35mm.errors import CaptioningError

FACTS: dict[str, Any] = {
    **size_facts(1000, 500, None),
    "sharpness": 30.0,
    "letterbox": 0.0,
    "name": "cats/a.jpg",
    "stem": "a",
    "folder": "cats",
    "kind": "image",
    "bytes": 4096,
    "metadata": {"score": "0.4", "tag key": "red", "likes": 7},
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("width >= 512 and sharpness > 20 and aspect < 2.5", True),
        ("width >= 512 and sharpness > 40", False),
        ("not (width < 512 or height < 512)", False),
        ("400 < height <= 500", True),
        ("width * height > 1e5 and pixels == width * height", True),
        ("aspect == 2 and -aspect < 0", True),
        ("kind in ('image', 'video') and 'cats' in name", True),
        ("folder not in ['dogs', 'birds']", True),
        ("metadata.likes > 5 and metadata['tag key'] == 'red'", True),
        ("metadata.score > 0.5", False),
        ("metadata.score > 0.3", True),
        # A comparison with what a medium lacks is false.
        ("metadata.nothing > 1", False),
        ("duration > 1", False),
        ("width / (height - 500) > 1", False),
        ("name > 3", False),
    ],
)
def test_it_says_which_media_are_wanted(text: str, holds: bool) -> None:
    assert Where(text).holds(FACTS) is holds


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("width >= 2000 and sharpness > 20", False),
        ("width >= 512 or sharpness > 20", True),
        ("width >= 512 and sharpness > 20", None),
        ("not sharpness > 20", None),
        ("sharpness + 1 > 20 or letterbox in (0, 1)", None),
    ],
)
def test_it_decides_as_soon_as_what_is_known_decides(text: str, holds: bool | None) -> None:
    known = {name: value for name, value in FACTS.items() if name not in ("sharpness", "letterbox")}
    assert Where(text).holds(known) is holds


def test_it_says_what_it_needs() -> None:
    where = Where("width > 3 and sharpness > 2")
    assert (where.needs_size, where.needs_pixels) == (True, True)
    where = Where("name == 'a' or metadata.score > 0.2")
    assert (where.needs_size, where.needs_pixels) == (False, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("widht > 3", r"no name 'widht'. Did you mean width\? It knows width, height, aspect"),
        ("width >", "can't be read: "),
        ("", "can't be read: "),
        ("open('/etc/passwd')", "takes comparisons, .* got 'open"),
        ("name.upper() == 'A'", "takes comparisons"),
        ("name.__class__ == 'A'", "takes comparisons"),
        ("width ** 99", "takes comparisons"),
        ("lambda: 3", "takes comparisons"),
        ("(x := 3)", "takes comparisons"),
        ("metadata == 3", "write metadata.KEY"),
        ("width is 3", "takes comparisons"),
        ("not " * 100 + "width", "nested too deeply"),
        ("width > 1 and " * 200 + "width > 1", "at most 2,000 characters"),
    ],
)
def test_what_it_does_not_know_is_refused(text: str, message: str) -> None:
    with pytest.raises(CaptioningError, match=message):
        Where(text)
