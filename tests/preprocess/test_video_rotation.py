"""Turned videos: what the container says agrees with what libav shows on the frames, and ends upright."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image

from qwen35mm_preprocess import MediaLimits, MediaProcessor
from qwen35mm_preprocess.media import AVI, MATROSKA, MP4
from qwen35mm_preprocess.video import decode_frames
from qwen35mm_preprocess.video_probe import open_video, probe_video
from qwen35mm_preprocess.video_rotation import read_transpose
from tests.preprocess.media_files import encode_video, pixel, scene, turned

LIMITS = MediaLimits()
# libav's angle on a frame is counter-clockwise.
BY_ANGLE = {
    0: None,
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    -180: Image.Transpose.ROTATE_180,
    -90: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("quarters", [0, 1, 2, 3])
@pytest.mark.parametrize("container", ["mp4", "mov", "matroska"])
def test_agrees_with_libav(container: str, quarters: int) -> None:
    data = turned(encode_video([scene(0)], codec="mpeg4"), quarters, container)
    with open_video(data, LIMITS) as video:
        angle = next(video.container.decode(video.stream)).rotation
    info = probe_video(data, LIMITS)
    assert info.transpose == BY_ANGLE[angle]
    assert (info.transpose is None) == (quarters == 0)
    assert info.size == ((64, 48) if quarters % 2 else (48, 64))


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_phone_held_upright(container: str, processor: MediaProcessor) -> None:
    """The sensor stored the scene turned clockwise; its file says to turn it back, counter-clockwise."""
    stored = np.rot90(scene(3, (96, 64)), k=-1)
    data = turned(encode_video([stored] * 2, codec="mpeg4"), 3, container)
    info = probe_video(data, LIMITS)
    ((_, frame),) = decode_frames(data, info, [0], LIMITS)
    assert frame.size == (64, 96)
    np.testing.assert_allclose(pixel(frame, 8, 12), (220, 0, 0), atol=30)
    np.testing.assert_allclose(pixel(frame, 61, 80), (0, 180, 0), atol=30)
    plan = processor.plan(data)
    assert plan.source_size == (96, 64)
    assert plan.grid_thw.h > plan.grid_thw.w


def _iso(kind: bytes, *parts: bytes) -> bytes:
    content = b"".join(parts)
    return struct.pack(">I4s", 8 + len(content), kind) + content


def _tkhd(track: int, matrix: tuple[int, int, int, int], version: int = 0) -> bytes:
    a, b, c, d = (value * 65536 for value in matrix)
    times = bytes(16 if version else 8)
    head = bytes([version, 0, 0, 0]) + times + struct.pack(">I", track) + bytes((8 if version else 4) + 4 + 16)
    return _iso(b"tkhd", head, struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30), bytes(8))


def _movie(*tracks: bytes) -> io.BytesIO:
    boxes = b"".join(_iso(b"trak", _iso(b"edts", bytes(12)), track) for track in tracks)
    large = struct.pack(">I4sQ", 1, b"mdat", 24) + bytes(8)
    return io.BytesIO(_iso(b"ftyp", b"isom", bytes(4)) + large + _iso(b"moov", _iso(b"mvhd", bytes(100)), boxes))


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        ((1, 0, 0, 1), None),
        ((0, 1, -1, 0), Image.Transpose.ROTATE_270),
        ((-1, 0, 0, -1), Image.Transpose.ROTATE_180),
        ((0, -1, 1, 0), Image.Transpose.ROTATE_90),
        ((-1, 0, 0, 1), Image.Transpose.FLIP_LEFT_RIGHT),
        ((1, 0, 0, -1), Image.Transpose.FLIP_TOP_BOTTOM),
        ((0, 0, 0, 0), None),
    ],
)
def test_track_header(matrix: tuple[int, int, int, int], expected: Image.Transpose | None, version: int) -> None:
    sound = _tkhd(1, (0, 1, 1, 0))
    assert read_transpose(_movie(sound, _tkhd(2, matrix, version)), MP4, 2, 0) == expected


@pytest.mark.parametrize("transpose", list(Image.Transpose))
def test_every_matrix_moves_pixels_as_it_says(transpose: Image.Transpose) -> None:
    """Taken at its word: pixel (x, y) is shown at (ax + cy, bx + dy), moved back into the picture."""
    pixels = np.arange(6, dtype=np.uint8).reshape(2, 3)
    expected = np.asarray(Image.fromarray(pixels).transpose(transpose))
    for matrix in [(s, 0, 0, t) for s in (1, -1) for t in (1, -1)] + [(0, s, t, 0) for s in (1, -1) for t in (1, -1)]:
        if read_transpose(_movie(_tkhd(1, matrix)), MP4, 1, 0) != transpose:
            continue
        a, b, c, d = matrix
        places = {(a * x + c * y, b * x + d * y): pixels[y, x] for y in range(2) for x in range(3)}
        left, top = (min(axis) for axis in zip(*places, strict=True))
        shown = {(x - left, y - top): value for (x, y), value in places.items()}
        assert all(expected[y, x] == value for (x, y), value in shown.items())
        return
    pytest.fail("no matrix gives this transpose")


def test_missing_track_other_containers_and_garbage() -> None:
    assert read_transpose(_movie(_tkhd(1, (0, 1, -1, 0))), MP4, 2, 0) is None
    assert read_transpose(_movie(_tkhd(1, (0, 1, -1, 0))), AVI, 1, 0) is None
    whole = _movie(_tkhd(1, (0, 1, -1, 0))).getvalue()
    for stop in range(len(whole)):
        read_transpose(io.BytesIO(whole[:stop]), MP4, 1, 0)
        read_transpose(io.BytesIO(whole[stop:]), MP4, 1, 0)
        read_transpose(io.BytesIO(whole[stop:]), MATROSKA, 1, 0)


def test_damaged_matroska_headers_never_raise() -> None:
    whole = bytearray(turned(encode_video([scene(0)], codec="mpeg4"), 1, "matroska"))
    for at in range(600):
        damaged = whole.copy()
        damaged[at] ^= 0xFF
        read_transpose(io.BytesIO(bytes(damaged)), MATROSKA, 1, 0)
