"""Computes the size after the resize, equal to transformers' two `smart_resize` functions."""

from __future__ import annotations

import math

from qwen35mm_preprocess.types import ImageProcessing, Size, VideoProcessing


def image_size(source: Size, processing: ImageProcessing) -> Size:
    """The size of an image after the resize (transformers, models/qwen2_vl, `smart_resize`)."""
    return _fit(source, 1, 1, processing.factor, processing.min_pixels, processing.max_pixels)


def video_size(source: Size, num_frames: int, processing: VideoProcessing) -> Size:
    """The size of each of a video's `num_frames` frames after the resize (models/qwen3_vl, `smart_resize`).

    A lone frame counts as `temporal_patch_size` frames, which transformers refuses.
    """
    patch = processing.temporal_patch_size
    num_frames = max(num_frames, patch)
    factor, max_pixels = processing.factor, processing.max_total_pixels
    if processing.max_frame_tokens is not None:
        share = min(processing.max_frame_tokens * factor**2, max_pixels // num_frames)
        max_pixels = num_frames * max(share, int(processing.min_total_pixels * 1.05))
    height, width = source
    if min(source) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    even_frames = round(num_frames / patch) * patch
    return _fit((height, width), num_frames, even_frames, factor, processing.min_total_pixels, max_pixels)


def shrink_to_tokens(size: Size, source: Size, factor: int, max_tokens: int) -> Size:
    """The largest size with about the source's shape and at most `max_tokens` tokens, never larger than `size`.

    Unlike the functions above, it always keeps its bound: a long, thin picture loses length once its short side is one
    token, and no minimal area applies.
    """
    if size[0] * size[1] <= max_tokens * factor**2:
        return size
    shrunk = math.sqrt(source[0] * source[1] / (max_tokens * factor**2))
    rows, columns = (
        max(1, min(limit, math.floor(side / shrunk)) // factor) for side, limit in zip(source, size, strict=True)
    )
    if rows > columns:
        rows = min(rows, max(1, max_tokens // columns))
    else:
        columns = min(columns, max(1, max_tokens // rows))
    return rows * factor, columns * factor


def _fit(source: Size, frames: int, even_frames: int, factor: int, min_pixels: int, max_pixels: int) -> Size:
    """Multiples of `factor` nearest to the source, rescaled if the area over all frames is out of bounds."""
    height, width = source
    fitted = round(height / factor) * factor, round(width / factor) * factor
    area = even_frames * fitted[0] * fitted[1]
    # The product's order matters: these floats must round as transformers' do.
    pixels = frames * height * width
    if area > max_pixels:
        shrink = math.sqrt(pixels / max_pixels)
        return _down(height / shrink, factor), _down(width / shrink, factor)
    if area < min_pixels:
        grow = math.sqrt(min_pixels / pixels)
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return fitted


def _down(side: float, factor: int) -> int:
    return max(factor, math.floor(side / factor) * factor)
