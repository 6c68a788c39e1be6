"""Normalisation and patch order, bit for bit, and what a digest depends on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qwen35mm_preprocess import GridTHW, ImageProcessing, VideoProcessing
from qwen35mm_preprocess.patches import empty_patches, media_digest, read_frame, unit_digest, write_frame
from tests.preprocess import oracles
from tests.preprocess.media_files import HALF

STATISTICS = [(HALF, HALF), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]


@pytest.mark.parametrize(("mean", "std"), STATISTICS)
@pytest.mark.parametrize("num_frames", [2, 3, 6])
def test_video_patches_equal_the_oracle(mean: tuple, std: tuple, num_frames: int) -> None:
    processing = VideoProcessing(16, 2, 2, mean, std)
    frames = np.random.default_rng(num_frames).integers(0, 256, (num_frames, 64, 96, 3), np.uint8)
    expected, sizes = oracles.video_pixel_values(frames, processing)
    grid = GridTHW(*sizes)
    patches = empty_patches(grid, processing)
    for unit, slot in np.ndindex(grid.t, 2):
        write_frame(frames[min(2 * unit + slot, num_frames - 1)], patches, grid, processing, unit, slot)
    np.testing.assert_array_equal(patches.values(), expected)
    some = slice(3, 3 + 65)
    np.testing.assert_array_equal(patches[some].values(), expected[some])
    for unit, slot in np.ndindex(grid.t, 2):
        read = read_frame(patches, grid, processing, unit, slot)
        np.testing.assert_array_equal(read, frames[min(2 * unit + slot, num_frames - 1)])


def test_a_units_digest_depends_on_pixels_size_and_processing() -> None:
    image = ImageProcessing(16, 2, 2, HALF, HALF)
    frame = np.zeros((32, 64, 3), np.uint8)
    other = frame.copy()
    other[31, 63, 2] = 1
    digests = [
        unit_digest(image, (32, 64), [frame]),
        unit_digest(image, (32, 64), [other]),
        unit_digest(image, (64, 32), [frame.reshape(64, 32, 3)]),
        unit_digest(replace(image, image_std=(0.5, 0.5, 0.25)), (32, 64), [frame]),
        unit_digest(VideoProcessing(16, 2, 2, HALF, HALF), (32, 64), [frame]),
    ]
    assert len(set(digests)) == len(digests)
    assert unit_digest(image, (32, 64), [frame.copy()]) == digests[0]


def test_media_digest() -> None:
    assert media_digest(("a" * 64,)) == "a" * 64
    assert media_digest(("a" * 64, "b" * 64)) != media_digest(("b" * 64, "a" * 64))
