"""Finds pictures and videos that look the same to a person: re-encoded, resized or slightly cropped.

The hash is a pHash, the signs of the lowest frequencies of a picture's cosine transform (C. Zauner, "Implementation
and Benchmarking of Perceptual Image Hash Functions", 2010), with two changes. Half of its bits describe colour: a hash
of brightness alone, pHash or dHash, confuses a red ball with a green one. And a coefficient counts as positive above
half a grey level, not above the median: otherwise noise decides the bits of a picture with flat areas.

The hash misses small details: a word on a sign, a distant person, a circle instead of a square.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
from PIL import Image

from qwen35mm_preprocess import ImageProcessing, PreparedMedia, VideoProcessing
from qwen35mm_preprocess.patches import read_frame

T = TypeVar("T")

SUGGESTED_MAX_DISTANCE = 4
"""The most bits that differ per frame; `tests/captioning/media/test_similar.py` shows what this finds and misses."""

_FRAME_BITS = 64
_FRAME_MASK = (1 << _FRAME_BITS) - 1
_SIDE = 32
_BRIGHTNESS_BITS, _COLOUR_BITS = 32, 16
_MIN_COEFFICIENT = 0.5
_INITIAL_CAPACITY = 1024

# BT.601, as in JPEG: brightness and the two colour differences, blue and red.
_RGB_TO_YCBCR = np.array([[0.299, 0.587, 0.114], [-0.1687, -0.3313, 0.5], [0.5, -0.4187, -0.0813]])
# From the lowest frequency up. Without the mean, so that brightening the whole picture changes nothing.
_FREQUENCIES = sorted(((i, j) for i in range(9) for j in range(9)), key=lambda at: (sum(at), at))[1:]
_ROWS, _COLUMNS = np.array(_FREQUENCIES[:_BRIGHTNESS_BITS]).T
# [frequency, pixel]: the cosine transform (DCT-II), scaled so that coefficients are in grey levels.
_COSINES = np.cos(np.pi * np.arange(9)[:, None] * (2 * np.arange(_SIDE) + 1) / (2 * _SIDE)) * (2 / _SIDE)


def perceptual_hash(pixels: np.ndarray) -> int:
    """A picture's look in 64 bits: 32 of brightness and 16 of each colour difference.

    Args:
        pixels: RGB, uint8 [H, W, 3].

    Raises:
        ValueError: pixels of another shape or type.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise ValueError(f"pixels must be uint8 [H, W, 3]; got {pixels.dtype} {list(pixels.shape)}.")
    small = Image.fromarray(pixels).resize((_SIDE, _SIDE), Image.Resampling.BOX)
    channels = np.moveaxis(np.asarray(small, np.float64) @ _RGB_TO_YCBCR.T, 2, 0)
    coefficients = (_COSINES @ channels @ _COSINES.T)[:, _ROWS, _COLUMNS]
    brightness, blue, red = coefficients > _MIN_COEFFICIENT
    bits = np.concatenate([brightness, blue[:_COLOUR_BITS], red[:_COLOUR_BITS]])
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


def similarity(frames: Sequence[np.ndarray]) -> int:
    """The hashes of a medium's frames as one number, which also contains their count.

    Args:
        frames: RGB, uint8 [H, W, 3] each.
    """
    packed = 1
    for frame in frames:
        packed = packed << _FRAME_BITS | perceptual_hash(frame)
    return packed


def media_similarity(media: PreparedMedia, processing: ImageProcessing | VideoProcessing) -> int:
    """`similarity` of an image, or of a video's first, middle and last frame, from the model's input.

    Args:
        processing: the settings that prepared `media`.
    """
    grid_thw = media.plan.grid_thw
    places = [(0, 0)]
    if media.plan.kind == "video":
        places += [(grid_thw.t // 2, 0), (grid_thw.t - 1, processing.temporal_patch_size - 1)]
    return similarity([read_frame(media.patches, grid_thw, processing, unit, slot) for unit, slot in places])


class SimilarIndex(Generic[T]):
    """Finds the value of the medium that looks most like another one.

    Two media are near-duplicates if they have equally many frames and each pair of frames differs in at most
    `max_distance` bits. A search compares all added media: about two milliseconds for 100,000 images.

    Raises:
        ValueError: a distance below 0 or above 64.
    """

    def __init__(self, max_distance: int) -> None:
        if not 0 <= max_distance <= _FRAME_BITS:
            raise ValueError(f"max_distance must be 0 to {_FRAME_BITS} bits; got {max_distance}.")
        self._max_distance = max_distance
        # By number of frames: hashes uint64 [frames, capacity], and the media's values.
        self._media: dict[int, tuple[np.ndarray, list[T]]] = {}

    def add(self, similarity: int, value: T) -> None:
        """Adds a medium by its `similarity`."""
        frames = _unpacked(similarity)
        hashes, values = self._media.get(len(frames)) or (np.empty((len(frames), _INITIAL_CAPACITY), np.uint64), [])
        if len(values) == hashes.shape[1]:
            hashes = np.concatenate([hashes, np.empty_like(hashes)], axis=1)
        hashes[:, len(values)] = frames
        values.append(value)
        self._media[len(frames)] = hashes, values

    def find(self, similarity: int) -> T | None:
        """The value of the near-duplicate with the fewest different bits, the first added if equal; or None."""
        frames = _unpacked(similarity)
        hashes, values = self._media.get(len(frames), (np.empty((len(frames), 0), np.uint64), []))
        near = np.arange(len(values))
        totals = np.zeros(len(values), np.int64)
        for row, frame in zip(hashes, frames, strict=True):
            distances = np.bitwise_count(row[near] ^ np.uint64(frame)).astype(np.int64)
            kept = distances <= self._max_distance
            near, totals = near[kept], totals[kept] + distances[kept]
        return values[near[totals.argmin()]] if len(near) else None


def _unpacked(similarity: int) -> list[int]:
    num_frames, rest = divmod(similarity.bit_length() - 1, _FRAME_BITS)
    assert num_frames > 0, "similarity() was given no frame"
    assert rest == 0, "not a number that similarity() made"
    return [similarity >> _FRAME_BITS * index & _FRAME_MASK for index in reversed(range(num_frames))]
