"""Renders scenes with Pillow and writes them as files. The same scene gives the same pixels.

Fonts and photographs come from packages of the extra `eval`.
"""

from __future__ import annotations

import functools
import importlib
import io
import math
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from qwen35mm.errors import ConfigError
from qwen35mm.evaluation.scenes import Background, Clip, Item, Picture, Unknown, Word

_FONTS = (
    ("font_source_sans_pro", "SourceSansPro-Regular.ttf"), ("font_source_serif_pro", "SourceSerifPro-Regular.ttf"),
    ("font_hanken_grotesk", "HankenGrotesk-Medium.otf"), ("font_source_sans_pro", "SourceSansPro-Bold.ttf"),
    ("font_source_serif_pro", "SourceSerifPro-Bold.ttf"), ("font_fredoka_one", "FredokaOne-Regular.ttf"),
    ("font_source_sans_pro", "SourceSansPro-SemiboldIt.ttf"), ("font_hanken_grotesk", "HankenGrotesk-Bold.otf"),
)  # fmt: skip
# Training used neither these fonts nor, below, these photographs.
_HELD_OUT_FONTS = (("font_caladea", "Caladea-Bold.ttf"), ("font_manrope", "Manrope-SemiBold.ttf"))
NUM_FONTS = len(_FONTS)
NUM_ALL_FONTS = len(_FONTS) + len(_HELD_OUT_FONTS)
_PHOTOS = (
    "astronaut.png", "coffee.png", "rocket.jpg", "brick.png", "grass.png", "gravel.png", "camera.png", "coins.png",
    "hubble_deep_field.jpg", "moon.png", "ihc.png", "retina.jpg",
)  # fmt: skip
_HELD_OUT_PHOTOS = ("chelsea.png", "motorcycle_left.png", "page.png", "cell.png")


def picture_file(picture: Picture | Unknown, kind: str = "PNG", quality: int = 88) -> bytes:
    """The picture as a PNG or JPEG file."""
    options: dict[str, Any] = {"quality": quality} if kind == "JPEG" else {"optimize": True}
    buffer = io.BytesIO()
    render_picture(picture).save(buffer, kind, **options)
    return buffer.getvalue()


def clip_file(clip: Clip, fps: float) -> bytes:
    """The clip as an MP4 file (H.264) at `fps` frames a second, rounded. Width and height must be even."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=round(fps), options={"crf": "18", "preset": "fast"})
        stream.width, stream.height, stream.pix_fmt = clip.width, clip.height, "yuv420p"
        stream.thread_count = 1  # more threads give other bytes each time
        for frame in render_clip(clip, fps):
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    return buffer.getvalue()


def render_picture(picture: Picture | Unknown) -> Image.Image:
    """The picture as an RGB image."""
    size = picture.width, picture.height
    if isinstance(picture, Unknown):
        return _unknown(picture, size)
    image = _draw_items(_render(picture.background, size), picture.items)
    for word in picture.words:
        _draw_word(image, word)
    if picture.jpeg is None:
        return image
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=picture.jpeg)
    return Image.open(buffer).convert("RGB")


def render_clip(clip: Clip, fps: float) -> list[Image.Image]:
    """RGB images: frame i shows the clip after i / fps seconds. Equal frames are one object."""
    total = max(2, round(clip.duration_s * fps))
    canvas = _render(clip.background, (clip.width, clip.height))
    shown = [clip.at(min(1.0, i / fps / clip.duration_s)) for i in range(total)]
    frames = {items: _draw_items(canvas.copy(), items) for items in dict.fromkeys(shown)}
    return [frames[items] for items in shown]


def _render(background: Background, size: tuple[int, int]) -> Image.Image:
    if background.texture == "plain":
        return Image.new("RGB", size, background.start)
    mix = _texture(background, *size)
    rest = 1 - mix
    bands = []  # numpy is slow on a last axis of three
    for start, end in np.array((background.start, background.end), np.float32).T:
        mixed = start + 40 * mix if background.texture == "noise" else start * rest + end * mix
        bands.append(Image.fromarray(np.clip(mixed, 0, 255, out=mixed).astype(np.uint8)))
    return Image.merge("RGB", bands)


def _texture(background: Background, width: int, height: int) -> np.ndarray:
    """[height, width] from 0 to `amount`: the share of the second colour, unless the background is plain."""
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
        case _:  # blobs
            coarse = Image.fromarray(rng.integers(0, 256, (6, 6), dtype=np.uint8))
            mix = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32) / 255
    return np.broadcast_to(mix, (height, width)).astype(np.float32) * background.amount


def _steps(count: int) -> np.ndarray:
    """`count` evenly spaced numbers from 0 to 1."""
    return np.arange(count) * (1 / max(1, count - 1))


def _draw_items(canvas: Image.Image, items: tuple[Item, ...]) -> Image.Image:
    """Draws at four times the resolution, through a mask, so that edges are smooth."""
    width, height = canvas.size
    for item in items:
        radius = item.radius * math.sqrt(width * height)
        half = math.ceil(radius * 1.2) + 1
        left, top = round(item.x * width) - half, round(item.y * height) - half
        mask = Image.new("L", (8 * half, 8 * half))
        outline = _outline(item.shape, item.angle)
        points = [(4 * (half + radius * x), 4 * (half + radius * y)) for x, y in outline]
        ImageDraw.Draw(mask).polygon(points, fill=255)
        canvas.paste(item.rgb, (left, top), mask.resize((2 * half, 2 * half), Image.Resampling.BOX))
    return canvas


def item_box(item: Item, size: tuple[int, int]) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) as fractions of (width, height), cut at the picture's edges."""
    width, height = size
    unit = item.radius * math.sqrt(width * height)
    xs, ys = zip(*_outline(item.shape, item.angle), strict=True)
    left, right = (item.x + x * unit / width for x in (min(xs), max(xs)))
    top, bottom = (item.y + y * unit / height for y in (min(ys), max(ys)))
    return max(0.0, left), max(0.0, top), min(1.0, right), min(1.0, bottom)


@functools.lru_cache(maxsize=1024)  # opening a font takes as long as drawing a small picture
def _font(number: int, size: int) -> ImageFont.FreeTypeFont:
    package, name = (*_FONTS, *_HELD_OUT_FONTS)[number]
    return ImageFont.truetype(_folder_of(package) / "files" / name, size)


def _folder_of(package: str) -> Path:
    """The folder of a package of the extra `eval`.

    Raises:
        ConfigError: it isn't installed.
    """
    try:
        return Path(importlib.import_module(package).__file__ or "").parent
    except ImportError as error:
        raise ConfigError(
            f"The questions about the demo model need the package {package}, which isn't installed. "
            "pip install 'qwen35mm[eval]' installs it. Or ask none: --questions 0."
        ) from error


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
    """A crop of a photograph, or noise. Seeds from 2**31 on select photographs that training never showed."""
    rng = np.random.default_rng(picture.seed)
    if picture.kind == "noise":
        fine = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        coarse = int(rng.integers(1, 5))
        image = Image.fromarray(fine[::coarse, ::coarse]).resize(size)
        return image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0, 1.5))))
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


def _varied(rng: np.random.Generator, image: Image.Image, names: tuple[str, ...]) -> Image.Image:
    """A photograph as training varied it: blended, with other colours, or upside down."""
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
def _outline(shape: str, angle: float) -> list[tuple[float, float]]:
    """The shape's polygon around the origin, in radii, turned by `angle`. All shapes have about the same area."""

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
        case _:  # cross
            a, b = 0.34, 1.0
            quarter = [(a, -b), (a, -a), (b, -a)]
            points = [p for t in range(4) for p in (_turned(q, t * math.pi / 2) for q in quarter)]
    return [_turned(p, angle) for p in points]


def _turned(point: tuple[float, float], angle: float) -> tuple[float, float]:
    cos, sin = math.cos(angle), math.sin(angle)
    return point[0] * cos - point[1] * sin, point[0] * sin + point[1] * cos
