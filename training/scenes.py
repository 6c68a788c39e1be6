"""The synthetic world: pictures of one to three coloured shapes, and clips in which one shape does something.

A scene is plain data, taken from a `random.Random`; `drawing` renders it. Places are the nine cells of a 3 x 3 grid.
Some combinations of color, shape and place (or a clip's event) are held out: the training split never shows them,
the "combos" split always does.
"""

from __future__ import annotations

import math
import random
import zlib
from dataclasses import dataclass
from typing import Literal

COLORS = {
    "red": (220, 35, 35),
    "orange": (245, 140, 20),
    "yellow": (245, 225, 40),
    "green": (40, 165, 60),
    "blue": (40, 80, 220),
    "purple": (140, 50, 175),
    "white": (246, 246, 246),
    "black": (14, 14, 14),
}
SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross")
PLACES = (
    ("top left", "top", "top right"),
    ("left", "center", "right"),
    ("bottom left", "bottom", "bottom right"),
)
MOTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
Split = Literal["train", "seen", "combos"]

_CELL_MARGIN = 0.035  # how far a centre stays from the border between two places, as a fraction of the side
_MIN_CONTRAST = 90.0  # Euclidean RGB distance between a shape and the background


@dataclass(frozen=True)
class Item:
    """One shape: its centre as fractions of width and height, its radius as a fraction of sqrt(area)."""

    color: str
    shape: str
    x: float
    y: float
    radius: float
    angle: float
    rgb: tuple[int, int, int]

    @property
    def place(self) -> str:
        return PLACES[min(2, int(self.y * 3))][min(2, int(self.x * 3))]


@dataclass(frozen=True)
class Background:
    """Two corner colours of a linear gradient, and the amplitude and seed of its noise."""

    start: tuple[int, int, int]
    end: tuple[int, int, int]
    vertical: bool
    noise: float
    seed: int


@dataclass(frozen=True)
class Picture:
    """`items` are in reading order: by row, then by column."""

    width: int
    height: int
    background: Background
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Clip:
    """One shape that moves in a straight line ("left", ...), changes colour ("change") or does nothing ("still").

    `end` is the shape as it is at the end; `begin` and `finish` bound the event as fractions of the duration.
    """

    width: int
    height: int
    background: Background
    start: Item
    end: Item
    event: str
    begin: float
    finish: float
    duration_s: float

    def at(self, fraction: float) -> Item:
        """The item at `fraction` (0 to 1) of the clip."""
        progress = min(1.0, max(0.0, (fraction - self.begin) / max(1e-6, self.finish - self.begin)))
        if self.event == "change":
            return self.end if progress >= 0.5 else self.start
        x = self.start.x + (self.end.x - self.start.x) * progress
        y = self.start.y + (self.end.y - self.start.y) * progress
        return Item(self.start.color, self.start.shape, x, y, self.start.radius, self.start.angle, self.start.rgb)


def is_held_out(color: str, shape: str, where: str) -> bool:
    """Whether this combination (of a place or a clip's event) is kept out of training: one in ten."""
    return zlib.crc32(f"{color} {shape} {where}".encode()) % 10 == 0


def random_picture(
    rng: random.Random, size: tuple[int, int], num_items: int, split: Split = "train", unique: bool = False
) -> Picture:
    """A picture of `size` (width, height). With `unique`, no colour and no shape appears twice."""
    while True:
        background = _random_background(rng)
        items: list[Item] = []
        for _ in range(40):
            if len(items) == num_items:
                break
            item = _random_item(rng, size, background, 0.30 if num_items == 1 else 0.19)
            if all(_fits_beside(item, other, size, unique) for other in items):
                items.append(item)
        held_out = any(is_held_out(i.color, i.shape, i.place) for i in items)
        if len(items) == num_items and held_out == (split == "combos"):
            order = {name: i for i, name in enumerate(sum(PLACES, ()))}
            return Picture(*size, background, tuple(sorted(items, key=lambda i: order[i.place])))


def random_clip(
    rng: random.Random,
    size: tuple[int, int],
    split: Split = "train",
    event: str | None = None,
    duration_s: float = 3.0,
) -> Clip:
    """A clip of `size` (width, height); motions cover at least a third of the frame."""
    while True:
        kind = event or rng.choices((*MOTIONS, "change", "still"), (5, 5, 5, 5, 6, 3))[0]
        background = _random_background(rng)
        start = _random_item(rng, size, background, 0.25)
        if is_held_out(start.color, start.shape, kind) != (split == "combos"):
            continue
        end = start
        if kind in MOTIONS:
            start, end = _moved(rng, start, MOTIONS[kind])
        elif kind == "change":
            color = rng.choice([c for c in COLORS if c != start.color])
            rgb = _jittered(rng, color)
            if _distance(rgb, _middle(background)) < _MIN_CONTRAST:
                continue
            end = Item(color, start.shape, start.x, start.y, start.radius, start.angle, rgb)
        begin, finish = rng.uniform(0, 0.15), rng.uniform(0.85, 1)
        if kind == "change":
            begin, finish = rng.choice(((0.2, 0.5), (0.3, 0.7), (0.5, 0.8)))
        return Clip(*size, background, start, end, kind, begin, finish, duration_s)


def random_size(rng: random.Random, aspect: float, big: float = 0.03) -> tuple[int, int]:
    """A random (width, height) of this aspect, width / height; a share `big` of them up to a megapixel."""
    side = rng.uniform(400, 1000) if rng.random() < big else rng.uniform(70, 260)
    return max(16, round(side * math.sqrt(aspect))), max(16, round(side / math.sqrt(aspect)))


def random_aspect(rng: random.Random) -> float:
    """Mostly what cameras and screens make; the rest log-uniform from 1:4 to 4:1, and a few strips beyond."""
    draw = rng.random()
    if draw < 0.55:
        aspect = rng.choice((1.0, 1.0, 4 / 3, 3 / 2, 16 / 9))
        return aspect if rng.random() < 0.6 else 1 / aspect
    spread = 4.0 if draw < 0.96 else 9.0
    return math.exp(rng.uniform(-math.log(spread), math.log(spread)))


def _random_item(rng: random.Random, size: tuple[int, int], background: Background, max_radius: float) -> Item:
    width, height = size
    unit = math.sqrt(width * height)
    radius = min(rng.uniform(0.085, max_radius), 0.31 * min(width, height) / unit)
    x, y = (_random_coordinate(rng, radius * unit / side) for side in (width, height))
    while True:
        color = rng.choice(tuple(COLORS))
        rgb = _jittered(rng, color)
        if min(_distance(rgb, background.start), _distance(rgb, background.end)) >= _MIN_CONTRAST:
            return Item(color, rng.choice(SHAPES), x, y, radius, math.radians(rng.uniform(-9, 9)), rgb)


def _random_coordinate(rng: random.Random, reach: float) -> float:
    """A centre in one of the thirds, clear of their borders; at most a tenth of the radius is cut off."""
    third = rng.randrange(3)
    low, high = third / 3 + _CELL_MARGIN, (third + 1) / 3 - _CELL_MARGIN
    low, high = (max(low, min(high, 0.9 * reach)), min(high, max(low, 1 - 0.9 * reach)))
    return rng.uniform(low, high)


def _fits_beside(item: Item, other: Item, size: tuple[int, int], unique: bool) -> bool:
    if item.place == other.place or (item.color == other.color and item.shape == other.shape):
        return False
    if unique and (item.color == other.color or item.shape == other.shape):
        return False
    width, height = size
    gap = math.hypot((item.x - other.x) * width, (item.y - other.y) * height)
    return gap > 1.12 * (item.radius + other.radius) * math.sqrt(width * height)


def _moved(rng: random.Random, item: Item, direction: tuple[int, int]) -> tuple[Item, Item]:
    """The item at the two ends of a motion along `direction`."""
    near, far = rng.uniform(0.14, 0.32), rng.uniform(0.68, 0.86)
    ends = []
    for along in (near, far):
        x, y = item.x, item.y
        if direction[0]:
            x = along if direction[0] > 0 else 1 - along
        else:
            y = along if direction[1] > 0 else 1 - along
        ends.append(Item(item.color, item.shape, x, y, item.radius, item.angle, item.rgb))
    return ends[0], ends[1]


def _random_background(rng: random.Random) -> Background:
    level = rng.choice((rng.uniform(185, 255), rng.uniform(185, 255), rng.uniform(5, 70), rng.uniform(95, 160)))
    start = _clipped(level + rng.uniform(-14, 14) for _ in range(3))
    drift = rng.choice((0.0, rng.uniform(-30, 30)))
    end = _clipped(c + drift for c in start)
    noise = rng.choice((0.0, 0.0, rng.uniform(2, 9)))
    return Background(start, end, rng.random() < 0.5, noise, rng.getrandbits(32))


def _jittered(rng: random.Random, color: str) -> tuple[int, int, int]:
    shade = rng.uniform(0.86, 1.04)
    return _clipped(c * shade + rng.uniform(-13, 13) for c in COLORS[color])


def _clipped(channels) -> tuple[int, int, int]:
    r, g, b = (int(min(255, max(0, c))) for c in channels)
    return r, g, b


def _middle(background: Background) -> tuple[int, int, int]:
    return _clipped((a + b) / 2 for a, b in zip(background.start, background.end, strict=True))


def _distance(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
    return math.dist(a, b)
