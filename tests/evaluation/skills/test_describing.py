"""What is said of one shape is true of the only one that the question can mean."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from qwen35mm.evaluation.scenes import ALL_PLACES, Picture, Split, is_held_out
from qwen35mm.evaluation.skills import SKILLS, asking, describing, relations
from qwen35mm.evaluation.skills.base import picture_for
from tests.evaluation.claims import COLORS, GROUNDS, SHAPES, captioned, holds, named, seen, spelled_out

ABOUT_IT: dict[str, Callable[..., Any]] = {
    "caption": describing.caption_turn,
    "color": describing.color_turn,
    "shape": describing.shape_turn,
    "place": describing.place_turn,
    "size": describing.size_turn,
    "yes no": asking.yes_no_turn,
}
TURNS: dict[str, Callable[..., Any]] = {
    "what": describing.what_turn,
    "background": describing.background_turn,
    "count": asking.count_turn,
    "relation": relations.relation_turn,
    "extreme": relations.extreme_turn,
}
SPLITS: tuple[Split, ...] = ("seen", "combos")
pytestmark = pytest.mark.usefixtures("plainly")


def turns(name: str, count: int, most: int = 6) -> list[tuple[Picture, Any, Any]]:
    """(picture, what the turn before was about, turn)."""
    rng = random.Random(name)
    found = []
    while len(found) < count:
        split = rng.choice(SPLITS)
        picture = picture_for(rng, split, most, 2 if name in ("relation", "extreme") else 1)
        about = rng.choice((None, *picture.items))
        turn = ABOUT_IT[name](rng, picture, about) if name in ABOUT_IT else TURNS[name](rng, picture)
        if turn is not None:
            found.append((picture, about, turn))
    return found


@pytest.mark.parametrize("name", ["color", "shape", "place", "size", "what", "background"])
def test_answers_are_true_and_mean_one_shape(name: str) -> None:
    for picture, about, turn in turns(name, 60):
        question = spelled_out(turn.question.lower())
        asked = None if name == "background" else named(picture.items, question.replace("shape does", "does"))
        by_pronoun = re.search(r"\b(it|its|that)\b", question) and not asked
        it = about or (picture.items[0] if len(picture.items) == 1 else None)
        if not by_pronoun and asked:
            (it,) = asked
        assert holds(picture, turn.answer, it), (turn, picture.items)
        # What is asked for is what is told.
        told = set(re.findall(r"[\w-]+", turn.answer.lower()))
        kind = {"color": COLORS, "shape": SHAPES, "size": ("small", "medium-sized", "big"), "background": GROUNDS}
        if name in kind:
            assert told & set(kind[name])
        if name == "what" and "nothing" not in told:
            assert turn.about == it


def test_captions_name_everything_in_reading_order() -> None:
    for picture, _, turn in turns("caption", 50):
        parts = captioned(turn.answer)
        assert parts == seen(picture.items)
        assert [part[3] for part in parts] == sorted((part[3] for part in parts), key=ALL_PLACES.index)


def test_only_the_combos_split_shows_what_is_held_out() -> None:
    for name in ("caption 1-3", "caption 4-6", "color", "relation", "box"):
        for split in SPLITS:
            rng = random.Random(f"{name} {split}")
            for _ in range(25):
                content = SKILLS[name].sample(rng, split).messages[0]["content"]
                (picture,) = (part["image"] for part in content if part["type"] == "image")
                kept_out = [is_held_out(i.color, i.shape, i.place) for i in picture.items]
                assert any(kept_out) == (split == "combos")
