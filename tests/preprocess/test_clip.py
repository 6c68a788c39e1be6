"""What is taken of a video where somebody chose: a range, a number of frames, nothing that shows the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qwen35mm_preprocess import (
    MediaBudget,
    MediaConfigError,
    MediaLimitError,
    MediaPlan,
    MediaPlanError,
    MediaProcessor,
    VideoClip,
)
from tests.preprocess.media_files import LIMITS, VIDEO, encode_video, scene


@pytest.fixture(scope="module")
def video() -> bytes:
    """Six seconds."""
    return encode_video([scene(i) for i in range(60)], fps=10)


@pytest.fixture(scope="module")
def processor(processor: MediaProcessor) -> MediaProcessor:
    return replace(processor, video_processing=VIDEO, limits=LIMITS)


def times(plan: MediaPlan) -> list[float]:
    return [round(time_s, 3) for time_s in plan.frame_times_s or ()]


def test_frames_of_a_range_keep_their_times_in_the_whole(processor: MediaProcessor, video: bytes) -> None:
    plan = processor.plan(video, clip=VideoClip(2.0, 4.0, 5))
    assert times(plan) == [2.0, 2.5, 3.0, 3.5, 4.0]
    assert plan.timestamps_s == (2.25, 3.25, 4.0)
    assert plan.duration_s == processor.plan(video).duration_s == 6.0
    # Both ends belong to it, and frames between them only.
    assert times(processor.plan(video, clip=VideoClip(2.05, 2.35, 9))) == [2.1, 2.2, 2.3]
    assert times(processor.plan(video, clip=VideoClip(5.55))) == [5.6, 5.7, 5.8, 5.9]
    # Where no frame begins, the one on the screen; also after the last began.
    assert times(processor.plan(video, clip=VideoClip(2.02, 2.08))) == [2.0]
    assert times(processor.plan(video, clip=VideoClip(5.95))) == [5.9]


def test_without_a_number_a_range_is_sampled_as_a_video_of_its_length(processor: MediaProcessor, video: bytes) -> None:
    short = encode_video([scene(i) for i in range(31)], fps=10)
    cut, whole = processor.plan(video, clip=VideoClip(2.0, 5.0)), processor.plan(short)
    assert [round(time_s - 2.0, 3) for time_s in times(cut)] == times(whole)
    assert (cut.size, cut.num_tokens) == (whole.size, whole.num_tokens)
    assert processor.plan(video, clip=VideoClip()) == processor.plan(video, clip=VideoClip(0.0, 6.0))
    assert processor.plan(video, clip=VideoClip()) == processor.plan(video)


def test_a_clips_pixels_are_those_of_its_frames(processor: MediaProcessor, video: bytes) -> None:
    whole = processor.prepare(video, clip=VideoClip(0.0, None, 60))
    clip = processor.prepare(video, clip=VideoClip(2.0, 3.9, 20))
    assert clip.plan.size == whole.plan.size
    assert clip.plan.unit_digests == (whole.plan.unit_digests or ())[10:20]
    assert clip.plan.digest != whole.plan.digest
    again = processor.prepare(video, clip.plan)
    np.testing.assert_array_equal(again.pixel_values, clip.pixel_values)


def test_limits_hold_for_clips(processor: MediaProcessor, video: bytes) -> None:
    few = replace(processor, budget=MediaBudget(max_frames=8))
    plan = few.plan(video, clip=VideoClip(1.0, 5.0, 30))
    assert (len(plan.frame_indices or ()), plan.frame_times_s[0], plan.frame_times_s[-1]) == (8, 1.0, 5.0)  # pyright: ignore[reportOptionalSubscript]
    assert tuple(map(str, plan.notes)) == ("8 frames are used, not 30: at most 8 are taken from a video.",)
    tight = replace(processor, budget=MediaBudget(max_video_tokens=120))
    plan = tight.plan(video, clip=VideoClip(1.0, 5.0, 30))
    assert plan.num_prompt_tokens <= 120
    assert min(times(plan)) == 1.0
    with pytest.raises(MediaLimitError, match=r"6\.0 seconds long; the part from 6\.0 seconds on isn't in it"):
        processor.plan(video, clip=VideoClip(6.0))


def test_frames_that_show_the_same_are_named(processor: MediaProcessor) -> None:
    still = encode_video([scene(i // 6) for i in range(24)], fps=2)
    clip = VideoClip(0.0, None, 24, drop_similar=True)
    plan = processor.prepare(still, clip=clip).plan
    assert plan.similar_indices
    assert sorted((*plan.similar_indices, *(plan.frame_indices or ()))) == list(range(24))
    assert processor.prepare(still, plan).plan == plan
    assert processor.prepare(still, clip=replace(clip, drop_similar=False)).plan.similar_indices == ()
    for wrong in ((5, 4), plan.frame_indices):
        with pytest.raises(MediaPlanError, match="damaged"):
            replace(plan, similar_indices=wrong)
    with pytest.raises(MediaPlanError, match="more frames than the video has"):
        processor.check(replace(plan, similar_indices=tuple(range(100, 124))), still)


@pytest.mark.parametrize(
    "values",
    [
        {"start_s": -0.1},
        {"start_s": float("nan")},
        {"start_s": 2.0, "end_s": 1.0},
        {"end_s": float("inf")},
        {"num_frames": 0},
        {"num_frames": True},
        {"drop_similar": 1},
    ],
)
def test_a_clip_that_can_not_be(values: dict[str, Any]) -> None:
    with pytest.raises(MediaConfigError, match=r"VideoClip\."):
        VideoClip(**values)
