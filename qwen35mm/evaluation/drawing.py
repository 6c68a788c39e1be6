"""Renders scenes with Pillow; the same scene gives the same pixels.

Fonts and photographs come from packages of the extra `train`: what the held-out splits show is in fonts that training
never draws.
"""

from __future__ import annotations

import functools
import importlib
import io
import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from qwen35mm.evaluation.scenes import SHAPES, Background, Clip, Item, Picture, Unknown, Word

_FONTS = (
    ("font_source_sans_pro", "SourceSansPro-Regular.ttf"),
    ("font_source_serif_pro", "SourceSerifPro-Regular.ttf"),
    ("font_hanken_grotesk", "HankenGrotesk-Medium.otf"),
    ("font_source_sans_pro", "SourceSansPro-Bold.ttf"),
    ("font_source_serif_pro", "SourceSerifPro-Bold.ttf"),
    ("font_fredoka_one", "FredokaOne-Regular.ttf"),
    ("font_source_sans_pro", "SourceSansPro-SemiboldIt.ttf"),
    ("font_hanken_grotesk", "HankenGrotesk-Bold.otf"),
)
_HELD_OUT_FONTS = (("font_caladea", "Caladea-Bold.ttf"), ("font_manrope", "Manrope-SemiBold.ttf"))
NUM_FONTS = len(_FONTS)
NUM_ALL_FONTS = len(_FONTS) + len(_HELD_OUT_FONTS)
_PHOTOS = (
    "astronaut.png", "coffee.png", "rocket.jpg", "brick.png", "grass.png", "gravel.png", "camera.png", "coins.png",
    "hubble_deep_field.jpg", "moon.png", "ihc.png", "retina.jpg",
)  # fmt: skip
_HELD_OUT_PHOTOS = ("chelsea.png", "motorcycle_left.png", "page.png", "cell.png")


def render_picture(picture: Picture | Unknown, smooth: bool = False, scale: float = 1.0) -> Image.Image:
    """The picture as an RGB image at `scale` of its size; `smooth` spends time on the edges of large shapes."""
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    if isinstance(picture, Unknown):
        return _unknown(picture, size)
    image = _draw_items(_render(picture.background, size), picture.items, smooth)
    for word in picture.words:
        _draw_word(image, word)
    if picture.jpeg is None:
        return image
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=picture.jpeg)
    return Image.open(buffer).convert("RGB")


def render_clip(
    clip: Clip,
    fractions: list[float],
    smooth: bool = False,
    scale: float = 1.0,
    size: tuple[int, int] | None = None,
) -> list[Image.Image]:
    """Frames of the clip at the given fractions of its duration, as RGB images.

    They are drawn at `scale` of the clip's size, then resized to `size`; those that show the same are one image.
    """
    canvas = _render(clip.background, (round(clip.width * scale), round(clip.height * scale)))
    shown = [clip.at(fraction) for fraction in fractions]
    frames = {items: _draw_items(canvas.copy(), items, smooth) for items in dict.fromkeys(shown)}
    if size is not None:
        frames = {items: frame.resize(size, Image.Resampling.BICUBIC) for items, frame in frames.items()}
    return [frames[items] for items in shown]


def _render(background: Background, size: tuple[int, int]) -> Image.Image:
    if background.texture == "plain":
        return Image.new("RGB", size, background.start)
    mix = _texture(background, *size)
    rest = 1 - mix
    bands = []  # one by one: numpy is slow where the last axis is as short as three channels
    for start, end in np.array((background.start, background.end), np.float32).T:
        mixed = start + 40 * mix if background.texture == "noise" else start * rest + end * mix
        bands.append(Image.fromarray(np.clip(mixed, 0, 255, out=mixed).astype(np.uint8)))
    return Image.merge("RGB", bands)


def _texture(background: Background, width: int, height: int) -> np.ndarray:
    """[height, width] in 0 to `amount`: how far the second colour is mixed in, where the background isn't plain."""
    rng = np.random.default_rng(background.seed)
    x, y = _steps(width), _steps(height)[:, None]
    turn = rng.uniform(0, math.pi)
    match background.texture:
        case "gradient":
            mix = x * math.cos(turn) + y * math.sin(turn)
        case "noise":
            mix = rng.standard_normal((height, width), dtype=np.float32) * 0.5
        case "stripes":
            along = (x * math.cos(turn) + y * math.sin(turn)) * rng.uniform(4, 14)
            mix = along - np.floor(along) > 0.5  # several times as fast as % 1
        case "checks":
            count = rng.uniform(4, 12)
            mix = ((x * count).astype(int) + (y * count * height / width).astype(int)) % 2
        case "blobs":
            coarse = Image.fromarray(rng.integers(0, 256, (6, 6), dtype=np.uint8))
            mix = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32) / 255
        case other:
            raise ValueError(f"unknown texture {other!r}")
    return np.broadcast_to(mix, (height, width)).astype(np.float32) * background.amount


def _steps(count: int) -> np.ndarray:
    """`count` places from 0 to 1."""
    return np.arange(count) * (1 / max(1, count - 1))


def _draw_items(canvas: Image.Image, items: tuple[Item, ...], smooth: bool) -> Image.Image:
    """Draws small shapes at a multiple of the resolution through a mask, so that their edges are smooth too."""
    width, height = canvas.size
    for item in items:
        radius = item.radius * math.sqrt(width * height)
        scale = 4 if radius < 16 or smooth else 2 if radius < 40 else 1
        half = math.ceil(radius * 1.2) + 1
        left, top = round(item.x * width) - half, round(item.y * height) - half
        mask = Image.new("L", (2 * half * scale, 2 * half * scale))
        outline = _outline(item.shape, item.angle)
        points = [(scale * (half + radius * x), scale * (half + radius * y)) for x, y in outline]
        ImageDraw.Draw(mask).polygon(points, fill=255)
        canvas.paste(item.rgb, (left, top), mask.resize((2 * half, 2 * half), Image.Resampling.BOX))
    return canvas


def item_box(item: Item, size: tuple[int, int]) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) as fractions of (width, height), cut at the picture's edges."""
    width, height = size
    unit = item.radius * math.sqrt(width * height)
    left, top, right, bottom = _extent(item.shape, item.angle)
    xs, ys = [item.x + x * unit / width for x in (left, right)], [item.y + y * unit / height for y in (top, bottom)]
    return max(0.0, xs[0]), max(0.0, ys[0]), min(1.0, xs[1]), min(1.0, ys[1])


@functools.lru_cache(maxsize=1024)  # to open one and read its first letter takes as long as to draw a small picture
def _font(number: int, size: int) -> ImageFont.FreeTypeFont:
    package, name = (*_FONTS, *_HELD_OUT_FONTS)[number]
    return ImageFont.truetype(_folder_of(package) / "files" / name, size)


def _folder_of(package: str) -> Path:
    """Where a package of the extra `train` lies.

    Raises:
        ImportError: it isn't installed.
    """
    try:
        return Path(importlib.import_module(package).__file__ or "").parent
    except ImportError as error:
        raise ImportError(
            f"The scenes need the package {package}, which isn't installed. The extra 'train' has it: "
            "pip install 'qwen35mm[train]'"
        ) from error


def word_layout(word: Word, size: tuple[int, int]) -> tuple[ImageFont.FreeTypeFont, float, float, list[float]]:
    """(font, left, top, edges): where the word is drawn in pixels, and where each letter ends, from its left edge."""
    font, x, y = _placed(word, size)
    return font, x, y, [font.getlength(word.text[: i + 1]) for i in range(len(word.text))]


def _placed(word: Word, size: tuple[int, int]) -> tuple[ImageFont.FreeTypeFont, float, float]:
    width, height = size
    font = _font(word.font, max(6, round(word.height * height * 1.15)))
    left, top, right, bottom = font.getbbox(word.text)
    x, y = word.x * width - (right - left) / 2 - left, word.y * height - (bottom - top) / 2 - top
    x = min(max(x, 1 - left), max(1 - left, width - 1 - right))
    y = min(max(y, 1 - top), max(1 - top, height - 1 - bottom))
    return font, x, y


def _draw_word(canvas: Image.Image, word: Word) -> None:
    font, x, y = _placed(word, canvas.size)
    if not word.angle:
        ImageDraw.Draw(canvas).text((x, y), word.text, fill=word.rgb, font=font)
        return
    mask = Image.new("L", canvas.size)
    ImageDraw.Draw(mask).text((x, y), word.text, fill=255, font=font)
    centre = (word.x * canvas.width, word.y * canvas.height)
    mask = mask.rotate(word.angle, Image.Resampling.BILINEAR, center=centre)
    box = mask.getbbox()
    if box is not None:
        canvas.paste(word.rgb, box, mask.crop(box))


@functools.lru_cache(maxsize=20)
def _photo(name: str) -> Image.Image:
    image = Image.open(_folder_of("skimage.data") / name).convert("RGB")
    image.thumbnail((512, 512))
    return image


def _unknown(picture: Unknown, size: tuple[int, int]) -> Image.Image:
    """A crop of a photograph, or noise; seeds from 2**31 on show photographs that training never does."""
    rng = np.random.default_rng(picture.seed)
    if picture.kind == "noise":
        fine = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        coarse = int(rng.integers(1, 5))
        image = Image.fromarray(fine[::coarse, ::coarse]).resize(size)
        return image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0, 1.5))))
    if picture.kind == "page":
        return _page(rng, size)
    names = _HELD_OUT_PHOTOS if picture.seed >= 2**31 else _PHOTOS
    photo = _photo(names[int(rng.integers(len(names)))])
    aspect = size[0] / size[1]
    most = min(photo.width, photo.height * aspect)
    width = most * rng.uniform(0.45, 1.0)
    height = width / aspect
    left, top = rng.uniform(0, photo.width - width), rng.uniform(0, photo.height - height)
    if rng.random() < 0.5:
        photo = photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    box = (left, top, left + width, top + height)
    image = photo.resize(size, Image.Resampling.BICUBIC, box=box)
    return image if picture.seed >= 2**31 else _varied(rng, image, names)


def _page(rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    """A page of print, as a scan or a photograph of one: more lines than a sign has, and lit unevenly."""
    ground = int(rng.integers(0, 256))
    ink = (ground + int(rng.integers(108, 149))) % 256
    image = Image.new("L", size, ground)
    canvas = ImageDraw.Draw(image)
    height = max(7, round(min(max(size) * rng.uniform(0.025, 0.1), size[1] / 8)))  # four lines at least
    font, letters = _font(int(rng.integers(NUM_FONTS)), height), np.array([*"abcdefghijklmnopqrstuvwxyzABCDE0123"])
    for top in range(round(-height * rng.random()), size[1], round(height * rng.uniform(1.1, 1.9))):
        words = ("".join(rng.choice(letters, rng.integers(1, 10))) for _ in range(2 + 3 * size[0] // (8 * height)))
        canvas.text((rng.uniform(-1, 2) * height, top), " ".join(words), fill=ink, font=font)
    if rng.random() < 0.3:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if rng.random() < 0.5:
        image = image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.02, 0.06) * height)))
    across, down = (np.linspace(rng.uniform(0.8, 1.1), rng.uniform(0.8, 1.1), pixels) for pixels in size)
    light = across * down[:, None]
    return Image.fromarray((np.asarray(image) * light).clip(0, 255).astype(np.uint8)).convert("RGB")


def _varied(rng: np.random.Generator, image: Image.Image, names: tuple[str, ...]) -> Image.Image:
    """A photograph as nobody took it: a few photographs are learned by heart, and no other one is known for one."""
    if rng.random() < 0.3:
        other = _photo(names[int(rng.integers(len(names)))]).resize(image.size, Image.Resampling.BILINEAR)
        image = Image.blend(image, other, float(rng.uniform(0.2, 0.6)))
    if rng.random() < 0.5:
        channels = image.split()
        image = Image.merge("RGB", [channels[i] for i in rng.permutation(3)])
    if rng.random() < 0.3:
        image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    gains = rng.uniform(0.6, 1.3, 3), rng.uniform(-40, 40)
    table = np.clip(np.arange(256) * gains[0][:, None] + gains[1], 0, 255).astype(np.uint8)
    return image.point(table.flatten().tolist())


@functools.lru_cache(maxsize=4096)
def _extent(shape: str, angle: float) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) of the shape's polygon."""
    xs, ys = zip(*_outline(shape, angle), strict=True)
    return min(xs), min(ys), max(xs), max(ys)


@functools.lru_cache(maxsize=4096)
def _outline(shape: str, angle: float) -> list[tuple[float, float]]:
    """The shape's polygon around the origin in radii, of about equal area for every shape, turned by `angle`."""

    def ring(count: int, radii: tuple[float, ...], phase: float) -> list[tuple[float, float]]:
        turns = (phase + 2 * math.pi * i / count for i in range(count))
        return [
            (radii[i % len(radii)] * math.sin(t), -radii[i % len(radii)] * math.cos(t)) for i, t in enumerate(turns)
        ]

    match shape:
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
    return [_turned(p, angle) for p in points]


def _turned(point: tuple[float, float], angle: float) -> tuple[float, float]:
    cos, sin = math.cos(angle), math.sin(angle)
    return point[0] * cos - point[1] * sin, point[0] * sin + point[1] * cos
