"""Test cases: conversations with real files in them, and the one right last answer."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from training import dialogues, files, scenes
from training.dialogues import Turn
from training.phrases import CLIP_SKILLS, PICTURE_SKILLS
from training.scenes import Split

EVAL_SEED = 900_000_000  # far from the seeds that training draws from
PICTURE_CASES = ("caption 1", "caption 2", "caption 3", *(s for s in PICTURE_SKILLS if s != "caption"))
CLIP_CASES = ("clip caption", "motion", "color change", "clip color", "clip shape")
OTHER_CASES = ("follow-up", "clip follow-up", "second picture", "chat", "no media", "off topic")
SKILLS = (*PICTURE_CASES, *CLIP_CASES, *OTHER_CASES)


@dataclass(frozen=True)
class Case:
    """`messages` end with the question; media are files: {"type": "image", "image": bytes}, or "video"."""

    skill: str
    messages: list[dict[str, Any]]
    expected: str


def make_cases(skill: str, count: int, split: Split, seed: int = EVAL_SEED) -> list[Case]:
    """`count` cases of a skill; the same for the same arguments. `split`: "seen" or "combos" (held out)."""
    rng = random.Random(f"{seed} {skill} {split}")
    return [_case(rng, skill, split) for _ in range(count)]


def _case(rng: random.Random, skill: str, split: Split) -> Case:
    if skill in ("chat", "no media", "off topic"):
        while (turn := dialogues.text_turn(rng)).skill != skill.replace(" ", "_"):
            pass
        return _dialogue(skill, [turn], None)
    if skill in CLIP_CASES or skill == "clip follow-up":
        return _clip_case(rng, skill, split)
    if skill == "second picture":
        first, second = (_picture_case(rng, name, split) for name in ("caption 1", rng.choice(("caption 2", "place"))))
        history = [*first.messages, {"role": "assistant", "content": first.expected}]
        return Case(skill, history + second.messages, second.expected)
    return _picture_case(rng, skill, split)


def _picture_case(rng: random.Random, skill: str, split: Split) -> Case:
    number = int(skill[-1]) if skill.startswith("caption") else rng.choice((1, 2, 3))
    size = scenes.random_size(rng, scenes.random_aspect(rng), big=0.1)
    picture = scenes.random_picture(rng, size, number, split, unique=rng.random() < 0.5)
    turns: list[Turn] = []
    if skill == "follow-up":
        turns.append(_turn(rng, picture, rng.choice(("caption", "color", "shape", "what")), None))
    last = skill.split()[0] if skill != "follow-up" else rng.choice(("place", "color", "count", "shape"))
    turns.append(_turn(rng, picture, last, turns[-1].about if turns else None))
    kind = rng.choice(("PNG", "JPEG"))
    file = files.picture_file(picture, kind, quality=rng.randint(60, 95))
    return _dialogue(skill, turns, {"type": "image", "image": file})


def _turn(rng: random.Random, picture: scenes.Picture, skill: str, about: scenes.Item | None) -> Turn:
    while (turn := dialogues.picture_turn(rng, picture, skill, about)) is None:
        pass
    return turn


def _clip_case(rng: random.Random, skill: str, split: Split) -> Case:
    width, height = scenes.random_size(rng, min(2.5, max(0.4, scenes.random_aspect(rng))), big=0.05)
    event = {"motion": rng.choice((*scenes.MOTIONS, "still")), "color change": "change"}.get(skill)
    duration = rng.uniform(1, 8)
    clip = scenes.random_clip(rng, (width // 2 * 2, height // 2 * 2), split, event, duration)
    names = {"clip caption": "clip", "motion": "motion", "color change": "motion", "clip color": "clip_color"}
    names["clip shape"] = "clip_shape"
    turns = []
    if skill == "clip follow-up":
        turns.append(dialogues.clip_turn(rng, clip, rng.choice(tuple(CLIP_SKILLS))))
    turns.append(dialogues.clip_turn(rng, clip, names.get(skill) or rng.choice(tuple(CLIP_SKILLS))))
    return _dialogue(skill, turns, {"type": "video", "video": files.clip_file(clip)})


def _dialogue(skill: str, turns: list[Turn], medium: dict[str, Any] | None) -> Case:
    messages: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        content: list[dict[str, Any]] = [{"type": "text", "text": turn.question}]
        if index == 0 and medium is not None:
            content.insert(0, medium)
        messages.append({"role": "user", "content": content})
        if index < len(turns) - 1:
            messages.append({"role": "assistant", "content": turn.answer})
    return Case(skill, messages, turns[-1].answer)
