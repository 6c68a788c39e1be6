"""Small talk, what can't be told, and follow-ups: what "it" means, and which picture is asked about."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from qwen35mm.evaluation import drawing
from qwen35mm.evaluation.drawing import render_picture
from qwen35mm.evaluation.scenes import Picture, Unknown
from qwen35mm.evaluation.skills import SKILLS, chat, declining, followups
from qwen35mm.evaluation.skills.chat import CANT_TELL, NO_MEDIA
from tests.training.claims import captioned, holds, named, seen, spelled_out
from tests.training.test_language import questions

pytestmark = pytest.mark.usefixtures("plainly")


def test_kinds_of_small_talk_share_no_question() -> None:
    rng = random.Random(0)
    answers: dict[str, set[str]] = {}
    for _ in range(1500):
        turn = rng.choice((chat.chat_turn, chat.off_topic_turn, chat.no_media_turn))(rng, rng.choice(("train", "seen")))
        answers.setdefault(turn.question.lower().strip("?!. "), set()).add(turn.answer)
    assert len(answers) > 300
    assert not [question for question, found in answers.items() if len(found) > 1]
    assert {answer for found in answers.values() for answer in found} >= {CANT_TELL, NO_MEDIA, chat.WHO, "Goodbye!"}


def test_what_is_to_be_said_stands_in_the_question() -> None:
    rng = random.Random(0)
    found = set()
    for split in ("train", "seen"):
        for _ in range(100):
            turn = chat.repeat_turn(rng, split)
            assert turn.answer in turn.question
            assert "{" not in turn.question
            found.add(turn.answer)
    assert len(found) > 190
    assert {len(said.split()) for said in found} >= {1, 2, 3, 4}
    assert any(said.isdigit() for said in found)


def test_things_of_the_evaluation_are_new_ones() -> None:
    rng = random.Random(0)
    train = " ".join(chat.off_topic_turn(rng, "train").question for _ in range(2000))
    new = [thing for names in (chat._THINGS, chat._PLACES) for thing in names[len(names) * 4 // 5 :]]
    new = [thing for thing in new if not any(thing in template for template in chat._OFF_TOPIC)]
    assert len(new) > 15
    assert not [thing for thing in new if re.search(rf"\b{re.escape(thing)}\b", train)]


def test_photographs_of_the_evaluation_are_none_of_training() -> None:
    rng = random.Random(0)
    photos = {"train": set(), "combos": set()}
    for split, found in photos.items():
        for _ in range(80):
            unknown = declining.random_unknown(rng, split)  # type: ignore[arg-type]
            if unknown.kind == "photo":
                names = drawing._HELD_OUT_PHOTOS if unknown.seed >= 2**31 else drawing._PHOTOS
                found.add(names[int(np.random.default_rng(unknown.seed).integers(len(names)))])
    assert photos["train"] <= set(drawing._PHOTOS)
    assert photos["combos"] == set(drawing._HELD_OUT_PHOTOS)
    assert not set(drawing._PHOTOS) & set(drawing._HELD_OUT_PHOTOS)
    plain = [np.asarray(render_picture(Unknown(96, 64, "photo", seed))).std() for seed in (3, 2**31 + 3)]
    assert min(plain) > 3


def test_pages_are_legible_and_training_alone_has_them() -> None:
    """The evaluation has a photograph of one, which is held out."""
    rng = random.Random(0)
    kinds = {split: {declining.random_unknown(rng, split).kind for _ in range(60)} for split in ("train", "combos")}
    assert kinds == {"train": {"photo", "page", "noise"}, "combos": {"photo", "noise"}}
    for seed in range(60):
        pixels = np.asarray(render_picture(Unknown(200, 160, "page", seed)).convert("L")).astype(int)
        # Ink beside paper, in half of its squares at least, however it is lit.
        squares = pixels.reshape(16, 10, 20, 10).swapaxes(1, 2).reshape(-1, 100)
        assert (np.ptp(squares, axis=1) > 50).mean() > 0.5


def test_of_unknown_pictures_nothing_is_told() -> None:
    rng = random.Random(0)
    found = set()
    for split in ("train", "seen"):
        for _ in range(150):
            turn = declining.unknown_turn(rng, split)
            assert turn.answer == CANT_TELL
            found.add(turn.question)
            assert not re.search("crosss|{|}", turn.question)
    assert len(found) > 100


def test_it_is_what_the_turn_before_was_about() -> None:
    rng = random.Random(0)
    pronouns = 0
    for _ in range(60):
        sample = followups._sample(rng, "train")
        (picture,) = (part["image"] for part in sample.messages[0]["content"] if part["type"] == "image")
        it = None
        for question, answer in zip(sample.messages[::2], sample.messages[1::2], strict=True):
            (text,) = questions([question])
            meant = named(picture.items, spelled_out(text.lower()))
            claim = answer["content"].split(", ", 1)[-1]
            if claim.startswith("it ") or claim.startswith("It "):
                # "Is it at the top?" asks about the former one, "What color is it at the top?" about that there.
                it = meant[0] if meant and not answer["content"].startswith(("Yes", "No")) else it
                pronouns += 1
                assert it is not None
            elif subject := named(picture.items, claim):
                (it,) = subject[:1]
            assert holds(picture, claim[0].lower() + claim[1:], it), (text, claim, it)
    assert pronouns > 60


def test_of_another_the_same_is_asked_by_what_is_new() -> None:
    rng = random.Random(0)
    elided = 0
    for split in ("train", "seen", "combos") * 40:
        sample = followups.again_sample(rng, split)
        (picture,) = (part["image"] for part in sample.messages[0]["content"] if part["type"] == "image")
        assert len(set(sample.skills)) == 1
        for question, answer in zip(sample.messages[2::2], sample.messages[3::2], strict=True):
            (text,) = questions([question])
            claim = answer["content"].split(", ", 1)[-1]
            assert holds(picture, claim[0].lower() + claim[1:], None), (text, claim)
            meant = named(picture.items, spelled_out(text.lower())) or []
            said = named(picture.items, claim) or []
            assert {item.name for item in said} <= {item.name for item in meant}, (text, claim)
            elided += 1
    assert elided > 120


def test_the_newest_picture_is_asked_about() -> None:
    rng = random.Random(0)
    captions = 0
    for _ in range(60):
        sample = SKILLS["second picture"].sample(rng, "train")
        first, second = (
            part["image"] for message in sample.messages[::2] for part in message["content"] if part["type"] == "image"
        )
        assert isinstance(second, Picture)
        assert captioned(sample.messages[1]["content"]) == seen(first.items)
        if sample.skill == "caption":
            captions += 1
            assert captioned(sample.messages[3]["content"]) == seen(second.items)
    assert captions > 5
