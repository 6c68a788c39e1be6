"""Which frames are sampled, against transformers at a constant rate and by hand where the rate varies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm_preprocess import VideoProcessing
from qwen35mm_preprocess.video_probe import VideoInfo
from qwen35mm_preprocess.video_sample import count_frames, frame_times, patch_timestamps, sample_frames
from tests.preprocess import oracles
from tests.preprocess.media_files import HALF

PROCESSING = VideoProcessing(16, 2, 2, HALF, HALF)


def constant(num_frames: int, fps: float) -> VideoInfo:
    return VideoInfo(
        size=(48, 64),
        transpose=None,
        pts=np.arange(num_frames),
        is_key=np.zeros(num_frames, bool),
        times_s=np.arange(num_frames) / fps,
        fps=fps,
        is_constant=True,
        duration_s=num_frames / fps,
        can_seek=True,
        warnings=(),
    )


def varying(*times_s: float, last_s: float) -> VideoInfo:
    info = constant(len(times_s), len(times_s) / (times_s[-1] + last_s))
    return replace(info, times_s=np.array(times_s), is_constant=False, duration_s=times_s[-1] + last_s)


_rates = st.one_of(st.sampled_from([24.0, 25.0, 30.0, 60.0, 30000 / 1001, 24000 / 1001]), st.floats(0.5, 240))


@given(
    st.integers(1, 20000),
    _rates,
    st.sampled_from([0.5, 1.0, 2.0, 3.7]),
    st.integers(1, 8),
    st.sampled_from([8, 16, 768]),
)
def test_constant_rate_equals_the_oracle(
    num_frames: int, rate: float, fps: float, min_frames: int, max_frames: int
) -> None:
    processing = replace(PROCESSING, fps=fps, min_frames=min_frames, max_frames=max_frames)
    info = constant(num_frames, rate)
    indices = sample_frames(info, count_frames(info, fps, min_frames, max_frames), min_frames)
    assert list(indices) == oracles.sample_frames(num_frames, rate, processing)
    times = frame_times(info, indices)
    assert list(patch_timestamps(times, 2)) == oracles.timestamps(indices, rate)


def test_varying_rate_takes_what_is_on_the_screen() -> None:
    info = varying(0.0, 0.1, 0.2, 5.0, 9.0, last_s=1.0)
    assert count_frames(info, 0.5, 1, 99) == 5
    # Moments 0, 2.25, 4.5, 6.75 and 9: the frame of 0.2 s stands still at two of them and is taken once.
    assert sample_frames(info, 5) == (0, 2, 3, 4)
    assert frame_times(info, (0, 2, 3, 4)) == (0.0, 0.2, 5.0, 9.0)


def test_varying_rate_takes_the_first_and_the_last() -> None:
    info = varying(0.0, 1 / 3, 2.1, 2.2, 10 / 3, last_s=0.1)
    assert sample_frames(info, 2) == (0, 4)


def test_varying_rate_keeps_the_minimum() -> None:
    info = varying(0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 100.0, last_s=0.01)
    assert sample_frames(info, 4) == (0, 5, 6)
    assert sample_frames(info, 4, min_frames=4) == (0, 2, 4, 6)


@given(st.lists(st.floats(0.001, 20), min_size=1, max_size=60), st.floats(0.1, 10), st.integers(1, 8))
def test_varying_rate_is_in_order_and_in_bounds(steps: list[float], fps: float, min_frames: int) -> None:
    info = varying(*np.concatenate([[0.0], np.cumsum(steps)]).tolist(), last_s=0.1)
    count = count_frames(info, fps, min_frames, 30)
    indices = sample_frames(info, count, min_frames)
    assert min(min_frames, count) <= len(indices) <= count
    assert list(indices) == sorted(set(indices))
    assert indices[0] == 0
    if count > 1:
        assert indices[-1] == info.num_frames - 1


@pytest.mark.parametrize(
    ("times", "patch", "expected"),
    [
        ((0.0, 1.0, 2.0, 3.0), 2, (0.5, 2.5)),
        ((0.0, 1.0, 2.0), 2, (0.5, 2.0)),
        ((1.5,), 2, (1.5,)),
        ((0.0, 1.0, 5.0, 6.0), 3, (2.5, 6.0)),
    ],
)
def test_patch_timestamps(times: tuple[float, ...], patch: int, expected: tuple[float, ...]) -> None:
    assert patch_timestamps(times, patch) == expected
