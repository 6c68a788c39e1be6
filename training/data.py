"""Turns scenes and dialogues into batches: token ids, labels, M-RoPE positions and pixel patches.

All media of a batch share one patch grid, so that the vision tower runs them as one dense tensor; sequences
are padded on the right, where causal layers never look. A span is an image or one temporal patch of a clip.
"""

from __future__ import annotations

import io
import random
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as image_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as video_resize
from transformers.utils.chat_template_utils import render_jinja_template

from training.drawing import render_clip, render_picture
from training.export import IMAGE_PROCESSOR, VIDEO_PROCESSOR
from training.scenes import COLORS, PLACES, SHAPES, Clip, Item, Picture
from training.tokenizer import token_ids

IGNORE = -100
MERGED = 32  # pixels of a merged token's side: patch 16, merge 2
_PLACES = sum(PLACES, ())


@dataclass
class Media:
    """Spans of one image or clip: `frames` uint8 [spans, 2, height, width, 3]; `times_s` per span of a clip."""

    frames: np.ndarray
    times_s: list[float] | None
    items: list[tuple[Item, ...]]  # what each span shows


@dataclass
class Example:
    """A conversation that ends with the answer to be learned; `skills` has one name per assistant turn."""

    messages: list[dict[str, Any]]
    skills: list[str]
    media: list[Media] = field(default_factory=list)
    thought: str | None = None


def image_grid(size: tuple[int, int]) -> tuple[int, int]:
    """(height, width) to which the checkpoint's image processor brings a picture of (width, height)."""
    limits = IMAGE_PROCESSOR["size"]
    return image_resize(size[1], size[0], MERGED, limits["shortest_edge"], limits["longest_edge"])


def video_grid(size: tuple[int, int], num_frames: int) -> tuple[int, int]:
    """(height, width) in pixels to which the video processor brings frames of (width, height)."""
    limits = VIDEO_PROCESSOR["size"]
    frames = max(2, num_frames)
    return video_resize(frames, size[1], size[0], 2, MERGED, limits["shortest_edge"], limits["longest_edge"])


def picture_media(rng: random.Random, picture: Picture, grid: tuple[int, int]) -> Media:
    pixels = _resized(_worn(rng, render_picture(picture)), grid)
    return Media(np.stack([pixels, pixels])[None], None, [picture.items])


def clip_media(rng: random.Random, clip: Clip, times_s: list[float], grid: tuple[int, int]) -> Media:
    """The clip at the given frame times; an odd last frame is repeated."""
    fractions = [t / clip.duration_s for t in times_s]
    wear = random.Random(rng.random()) if rng.random() < 0.2 else None
    images = render_clip(clip, fractions)
    frames = [_resized(_worn(wear, image, 1.0) if wear else image, grid) for image in images]
    if len(frames) % 2:
        frames, times_s, fractions = (
            [*frames, frames[-1]],
            [*times_s, times_s[-1]],
            [*fractions, fractions[-1]],
        )
    pairs = range(0, len(frames), 2)
    return Media(
        np.stack(frames).reshape(-1, 2, *frames[0].shape),
        [(times_s[i] + times_s[i + 1]) / 2 for i in pairs],
        [(clip.at((fractions[i] + fractions[i + 1]) / 2),) for i in pairs],
    )


def frame_times(duration_s: float, num_frames: int, fps: float) -> list[float]:
    """Presentation times of evenly spread frames, as the video processor picks them from a file of `fps`."""
    total = max(num_frames, round(duration_s * fps))
    return [float(i) / fps for i in np.linspace(0, total - 1, num_frames).round()]


def num_sampled_frames(duration_s: float, fps: float = 25.0) -> int:
    """How many frames the video processor samples from a clip of this length."""
    wanted = min(
        max(int(duration_s * VIDEO_PROCESSOR["fps"]), VIDEO_PROCESSOR["min_frames"]),
        VIDEO_PROCESSOR["max_frames"],
    )
    return min(wanted, max(1, round(duration_s * fps)))


def patchify(frames: np.ndarray) -> np.ndarray:
    """uint8 [spans, 2, height, width, 3] -> float32 [spans * patches, 1536], in the processors' order."""
    spans, _, height, width, _ = frames.shape
    pixels = frames.astype(np.float32) / 127.5 - 1.0
    blocks = pixels.reshape(spans, 2, height // 32, 2, 16, width // 32, 2, 16, 3)
    return blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3 * 2 * 16 * 16)


def mrope_positions(ids: np.ndarray, media_ids: tuple[int, int], grid: tuple[int, int]) -> np.ndarray:
    """M-RoPE positions [3, T] for spans of one merged grid; equal to transformers' get_rope_index."""
    rows, columns = grid
    positions = np.empty((3, len(ids)), dtype=np.int64)
    is_media = np.isin(ids, media_ids)
    index = position = 0
    while index < len(ids):
        if not is_media[index]:
            positions[:, index] = position
            index, position = index + 1, position + 1
            continue
        count = rows * columns
        span = positions[:, index : index + count]
        span[0] = position
        span[1] = position + np.repeat(np.arange(rows), columns)
        span[2] = position + np.tile(np.arange(columns), rows)
        index, position = index + count, position + max(rows, columns)
    return positions


class Encoder:
    """Renders an example with the checkpoint's own template and tokenizes it."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.ids = token_ids(tokenizer)
        self.media_ids = (self.ids["<|image_pad|>"], self.ids["<|video_pad|>"])
        self.answer_start = tokenizer.encode("<|im_start|>assistant\n").ids

    def prompt(self, example: Example, think: bool | None = None) -> str:
        """The text of the prompt, with one placeholder a token for every medium."""
        thinking = example.thought is not None if think is None else think
        messages = example.messages[:-1] if example.messages[-1]["role"] == "assistant" else example.messages
        rendered, _ = render_jinja_template(
            [messages], chat_template=self.template, add_generation_prompt=True, enable_thinking=thinking
        )
        media = iter(example.media)
        pattern = r"<\|vision_start\|><\|(image|video)_pad\|><\|vision_end\|>"
        return re.sub(pattern, lambda match: _placeholder(next(media), match[1]), rendered[0])

    def encode(self, example: Example) -> tuple[np.ndarray, np.ndarray]:
        """(ids, answers): `answers` has the assistant turn's number where a token is to be learned, else -1."""
        answer = example.messages[-1]["content"]
        if example.thought is not None:
            answer = f"{example.thought}\n</think>\n\n{answer}"
        prompt_ids = self.tokenizer.encode(self.prompt(example)).ids
        answer_ids = [*self.tokenizer.encode(answer).ids, self.ids["<|im_end|>"]]
        answers = np.full(len(prompt_ids) + len(answer_ids), -1, dtype=np.int64)
        turn, start, length = 0, self.answer_start, len(self.answer_start)
        for index in range(length, len(prompt_ids)):
            if turn < len(example.skills) - 1 and prompt_ids[index - length : index] == start:
                end = prompt_ids.index(self.ids["<|im_end|>"], index) + 1
                answers[index:end] = turn
                turn += 1
        answers[len(prompt_ids) :] = len(example.skills) - 1
        return np.array(prompt_ids + answer_ids, dtype=np.int64), answers


def collate(encoder: Encoder, examples: list[Example]) -> dict[str, Any]:
    """A batch of examples whose media share one grid.

    `input_ids` [B, T]; `labels` [B, T]: the id to be predicted at each place, or IGNORE; `answers` [B, T]: the
    number of the answer that it belongs to, whose skill is in `skills`; `position_ids` [3, B, T]; and the entries
    of `vision_batch`.
    """
    encoded = [encoder.encode(example) for example in examples]
    media = [medium for example in examples for medium in example.media]
    height, width = media[0].frames.shape[2:4] if media else (MERGED, MERGED)
    longest = max(len(ids) for ids, _ in encoded)
    shape = (len(examples), longest)
    input_ids = np.full(shape, encoder.ids["<|endoftext|>"], dtype=np.int64)
    labels, answers = np.full(shape, IGNORE, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
    positions = np.zeros((3, *shape), dtype=np.int64)
    skills: list[str] = []
    for row, ((ids, turns), example) in enumerate(zip(encoded, examples, strict=True)):
        length = len(ids)
        input_ids[row, :length] = ids
        positions[:, row, :length] = mrope_positions(ids, encoder.media_ids, (height // MERGED, width // MERGED))
        learned = np.flatnonzero(turns >= 0)
        labels[row, learned - 1] = ids[learned]
        answers[row, learned - 1] = turns[learned] + len(skills)
        skills += example.skills
    batch = {
        "input_ids": torch.from_numpy(input_ids),
        "labels": torch.from_numpy(labels),
        "answers": torch.from_numpy(answers),
        "position_ids": torch.from_numpy(positions),
        "skills": skills,
    }
    return batch | (vision_batch(media) if media else {})


def vision_batch(media: list[Media]) -> dict[str, Any]:
    """`pixels` [spans * patches, 1536], `grid_thw` [spans, 3], `targets` int64 [spans * tokens, 4].

    The targets say what is at each merged token: color, shape, place (0: nothing), and whether a centre is there.
    """
    frames = np.concatenate([medium.frames for medium in media])
    height, width = frames.shape[2:4]
    targets = [token_targets(items, (height, width)) for medium in media for items in medium.items]
    return {
        "pixels": torch.from_numpy(patchify(frames)),
        "grid_thw": torch.tensor([[1, height // 16, width // 16]]).repeat(len(frames), 1),
        "targets": torch.from_numpy(np.concatenate(targets)),
    }


def token_targets(items: tuple[Item, ...], size: tuple[int, int]) -> np.ndarray:
    """[tokens, 4]: the number of color, shape and place at each merged token, and 1 where a centre is."""
    height, width = size
    rows, columns = height // MERGED, width // MERGED
    targets = np.zeros((rows, columns, 4), dtype=np.int64)
    y, x = (np.mgrid[0:rows, 0:columns] + 0.5) * MERGED
    nearest = np.full((rows, columns), np.inf)
    for item in items:
        distance = np.hypot(x - item.x * width, y - item.y * height)
        row, column = min(rows - 1, int(item.y * rows)), min(columns - 1, int(item.x * columns))
        near = distance < 0.8 * item.radius * np.sqrt(width * height)
        near[row, column] = True
        near &= distance < nearest
        number = (
            1 + tuple(COLORS).index(item.color),
            1 + SHAPES.index(item.shape),
            1 + _PLACES.index(item.place),
        )
        targets[near, :3] = number
        nearest[near] = distance[near]
        targets[row, column, 3] = 1
    return targets.reshape(-1, 4)


def _placeholder(media: Media, kind: str) -> str:
    count = media.frames.shape[2] * media.frames.shape[3] // MERGED**2
    span = f"<|vision_start|>{f'<|{kind}_pad|>' * count}<|vision_end|>"
    if media.times_s is None:
        return span
    return "".join(f"<{time:.1f} seconds>{span}" for time in media.times_s)


def _resized(image: Image.Image, grid: tuple[int, int]) -> np.ndarray:
    return np.asarray(image.resize((grid[1], grid[0]), Image.Resampling.BICUBIC))


def _worn(rng: random.Random, image: Image.Image, share: float = 0.15) -> Image.Image:
    """Some of the pictures go through JPEG, as uploads do."""
    if rng.random() >= share:
        return image
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=rng.randint(55, 95))
    return Image.open(buffer).convert("RGB")
