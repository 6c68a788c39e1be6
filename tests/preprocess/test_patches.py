"""Normalisation and patch order, bit for bit, and what a digest depends on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qwen35mm_preprocess import GridTHW, ImageProcessing, VideoProcessing
from qwen35mm_preprocess.patches import PatchWriter, UnitDigest, media_digest, read_frame
from tests.preprocess import oracles
from tests.preprocess.media_files import HALF

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize(("mean", "std"), [(HALF, HALF), IMAGENET])
@pytest.mark.parametrize("num_frames", [2, 3, 6])
def test_video_patches_equal_the_oracle(mean: tuple, std: tuple, num_frames: int) -> None:
    processing = VideoProcessing(16, 2, 2, mean, std)
    frames = np.random.default_rng(num_frames).integers(0, 256, (num_frames, 64, 96, 3), np.uint8)
    expected, grid = oracles.video_pixel_values(frames, processing)
    writer = PatchWriter(GridTHW(*grid), processing)
    for index in range(2 * grid[0]):
        writer.write(frames[min(index, num_frames - 1)], index // 2, index % 2)
    np.testing.assert_array_equal(writer.patches.values(), expected)
    some = slice(3, 3 + 65)
    np.testing.assert_array_equal(writer.patches[some].values(), expected[some])


@pytest.mark.parametrize(("mean", "std"), [(HALF, HALF), IMAGENET])
def test_image_patches_equal_the_oracle(mean: tuple, std: tuple) -> None:
    processing = ImageProcessing(16, 2, 2, mean, std, min_pixels=1024, max_pixels=10**6)
    # Every 8-bit value in every channel.
    frame = np.random.default_rng(0).permuted(np.arange(64 * 96 * 3) % 256).astype(np.uint8).reshape(64, 96, 3)
    expected = oracles.image_processor(processing)(frame, return_tensors="np", input_data_format="channels_last")
    writer = PatchWriter(GridTHW(1, 4, 6), processing, num_frames=1)
    writer.write(frame, 0)
    values = writer.patches.values()
    np.testing.assert_array_equal(values, expected["pixel_values"])
    assert values.dtype == np.float32
    assert writer.patches.pixels.nbytes * 8 == values.nbytes


@pytest.mark.parametrize(("mean", "std"), [(HALF, HALF), IMAGENET])
@pytest.mark.parametrize("kind", [ImageProcessing, VideoProcessing])
def test_a_frame_is_read_as_it_was_written(mean: tuple, std: tuple, kind: type) -> None:
    processing = kind(16, 2, 2, mean, std)
    frames = np.random.default_rng(0).permuted(np.arange(4 * 64 * 96 * 3) % 256).astype(np.uint8)
    frames = frames.reshape(4, 64, 96, 3)
    grid = GridTHW(2, 4, 6)
    writer = PatchWriter(grid, processing)
    for index, frame in enumerate(frames):
        writer.write(frame, index // 2, index % 2)
    for index, frame in enumerate(frames):
        read = read_frame(writer.patches, grid, processing, index // 2, index % 2)
        assert read.dtype == np.uint8
        np.testing.assert_array_equal(read, frame)
    still = PatchWriter(GridTHW(1, 4, 6), processing, num_frames=1)
    still.write(frames[3], 0)
    for slot in range(2):
        np.testing.assert_array_equal(read_frame(still.patches, GridTHW(1, 4, 6), processing, 0, slot), frames[3])


def test_unit_digest_depends_on_pixels_size_and_processing() -> None:
    processing = ImageProcessing(16, 2, 2, HALF, HALF)
    frame = np.zeros((32, 64, 3), np.uint8)

    def digest(frame: np.ndarray, processing: ImageProcessing | VideoProcessing = processing) -> str:
        unit = UnitDigest(processing, (frame.shape[0], frame.shape[1]))
        unit.update(frame)
        return unit.hexdigest()

    other = frame.copy()
    other[31, 63, 2] = 1
    digests = [
        digest(frame),
        digest(other),
        digest(frame.reshape(64, 32, 3)),
        digest(frame, replace(processing, image_std=(0.5, 0.5, 0.25))),
        digest(frame, VideoProcessing(16, 2, 2, HALF, HALF)),
    ]
    assert len(set(digests)) == len(digests)
    assert digest(frame) == digest(frame.copy())


def test_media_digest() -> None:
    assert media_digest(("a" * 64,)) == "a" * 64
    assert media_digest(("a" * 64, "b" * 64)) != media_digest(("b" * 64, "a" * 64))
