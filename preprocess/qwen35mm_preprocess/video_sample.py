"""Which frames of a video are used, and their times: pure arithmetic over `VideoInfo`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qwen35mm_preprocess.video_probe import VideoInfo


def count_frames(info: VideoInfo, fps: float, min_frames: int, max_frames: int) -> int:
    """How many frames to sample at `fps` (transformers' Qwen3VLVideoProcessor.sample_frames)."""
    seconds = info.num_frames / info.fps if info.is_constant else info.duration_s
    return min(max(int(seconds * fps), min_frames), max_frames, info.num_frames)


def sample_frames(info: VideoInfo, num_frames: int, min_frames: int = 1) -> tuple[int, ...]:
    """Indices of about `num_frames` frames, spread evenly over the presentation time from the first to the last.

    At a constant rate exactly `num_frames`, those of transformers' `sample_frames`. Where the rate varies, the frames
    that are on the screen at evenly spread times: one that is shown for long is taken once, so there may be fewer, but
    not below `min_frames`.
    """
    if info.is_constant:
        return _spread(info.num_frames, num_frames)
    moments = np.linspace(0, info.times_s[-1], num_frames)
    # The last moment must find the last frame, whatever the rounding.
    shown = np.searchsorted(info.times_s, moments + 1e-9, side="right") - 1
    indices = np.unique(shown)
    least = min(min_frames, num_frames)
    if len(indices) < least:
        return _spread(info.num_frames, least)
    return tuple(indices.tolist())


def _spread(num_frames: int, count: int) -> tuple[int, ...]:
    """`count` of `num_frames` indices, spread evenly from the first to the last."""
    return tuple(np.linspace(0, num_frames - 1, count).round().astype(int).tolist())


def frame_times(info: VideoInfo, indices: Sequence[int]) -> tuple[float, ...]:
    """Presentation times of frames in seconds, from the file's first frame."""
    return tuple(info.times_s[list(indices)].tolist())


def patch_timestamps(times_s: Sequence[float], temporal_patch_size: int) -> tuple[float, ...]:
    """One time for each temporal patch: the mean of its first and last frame's.

    The last frame stands in for those missing in the last patch. Equal to `_calculate_timestamps` of transformers'
    Qwen3VLProcessor.
    """
    padded = list(times_s) + [times_s[-1]] * (-len(times_s) % temporal_patch_size)
    return tuple(
        (padded[at] + padded[at + temporal_patch_size - 1]) / 2 for at in range(0, len(padded), temporal_patch_size)
    )
