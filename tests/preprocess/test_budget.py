"""Plans under a token budget: fewer frames first, then smaller ones, never over the limit, and always said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from qwen35mm_preprocess import (
    MediaBudget,
    MediaBudgetError,
    MediaPlan,
    MediaProcessor,
    MediaSource,
    VideoProcessing,
    processor,
    timestamp_text,
    video,
)
from qwen35mm_preprocess.video_probe import VideoInfo
from tests.preprocess.media_files import IMAGE, SMALL_VIDEO, VIDEO
from tests.preprocess.test_video_probe import constant, varying


def _plan(info: VideoInfo, video_processing: VideoProcessing = VIDEO, **settings: Any) -> MediaPlan:
    """The plan of a video that has these frames."""
    made = MediaProcessor(IMAGE, video_processing, MediaBudget(**settings), cache_bytes_per_token=12288)
    with mock.patch.object(processor, "probe_video", return_value=info):
        return made.plan("x.mp4", "video")


def _plan_image(source: MediaSource, max_tokens: int | None = None) -> MediaPlan:
    return MediaProcessor(IMAGE, VIDEO, MediaBudget(max_tokens), cache_bytes_per_token=12288).plan(source, "image")


def _sized(info: VideoInfo, height: int, width: int) -> VideoInfo:
    return replace(info, size=(height, width))


def _frames(plan: MediaPlan) -> int:
    return len(plan.frame_indices or ())


def test_costs_of_an_image() -> None:
    plan = _plan_image(Image.new("RGB", (640, 480)))
    assert plan.size == (480, 640)
    assert plan.grid_thw == (1, 30, 40)
    assert plan.num_tokens == 300
    assert plan.num_prompt_tokens == 302
    assert plan.cache_bytes == 302 * 12288
    assert plan.notes == ()


def test_costs_of_a_video() -> None:
    plan = _plan(_sized(constant(300, 30), 480, 640))
    assert _frames(plan) == 20
    assert plan.grid_thw == (10, 30, 40)
    assert plan.num_tokens == 3000
    assert plan.timestamps_s is not None
    assert plan.num_prompt_tokens == 3000 + 20 + sum(len(timestamp_text(time)) for time in plan.timestamps_s)
    assert plan.cache_bytes == plan.num_prompt_tokens * 12288
    assert (plan.source_frames, plan.duration_s, plan.notes) == (300, 10.0, ())


def test_a_large_photo_on_a_cpu() -> None:
    photo = Image.new("L", (4000, 3000))
    free = _plan_image(photo)
    assert free.num_tokens == 11750
    plan = _plan_image(photo, max_tokens=MediaBudget.for_cpu().max_image_tokens)
    assert 1150 < plan.num_prompt_tokens <= 1280
    assert plan.size[1] / plan.size[0] == pytest.approx(4 / 3, rel=0.04)
    assert tuple(map(str, plan.notes)) == (
        f"Reduced to {plan.size[1]} x {plan.size[0]} pixels, not {free.size[1]} x {free.size[0]}, "
        "to stay within 1,280 tokens.",
    )


@pytest.mark.parametrize(
    ("num_frames", "max_tokens", "num_used", "is_smaller"),
    [(600, 4096, 24, False), (600, 300, 4, True), (3, 100, 3, True)],
    ids=["fewer frames first", "then smaller frames", "a short one only gets smaller"],
)
def test_a_video_within_a_limit(num_frames: int, max_tokens: int, num_used: int, is_smaller: bool) -> None:
    info = _sized(constant(num_frames, 30), 480, 640)
    free, plan = _plan(info), _plan(info, max_video_tokens=max_tokens)
    assert (_frames(free), _frames(plan)) == (min(num_frames, 40), num_used)
    assert plan.num_prompt_tokens <= max_tokens
    assert (plan.size < free.size) is is_smaller
    limit = f"to stay within {max_tokens:,} tokens."
    notes = [
        f"{num_used} frames are used, not 40, {limit}",
        f"Reduced to {plan.size[1]} x {plan.size[0]} pixels, not 640 x 480, {limit}",
    ]
    assert tuple(map(str, plan.notes)) == tuple(notes[num_frames == 3 : 1 + is_smaller])
    assert plan.frame_indices is not None
    assert (plan.frame_indices[0], plan.frame_indices[-1]) == (0, num_frames - 1)


def test_what_can_not_fit_is_refused_with_the_number_that_would() -> None:
    info = _sized(constant(600, 30), 480, 640)
    with pytest.raises(MediaBudgetError, match=r"A video of 4 frames takes at least 34 tokens.*the limit is 33"):
        _plan(info, max_video_tokens=33)
    assert _plan(info, max_video_tokens=34).num_prompt_tokens <= 34
    with pytest.raises(MediaBudgetError, match="at least 3 tokens"):
        _plan_image(Image.new("L", (9, 9)), max_tokens=2)


@pytest.mark.parametrize(
    ("num_frames", "settings", "num_used"),
    [
        (600, {"fps": 0.5}, 10),
        (600, {"fps": 1000}, 600),
        (600, {"max_frames": 6}, 6),
        (600, {"max_frames": 1}, 1),
        # The checkpoint's own maximum.
        (30 * 3600, {}, 768),
    ],
)
def test_max_frames_and_fps(num_frames: int, settings: dict[str, Any], num_used: int) -> None:
    plan = _plan(_sized(constant(num_frames, 30), 480, 640), **settings)
    assert _frames(plan) == num_used
    frames = "1 frame is" if num_used == 1 else f"{num_used} frames are"
    note = f"{frames} used, not 2 a second: at most {num_used} are taken from a video."
    assert tuple(map(str, plan.notes)) == (() if "fps" in settings else (note,))


def test_the_frames_that_are_named_are_the_frames_that_are_used() -> None:
    """Of still pictures that are shown for long, fewer than the limit; and where tokens take more away, those."""
    times = [*(index / 30 for index in range(40)), 60.0, 120.0]
    stills = _plan(_sized(varying(*times, last_s=1.0), 480, 640), max_frames=32)
    assert str(stills.notes[0]).startswith(f"{_frames(stills)} frames are used, not 2 a second")
    assert _frames(stills) == 4
    less = _plan(_sized(constant(600, 30), 480, 640), max_frames=32, max_video_tokens=2000)
    assert _frames(less) < 32
    assert [str(note).split(",")[0] for note in less.notes] == [f"{_frames(less)} frames are used"] * 2


def test_varying_rate() -> None:
    info = _sized(varying(0.0, 0.1, 0.2, 5.0, 9.0, last_s=1.0), 480, 640)
    plan = _plan(info)
    assert plan.frame_times_s == (0.0, 0.2, 5.0, 9.0)
    assert _plan(info, max_video_tokens=700).num_prompt_tokens <= 700


_sides = st.integers(16, 2200)


@given(
    st.integers(1, 3000),
    st.sampled_from([5.0, 24.0, 30.0]),
    _sides,
    _sides,
    st.integers(10, 20000),
    st.sampled_from([VIDEO, SMALL_VIDEO]),
)
def test_a_video_never_passes_its_limit(
    num_frames: int, rate: float, height: int, width: int, max_tokens: int, processing: VideoProcessing
) -> None:
    info = _sized(constant(num_frames, rate), height, width)
    free = _plan(info, processing)
    least = min(processing.min_frames, num_frames)
    try:
        plan = _plan(info, processing, max_video_tokens=max_tokens)
    except MediaBudgetError:
        # A patch of one token, its marks and its longest timestamp, for as few frames as allowed.
        assert max_tokens < -(-least // 2) * (3 + len(timestamp_text(float(info.times_s[-1]))))
        return
    assert plan.num_prompt_tokens <= max_tokens
    assert least <= _frames(plan) <= _frames(free)
    assert plan.size[0] <= free.size[0]
    assert plan.size[1] <= free.size[1]
    assert plan.num_tokens == plan.grid_thw.num_tokens()
    if plan.size != free.size:
        assert -(-_frames(plan) // 2) == -(-least // 2)
    if free.num_prompt_tokens <= max_tokens - 3 * free.grid_thw.t:
        assert plan == free
    assert bool(plan.notes) >= (plan != free)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(3, 5000))
def test_an_image_never_passes_its_limit(height: int, width: int, max_tokens: int) -> None:
    height, width = max(height, -(-width // 200)), max(width, -(-height // 200))
    picture = Image.new("L", (width, height))
    free = _plan_image(picture)
    plan = _plan_image(picture, max_tokens=max_tokens)
    assert plan.num_prompt_tokens <= max_tokens
    assert (plan == free) == (free.num_prompt_tokens <= max_tokens)


def test_no_frame_is_decoded_for_a_plan(clip: bytes, processor: MediaProcessor) -> None:
    """The pictures' data is destroyed; only the index is left, and the plan is the same."""
    data = bytearray(clip)
    start, stop = data.index(b"mdat") + 4, data.index(b"moov") - 4
    # The first frame stays: libav looks at it to open the file.
    keep = start + (stop - start) // 2
    data[keep:stop] = bytes(stop - keep)
    with mock.patch.object(video, "open_video", side_effect=AssertionError):
        assert processor.plan(bytes(data)) == processor.plan(clip)
