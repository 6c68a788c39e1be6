"""Converts decoded pictures to upright RGB at the wanted size.

How every mode becomes RGB:
    1, L, P, RGB, CMYK, YCbCr, HSV, LAB     Pillow's conversion, then from the file's colours to sRGB
    alpha (LA, PA, RGBA, La, RGBa) or a
    transparent colour (GIF, PNG)           composed over white
    16-bit grey (I;16...)                   0..65535 scaled to 0..255
    I, F (32-bit grey)                      by the file's declared range; else by the first of 1 (F), 255, 65535 and the
                                            type's range that covers nearly all values
With "checkpoint" colours, profiles are ignored, and the least and the greatest value of I and F become 0 and 255.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from qwen35mm_preprocess.color import to_srgb
from qwen35mm_preprocess.types import ColorMode, Size

# EXIF's orientation to the operation that turns the picture upright; 5 to 8 swap width and height.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SWAP_SIDES = frozenset(UPRIGHT[orientation] for orientation in (5, 6, 7, 8))
# For these, the first shown row is the last stored row or column.
_FROM_THE_END = frozenset(UPRIGHT[orientation] for orientation in (3, 4, 7, 8))
# Pixels in a strip. Converting strip by strip avoids a second full-size copy.
_PIXELS_AT_ONCE = 1 << 21
# TIFF's tags for the values of black and white.
_MIN, _MAX, _S_MIN, _S_MAX = 280, 281, 340, 341
_NEARLY_ALL = 0.999
# A PNG's grey of 2 and 4 bits as Pillow names it, and the step to the next grey in 8 bits.
_STEPS = {"L;2": 85, "L;4": 17}
# The key in a picture's `info` for the result of `color.code_points`.
CODE_POINTS = "code points"


def resized(image: Image.Image, turn: Image.Transpose | None, color: ColorMode, size: Size) -> Image.Image:
    """Equals `to_rgb`, a turn and a resize of the whole picture, but works on strips of rows.

    Pillow resizes horizontally first, then vertically, with 8 bits between. So the first step can run in strips.
    """
    if image.mode in ("I", "F"):
        # Their range depends on all values.
        image = to_rgb(image, color)
    swaps = turn in SWAP_SIDES
    rows, columns = (image.width, image.height) if swaps else (image.height, image.width)
    height, width = size
    narrow = Image.new("RGB", (width, rows))
    step = max(1, _PIXELS_AT_ONCE // columns)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        first, last = (rows - stop, rows - start) if turn in _FROM_THE_END else (start, stop)
        part = image.crop((first, 0, last, columns) if swaps else (0, first, columns, last))
        part = to_rgb(part, color)
        part = part if turn is None else part.transpose(turn)
        narrow.paste(part.resize((width, stop - start), Image.Resampling.BICUBIC), (0, start))
    return narrow.resize((width, height), Image.Resampling.BICUBIC)


def to_rgb(image: Image.Image, color: ColorMode = "srgb") -> Image.Image:
    """The picture in mode RGB, by the table at the top of this file."""
    info = image.info
    if image.mode.startswith("I;16"):
        image = _narrow(image)
    elif image.mode in ("I", "F"):
        values = np.nan_to_num(np.asarray(image, np.float64), nan=0.0, posinf=0.0, neginf=0.0)
        least, greatest = _own_range(image, values) if color == "srgb" else (values.min(), values.max())
        image = _scaled(values, least, greatest)
    has_alpha = any(band in "Aa" for band in image.getbands()) or info.get("transparency") is not None
    if color == "checkpoint":
        return _over_white(with_alpha(image)) if has_alpha else image.convert("RGB")
    alpha = None
    if has_alpha:
        image = with_alpha(image)
        alpha = image.getchannel("A")
        image = image.convert("RGB")
    elif image.mode not in ("L", "RGB", "CMYK", "LAB"):
        image = image.convert("RGB")
    shown = to_srgb(image, info, info.get(CODE_POINTS))
    if alpha is not None:
        shown.putalpha(alpha)
        shown = _over_white(shown)
    # A saved copy mustn't carry the old profile.
    shown.info = {}
    return shown


def with_alpha(image: Image.Image) -> Image.Image:
    """The picture in mode RGBA."""
    if image.mode.startswith("I;16"):
        image = _narrow(image)
    return (image.convert("LA") if image.mode == "La" else image).convert("RGBA")


def fit_transparency(png: Image.Image) -> None:
    """Brings the transparent colour of an opened PNG to the 8 bits of its pixels. Pillow leaves it as it is stored."""
    key, tiles = png.info.get("transparency"), getattr(png, "tile", None)
    stored = tiles[0].args if tiles else None
    if isinstance(key, int) and stored in _STEPS:
        png.info["transparency"] = key * _STEPS[stored]
    elif isinstance(key, tuple) and stored == "RGB;16B":
        png.info["transparency"] = tuple(value >> 8 for value in key)


def _narrow(image: Image.Image) -> Image.Image:
    """16-bit grey in 8 bits, with alpha if a value is transparent."""
    wide, key = np.asarray(image).astype(np.uint32), image.info.get("transparency")
    grey = Image.fromarray(((wide * 255 + 32767) // 65535).astype(np.uint8))
    if key is not None:
        grey.putalpha(Image.fromarray(np.where(wide == key, 0, 255).astype(np.uint8)))
    return grey


def _over_white(image: Image.Image) -> Image.Image:
    return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")


def _own_range(image: Image.Image, values: np.ndarray) -> tuple[float, float]:
    """The values of black and white in 32-bit grey. One hot pixel mustn't turn the others black."""
    if image.format == "PPM":
        # Pillow has already scaled it by the file's maximum.
        return 0.0, 65535.0
    tags = getattr(image, "tag_v2", {})
    for names in ((_S_MIN, _S_MAX), (_MIN, _MAX)):
        least, greatest = (np.ravel(tags.get(name, np.nan))[:1].astype(np.float64) for name in names)
        if np.isfinite(least).all() and np.isfinite(greatest).all() and float(least[0]) < float(greatest[0]):
            return float(least[0]), float(greatest[0])
    nearly_all = np.quantile(values, _NEARLY_ALL)
    ranges = (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0)
    return 0.0, next((top for top in ranges if nearly_all <= top), float(2**31 - 1))


def _scaled(values: np.ndarray, least: float, greatest: float) -> Image.Image:
    if least == greatest:
        return Image.fromarray(np.full(values.shape, np.clip(least, 0, 255), np.uint8))
    scaled = np.clip((values - least) / (greatest - least), 0, 1) * 255
    return Image.fromarray(scaled.round().astype(np.uint8))
