"""Pictures, signs and clips as plain data, drawn from a `random.Random`. `drawing` renders them.

A picture has one to six coloured shapes at the nine places of a 3 x 3 grid. A clip has one or two shapes, and something
happens to one of them. Training never showed some combinations of colour, shape and place (or a clip's event): "combos"
always has one of these, "seen" never does.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

COLORS = {
    "red": (220, 35, 35), "orange": (245, 140, 20), "yellow": (245, 225, 40), "green": (40, 165, 60),
    "blue": (40, 80, 220), "purple": (140, 50, 175), "white": (246, 246, 246), "black": (14, 14, 14),
}  # fmt: skip
# The range of each channel of a background.
BACKGROUNDS = {
    "white": ((238, 255),) * 3, "gray": ((105, 165),) * 3, "black": ((0, 28),) * 3,
    "red": ((235, 255), (150, 180), (150, 180)), "yellow": ((240, 255), (235, 250), (150, 180)),
    "green": ((150, 185), (225, 250), (150, 185)), "blue": ((150, 180), (190, 215), (240, 255)),
    "purple": ((205, 225), (165, 190), (235, 255)),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross")
SIZES = {"small": (0.055, 0.082), "": (0.102, 0.135), "big": (0.162, 0.26)}  # radius / sqrt(area)
PLACES = (
    ("top left", "top", "top right"),
    ("left", "center", "right"),
    ("bottom left", "bottom", "bottom right"),
)
ALL_PLACES = sum(PLACES, ())
MOTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
EVENTS = (*MOTIONS, "change", "appear", "vanish", "still")
TEXTURES = ("plain", "plain", "plain", "gradient", "gradient", "noise", "stripes", "checks", "blobs")
Split = Literal["seen", "combos"]
RGB = tuple[int, int, int]

_CELL_MARGIN = 0.035  # how far a centre stays from the border between two places, as a fraction of the side
MIN_CONTRAST = 90.0  # Euclidean RGB distance between a shape and the background


@dataclass(frozen=True)
class Item:
    """One shape. The centre is in fractions of width and height, the radius in a fraction of sqrt(area)."""

    color: str
    shape: str
    x: float
    y: float
    radius: float
    angle: float
    rgb: RGB
    size: str = ""

    @property
    def place(self) -> str:
        return PLACES[min(2, int(self.y * 3))][min(2, int(self.x * 3))]

    @property
    def name(self) -> str:
        return f"{self.color} {self.shape}"


@dataclass(frozen=True)
class Word:
    """A line of text. Centre and height are in fractions of the picture; `font` is an index into drawing's fonts."""

    text: str
    x: float
    y: float
    height: float
    color: str
    rgb: RGB
    font: int
    angle: float


@dataclass(frozen=True)
class Background:
    """Two colours mixed by a texture, up to `amount` (0 to 1)."""

    name: str
    start: RGB
    end: RGB
    texture: str
    amount: float
    seed: int


@dataclass(frozen=True)
class Picture:
    """`items` are in reading order of their places, `words` from top to bottom."""

    width: int
    height: int
    background: Background
    items: tuple[Item, ...] = ()
    words: tuple[Word, ...] = ()
    jpeg: int | None = None  # JPEG quality, if it was compressed once before it became a file


@dataclass(frozen=True)
class Unknown:
    """A picture without any shapes: a crop of a photograph, or noise."""

    width: int
    height: int
    kind: str  # "photo" or "noise"
    seed: int


@dataclass(frozen=True)
class Clip:
    """`start` becomes `end`, while `others` stand still.

    `event` is one of `EVENTS`. `begin` and `finish` are fractions of the duration, equal for sudden events.
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
    others: tuple[Item, ...] = ()

    def at(self, fraction: float) -> tuple[Item, ...]:
        """The items at `fraction` (0 to 1) of the clip."""
        progress = min(1.0, max(0.0, (fraction - self.begin) / max(1e-6, self.finish - self.begin)))
        if self.event in ("appear", "vanish") and (progress >= 0.5) == (self.event == "vanish"):
            return self.others
        if self.event == "change":
            return (self.end if progress >= 0.5 else self.start, *self.others)
        x = self.start.x + (self.end.x - self.start.x) * progress
        y = self.start.y + (self.end.y - self.start.y) * progress
        return (replace(self.start, x=x, y=y), *self.others)

    @property
    def event_s(self) -> float:
        """The time of the event, in seconds; of a motion, its begin."""
        at = self.begin if self.event in MOTIONS else (self.begin + self.finish) / 2
        return at * self.duration_s


def is_held_out(color: str, shape: str, where: str) -> bool:
    """Whether training never showed this combination of colour, shape, and place or event. One in ten is."""
    return zlib.crc32(f"{color} {shape} {where}".encode()) % 10 == 0


def random_picture(
    rng: random.Random, size: tuple[int, int], num_items: int, split: Split = "seen", unique: bool = False
) -> Picture:
    """A picture of `size` (width, height). With `unique`, no colour and no shape appears twice."""
    while True:
        background = random_background(rng)
        # Sometimes only two kinds of shapes, so that there is more than one to count.
        shapes = tuple(rng.sample(SHAPES, 2)) if num_items > 2 and rng.random() < 0.35 and not unique else SHAPES
        items: list[Item] = []
        for _ in range(60):
            if len(items) == num_items:
                break
            item = _random_item(rng, size, background, num_items, shapes)
            if all(_fits_beside(item, other, size, unique) for other in items):
                items.append(item)
        held_out = any(is_held_out(i.color, i.shape, i.place) for i in items)
        if len(items) == num_items and held_out == (split == "combos"):
            order = {name: i for i, name in enumerate(ALL_PLACES)}
            jpeg = rng.randint(45, 95) if rng.random() < 0.25 else None
            return Picture(*size, background, tuple(sorted(items, key=lambda i: order[i.place])), jpeg=jpeg)


def random_clip(
    rng: random.Random,
    size: tuple[int, int],
    split: Split = "seen",
    event: str | None = None,
    duration_s: float = 3.0,
) -> Clip:
    """A clip of `size` (width, height). Motions cover at least a third of the frame."""
    while True:
        kind = event or rng.choices(EVENTS, (5, 5, 5, 5, 6, 6, 6, 3))[0]
        background = replace(random_background(rng), texture=rng.choice(("plain", "gradient", "noise")))
        start = _random_item(rng, size, background, 2, SHAPES)
        if is_held_out(start.color, start.shape, kind) != (split == "combos"):
            continue
        end = start
        if kind in MOTIONS:
            start, end = _moved(rng, start, MOTIONS[kind])
        elif kind == "change":
            color = rng.choice([c for c in COLORS if c != start.color])
            rgb = jittered(rng, color)
            if contrast(rgb, background) < MIN_CONTRAST:
                continue
            end = replace(start, color=color, rgb=rgb)
        begin, finish = rng.uniform(0, 0.15), rng.uniform(0.85, 1)
        if kind in ("change", "appear", "vanish"):
            begin = finish = rng.uniform(0.25, 0.75)
        others: tuple[Item, ...] = ()
        # If both shapes stood still, nobody would know which one is meant.
        if kind != "still" and rng.random() < 0.4:
            other = _random_item(rng, size, background, 3, SHAPES)
            apart = all(_fits_beside(other, replace(start, x=x, y=y), size, True) for x, y in _path(start, end))
            if not apart or is_held_out(other.color, other.shape, other.place):
                continue
            others = (other,)
        return Clip(*size, background, start, end, kind, begin, finish, duration_s, others)


def random_sign(rng: random.Random, size: tuple[int, int], texts: list[str], num_fonts: int) -> Picture:
    """Lines of text, one below the other, in one of the first `num_fonts` fonts."""
    background = random_background(rng)
    if rng.random() < 0.5:
        background = replace(background, texture="plain")
    font, rows, words = rng.randrange(num_fonts), len(texts), []
    width, height = size
    for row, text in enumerate(texts):
        while True:
            color = rng.choice(tuple(COLORS))
            rgb = jittered(rng, color)
            if contrast(rgb, background) >= 110:
                break
        # As high as the row allows and no wider than the picture: a letter is about 0.62 of its height wide.
        most = min(0.8 / rows, 0.92 * width / (0.66 * max(2, len(text)) * height))
        line = max(min(most, 26 / height * max(1.0, math.sqrt(width * height) / 512)), most * rng.uniform(0.6, 1.0))
        line = min(line, most)
        half = min(0.5, 0.33 * line * len(text) * height / width)
        x = rng.uniform(half, 1 - half) if half < 0.5 else 0.5
        slack = max(0.0, (1 / rows - 1.15 * line) / 2)
        y = (row + 0.5) / rows + rng.uniform(-slack, slack)
        angle = rng.uniform(-4, 4) if rng.random() < 0.3 else 0.0
        words.append(Word(text, x, y, line, color, rgb, font, angle))
    jpeg = rng.randint(60, 95) if rng.random() < 0.2 else None
    return Picture(*size, background, (), tuple(words), jpeg)


def random_size(rng: random.Random, aspect: float | None = None, largest: float | None = None) -> tuple[int, int]:
    """(width, height) of 64 to 1,024 pixels a side, mostly small. `largest` limits the root of the area."""
    aspect = random_aspect(rng) if aspect is None else aspect
    low, high = rng.choices(((70, 128), (128, 256), (256, 512), (512, 1000)), (38, 44, 13, 5))[0]
    side = min(math.exp(rng.uniform(math.log(low), math.log(high))), largest or math.inf)
    bounds = (64 * max(math.sqrt(aspect), 1 / math.sqrt(aspect)), 1024 / max(math.sqrt(aspect), 1 / math.sqrt(aspect)))
    side = min(bounds[1], max(bounds[0], side))
    return round(side * math.sqrt(aspect)), round(side / math.sqrt(aspect))


def random_aspect(rng: random.Random) -> float:
    """Width / height: mostly a common format, otherwise log-uniform from 1:4 to 4:1."""
    if rng.random() < 0.65:
        aspect = rng.choice((1.0, 1.0, 4 / 3, 3 / 2, 16 / 9))
        return aspect if rng.random() < 0.65 else 1 / aspect
    return math.exp(rng.uniform(-math.log(4), math.log(4)))


def random_background(rng: random.Random) -> Background:
    name = rng.choices(tuple(BACKGROUNDS), (6, 3, 3, 1, 1, 1, 1, 1))[0]
    start = _within(rng, name)
    texture = rng.choice(TEXTURES)
    amount = rng.uniform(0.2, 0.6 if texture == "noise" else 1.0)
    return Background(name, start, _within(rng, name), texture, amount, rng.getrandbits(32))


def _within(rng: random.Random, name: str) -> RGB:
    channels = BACKGROUNDS[name]
    if name in ("white", "gray", "black"):
        level = rng.uniform(*channels[0])
        return _clipped(level + rng.uniform(-5, 5) for _ in range(3))
    return _clipped(rng.uniform(*channel) for channel in channels)


def _random_item(
    rng: random.Random, size: tuple[int, int], background: Background, num_items: int, shapes: tuple[str, ...]
) -> Item:
    width, height = size
    unit = math.sqrt(width * height)
    names, weights = tuple(SIZES), ((2, 3, 4) if num_items < 3 else (3, 4, 1 if num_items > 4 else 2))
    most = 0.31 * min(width, height) / unit  # strips have no room for big ones
    kind = rng.choices(names, [w if SIZES[n][0] < most else 0 for n, w in zip(names, weights, strict=True)])[0]
    low, high = SIZES[kind]
    radius = rng.uniform(low, min(high, most, 0.20 if num_items > 1 else 1.0))
    x, y = (_random_coordinate(rng, radius * unit / side) for side in (width, height))
    while True:
        color = rng.choice(tuple(COLORS))
        rgb = jittered(rng, color)
        if contrast(rgb, background) >= MIN_CONTRAST:
            angle = math.radians(rng.uniform(-9, 9))
            return Item(color, rng.choice(shapes), x, y, radius, angle, rgb, kind)


def _random_coordinate(rng: random.Random, reach: float) -> float:
    """A coordinate within one of the thirds. At most a tenth of the radius is cut off."""
    third = rng.randrange(3)
    low, high = third / 3 + _CELL_MARGIN, (third + 1) / 3 - _CELL_MARGIN
    low, high = (max(low, min(high, 0.9 * reach)), min(high, max(low, 1 - 0.9 * reach)))
    return rng.uniform(low, high)


def _fits_beside(item: Item, other: Item, size: tuple[int, int], unique: bool) -> bool:
    if item.place == other.place or item.name == other.name:
        return False
    if unique and (item.color == other.color or item.shape == other.shape):
        return False
    width, height = size
    gap = math.hypot((item.x - other.x) * width, (item.y - other.y) * height)
    return gap > 1.12 * (item.radius + other.radius) * math.sqrt(width * height)


def _moved(rng: random.Random, item: Item, direction: tuple[int, int]) -> tuple[Item, Item]:
    """The item at the start and the end of a motion along `direction`."""
    near, far = rng.uniform(0.14, 0.32), rng.uniform(0.68, 0.86)
    ends = []
    for along in (near, far):
        x, y = item.x, item.y
        if direction[0]:
            x = along if direction[0] > 0 else 1 - along
        else:
            y = along if direction[1] > 0 else 1 - along
        ends.append(replace(item, x=x, y=y))
    return ends[0], ends[1]


def _path(start: Item, end: Item) -> list[tuple[float, float]]:
    return [(start.x + (end.x - start.x) * t / 4, start.y + (end.y - start.y) * t / 4) for t in range(5)]


def jittered(rng: random.Random, color: str) -> RGB:
    shade = rng.uniform(0.86, 1.04)
    return _clipped(c * shade + rng.uniform(-13, 13) for c in COLORS[color])


def _clipped(channels: Iterable[float]) -> RGB:
    r, g, b = (int(min(255, max(0, c))) for c in channels)
    return r, g, b


def contrast(rgb: RGB, background: Background) -> float:
    return min(math.dist(rgb, background.start), math.dist(rgb, background.end))
