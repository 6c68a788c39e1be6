"""Clips of single pictures: every frame comes back, at its time."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from qwen35mm_preprocess import MediaBudget, MediaProcessor, MediaSourceError, detect_kind, family_processing
from qwen35mm_preprocess.animation import animation_frames, probe_animation
from qwen35mm_preprocess.frames import clip_of_jpegs, clip_of_pictures
from qwen35mm_preprocess.types import MediaLimits

LIMITS = MediaLimits()


def pictures(count: int, size: tuple[int, int] = (96, 64)) -> list[Image.Image]:
    """Each in one colour."""
    return [Image.new("RGB", size, (20 * index, 250 - 20 * index, 128)) for index in range(count)]


def jpegs(frames: list[Image.Image]) -> list[bytes]:
    found = []
    for frame in frames:
        frame.save(into := io.BytesIO(), "JPEG", quality=95)
        found.append(into.getvalue())
    return found


@pytest.mark.parametrize(
    ("how", "times"),
    [
        ({}, [0, 0.5, 1, 1.5, 2]),
        ({"fps": 29.97}, [index * 100 / 2997 for index in range(5)]),
        ({"times_s": [3, 4.5, 4.7, 90, 90.25]}, [0, 1.5, 1.7, 87, 87.25]),
    ],
)
def test_pictures_come_back_at_their_times(how: dict[str, float], times: list[float]) -> None:
    frames = pictures(5)
    clip = clip_of_pictures(frames, **how)  # pyright: ignore[reportArgumentType]
    assert detect_kind(clip) == "video"
    found = probe_animation(clip, LIMITS)
    assert (found.size, found.num_announced) == ((64, 96), 5)
    np.testing.assert_allclose(found.times_s, times, atol=1e-3)
    read = dict(animation_frames(clip, range(5), LIMITS, "srgb"))
    assert all(np.array_equal(np.asarray(read[index]), np.asarray(frames[index])) for index in range(5))


def test_jpegs_become_a_clip_without_being_decoded() -> None:
    processor = MediaProcessor(*family_processing(), budget=MediaBudget(fps=2.0))
    clip = clip_of_jpegs(jpegs(pictures(6)))
    plan = processor.plan(clip)
    assert plan.kind == "video"
    prepared = processor.prepare(clip, plan)
    assert prepared.plan.grid_thw[0] == 3
    assert prepared.plan.timestamps_s is not None
    np.testing.assert_allclose(prepared.plan.timestamps_s, [0.25, 1.25, 2.25], atol=0.01)


def test_a_single_frame_is_a_video_too() -> None:
    assert detect_kind(clip_of_pictures(pictures(1))) == "video"
    assert probe_animation(clip_of_pictures(pictures(1)), LIMITS).num_announced == 2
    assert detect_kind(clip_of_jpegs(jpegs(pictures(1)))) == "video"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: clip_of_pictures([]), "the list is empty"),
        (lambda: clip_of_pictures([*pictures(1), *pictures(1, (8, 8))]), "same size"),
        (lambda: clip_of_pictures(pictures(2), fps=0), "up to 90 a second; got 0"),
        (lambda: clip_of_pictures(pictures(2), times_s=[1]), "a time for each of the 2 frames; got 1"),
        (lambda: clip_of_pictures(pictures(2), times_s=[1, 1]), "times must rise"),
        (lambda: clip_of_jpegs([]), "at least one"),
        (lambda: clip_of_jpegs([b"\xff\xd8\xff\xe0"]), "isn't a JPEG"),
        (lambda: clip_of_jpegs([b"no"]), "isn't a JPEG"),
        (lambda: clip_of_jpegs([b"\xff\xd8" + b"\xff" * 50_000_000]), "isn't a JPEG"),
        (lambda: clip_of_jpegs([b"\xff\xd8" + b"\xff\xe0\0\2" * 5_000_000]), "isn't a JPEG"),
        (lambda: clip_of_jpegs(jpegs([*pictures(1), *pictures(1, (8, 8))])), "of one size"),
    ],
)
def test_what_makes_no_clip_is_refused_in_words(make, said: str) -> None:
    with pytest.raises(MediaSourceError, match=said):
        make()
