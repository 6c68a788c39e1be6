"""Settings: what a checkpoint's files become, and which values are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qwen35mm_preprocess import (
    GridTHW,
    ImageProcessing,
    MediaBudget,
    MediaConfigError,
    MediaLimits,
    VideoProcessing,
)

CONFIG: dict[str, Any] = {
    "size": {"shortest_edge": 4096, "longest_edge": 25165824},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


def test_image_processing_from_a_checkpoint() -> None:
    processing = ImageProcessing.from_dict(CONFIG)
    assert (processing.min_pixels, processing.max_pixels) == (4096, 25165824)
    assert processing.image_mean == (0.5, 0.5, 0.5)
    assert processing.factor == 32
    assert processing.patch_dim == 1536


def test_older_names_of_the_pixel_bounds_win() -> None:
    processing = ImageProcessing.from_dict({**CONFIG, "min_pixels": 100, "max_pixels": 200})
    assert (processing.min_pixels, processing.max_pixels) == (100, 200)


def test_video_processing_has_the_defaults_of_transformers() -> None:
    processing = VideoProcessing.from_dict(CONFIG)
    assert (processing.fps, processing.min_frames, processing.max_frames) == (2, 4, 768)
    assert (processing.min_total_pixels, processing.max_total_pixels) == (4096, 25165824)
    assert processing.max_frame_tokens is None


def test_video_processing_reads_what_the_file_sets() -> None:
    processing = VideoProcessing.from_dict(
        {**CONFIG, "fps": 4, "min_frames": 2, "max_frames": 8, "cap_pixels_per_frame": True, "max_video_tokens": 100}
    )
    assert (processing.fps, processing.min_frames, processing.max_frames) == (4, 2, 8)
    assert processing.max_frame_tokens == 100


@pytest.mark.parametrize("key", ["patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std"])
def test_a_missing_key_is_named(key: str) -> None:
    config = {name: value for name, value in CONFIG.items() if name != key}
    for processing in (ImageProcessing, VideoProcessing):
        with pytest.raises(MediaConfigError, match=key):
            processing.from_dict(config)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"size": {"height": 3, "width": 3}}, "size.shortest_edge"),
        ({"resample": 2}, "bicubic"),
        ({"do_resize": False}, "do_resize"),
        ({"patch_size": 0}, "patch_size"),
        ({"patch_size": "16"}, "patch_size"),
        ({"image_mean": [0.5, 0.5]}, "three finite numbers"),
        ({"image_std": [0.5, 0.5, 0]}, "image_std"),
        ({"size": {"shortest_edge": 10, "longest_edge": 5}}, "pixels"),
    ],
)
def test_unusable_values_are_refused(change: dict[str, Any], match: str) -> None:
    for processing in (ImageProcessing, VideoProcessing):
        with pytest.raises(MediaConfigError, match=match):
            processing.from_dict({**CONFIG, **change})


def test_a_fixed_number_of_frames_is_refused() -> None:
    with pytest.raises(MediaConfigError, match="num_frames"):
        VideoProcessing.from_dict({**CONFIG, "num_frames": 8})


def test_fingerprint_follows_what_decides_the_pixels() -> None:
    image = ImageProcessing.from_dict(CONFIG)
    assert image.fingerprint() == replace(image, min_pixels=1, max_pixels=5000).fingerprint()
    for change in (
        {"patch_size": 14},
        {"merge_size": 1},
        {"temporal_patch_size": 1},
        {"image_mean": (0.5, 0.5, 0.4)},
        {"image_std": (0.5, 0.5, 0.4)},
        {"rescale_factor": 1 / 256},
    ):
        assert image.fingerprint() != replace(image, **change).fingerprint()
    assert image.fingerprint() != VideoProcessing.from_dict(CONFIG).fingerprint()


def test_grid() -> None:
    grid = GridTHW(3, 4, 6)
    assert grid.num_patches == 72
    assert grid.num_tokens() == 18
    assert grid.num_tokens(merge_size=1) == 72


def test_default_budgets_are_those_of_the_design() -> None:
    assert (MediaBudget.for_cpu().max_image_tokens, MediaBudget.for_cpu().max_video_tokens) == (1280, 4096)
    assert (MediaBudget.for_gpu().max_image_tokens, MediaBudget.for_gpu().max_video_tokens) == (4096, 16384)


@pytest.mark.parametrize("field", ["max_image_tokens", "max_video_tokens", "max_frames", "fps", "similar_difference"])
def test_budgets_are_positive(field: str) -> None:
    with pytest.raises(MediaConfigError, match=field):
        MediaBudget(**{field: 0})  # type: ignore[arg-type]


def test_limits_are_positive() -> None:
    with pytest.raises(MediaConfigError, match="max_duration_s"):
        MediaLimits(max_duration_s=0)
