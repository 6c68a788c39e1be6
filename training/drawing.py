"""Renders scenes with Pillow; the same scene gives the same pixels."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image, ImageDraw

from training.scenes import SHAPES, Background, Clip, Item, Picture


def render_picture(picture: Picture, smooth: bool = False) -> Image.Image:
    """The picture as an RGB image; `smooth` spends time on the edges of large shapes."""
    return _draw_items(_render(picture.background, (picture.width, picture.height)), picture.items, smooth)


def render_clip(clip: Clip, fractions: list[float], smooth: bool = False) -> list[Image.Image]:
    """Frames of the clip at the given fractions of its duration, as RGB images."""
    canvas = _render(clip.background, (clip.width, clip.height))
    return [_draw_items(canvas.copy(), (clip.at(f),), smooth) for f in fractions]


def _render(background: Background, size: tuple[int, int]) -> Image.Image:
    width, height = size
    length = height if background.vertical else width
    ramp = np.linspace(0, 1, length, dtype=np.float32)[:, None]
    line = np.array(background.start, np.float32) * (1 - ramp) + np.array(background.end, np.float32) * ramp
    pixels = np.broadcast_to(line[:, None] if background.vertical else line[None], (height, width, 3))
    if background.noise:
        noise = np.random.default_rng(background.seed).standard_normal((height, width, 1), dtype=np.float32)
        pixels = pixels + background.noise * noise
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _draw_items(canvas: Image.Image, items: tuple[Item, ...], smooth: bool) -> Image.Image:
    """Draws small shapes at a multiple of the resolution through a mask, so that their edges are smooth too."""
    width, height = canvas.size
    for item in items:
        radius = item.radius * math.sqrt(width * height)
        scale = 4 if radius < 16 or smooth else 2 if radius < 40 else 1
        half = math.ceil(radius * 1.1) + 1
        left, top = round(item.x * width) - half, round(item.y * height) - half
        mask = Image.new("L", (2 * half * scale, 2 * half * scale))
        points = [(scale * (half + radius * x), scale * (half + radius * y)) for x, y in _outline(item)]
        ImageDraw.Draw(mask).polygon(points, fill=255)
        canvas.paste(item.rgb, (left, top), mask.resize((2 * half, 2 * half), Image.Resampling.BOX))
    return canvas


def _outline(item: Item) -> list[tuple[float, float]]:
    """The shape's polygon around the origin, of about equal area for every shape, turned by `angle`."""

    def ring(count: int, radii: tuple[float, ...], phase: float) -> list[tuple[float, float]]:
        turns = (phase + 2 * math.pi * i / count for i in range(count))
        return [
            (radii[i % len(radii)] * math.sin(t), -radii[i % len(radii)] * math.cos(t)) for i, t in enumerate(turns)
        ]

    match item.shape:
        case "circle":
            points = ring(48, (0.92,), 0)
        case "square":
            points = ring(4, (1.12,), math.pi / 4)
        case "triangle":
            points = [(x, y + 0.12) for x, y in ring(3, (1.18,), 0)]
        case "star":
            points = ring(10, (1.2, 0.5), 0)
        case "diamond":
            points = [(0.8 * x, 1.15 * y) for x, y in ring(4, (1.0,), 0)]
        case "cross":
            a, b = 0.34, 1.0
            quarter = [(a, -b), (a, -a), (b, -a)]
            points = [p for t in range(4) for p in (_turned(q, t * math.pi / 2) for q in quarter)]
        case other:
            raise ValueError(f"unknown shape {other!r}; expected one of {SHAPES}")
    return [_turned(p, item.angle) for p in points]


def _turned(point: tuple[float, float], angle: float) -> tuple[float, float]:
    cos, sin = math.cos(angle), math.sin(angle)
    return point[0] * cos - point[1] * sin, point[0] * sin + point[1] * cos
