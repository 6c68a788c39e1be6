"""Makes a clip of single pictures: of pixels an animated PNG, of JPEGs an AVI. Both are lossless.

Nothing is decoded here, so that pictures of strangers can be given to `clip_of_jpegs` anywhere.
"""

from __future__ import annotations

import itertools
import re
import struct
import zlib
from collections.abc import Sequence
from fractions import Fraction

from PIL import Image

from qwen35mm_preprocess.errors import MediaSourceError
from qwen35mm_preprocess.media import NamedBytes

# Frames a second of a list of frames that says nothing else, as the model samples a video.
DEFAULT_FPS = 2.0
# An animated PNG's frame of 10 ms or less would last 100 ms.
_MAX_FPS = 90.0
_MOST = 0xFFFF
# JPEG's frame headers: baseline, extended and progressive, but no tables (C4, C8, CC).
_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# A photo has some twenty.
_MAX_MARKERS = 1000
_FILL = re.compile(rb"\xff+")


def clip_of_pictures(
    frames: Sequence[Image.Image], *, fps: float | None = None, times_s: Sequence[float] | None = None
) -> NamedBytes:
    """An animated PNG of frames of one size.

    Args:
        fps: frames a second; without it and `times_s`, two.
        times_s: when each frame is shown, in rising order.

    Raises:
        MediaSourceError: no frames, frames of several sizes, or impossible times.
    """
    _check_fps(fps)
    if not frames:
        raise MediaSourceError("A video needs frames; the list is empty.")
    if any(frame.size != frames[0].size for frame in frames):
        raise MediaSourceError("A video's frames must all have the same size. Resize them.")
    delays = _delays(len(frames), fps or DEFAULT_FPS, times_s)
    pictures = [frame.convert("RGB") for frame in frames]
    if len(pictures) == 1:
        # A single frame would be a picture.
        pictures, delays = pictures * 2, [delays[0] / 2] * 2
    width, height = pictures[0].size
    chunks = [
        (b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)),
        (b"acTL", struct.pack(">2I", len(pictures), 0)),
    ]
    number = 0
    for picture, delay in zip(pictures, delays, strict=True):
        # What lasts long is counted in coarser steps: both numbers have 16 bits.
        coarsest = max(1, min(_MOST, int(_MOST / delay)))
        short = min(delay, Fraction(_MOST)).limit_denominator(coarsest)
        head = struct.pack(">5I2H2B", number, width, height, 0, 0, short.numerator, short.denominator, 0, 0)
        rows = picture.tobytes()
        step = 3 * width
        data = zlib.compress(b"".join(b"\0" + rows[at : at + step] for at in range(0, len(rows), step)), 1)
        chunks.append((b"fcTL", head))
        chunks.append((b"IDAT", data) if number == 0 else (b"fdAT", struct.pack(">I", number + 1) + data))
        number += 1 if number == 0 else 2
    chunks.append((b"IEND", b""))
    whole = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return NamedBytes(b"\x89PNG\r\n\x1a\n" + whole)


def clip_of_jpegs(frames: Sequence[bytes], *, fps: float | None = None) -> NamedBytes:
    """An AVI of JPEGs of one size, `fps` a second (two if None); `data:video/jpeg` lists such frames.

    Raises:
        MediaSourceError: a frame isn't a JPEG, or has another size than the first.
    """
    _check_fps(fps)
    sizes = {_jpeg_size(frame) for frame in frames}
    if len(sizes) != 1:
        raise MediaSourceError("A video's frames must be JPEGs of one size, at least one. Resize them.")
    width, height = sizes.pop()
    frames = [*frames, frames[0]] if len(frames) == 1 else frames
    rate = Fraction(fps or DEFAULT_FPS).limit_denominator(1001)
    largest = max(map(len, frames))
    main = struct.pack("<14I", round(1e6 / rate), 0, 0, 0x10, len(frames), 0, 1, largest, width, height, 0, 0, 0, 0)
    stream = struct.pack(
        "<4s4sI2H8I4H",
        *(b"vids", b"MJPG", 0, 0, 0, 0, rate.denominator, rate.numerator, 0, len(frames), largest, 0xFFFFFFFF, 0),
        *(0, 0, width, height),
    )
    form = struct.pack("<3I2H4s5I", 40, width, height, 1, 24, b"MJPG", 3 * width * height, 0, 0, 0, 0)
    header = _riff(b"avih", main) + _list(b"strl", _riff(b"strh", stream) + _riff(b"strf", form))
    index, body, place = [], [], 4
    for frame in frames:
        chunk = _riff(b"00dc", frame)
        index.append(struct.pack("<4s3I", b"00dc", 0x10, place, len(frame)))
        body.append(chunk)
        place += len(chunk)
    movie = _list(b"hdrl", header) + _list(b"movi", b"".join(body)) + _riff(b"idx1", b"".join(index))
    return NamedBytes(_riff(b"RIFF", b"AVI " + movie))


def _check_fps(fps: float | None) -> None:
    if fps is not None and not (isinstance(fps, int | float) and 0 < fps <= _MAX_FPS):
        raise MediaSourceError(f"A list of frames may have up to {_MAX_FPS:g} a second; got {fps!r}.")


def _delays(count: int, fps: float, times_s: Sequence[float] | None) -> list[Fraction]:
    """How long each frame is shown, in seconds."""
    if times_s is None:
        return [1 / Fraction(fps).limit_denominator(1001)] * count
    if len(times_s) != count:
        raise MediaSourceError(f"There must be a time for each of the {count} frames; got {len(times_s)}.")
    # In milliseconds from the first frame, so that no error adds up.
    marks = [round(1000 * (time - times_s[0])) for time in times_s]
    steps = [later - earlier for earlier, later in itertools.pairwise(marks)]
    if any(step <= 10 for step in steps):
        raise MediaSourceError("The frames' times must rise, by more than 10 ms each.")
    return [Fraction(step, 1000) for step in [*steps, steps[-1] if steps else 500]]


def _jpeg_size(data: bytes) -> tuple[int, int]:
    """A JPEG's width and height, by its markers. Takes no longer for a hostile one."""
    at = 2 if data[:2] == b"\xff\xd8" else len(data)
    for _ in range(_MAX_MARKERS):
        filled = _FILL.match(data, at)
        if filled is None or filled.end() + 8 > len(data):
            break
        # The last byte of the run begins the marker.
        at = filled.end() - 1
        marker, size = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker in _SIZES:
            height, width = struct.unpack_from(">2H", data, at + 5)
            return width, height
        at += 2 + size
    raise MediaSourceError("A frame of the video isn't a JPEG that can be read.")


def _riff(name: bytes, data: bytes) -> bytes:
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def _list(name: bytes, data: bytes) -> bytes:
    return _riff(b"LIST", name + data)
