"""Scenes as the vision tower takes them: patches on the grids that the checkpoint's processors choose, and targets.

A span is an image or one temporal patch (two frames) of a clip.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as image_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as video_resize

from qwen35mm.evaluation.drawing import item_box, render_clip, render_picture, word_layout
from qwen35mm.evaluation.scenes import (
    ALL_PLACES,
    BACKGROUNDS,
    COLORS,
    MOTIONS,
    SHAPES,
    SIZES,
    Clip,
    Item,
    Picture,
    Unknown,
)
from training.export import IMAGE_PROCESSOR, VIDEO_PROCESSOR

MERGED = 32  # pixels of a merged token's side: patch 16, merge 2
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
MOST_LETTERS = 3  # letters whose middles may lie in one token
MOST_MEDIA = 6  # that are told apart by their number
MOST_ITEMS = 6  # shapes of a picture
EDGES = ("x1", "y1", "x2", "y2", "x", "y")  # of the box around a shape, and its middle
# Of each token's targets: classes, and how many numbers of a box follow them.
CLASSES = {
    "color": len(COLORS) + 1,
    "shape": len(SHAPES) + 1,
    "place": len(ALL_PLACES) + 1,
    "size": len(SIZES) + 1,
    "centre": 2,
    "background": len(BACKGROUNDS) + 1,
    "letter 1": len(LETTERS) + 1,
    "letter 2": len(LETTERS) + 1,
    "letter 3": len(LETTERS) + 1,
    # The digits that boxes and points are written with: from a number alone, answers didn't learn to write them.
    **{f"{edge} {digit}": count for edge in EDGES for digit, count in (("100", 12), ("10", 11))},
}

# What the decoder is asked at each merged token beside that, and of how many classes.
KNOWN = {
    "color before": len(COLORS) + 1,
    "shape before": len(SHAPES) + 1,
    "tens of seconds": 10,
    "seconds": 10,
    "tenths of seconds": 10,
    "medium": MOST_MEDIA,
    "so far": MOST_ITEMS,
    "so far of its color": MOST_ITEMS,
    "so far of its shape": MOST_ITEMS,
}
_BEFORE, _TIME, _MEDIUM, _SO_FAR = slice(0, 2), slice(2, 5), 5, slice(6, 9)  # columns of `to_know`


@dataclass
class Media:
    """Spans of one image or clip, drawn when they are first looked at: in a conversation that fits no row, never.

    Attributes:
        size: of a frame in pixels: (height, width).
        times_s: of each span of a clip.
        draw: gives `frames`, `targets` and `boxes`.
    """

    size: tuple[int, int]
    times_s: list[float] | None
    draw: Callable[[], tuple[np.ndarray, np.ndarray, np.ndarray]]

    @functools.cached_property
    def _drawn(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.draw()

    @property
    def frames(self) -> np.ndarray:
        """uint8 [spans, 2, height, width, 3], or [spans, 1, ...] for an image, whose frame counts twice."""
        return self._drawn[0]

    @property
    def targets(self) -> np.ndarray:
        """int16 [spans * tokens, CLASSES]."""
        return self._drawn[1]

    @property
    def boxes(self) -> np.ndarray:
        """float32 [spans * tokens, 4] in 0 to 1, NaN where none is."""
        return self._drawn[2]

    @property
    def num_spans(self) -> int:
        return 1 if self.times_s is None else len(self.times_s)

    @property
    def grid(self) -> tuple[int, int]:
        """Merged tokens of a span: (rows, columns)."""
        return self.size[0] // MERGED, self.size[1] // MERGED

    @property
    def tokens_per_span(self) -> int:
        return self.grid[0] * self.grid[1]


def image_size(size: tuple[int, int], least_tokens: int | None = None) -> tuple[int, int]:
    """(height, width) to which the checkpoint's image processor brings a picture of (width, height).

    `least_tokens`: in place of the processor's own lower limit.
    """
    limits = IMAGE_PROCESSOR["size"]
    least = limits["shortest_edge"] if least_tokens is None else least_tokens * MERGED**2
    return image_resize(size[1], size[0], MERGED, least, limits["longest_edge"])


def video_size(size: tuple[int, int], num_frames: int) -> tuple[int, int]:
    """(height, width) in pixels to which the video processor brings frames of (width, height)."""
    limits = VIDEO_PROCESSOR["size"]
    frames = max(2, num_frames)
    return video_resize(frames, size[1], size[0], 2, MERGED, limits["shortest_edge"], limits["longest_edge"])


def frame_times(duration_s: float, fps: float) -> list[float]:
    """Presentation times of the frames that the video processor samples from a file of `fps` frames a second."""
    total = max(1, round(duration_s * fps))
    limits = VIDEO_PROCESSOR
    wanted = min(max(int(total / fps * limits["fps"]), limits["min_frames"]), limits["max_frames"])
    return [float(i) / fps for i in np.linspace(0, total - 1, min(wanted, total)).round()]


def picture_media(picture: Picture | Unknown, least_tokens: int | None = None) -> Media:
    """The picture as the image processor makes it (`image_size`), drawn at 1.5 times that size where it is larger."""
    height, width = image_size((picture.width, picture.height), least_tokens)

    def draw() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        scale = min(1.0, 1.5 * width / picture.width)
        image = render_picture(picture, scale=scale).resize((width, height), Image.Resampling.BICUBIC)
        return np.asarray(image)[None, None], *token_targets(picture, (height, width))

    return Media((height, width), None, draw)


def clip_media(clip: Clip, times_s: list[float]) -> Media:
    """The clip at the given frame times; an odd last frame is repeated."""
    height, width = video_size((clip.width, clip.height), len(times_s))
    times_s = times_s + times_s[-1:] * (len(times_s) % 2)
    middles = [(a + b) / 2 for a, b in zip(times_s[::2], times_s[1::2], strict=True)]
    # What happens at once between the frames of a span has happened in it: "when" is asked so (`skills.clips.seconds`).
    known_s = middles if clip.event in MOTIONS else times_s[1::2]

    def draw() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        scale = min(1.0, 1.5 * width / clip.width)
        images = render_clip(clip, [t / clip.duration_s for t in times_s], scale=scale, size=(width, height))
        frames = np.stack([np.asarray(image) for image in images]).reshape(-1, 2, height, width, 3)
        shown = [Picture(width, height, clip.background, clip.at(t / clip.duration_s)) for t in known_s]
        once = {each: token_targets(each, (height, width)) for each in dict.fromkeys(shown)}
        targets, boxes = zip(*(once[each] for each in shown), strict=True)
        return frames, np.concatenate(targets), np.concatenate(boxes)

    return Media((height, width), middles, draw)


def random_timing(rng: random.Random, most_frames: int, fps: float) -> tuple[float, list[float]]:
    """A duration in seconds, and the times of the frames that are sampled from a file of `fps` frames a second."""
    long = rng.uniform(16, 40) if most_frames >= 32 else most_frames / 2
    duration = rng.choices((rng.uniform(1, 4), rng.uniform(3, most_frames / 2), long), (5, 4, 1))[0]
    return duration, frame_times(duration, fps)


def patchify(frames: np.ndarray) -> np.ndarray:
    """uint8 [spans, 1 or 2, height, width, 3] -> uint8 [spans * patches, 1536], in the processors' order."""
    frames = np.broadcast_to(frames, (len(frames), 2, *frames.shape[2:]))
    spans, _, height, width, _ = frames.shape
    blocks = frames.reshape(spans, 2, height // 32, 2, 16, width // 32, 2, 16, 3)
    return blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3 * 2 * 16 * 16)


def pixel_values(pixels: torch.Tensor) -> torch.Tensor:
    """Bytes -> float32 as the processors make them: bytes are a quarter of what goes from one process to another."""
    return pixels.float() / 127.5 - 1.0


def vision_batch(media: list[Media]) -> dict[str, torch.Tensor]:
    """`pixels` uint8 [patches, 1536], `grids` [spans, 3], and of each merged token `targets` and `boxes` for probes."""
    grids = [(1, 2 * m.grid[0], 2 * m.grid[1]) for m in media for _ in range(len(m.frames))]
    return {
        "pixels": torch.from_numpy(np.concatenate([patchify(medium.frames) for medium in media])),
        "grids": torch.tensor(grids),
        "targets": torch.from_numpy(np.concatenate([medium.targets for medium in media]).astype(np.int64)),
        "boxes": torch.from_numpy(np.concatenate([medium.boxes for medium in media])),
    }


def to_know(media: list[Media]) -> np.ndarray:
    """What can be known of each merged token by those before it: int16 [tokens, KNOWN], -1 where there is nothing.

    What was at its place in the span before (colour and shape as in targets), if that had the same size; the digits of
    its span's time as the prompt writes it; how many media came before its own; and at the middle of a picture's shape
    how many shapes the tokens up to there have shown before it, of any kind, of its colour and of its shape.
    """
    found: list[np.ndarray] = []
    grid, last = None, None
    for number, medium in enumerate(media):
        times = [None] if medium.times_s is None else medium.times_s
        for span, time in zip(medium.targets.reshape(len(times), -1, len(CLASSES)), times, strict=True):
            known = np.full((len(span), len(KNOWN)), -1, dtype=np.int16)
            if last is not None and grid == medium.grid:
                known[:, _BEFORE] = last
            known[:, _MEDIUM] = min(number, MOST_MEDIA - 1)
            if time is None:
                for place, counts in _so_far(span):
                    known[place, _SO_FAR] = counts
            else:
                known[:, _TIME] = [int(digit) for digit in f"{time:05.1f}"[-4:].replace(".", "")]
            found.append(known)
            grid, last = medium.grid, span[:, :2]
    return np.concatenate(found)


def _so_far(targets: np.ndarray) -> list[tuple[int, tuple[int, int, int]]]:
    """Tokens with a shape's middle, and how many such come before each: of any kind, of its colour, of its shape."""
    places = np.flatnonzero(targets[:, 4])
    colors, shapes = targets[places, 0], targets[places, 1]
    return [
        (int(place), (i, int((colors[:i] == colors[i]).sum()), int((shapes[:i] == shapes[i]).sum())))
        for i, place in enumerate(places)
    ]


def token_targets(picture: Picture | Unknown, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """What is at each merged token of a picture of (height, width): classes (0: nothing), and the box around it."""
    height, width = size
    rows, columns = height // MERGED, width // MERGED
    targets = np.zeros((rows, columns, len(CLASSES)), dtype=np.int16)
    boxes = np.full((rows, columns, 4), np.nan, dtype=np.float32)
    if isinstance(picture, Unknown):
        return targets.reshape(-1, len(CLASSES)), boxes.reshape(-1, 4)
    targets[..., 5] = 1 + tuple(BACKGROUNDS).index(picture.background.name)
    y, x = (np.arange(rows)[:, None] + 0.5) * MERGED, (np.arange(columns) + 0.5) * MERGED
    nearest = np.full((rows, columns), np.inf)
    for item in picture.items:
        distance = np.hypot(x - item.x * width, y - item.y * height)
        row, column = _cell(item.y, rows), _cell(item.x, columns)
        near = distance < 0.8 * item.radius * np.sqrt(width * height)
        near[row, column] = True
        near &= distance < nearest
        targets[near, :4] = _classes(item)
        boxes[near] = box = item_box(item, (width, height))
        targets[near, -2 * len(EDGES) :] = _digits(*box, item.x, item.y)
        nearest[near] = distance[near]
        targets[row, column, 4] = 1
    for word in picture.words:
        _, left, _, edges = word_layout(word, (width, height))
        turn = np.deg2rad(word.angle)
        for letter, begin, end in zip(word.text.lower(), [0.0, *edges], edges, strict=False):
            along = (left + (begin + end) / 2) - word.x * width
            column = _cell((word.x * width + along * np.cos(turn)) / width, columns)
            row = _cell((word.y * height - along * np.sin(turn)) / height, rows)
            targets[row, column, 0] = 1 + tuple(COLORS).index(word.color)
            slots = targets[row, column, 6:9]
            free = np.flatnonzero(slots == 0)
            if letter in LETTERS and len(free):
                slots[free[0]] = 1 + LETTERS.index(letter)
    return targets.reshape(-1, len(CLASSES)), boxes.reshape(-1, 4)


def _digits(*edges: float) -> list[int]:
    """Of each in thousandths, the hundreds and the tens as classes."""
    return [1 + digit for edge in edges for digit in divmod(round(1000 * edge) // 10, 10)]


def _cell(fraction: float, count: int) -> int:
    return min(count - 1, max(0, int(fraction * count)))


def _classes(item: Item) -> tuple[int, int, int, int]:
    return (
        1 + tuple(COLORS).index(item.color),
        1 + SHAPES.index(item.shape),
        1 + ALL_PLACES.index(item.place),
        1 + tuple(SIZES).index(item.size),
    )
