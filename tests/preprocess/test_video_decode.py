"""The right frames come out, the same whether by seeking or by decoding everything, and damage costs only itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from qwen35mm_preprocess import MediaLimits
from qwen35mm_preprocess.video_decode import decode_frames, seek_runs
from qwen35mm_preprocess.video_probe import VideoInfo, probe_video
from tests.preprocess.media_files import encode_image, encode_video, scene, scene_index

LIMITS = MediaLimits()
CLOSED = {"g": "20", "keyint_min": "20", "sc_threshold": "0"}


def _decode(data: bytes, info: VideoInfo, indices: Sequence[int]) -> dict[int, np.ndarray]:
    return {index: np.asarray(frame) for index, frame in decode_frames(data, info, indices, LIMITS)}


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("mp4", "libx264"),
        ("mov", "mpeg4"),
        ("matroska", "libx264"),
        ("webm", "libvpx-vp9"),
        ("webm", "libvpx"),
        ("avi", "libx264"),
        ("avi", "mpeg4"),
        ("mpegts", "libx264"),
        ("gif", "gif"),
    ],
)
def test_frames_by_their_index(container: str, codec: str) -> None:
    data = encode_video([scene(i) for i in range(30)], container=container, codec=codec)
    wanted = [0, 1, 7, 8, 20, 29]
    frames = _decode(data, probe_video(data, LIMITS), wanted)
    assert list(frames) == wanted
    assert [scene_index(frame) for frame in frames.values()] == pytest.approx(wanted, abs=1 if codec == "gif" else 0)
    assert all(frame.shape == (48, 64, 3) and frame.dtype == np.uint8 for frame in frames.values())


@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [
        ("mp4", "libx264", CLOSED),
        ("mp4", "libx264", {**CLOSED, "x264-params": "open-gop=1:bframes=3"}),
        ("matroska", "libx264", CLOSED),
        ("matroska", "libx264", {**CLOSED, "x264-params": "intra-refresh=1"}),
        ("mp4", "libx265", {"x265-params": "keyint=20:min-keyint=20:open-gop=1:log-level=none"}),
        ("webm", "libvpx-vp9", {"g": "20", "deadline": "realtime", "cpu-used": "8"}),
    ],
)
def test_seeking_changes_no_bit(container: str, codec: str, options: dict[str, str]) -> None:
    noise = np.random.default_rng(0).integers(0, 40, (120, 48, 64, 3))
    moving = [np.roll(scene(i % 36) + noise[i], i, axis=1).clip(0, 255).astype(np.uint8) for i in range(120)]
    data = encode_video(moving, container=container, codec=codec, options=options)
    info = probe_video(data, LIMITS)
    assert info.can_seek
    for wanted in ([0, 50, 119], [45, 46, 95], list(range(0, 120, 7)), [119]):
        by_seeking = _decode(data, info, wanted)
        from_the_start = _decode(data, replace(info, can_seek=False), wanted)
        assert list(by_seeking) == list(from_the_start) == wanted
        assert all(np.array_equal(by_seeking[index], from_the_start[index]) for index in wanted)


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
    frames = _decode(long_clip, lying, wanted)
    assert list(frames) == wanted
    assert all(np.array_equal(frames[index], honest[index]) for index in wanted)


def test_damage_in_the_middle_leaves_the_rest() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (30, 48, 64, 3), np.uint8)
    data = bytearray(encode_video(list(noise), codec="mjpeg", container="matroska"))
    middle = len(data) // 2
    data[middle - 6000 : middle + 6000] = bytes(12000)
    info = probe_video(bytes(data), LIMITS)
    frames = _decode(bytes(data), info, range(info.num_frames))
    assert 0 in frames
    assert 10 < len(frames) < 30


def test_transparent_pixels_of_a_gif_lie_on_white() -> None:
    clear, red = Image.new("RGBA", (40, 40), (0, 0, 0, 0)), Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    red.paste((220, 0, 0, 255), (0, 0, 20, 40))
    data = encode_image(clear, "GIF", save_all=True, append_images=[red], duration=100, disposal=2)
    info = probe_video(data, LIMITS)
    frames = _decode(data, info, range(info.num_frames))
    assert (frames[0] == 255).all()
    assert frames[1][20, 30].tolist() == [255, 255, 255]
    assert frames[1][20, 10].tolist() == [220, 0, 0]
