"""The training mixture: an endless, seeded stream of batches, drawn in worker processes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from training import data, dialogues, scenes
from training.data import Encoder, Example, Media
from training.dialogues import Turn
from training.phrases import CLIP_SKILLS, PICTURE_SKILLS, SYSTEM_PROMPTS
from training.scenes import Picture

# Shares of the batches by what is in them; clips are long, so their share of the examples is a third.
BATCHES = {"picture": 63, "clip": 31, "text": 3, "two": 3}
POOL = 3  # batches that are drawn together and sorted by length, which saves padding


class Mixture(IterableDataset):
    """Batches for the vision phase (`phase` 0) or the joint phase (1).

    `progress` is a shared double that the trainer sets: phase + the fraction of the phase that is done; the number of
    shapes in a picture grows with it.
    """

    def __init__(self, encoder: Encoder, seed: int, progress: Any, tokens_per_batch: int = 2600) -> None:
        self.encoder = encoder
        self.seed = seed
        self.progress = progress
        self.tokens_per_batch = tokens_per_batch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        torch.set_num_threads(1)
        worker = get_worker_info()
        rng = random.Random(f"{self.seed}/{worker.id if worker else 0}")
        while True:
            phase, done = divmod(float(self.progress.value), 1.0)
            if phase < 1:
                yield {"phase": 0} | data.vision_batch(_vision_media(rng, done))
                continue
            kind = rng.choices(tuple(BATCHES), tuple(BATCHES.values()))[0]
            examples = sorted(_examples(rng, kind, done, POOL * self.tokens_per_batch), key=_num_characters)
            bounds = [len(examples) * i // POOL for i in range(POOL + 1)]
            for index in rng.sample(range(POOL), POOL):
                batch = examples[bounds[index] : bounds[index + 1]]
                yield {"phase": 1} | data.collate(self.encoder, batch)


def picture_example(rng: random.Random, picture: Picture, media: Media, num_turns: int, opening: str = "") -> Example:
    """A conversation of `num_turns` questions about one picture, which comes before or after the first question."""
    turns: list[Turn] = []
    while len(turns) < num_turns:
        skill = rng.choices(tuple(PICTURE_SKILLS), tuple(PICTURE_SKILLS.values()))[0]
        turn = dialogues.picture_turn(rng, picture, skill, turns[-1].about if turns else None)
        if turn is not None:
            turns.append(turn)
    return _conversation(rng, turns, media, "image", opening)


def clip_example(rng: random.Random, clip: scenes.Clip, media: Media, num_turns: int, opening: str = "") -> Example:
    """A conversation of `num_turns` questions about one clip."""
    names, weights = tuple(CLIP_SKILLS), tuple(CLIP_SKILLS.values())
    turns = [dialogues.clip_turn(rng, clip, rng.choices(names, weights)[0]) for _ in range(num_turns)]
    return _conversation(rng, turns, media, "video", opening)


def text_example(rng: random.Random, num_turns: int, opening: str = "") -> Example:
    return _conversation(rng, [dialogues.text_turn(rng) for _ in range(num_turns)], None, "text", opening)


def two_picture_example(rng: random.Random, first: tuple[Picture, Media], second: tuple[Picture, Media]) -> Example:
    """A second picture is sent in a later turn; the questions are about the newest."""
    before = picture_example(rng, *first, num_turns=1)
    after = picture_example(rng, *second, num_turns=rng.choice((1, 1, 2)))
    messages = before.messages + [m for m in after.messages if m["role"] != "system"]
    return Example(messages, before.skills + after.skills, before.media + after.media, after.thought)


def random_timing(rng: random.Random, num_frames: int) -> tuple[float, list[float]]:
    """A duration for which the processor would sample `num_frames`, and the times of those frames."""
    fps = rng.choice((10.0, 12.0, 15.0, 24.0, 25.0, 29.97, 30.0))
    if rng.random() < 0.12:
        duration = rng.uniform(0.5, 12)
    elif num_frames >= 8:
        duration = rng.uniform(4, 9) if rng.random() < 0.8 else rng.uniform(9, 60)
    elif num_frames <= 4:
        duration = rng.uniform(0.4 if rng.random() < 0.3 else 1.5, 2.5)
    else:
        duration = rng.uniform(num_frames / 2, (num_frames + 1) / 2)
    return duration, data.frame_times(duration, num_frames, fps)


def _conversation(rng: random.Random, turns: list[Turn], media: Media | None, kind: str, opening: str = "") -> Example:
    """Messages for the turns; `opening` "system" puts a system prompt first, "chat" small talk without a medium."""
    messages: list[dict[str, Any]] = []
    skills = [turn.skill for turn in turns]
    if opening == "system":
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    if opening == "chat":
        chat = dialogues.text_turn(rng)
        skills.insert(0, chat.skill)
        messages += [
            {"role": "user", "content": chat.question},
            {"role": "assistant", "content": chat.answer},
        ]
    for index, turn in enumerate(turns):
        content: list[dict[str, str]] = [{"type": "text", "text": turn.question}]
        if index == 0 and media is not None:
            content.insert(rng.choice((0, 0, 1)), {"type": kind})
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": turn.answer}]
    subject = {"image": "picture", "video": "clip", "text": "text"}[kind]
    thought = dialogues.thought(turns[-1].skill, subject) if rng.random() < 0.05 else None
    return Example(messages, skills, [media] if media is not None else [], thought)


def _num_characters(example: Example) -> int:
    texts = (m["content"] for m in example.messages)
    return sum(len(t) if isinstance(t, str) else sum(len(p.get("text", "")) for p in t) for t in texts)


def _examples(rng: random.Random, kind: str, done: float, tokens: int) -> list[Example]:
    """Examples of one kind and one media grid; about `tokens` tokens in all."""
    num_turns = rng.choice((1, 2, 3, 4))
    opening = rng.choices(("", "system", "chat"), (8, 1, 1))[0]
    if kind == "text":
        return [text_example(rng, num_turns, opening) for _ in range(tokens // (35 * num_turns))]
    aspect = scenes.random_aspect(rng)
    if kind == "clip":
        num_frames = rng.choices((2, 3, 4, 5, 6, 7, 8), (1, 1, 5, 3, 5, 3, 10))[0]
        clips = list(_clips(rng, aspect, num_frames, tokens // (28 * ((num_frames + 1) // 2) + 26 * num_turns)))
        return [clip_example(rng, clip, media, num_turns, opening) for clip, media in clips]
    if kind == "two":
        pairs = list(_pictures(rng, aspect, done, 2 * (tokens // 115)))
        return [two_picture_example(rng, *pair) for pair in zip(pairs[::2], pairs[1::2], strict=True)]
    pictures = _pictures(rng, aspect, done, tokens // (26 + 28 * num_turns))
    return [picture_example(rng, picture, media, num_turns, opening) for picture, media in pictures]


def _pictures(rng: random.Random, aspect: float, done: float, count: int) -> Iterator[tuple[Picture, Media]]:
    """Pictures of one grid; `done` is the fraction of the phase, which decides how many shapes they hold."""
    grid = data.image_grid(scenes.random_size(rng, aspect, big=0))
    weights = (1, min(1.2, 0.15 + 4 * done), min(1.5, max(0.0, 6 * done - 0.5)))
    while count:
        size = scenes.random_size(rng, aspect)
        if data.image_grid(size) == grid:
            count -= 1
            number = rng.choices((1, 2, 3), weights)[0]
            picture = scenes.random_picture(rng, size, number, "train", unique=rng.random() < 0.5)
            yield picture, data.picture_media(rng, picture, grid)


def _clips(rng: random.Random, aspect: float, num_frames: int, count: int) -> Iterator[tuple[scenes.Clip, Media]]:
    aspect = min(2.5, max(0.4, aspect))
    grid = data.video_grid(scenes.random_size(rng, aspect, big=0), num_frames)
    while count:
        size = scenes.random_size(rng, aspect, big=0.02)
        if data.video_grid(size, num_frames) == grid:
            count -= 1
            duration, times = random_timing(rng, num_frames)
            clip = scenes.random_clip(rng, size, "train", duration_s=duration)
            yield clip, data.clip_media(rng, clip, times, grid)


def _vision_media(rng: random.Random, done: float, count: int = 40) -> list[Media]:
    """Media of one grid for the vision phase: pictures, and now and then clips."""
    aspect = scenes.random_aspect(rng)
    if rng.random() < 0.2:
        return [media for _, media in _clips(rng, aspect, rng.choice((4, 6, 8)), count // 4)]
    return [media for _, media in _pictures(rng, aspect, done, count)]
