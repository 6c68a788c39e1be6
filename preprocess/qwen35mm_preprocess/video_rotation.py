"""How a video's frames are turned for display, read from the container: libav shows it on decoded frames only.

MP4 and MOV keep a display matrix in the track header (ISO/IEC 14496-12, 8.3.2 `tkhd`), Matroska a roll angle
(RFC 9559, `ProjectionPoseRoll`). Other containers have none. Angles are rounded to quarter turns.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

from PIL import Image

from qwen35mm_preprocess.media import MATROSKA, MP4, MediaFormat

# (a, b, c, d) of the display matrix, signs only, with y pointing down: a pixel (x, y) is shown at (ax + cy, bx + dy).
_TRANSPOSE = {
    (1, 0, 0, 1): None,
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
}
SWAPS_SIDES = (
    Image.Transpose.ROTATE_90,
    Image.Transpose.ROTATE_270,
    Image.Transpose.TRANSPOSE,
    Image.Transpose.TRANSVERSE,
)
_SEGMENT, _TRACKS, _TRACK, _VIDEO, _PROJECTION, _CLUSTER = 0x18538067, 0x1654AE6B, 0xAE, 0xE0, 0x7670, 0x1F43B675
_YAW, _ROLL = 0x7673, 0x7675


class _Box(NamedTuple):
    """An element of a container: its type and where its content lies."""

    kind: bytes | int
    start: int
    end: int


def read_transpose(stream: BinaryIO, found: MediaFormat, track_id: int, video_index: int) -> Image.Transpose | None:
    """The operation that puts a frame upright, or None.

    Args:
        stream: the file; its position is left anywhere.
        found: its format.
        track_id: the video's track in an MP4.
        video_index: the video's place among the video tracks of a Matroska file.
    """
    end = stream.seek(0, 2)
    if found is MP4:
        matrix = _mp4_matrix(stream, end, track_id)
    elif found is MATROSKA:
        matrix = _matroska_matrix(stream, end, video_index)
    else:
        return None
    longest = max(map(abs, matrix))
    a, b, c, d = (0 if abs(value) <= longest / 2 else (1 if value > 0 else -1) for value in matrix)
    return _TRANSPOSE.get((a, b, c, d))


def _mp4_matrix(stream: BinaryIO, end: int, track_id: int) -> tuple[float, float, float, float]:
    for header in _descend(stream, _Box(b"", 0, end), _iso_box, (b"moov", b"trak", b"tkhd")):
        content = _content(stream, header)
        id_at, matrix_at = (12, 40) if content[:1] == b"\0" else (20, 52)
        if len(content) >= matrix_at + 36 and struct.unpack_from(">I", content, id_at)[0] == track_id:
            a, b, _, c, d = struct.unpack_from(">5i", content, matrix_at)
            return a, b, c, d
    return 1, 0, 0, 1


def _matroska_matrix(stream: BinaryIO, end: int, video_index: int) -> tuple[float, float, float, float]:
    videos = list(_descend(stream, _Box(0, 0, end), _ebml_element, (_SEGMENT, _TRACKS, _TRACK, _VIDEO)))
    if video_index >= len(videos):
        return 1, 0, 0, 1
    angles = {_YAW: 0.0, _ROLL: 0.0}
    for projection in _descend(stream, videos[video_index], _ebml_element, (_PROJECTION,)):
        for pose in _children(stream, projection, _ebml_element):
            if pose.kind in angles and pose.end - pose.start in (4, 8):
                content = _content(stream, pose)
                angles[pose.kind] = struct.unpack(">f" if len(content) == 4 else ">d", content)[0]
    # The roll turns counter-clockwise; a yaw of 180 degrees is how a mirrored picture is written.
    flip = -1 if angles[_YAW] == 180 else 1
    roll = math.radians(angles[_ROLL]) if math.isfinite(angles[_ROLL]) else 0.0
    cos, sin = math.cos(roll), math.sin(roll)
    return flip * cos, -sin * flip, sin, cos


_ReadHeader = Callable[[BinaryIO, int], _Box | None]


def _descend(stream: BinaryIO, parent: _Box, read_header: _ReadHeader, path: tuple[bytes | int, ...]) -> Iterator[_Box]:
    """Every element below `parent` that the path of types leads to."""
    for child in _children(stream, parent, read_header):
        if child.kind != path[0]:
            continue
        if len(path) == 1:
            yield child
        else:
            yield from _descend(stream, child, read_header, path[1:])


def _children(stream: BinaryIO, parent: _Box, read_header: _ReadHeader) -> Iterator[_Box]:
    at = parent.start
    while at < parent.end:
        stream.seek(at)
        child = read_header(stream, parent.end)
        # A Matroska file has its tracks before its clusters, which may be many.
        if child is None or child.kind == _CLUSTER:
            return
        yield child._replace(end=min(child.end, parent.end))
        at = child.end


def _iso_box(stream: BinaryIO, end: int) -> _Box | None:
    start, header = stream.tell(), stream.read(16)
    if len(header) < 8:
        return None
    size, kind = struct.unpack_from(">I4s", header)
    length = 8
    if size == 1 and len(header) == 16:
        size, length = struct.unpack_from(">Q", header, 8)[0], 16
    elif size == 0:
        size = end - start
    return _Box(kind, start + length, start + size) if size >= length else None


def _ebml_element(stream: BinaryIO, end: int) -> _Box | None:
    kind, size = _vint(stream, keep_marker=True), _vint(stream, keep_marker=False)
    if kind is None or size is None:
        return None
    start = stream.tell()
    # All bits set: a live recording whose length was not known.
    is_unknown = any(size == 2 ** (7 * width) - 1 for width in range(1, 9))
    return _Box(kind, start, end if is_unknown else start + size)


def _vint(stream: BinaryIO, *, keep_marker: bool) -> int | None:
    first = stream.read(1)
    if not first or first[0] == 0:
        return None
    width = 9 - first[0].bit_length()
    rest = stream.read(width - 1)
    value = int.from_bytes(first + rest, "big")
    return value if keep_marker else value & (2 ** (7 * width) - 1)


def _content(stream: BinaryIO, box: _Box) -> bytes:
    stream.seek(box.start)
    return stream.read(min(box.end - box.start, 128))
