"""Settings: what a checkpoint's files become, and which values are refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from qwen35mm_preprocess import (
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


_SHARED: dict[str, Any] = {
    key: CONFIG[key] for key in ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
}
# The defaults of transformers.
_VIDEO = VideoProcessing(
    **_SHARED, fps=2.0, min_frames=4, max_frames=768, min_total_pixels=4096, max_total_pixels=25165824
)
_FRAMES: dict[str, Any] = {"fps": 4, "min_frames": 2, "max_frames": 8}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, ImageProcessing(**_SHARED, min_pixels=4096, max_pixels=25165824)),
        # Older names of the bounds win.
        ({"min_pixels": 100, "max_pixels": 200}, ImageProcessing(**_SHARED, min_pixels=100, max_pixels=200)),
        ({}, _VIDEO),
        (
            {**_FRAMES, "cap_pixels_per_frame": True, "max_video_tokens": 100},
            replace(_VIDEO, **_FRAMES, max_frame_tokens=100),
        ),
    ],
)
def test_processing_from_a_checkpoint(more: dict[str, Any], expected: ImageProcessing | VideoProcessing) -> None:
    processing = type(expected).from_dict({**CONFIG, **more})
    assert processing == expected
    assert (processing.factor, processing.patch_dim) == (32, 1536)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        *(({key: None}, f"lacks {key}") for key in _SHARED),
        ({"size": {"height": 3, "width": 3}}, "size.shortest_edge"),
        ({"resample": 2}, "bicubic"),
        ({"do_resize": False}, "do_resize"),
        ({"patch_size": 0}, "patch_size"),
        ({"patch_size": "16"}, "patch_size"),
        ({"image_mean": [0.5, 0.5]}, "three finite numbers"),
        ({"image_std": [0.5, 0.5, 0]}, "image_std"),
        ({"size": {"shortest_edge": 10, "longest_edge": 5}}, "pixels"),
        ({"num_frames": 8}, "num_frames"),
        # What only a damaged file has.
        ({"patch_size": True}, "patch_size"),
        ({"image_mean": 0.5}, "three finite numbers"),
        ({"image_std": ["a", "b", "c"]}, "three finite numbers"),
        ({"rescale_factor": "x"}, "rescale_factor"),
        ({"max_pixels": 10**400, "min_pixels": -(10**400)}, "pixels"),
        ({"size": 5}, "size.shortest_edge"),
        ({"fps": "fast"}, "fps"),
        ({"max_frames": 1.5}, "frames"),
        ({"cap_pixels_per_frame": True, "max_video_tokens": []}, "max_frame_tokens"),
    ],
)
def test_unusable_values_are_refused(change: dict[str, Any], match: str) -> None:
    of_videos = {"num_frames", "fps", "max_frames", "max_video_tokens"} & change.keys()
    for processing in (VideoProcessing,) if of_videos else (ImageProcessing, VideoProcessing):
        with pytest.raises(MediaConfigError, match=match):
            processing.from_dict({**CONFIG, **change})


def test_fingerprint_follows_what_decides_the_pixels() -> None:
    image = ImageProcessing.from_dict(CONFIG)
    assert image.fingerprint() == replace(image, min_pixels=1, max_pixels=5000).fingerprint()
    other = (0.5, 0.5, 0.4)
    changes: dict[str, Any] = {"patch_size": 14, "merge_size": 1, "temporal_patch_size": 1, "rescale_factor": 1 / 256}
    changes |= {"image_mean": other, "image_std": other}
    for name, value in changes.items():
        assert image.fingerprint() != replace(image, **{name: value}).fingerprint()
    assert image.fingerprint() != VideoProcessing.from_dict(CONFIG).fingerprint()


def test_default_budgets_are_those_of_the_design() -> None:
    cpu, gpu = MediaBudget.for_device("cpu"), MediaBudget.for_device("cuda")
    assert (cpu.max_image_tokens, cpu.max_video_tokens) == (1280, 4096)
    assert (gpu.max_image_tokens, gpu.max_video_tokens) == (4096, 16384)


@pytest.mark.parametrize("settings", [MediaBudget, MediaLimits])
def test_budgets_and_limits_are_positive(settings: Any) -> None:
    for field in fields(settings):
        if field.name != "drop_similar":
            with pytest.raises(MediaConfigError, match=field.name):
                settings(**{field.name: 0})
