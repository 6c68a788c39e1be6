"""What a demux of the packet times tells, for every container and for files that lie or lack something."""

from __future__ import annotations

import io
import struct
from dataclasses import replace

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from qwen35mm_preprocess import MediaDecodeError, MediaLimitError, MediaLimits
from qwen35mm_preprocess.media_plan import patch_timestamps
from qwen35mm_preprocess.video import decode_frames
from qwen35mm_preprocess.video_probe import (
    VideoInfo,
    count_frames,
    probe_video,
    sample_frames,
)
from tests.preprocess import oracles
from tests.preprocess.media_files import LIMITS, VIDEO, encode_video, scene, turned, with_sound

CONTAINERS = [
    ("mp4", "libx264"),
    ("mov", "mpeg4"),
    ("matroska", "libx264"),
    ("webm", "libvpx-vp9"),
    ("webm", "libvpx"),
    ("avi", "libx264"),
    ("mpegts", "libx264"),
    ("gif", "gif"),
]


@pytest.mark.parametrize("num_frames", [1, 23])
@pytest.mark.parametrize(("container", "codec"), CONTAINERS)
def test_constant_rate(container: str, codec: str, num_frames: int) -> None:
    data = encode_video([scene(i) for i in range(num_frames)], container=container, codec=codec)
    info = probe_video(data, LIMITS)
    assert info.times_s.tolist() == [index / 10 for index in range(num_frames)]
    assert info.duration_s > 0
    assert info.size == (48, 64)
    assert info.warnings == ()
    if num_frames > 1:
        assert (info.is_constant, info.fps, info.duration_s) == (True, 10, pytest.approx(2.3))
        assert info.is_key[0]
        assert (np.diff(info.pts) > 0).all()


def test_rate_that_milliseconds_can_only_round() -> None:
    """Matroska counts in milliseconds: 30 fps gives steps of 33 and 34, and is still 30 fps."""
    frames = [scene(i) for i in range(40)]
    info = probe_video(encode_video(frames, container="matroska", codec="mpeg4", fps=30), LIMITS)
    assert len(set(np.diff(info.pts).tolist())) > 1
    assert info.is_constant
    assert info.fps == 30
    assert info.times_s[29] == 29 / 30


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_variable_rate(container: str) -> None:
    pts = [0, 1, 2, 3, 30, 31, 32, 60]
    info = probe_video(encode_video([scene(i) for i in range(8)], container=container, codec="mpeg4", pts=pts), LIMITS)
    assert not info.is_constant
    assert info.times_s.tolist() == pytest.approx([tick / 10 for tick in pts])
    assert info.duration_s >= 6.0


def test_hidden_frames_of_vp8_do_not_count() -> None:
    """A frame that only serves others has a packet and a time of its own; here one is made so by its header."""
    data = encode_video([scene(i) for i in range(12)], container="webm", codec="libvpx")
    file = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(file, "w", format="webm") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for place, packet in enumerate(source.demux(video=0)):
            content = bytearray(bytes(packet))
            if packet.size == 0:
                continue
            if place == 5:
                content[0] &= ~0x10
            copy = av.Packet(bytes(content))
            copy.pts, copy.dts, copy.time_base, copy.stream = packet.pts, packet.dts, packet.time_base, stream
            copy.is_keyframe = packet.is_keyframe
            target.mux(copy)
    info = probe_video(file.getvalue(), LIMITS)
    assert info.num_frames == 11
    decoded = [index for index, _ in decode_frames(file.getvalue(), info, range(11), LIMITS)]
    assert decoded == list(range(11))


def test_cut_off_without_an_index() -> None:
    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 256, (48, 64, 3), np.uint8) for _ in range(60)]
    data = encode_video(frames, container="matroska", codec="mpeg4")
    info = probe_video(data[: len(data) // 2], LIMITS)
    assert 10 < info.num_frames < 50
    assert "cut off: it announces 6.0 s" in str(info.warnings[0])


@pytest.mark.parametrize("container", ["mov", "matroska", "avi", "flv"])
def test_longer_sound_is_no_damage(container: str) -> None:
    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 256, (48, 64, 3), np.uint8) for _ in range(30)]
    video = encode_video(frames, container=container, codec="flv" if container == "flv" else "mpeg4")
    info = probe_video(with_sound(video, 9, container), LIMITS)
    assert (info.num_frames, round(info.duration_s, 3), info.warnings) == (30, 3.0, ())
    if container != "mov":
        data = with_sound(video, 3, container)
        assert "cut off" in str(probe_video(data[: len(data) // 2], LIMITS).warnings)


def test_dropped_frames_of_an_avi_are_no_damage() -> None:
    frames = [scene(index) for index in range(20)]
    info = probe_video(encode_video(frames, container="avi", codec="mjpeg", pts=[*range(10), *range(13, 23)]), LIMITS)
    assert (info.num_frames, round(info.times_s[-1], 3), info.warnings) == (20, 2.2, ())


def test_no_frame_left(long_clip: bytes) -> None:
    start_of_pictures = long_clip.index(b"mdat") + 4
    with pytest.raises(MediaDecodeError, match="holds no frame"):
        probe_video(long_clip[:start_of_pictures], LIMITS)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_source_frames": 119}, "more than 119 frames"),
        ({"max_duration_s": 11}, "12 seconds long; at most 11"),
        ({"max_video_bytes": 999}, "MiB"),
        ({"max_aspect_ratio": 1.2}, r"more than 1\.2 times"),
    ],
)
def test_limits(long_clip: bytes, limits: dict[str, float], words: str) -> None:
    exact = MediaLimits(max_source_frames=120, max_duration_s=12, max_video_bytes=len(long_clip))
    assert probe_video(long_clip, exact).num_frames == 120
    with pytest.raises(MediaLimitError, match=words):
        probe_video(long_clip, replace(exact, **limits))


def test_an_edit_list_hides_frames() -> None:
    """The MP4's edit list says to start at half a second: five frames are there only to be decoded."""
    data = bytearray(encode_video([scene(i) for i in range(20)], codec="mpeg4"))
    at = data.index(b"elst")
    duration, media_time = struct.unpack_from(">Ii", data, at + 12)
    step = duration // 20
    ticks = probe_video(bytes(data), LIMITS).pts
    struct.pack_into(">Ii", data, at + 12, duration - 5 * step, media_time + 5 * int(ticks[1] - ticks[0]))
    info = probe_video(bytes(data), LIMITS)
    assert info.num_frames == 15
    assert info.times_s[0] == 0


_EVERY_MATRIX = [(s, 0, 0, t) for s in (1, -1) for t in (1, -1)] + [(0, s, t, 0) for s in (1, -1) for t in (1, -1)]


@pytest.mark.parametrize(
    ("container", "matrix"),
    [*(("mp4", matrix) for matrix in _EVERY_MATRIX), ("matroska", (0, -1, 1, 0)), ("matroska", (-1, 0, 0, -1))],
)
def test_a_turned_video_ends_upright(container: str, matrix: tuple[int, int, int, int]) -> None:
    """Taken at its word: pixel (x, y) is shown at (ax + cy, bx + dy), moved back into the picture."""
    video = encode_video([scene(0)], codec="mpeg4")
    ((_, stored),) = decode_frames(video, probe_video(video, LIMITS), [0], LIMITS)
    data = turned(video, matrix, container)
    info = probe_video(data, LIMITS)
    ((_, frame),) = decode_frames(data, info, [0], LIMITS)
    a, b, c, d = matrix
    y, x = np.indices((48, 64))
    across, down = a * x + c * y, b * x + d * y
    shown = np.zeros((*info.size, 3), np.uint8)
    shown[down - down.min(), across - across.min()] = np.asarray(stored)
    np.testing.assert_array_equal(np.asarray(frame), shown)


def test_a_matrix_of_zeros_turns_nothing() -> None:
    assert probe_video(turned(encode_video([scene(0)], codec="mpeg4"), (0, 0, 0, 0)), LIMITS).transpose is None


def test_a_movie_can_be_turned_as_a_whole() -> None:
    data = bytearray(encode_video([scene(0)], codec="mpeg4"))
    struct.pack_into(">5i", data, data.index(b"mvhd") + 4 + 36, 0, 65536, 0, -65536, 0)
    info = probe_video(bytes(data), LIMITS)
    assert (info.transpose, info.size) == (Image.Transpose.ROTATE_270, (64, 48))


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
    processing = replace(VIDEO, fps=fps, min_frames=min_frames, max_frames=max_frames)
    info = constant(num_frames, rate)
    indices = sample_frames(info, count_frames(info, fps, min_frames, max_frames), min_frames)
    assert list(indices) == oracles.sample_frames(num_frames, rate, processing)
    times = info.frame_times(indices)
    assert list(patch_timestamps(times, 2)) == oracles.timestamps(indices, rate)


def test_varying_rate_is_counted_by_its_duration() -> None:
    assert count_frames(varying(0.0, 0.1, 0.2, 5.0, 9.0, last_s=1.0), 0.5, 1, 99) == 5


@pytest.mark.parametrize(
    ("times_s", "count", "min_frames", "expected"),
    [
        # Moments 0, 2.25, 4.5, 6.75 and 9: the frame of 0.2 s stands still at two of them and is taken once.
        ((0.0, 0.1, 0.2, 5.0, 9.0), 5, 1, (0, 2, 3, 4)),
        ((0.0, 1 / 3, 2.1, 2.2, 10 / 3), 2, 1, (0, 4)),
        ((0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 100.0), 4, 1, (0, 5, 6)),
        ((0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 100.0), 4, 4, (0, 2, 4, 6)),
    ],
    ids=["on the screen", "first and last", "still", "minimum"],
)
def test_varying_rate_takes_what_is_on_the_screen(
    times_s: tuple[float, ...], count: int, min_frames: int, expected: tuple[int, ...]
) -> None:
    info = varying(*times_s, last_s=0.1)
    assert sample_frames(info, count, min_frames) == expected
    assert info.frame_times(expected) == tuple(times_s[index] for index in expected)


@given(st.lists(st.floats(0.001, 20), min_size=1, max_size=25), st.floats(0.1, 10), st.integers(1, 8))
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
