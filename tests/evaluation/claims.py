"""Whether what an answer says is true of a picture: read off the sentence and the coordinates, not off the grammar."""

from __future__ import annotations

import re
from collections.abc import Sequence

from qwen35mm.evaluation.scenes import Item, Picture

COLORS = ["red", "orange", "yellow", "green", "blue", "purple", "white", "black"]
SHAPES = ["circle", "square", "triangle", "star", "diamond", "cross"]
GROUNDS = ["white", "gray", "black", "red", "yellow", "green", "blue", "purple"]
NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_COLOR, _SHAPE = f"(?P<color>{'|'.join(COLORS)})", f"(?P<shape>{'|'.join(SHAPES)})"
_NAME = re.compile(rf"(?:{_COLOR} )?(?:{_SHAPE}|shape|one|thing|object)(?:e?s)?\b")
_AT = re.compile(
    r"(?:at|on|in) the (?P<place>top left|top right|bottom left|bottom right|top|bottom|left|right|center)\b(?! of)"
)
_CAPTION = re.compile(rf"an? (?:(?P<size>small|big) )?{_COLOR} {_SHAPE} (?P<at>(?:at|on|in) the .+)")


def place_of(item: Item) -> str:
    """The cell of a 3 x 3 grid that the centre lies in, by its coordinates."""
    row, column = min(2, int(3 * item.y)), min(2, int(3 * item.x))
    return f"{('top', '', 'bottom')[row]} {('left', '', 'right')[column]}".strip() or "center"


def size_of(item: Item) -> str:
    """By the radius: between the three sizes are gaps."""
    return "small" if item.radius < 0.09 else "medium-sized" if item.radius < 0.15 else "big"


def named(items: Sequence[Item], text: str) -> list[Item] | None:
    """The items that a text's first name and place fit; None where it has neither."""
    text = text.lower()
    name = next((match for match in _NAME.finditer(text) if match["color"] or match["shape"]), None)
    at = _AT.search(text)
    color, shape = (name["color"], name["shape"]) if name else (None, None)
    if not (color or shape or at):
        return None
    return [
        item
        for item in items
        if (not color or item.color == color)
        and (not shape or item.shape == shape)
        and (not at or place_of(item) == at["place"])
    ]


def spelled_out(question: str) -> str:
    """'What is at the top left?' of 'Top left?': the question with what its bare place leaves unsaid."""
    question = re.sub(r"\b(an? )?\w+,? or (is it )?(an? )?\w+", "", question)  # of two that are named, one is right
    if _AT.search(question):
        return question
    return re.sub(r"\b((?:top|bottom) (?:left|right)|top|bottom|left|right|center)\b", r"at the \1", question, count=1)


def the_one(items: Sequence[Item], text: str) -> Item:
    """The only item that a text can mean."""
    found = named(items, text)
    assert found is not None, f"{text!r} names nothing"
    assert len(found) == 1, f"{text!r} means {len(found)} of {[i.name for i in items]}"
    return found[0]


def captioned(text: str) -> list[tuple[str, str, str, str]]:
    """(size, colour, shape, place) of each part of a caption, in its order."""
    found = []
    for part in re.split(r", | and (?=an? )", text.rstrip(".").lower()):
        match = _CAPTION.fullmatch(part)
        assert match, f"{part!r} is no part of a caption"
        at = _AT.fullmatch(match["at"])
        assert at, part
        found.append((match["size"] or "medium-sized", match["color"], match["shape"], at["place"]))
    return found


def seen(items: Sequence[Item]) -> list[tuple[str, str, str, str]]:
    return [(size_of(item), item.color, item.shape, place_of(item)) for item in items]


def side_holds(side: str, first: Item, second: Item) -> bool:
    columns, rows = ([int(3 * getattr(i, axis)) for i in (first, second)] for axis in ("x", "y"))
    return {
        "left of": columns[0] < columns[1],
        "right of": columns[0] > columns[1],
        "above": rows[0] < rows[1],
        "below": rows[0] > rows[1],
    }[side]


def holds(picture: Picture, sentence: str, it: Item | None) -> bool:
    """Whether a sentence without "Yes" or "No" is true of the picture; `it` is what "it" means."""
    items, text = picture.items, sentence.rstrip(".").lower()
    if match := re.fullmatch(r"the background is (\w+)", text):
        return picture.background.name == match[1]
    if match := re.fullmatch(r"there (?:is|are) nothing (.+)", text):
        return named(items, match[1]) == []
    if match := re.fullmatch(r"there (?:is|are) (an?|\w+) (.+)", text):
        noun = match[2]
        count = len(items) if re.fullmatch("shapes?", noun) else len(named(items, noun) or ())
        return count > 0 if match[1] in ("a", "an") else NUMBERS.index(match[1]) == count
    if match := re.fullmatch(r"the (.+) is the (largest|smallest)", text):
        radii = sorted(item.radius for item in items)
        extreme, next_to = (radii[-1], radii[-2]) if match[2] == "largest" else (radii[0], radii[1])
        return the_one(items, match[1]).radius == extreme and not 0.9 < extreme / next_to < 1.1
    if match := re.fullmatch(r"the (.+?) is (not )?((?:above|below|left of|right of)(?: and \w+ of)?) the (.+)", text):
        first, second = the_one(items, match[1]), the_one(items, match[4])
        return all(side_holds(side, first, second) for side in match[3].split(" and ")) != bool(match[2])
    if match := re.fullmatch(r"an? .+ is (?:at|on|in) the .+", text):
        return set(captioned(text.replace(" is ", " ", 1))) <= set(seen(items))
    match = re.fullmatch(r"(it|the .+?) is (.+)", text)
    assert match, f"{sentence!r} is no known claim"
    item = it if match[1] == "it" else the_one(items, match[1])
    assert item is not None, f"nothing is meant by 'it' in {sentence!r}"
    value = re.sub(r"^an? ", "", match[2])
    at = _AT.fullmatch(value)
    if at:
        return place_of(item) == at["place"]
    assert value in (*COLORS, *SHAPES, "small", "medium-sized", "big"), value
    return value in (item.color, item.shape, size_of(item))
