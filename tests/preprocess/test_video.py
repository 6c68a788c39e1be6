"""Videos from file to pixel_values: the whole way against the oracles, odd frame counts, seeking, similar frames."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

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
from qwen35mm_preprocess.video import decode_frames, seek_runs
from qwen35mm_preprocess.video_probe import VideoInfo, probe_video
from tests.preprocess import oracles
from tests.preprocess.media_files import (
    LIMITS,
    SMALL_VIDEO,
    VIDEO,
    encode_image,
    encode_video,
    scene,
)


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


@pytest.mark.parametrize(
    ("container", "codec", "num_frames", "fps", "processing"),
    [
        ("mp4", "libx264", 30, 10, VIDEO),
        ("mp4", "libx264", 50, 24, SMALL_VIDEO),
        ("mov", "mpeg4", 5, 25, VIDEO),
        ("matroska", "libx264", 33, 30, SMALL_VIDEO),
        ("webm", "libvpx-vp9", 24, 12, VIDEO),
        ("webm", "libvpx", 13, 5, SMALL_VIDEO),
        ("avi", "libx264", 20, 10, VIDEO),
        ("avi", "mpeg4", 20, 10, SMALL_VIDEO),
        ("mpegts", "libx264", 20, 10, SMALL_VIDEO),
        ("gif", "gif", 20, 10, VIDEO),
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


@pytest.mark.parametrize(
    ("container", "codec", "num_frames"), [("mp4", "libx264", 3), ("mp4", "libx264", 1), ("gif", "gif", 1)]
)
def test_an_odd_number_of_frames_repeats_the_last(
    container: str, codec: str, num_frames: int, processor: MediaProcessor
) -> None:
    data = encode_video([scene(i * 10) for i in range(num_frames)], container=container, codec=codec)
    media = processor.prepare(data, kind="video")
    assert media.plan.frame_indices == tuple(range(num_frames))
    assert media.plan.timestamps_s == ((0.05, 0.2) if num_frames == 3 else (0.0,))
    blocks = media.pixel_values.reshape(media.plan.grid_thw.t, -1, 3, 2, 16 * 16)
    assert np.array_equal(blocks[-1, :, :, 0], blocks[-1, :, :, 1])
    assert num_frames == 1 or not np.array_equal(blocks[0, :, :, 0], blocks[0, :, :, 1])


def test_an_exception_from_progress_stops_the_work(clip: bytes, processor: MediaProcessor) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processor.prepare(clip, progress=stop)


@cache
def _standing(num_frames: int, move: int) -> bytes:
    """A still picture with some noise, in which a small square moves on at a frame."""
    rng = np.random.default_rng(0)
    background = rng.integers(60, 180, (3, 4, 3), np.uint8).repeat(32, 0).repeat(32, 1)
    frames = []
    for index in range(num_frames):
        frame = background.astype(int) + rng.integers(-2, 3, background.shape)
        left = 40 if index >= move else 10
        frame[40:52, left : left + 12] = (230, 20, 20)
        frames.append(frame.clip(0, 255).astype(np.uint8))
    return encode_video(frames, fps=2)


@pytest.fixture(scope="module")
def dropping(processor: MediaProcessor) -> MediaProcessor:
    return replace(processor, budget=MediaBudget(drop_similar=True))


def test_similar_patches_are_dropped_and_keep_their_times(processor: MediaProcessor, dropping: MediaProcessor) -> None:
    full = processor.prepare(_standing(20, 11)).plan
    media = dropping.prepare(_standing(20, 11))
    plan = media.plan
    # The first, the one in which the square moves, and the last; each shows its own time.
    assert plan.frame_indices == (0, 1, 10, 11, 18, 19)
    assert plan.frame_times_s == (0.0, 0.5, 5.0, 5.5, 9.0, 9.5)
    for kept, all_of_them in ((plan.timestamps_s, full.timestamps_s), (plan.unit_digests, full.unit_digests)):
        assert kept == tuple((all_of_them or ())[unit] for unit in (0, 5, 9))
    assert plan.grid_thw == GridTHW(3, full.grid_thw.h, full.grid_thw.w)
    assert tuple(map(str, plan.notes)) == ("14 frames are left out: they show the same as before.",)
    assert len(media.pixel_values) == plan.grid_thw.num_patches
    # What was dropped is pinned.
    assert plan.similar_difference is None
    again = processor.prepare(_standing(20, 11), plan)
    assert again.plan == plan
    np.testing.assert_array_equal(again.pixel_values, media.pixel_values)


def test_a_moving_picture_loses_nothing(clip: bytes, processor: MediaProcessor, dropping: MediaProcessor) -> None:
    assert dropping.prepare(clip).plan == processor.prepare(clip).plan


def test_two_patches_stay_of_a_still_picture(dropping: MediaProcessor) -> None:
    assert dropping.prepare(_standing(21, 99)).plan.frame_indices == (0, 1, 20)


def test_another_video_is_refused_before_decoding(clip: bytes, long_clip: bytes, processor: MediaProcessor) -> None:
    plan = processor.plan(clip)
    slower = encode_video([scene(i) for i in range(30)], fps=5)
    larger = encode_video([scene(i, (96, 64)) for i in range(30)])
    for other in (long_clip, slower, larger):
        with pytest.raises(MediaChangedError, match="is not the video that was planned"):
            processor.prepare(other, plan)


CLOSED = {"g": "20", "keyint_min": "20", "sc_threshold": "0"}


def _decode(data: bytes, info: VideoInfo, indices: Sequence[int]) -> dict[int, np.ndarray]:
    return {index: np.asarray(frame) for index, frame in decode_frames(data, info, indices, LIMITS)}


@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [
        ("mp4", "libx264", CLOSED),
        ("mp4", "libx264", {**CLOSED, "x264-params": "open-gop=1:bframes=3"}),
        ("matroska", "libx264", {**CLOSED, "x264-params": "intra-refresh=1"}),
        ("mp4", "libx265", {"x265-params": "keyint=20:min-keyint=20:open-gop=1:log-level=none"}),
        ("webm", "libvpx-vp9", {"g": "20", "deadline": "realtime", "cpu-used": "8"}),
    ],
)
def test_seeking_changes_no_bit(container: str, codec: str, options: dict[str, str]) -> None:
    noise = np.random.default_rng(0).integers(0, 40, (60, 48, 64, 3))
    moving = [np.roll(scene(i % 36) + noise[i], i, axis=1).clip(0, 255).astype(np.uint8) for i in range(60)]
    data = encode_video(moving, container=container, codec=codec, options=options)
    info = probe_video(data, LIMITS)
    assert info.can_seek
    from_the_start = _decode(data, replace(info, can_seek=False), range(60))
    for wanted in ([0, 50, 59], [25, 26, 55], list(range(0, 60, 7)), [59]):
        np.testing.assert_equal(_decode(data, info, wanted), {index: from_the_start[index] for index in wanted})


@pytest.mark.parametrize(
    ("keys", "indices", "expected"),
    [
        ([0], [0, 50, 119], [(None, [0, 50, 119])]),
        ([0, 20, 40, 60, 80, 100], [0, 50, 119], [(None, [0]), (40, [50]), (100, [119])]),
        ([0, 20, 40], [10, 19, 20, 21], [(None, [10, 19, 20, 21])]),
        ([0, 20, 40], [3, 20], [(None, [3]), (20, [20])]),
        ([0, 20], [4, 20], [(None, [4, 20])]),
        ([0, 20, 40], [41, 45], [(40, [41, 45])]),
        ([], [30], [(None, [30])]),
        ([7], [3], [(None, [3])]),
    ],
)
def test_seek_only_where_it_skips_enough(keys: list[int], indices: list[int], expected: list) -> None:
    is_key = np.zeros(120, bool)
    is_key[keys] = True
    assert seek_runs(is_key, indices) == expected


def test_an_index_that_lies_costs_time_only(long_clip: bytes) -> None:
    """Every frame is called a keyframe: seeks land elsewhere, and the frames come from the start after all."""
    info = probe_video(long_clip, LIMITS)
    lying = replace(info, is_key=np.ones(120, bool))
    wanted = [10, 57, 99]
    honest = _decode(long_clip, info, wanted)
    np.testing.assert_equal(_decode(long_clip, lying, wanted), honest)


def test_transparent_pixels_of_a_gif_lie_on_white() -> None:
    clear, red = Image.new("RGBA", (40, 40), (0, 0, 0, 0)), Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    red.paste((220, 0, 0, 255), (0, 0, 20, 40))
    data = encode_image(clear, "GIF", save_all=True, append_images=[red], duration=100, disposal=2)
    info = probe_video(data, LIMITS)
    frames = _decode(data, info, range(info.num_frames))
    assert (frames[0] == 255).all()
    assert frames[1][20, 30].tolist() == [255, 255, 255]
    assert frames[1][20, 10].tolist() == [220, 0, 0]
