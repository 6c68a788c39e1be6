"""Videos from file to pixel_values: the whole way against the oracles, odd frame counts, damage, similar frames."""

from __future__ import annotations

import io
from dataclasses import replace

import av
import numpy as np
import pytest
from PIL import Image

from qwen35mm_preprocess import (
    GridTHW,
    MediaBudget,
    MediaChangedError,
    MediaProcessor,
    VideoProcessing,
)
from tests.preprocess import oracles
from tests.preprocess.media_files import HALF, PHOTOGRAPHS, encode_video, scene

SMALL = VideoProcessing(16, 2, 2, HALF, HALF, min_total_pixels=65536, max_total_pixels=98304, max_frames=8)
DEFAULT = VideoProcessing(16, 2, 2, HALF, HALF)


def _as_transformers(data: bytes, processing: VideoProcessing) -> tuple[np.ndarray, tuple, list[int], list[float]]:
    """pixel_values, grid, frame indices and timestamps: transformers' steps, with Pillow's resize."""
    with av.open(io.BytesIO(data)) as container:
        fps = float(container.streams.video[0].average_rate or 0)
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    indices = oracles.sample_frames(len(frames), fps, processing)
    height, width = oracles.video_size(len(indices), frames[0].shape[0], frames[0].shape[1], processing)
    images = [Image.fromarray(frames[index]) for index in indices]
    resized = [np.asarray(image.resize((width, height), Image.Resampling.BICUBIC)) for image in images]
    pixel_values, grid = oracles.video_pixel_values(np.stack(resized), processing)
    return pixel_values, grid, indices, oracles.timestamps(indices, fps)


@pytest.mark.parametrize("processing", [DEFAULT, SMALL], ids=["default", "small"])
@pytest.mark.parametrize(
    ("container", "codec", "num_frames", "fps"),
    [
        ("mp4", "libx264", 30, 10),
        ("mp4", "libx264", 50, 24),
        ("mov", "mpeg4", 5, 25),
        ("matroska", "libx264", 33, 30),
        ("webm", "libvpx-vp9", 24, 12),
        ("webm", "libvpx", 13, 5),
        ("avi", "mpeg4", 20, 10),
        ("mpegts", "libx264", 20, 10),
    ],
)
def test_whole_way_equals_the_oracles(
    container: str, codec: str, num_frames: int, fps: int, processing: VideoProcessing, processor: MediaProcessor
) -> None:
    data = encode_video([scene(i % 36) for i in range(num_frames)], container=container, codec=codec, fps=fps)
    media = replace(processor, video_processing=processing).prepare(data)
    pixel_values, grid, indices, timestamps = _as_transformers(data, processing)
    assert list(media.plan.frame_indices or ()) == indices
    assert media.plan.grid_thw == grid
    assert list(media.plan.timestamps_s or ()) == timestamps
    np.testing.assert_array_equal(media.pixel_values, pixel_values)
    assert media.warnings == ()


def test_an_odd_number_of_frames_repeats_the_last(processor: MediaProcessor) -> None:
    data = encode_video([scene(i * 10) for i in range(3)])
    media = processor.prepare(data)
    assert media.plan.frame_indices == (0, 1, 2)
    assert media.plan.grid_thw.t == 2
    assert media.plan.timestamps_s == (0.05, 0.2)
    blocks = media.pixel_values.reshape(2, -1, 3, 2, 16 * 16)
    assert np.array_equal(blocks[1, :, :, 0], blocks[1, :, :, 1])
    assert not np.array_equal(blocks[0, :, :, 0], blocks[0, :, :, 1])


@pytest.mark.parametrize(("container", "codec"), [("mp4", "libx264"), ("webm", "libvpx-vp9"), ("gif", "gif")])
def test_one_frame_is_doubled(container: str, codec: str, processor: MediaProcessor) -> None:
    data = encode_video([scene(0)], container=container, codec=codec)
    media = processor.prepare(data, kind="video")
    assert media.plan.frame_indices == (0,)
    assert media.plan.timestamps_s == (0.0,)
    assert media.plan.grid_thw.t == 1
    blocks = media.pixel_values.reshape(-1, 3, 2, 16 * 16)
    assert np.array_equal(blocks[:, :, 0], blocks[:, :, 1])


def test_animated_gif(processor: MediaProcessor) -> None:
    media = processor.prepare(PHOTOGRAPHS / "no_time_for_that_tiny.gif")
    assert media.plan.kind == "video"
    assert media.plan.grid_thw.t > 1
    assert np.isfinite(media.pixel_values).all()


def test_progress(clip: bytes, processor: MediaProcessor) -> None:
    calls: list[tuple[int, int]] = []
    processor.prepare(clip, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(done, 6) for done in range(1, 7)]


def test_an_exception_from_progress_stops_the_work(clip: bytes, processor: MediaProcessor) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processor.prepare(clip, progress=stop)


def _standing(num_frames: int, *moves: int) -> bytes:
    """A still picture with some noise, in which a small square moves on at the given frames."""
    rng = np.random.default_rng(0)
    background = rng.integers(60, 180, (3, 4, 3), np.uint8).repeat(32, 0).repeat(32, 1)
    frames = []
    for index in range(num_frames):
        frame = background.astype(int) + rng.integers(-2, 3, background.shape)
        left = 10 + 30 * sum(index >= move for move in moves)
        frame[40:52, left : left + 12] = (230, 20, 20)
        frames.append(frame.clip(0, 255).astype(np.uint8))
    return encode_video(frames, fps=2)


def _dropping(processor: MediaProcessor) -> MediaProcessor:
    return replace(processor, budget=MediaBudget(drop_similar=True))


def test_similar_patches_are_dropped_and_keep_their_times(processor: MediaProcessor) -> None:
    data = _standing(20, 11)
    full = processor.prepare(data).plan
    media = _dropping(processor).prepare(data)
    plan = media.plan
    # The first, the one in which the square moves, and the last; each shows its own time.
    assert plan.frame_indices == (0, 1, 10, 11, 18, 19)
    assert full.timestamps_s is not None
    assert plan.timestamps_s == (full.timestamps_s[0], full.timestamps_s[5], full.timestamps_s[9])
    assert plan.frame_times_s == (0.0, 0.5, 5.0, 5.5, 9.0, 9.5)
    assert plan.grid_thw == GridTHW(3, full.grid_thw.h, full.grid_thw.w)
    assert plan.notes == ("14 frames are left out: they show the same as those before them.",)
    assert len(media.pixel_values) == plan.grid_thw.num_patches
    assert plan.unit_digests is not None
    assert full.unit_digests is not None
    assert plan.unit_digests == (full.unit_digests[0], full.unit_digests[5], full.unit_digests[9])


def test_what_was_dropped_is_pinned(processor: MediaProcessor) -> None:
    data = _standing(20, 11)
    media = _dropping(processor).prepare(data)
    assert media.plan.similar_difference is None
    again = processor.prepare(data, media.plan)
    assert again.plan == media.plan
    np.testing.assert_array_equal(again.pixel_values, media.pixel_values)


def test_a_moving_picture_loses_nothing(clip: bytes, processor: MediaProcessor) -> None:
    assert _dropping(processor).prepare(clip).plan == processor.prepare(clip).plan


def test_two_patches_stay_of_a_still_picture(processor: MediaProcessor) -> None:
    assert _dropping(processor).prepare(_standing(21)).plan.frame_indices == (0, 1, 20)


def test_another_video_is_refused_before_decoding(clip: bytes, long_clip: bytes, processor: MediaProcessor) -> None:
    plan = processor.plan(clip)
    slower = encode_video([scene(i) for i in range(30)], fps=5)
    larger = encode_video([scene(i, (96, 64)) for i in range(30)])
    for other in (long_clip, slower, larger):
        with pytest.raises(MediaChangedError, match="is not the video that was planned"):
            processor.prepare(other, plan)
