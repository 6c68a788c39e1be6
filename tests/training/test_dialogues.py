"""Answers follow from the scene, and the model could tell them from the question."""

import random
import re

import pytest

from training.dialogues import clip_turn, picture_caption, picture_turn, text_turn
from training.phrases import CLIP_SKILLS, NUMBERS, PICTURE_SKILLS
from training.scenes import COLORS, SHAPES, random_clip, random_picture

SIZE = (160, 120)


def test_caption_names_every_item_in_order():
    for seed in range(50):
        rng = random.Random(seed)
        picture = random_picture(rng, SIZE, rng.choice((1, 2, 3)))
        caption = picture_caption(picture)
        positions = [caption.lower().index(f"{item.color} {item.shape}") for item in picture.items]
        assert positions == sorted(positions)
        assert caption[0].isupper()
        assert caption.count(".") == 1


@pytest.mark.parametrize("skill", PICTURE_SKILLS)
def test_picture_answers_are_true_and_unambiguous(skill: str):
    rng = random.Random(skill)
    asked = 0
    while asked < 200:
        picture = random_picture(rng, SIZE, rng.choice((1, 2, 3)))
        about = rng.choice((None, rng.choice(picture.items)))
        turn = picture_turn(rng, picture, skill, about)
        if turn is None:
            continue
        asked += 1
        question, answer = turn.question.lower(), turn.answer.lower()
        if skill == "count":
            assert NUMBERS[len(picture.items)] in answer
        elif skill == "count_of":
            word = next(w for w in (*SHAPES, *COLORS) if w in question)
            assert NUMBERS[sum(word in (i.shape, i.color) for i in picture.items)] in answer
        elif skill != "caption":
            assert turn.about in picture.items
            named = not re.search(r"\bit\b|the shape\W*(please)?\W*$", question)
            fits = [i for i in picture.items if not _contradicts(question, i)]
            truths = {"color": "color", "shape": "shape", "place": "place", "what": "shape"}
            assert getattr(turn.about, truths[skill]) in answer
            if named:
                assert {getattr(i, truths[skill]) for i in fits} == {getattr(turn.about, truths[skill])}


def _contradicts(question: str, item) -> bool:
    """Whether the question names a color, shape or place that is not the item's."""
    colors, shapes = ([w for w in words if w in question] for words in (COLORS, SHAPES))
    if (colors and item.color not in colors) or (shapes and item.shape not in shapes):
        return True
    phrase = next((p for p in ("at the ", "on the ", "in the center") if p in question), None)
    if phrase is None:
        return False
    place = "center" if "center" in phrase else question.split(phrase, 1)[1].rstrip("?., ").removesuffix(", please")
    return item.place != place


@pytest.mark.parametrize("skill", CLIP_SKILLS)
def test_clip_answers_name_what_happens(skill: str):
    rng = random.Random(skill)
    for _ in range(100):
        clip = random_clip(rng, SIZE)
        answer = clip_turn(rng, clip, skill).answer
        if skill == "clip_shape":
            assert clip.start.shape in answer
        elif clip.event == "change":
            assert f"from {clip.start.color} to {clip.end.color}" in answer
        elif skill == "clip_color":
            assert clip.start.color in answer
        else:
            assert {"still": ("stays still", "does not move")}.get(clip.event, (clip.event,))[
                0 if skill == "clip" else -1
            ] in answer


def test_text_turns_have_an_answer():
    rng = random.Random(3)
    assert {text_turn(rng).skill for _ in range(200)} == {"chat", "no_media", "off_topic"}
