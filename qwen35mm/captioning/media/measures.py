"""Measures how a medium looks, for filters and records: its sharpness and its letterbox bars."""

from __future__ import annotations

from statistics import median

import numpy as np
from PIL import Image

from qwen35mm_preprocess import ImageProcessing, PreparedMedia, VideoProcessing
from qwen35mm_preprocess.patches import read_frame

# Every picture is measured at this longest side, so that its size doesn't decide its sharpness.
_SIDE = 256
# A bar's rows differ from its first row by no more than this many grey levels: compression adds noise.
_BAR_LEVELS = 8.0
# Bars are nearly black or nearly white; another plain border belongs to the picture.
_DARK, _LIGHT = 24.0, 231.0


def sharpness(grey: np.ndarray) -> float:
    """The variance of the Laplacian: low for blurred pictures, 0 for flat ones.

    Args:
        grey: float [H, W], 0 to 255.
    """
    if min(grey.shape) < 3:
        return 0.0
    centre = grey[1:-1, 1:-1]
    laplacian = grey[:-2, 1:-1] + grey[2:, 1:-1] + grey[1:-1, :-2] + grey[1:-1, 2:] - 4 * centre
    return float(laplacian.var())


def letterbox(grey: np.ndarray) -> float:
    """The share of a picture that uniform bars cover, at top and bottom or left and right; 0 to 1.

    Args:
        grey: float [H, W], 0 to 255.
    """
    return max(_bars(grey), _bars(grey.T))


def measures(media: PreparedMedia, processing: ImageProcessing | VideoProcessing) -> tuple[float, float]:
    """Sharpness and letterbox of an image, from the model's input.

    For a video, the median sharpness and the least letterbox of its first, middle and last frame.

    Args:
        processing: the settings that prepared `media`.
    """
    grid_thw = media.plan.grid_thw
    units = sorted({0, grid_thw.t // 2, grid_thw.t - 1}) if media.plan.kind == "video" else [0]
    greys = [_grey(read_frame(media.patches, grid_thw, processing, unit, 0)) for unit in units]
    return round(median(map(sharpness, greys)), 2), round(min(map(letterbox, greys)), 4)


def _grey(pixels: np.ndarray) -> np.ndarray:
    height, width = pixels.shape[:2]
    scale = _SIDE / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(Image.fromarray(pixels).convert("L").resize(size, Image.Resampling.BILINEAR), np.float64)


def _bars(grey: np.ndarray) -> float:
    """The share of the rows that are bars at both ends; 0 if only one end has one."""
    first, last = _num_bar_rows(grey), _num_bar_rows(grey[::-1])
    total = first + last
    # A picture that is all bar is a plain picture.
    return 0.0 if not first or not last or total >= len(grey) else total / len(grey)


def _num_bar_rows(rows: np.ndarray) -> int:
    level = float(np.mean(rows[0]))
    if _DARK < level < _LIGHT:
        return 0
    number = 0
    for row in rows:
        if float(np.abs(row - level).max()) > _BAR_LEVELS:
            break
        number += 1
    return number
