"""Reads animated WebP, PNG and AVIF as clips with the files' frame times.

A frame of 10 ms or less lasts 100 ms, as in browsers. Loops count once. Pillow composes the frames, except for PNG: it
blends palettes and grey with alpha differently from PNG's specification (3rd edition, 11.3.6), and over a picture that
isn't part of the animation.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple, cast

import numpy as np
from PIL import Image, ImageFile

from qwen35mm_preprocess.formats import AVIF, GIF, PNG
from qwen35mm_preprocess.image import decoded_rgb, opened_image, upright_size
from qwen35mm_preprocess.media import MediaSource, is_animated, open_stream, read_format
from qwen35mm_preprocess.rgb import fit_transparency, with_alpha
from qwen35mm_preprocess.types import ColorMode, MediaLimits, Size

_TOO_SHORT_S, _INSTEAD_S = 0.010, 0.100


class Animation(NamedTuple):
    """Size and times from the file's header and frame headers.

    size            (height, width) upright
    times_s         float64 [N] presentation times from the first frame
    last_s          duration of the last frame
    num_announced   number of frames in the header
    """

    size: Size
    times_s: np.ndarray
    last_s: float
    num_announced: int


def is_animation(source: MediaSource, limits: MediaLimits) -> bool:
    """Whether Pillow, not libav, reads the source as a clip.

    Raises:
        MediaSourceError, MediaLimitError, MediaFormatError: it can't be opened or has an unsupported format.
    """
    if isinstance(source, Image.Image):
        return False
    with open_stream(source, "video", limits) as stream:
        found = read_format(stream, source)
        return found is not GIF and is_animated(stream, source, found)


def probe_animation(source: MediaSource, limits: MediaLimits) -> Animation:
    """Reads the frame headers. Decodes an AVIF's frames to get their times.

    Raises:
        MediaError: the source is damaged or over a limit.
    """
    with opened_image(source, limits) as image:
        stream = _stream_of(image)
        num_frames = getattr(image, "n_frames", 1)
        if image.format == AVIF.pillow:
            times, last_s = _decoded_times(image, min(num_frames, limits.max_source_frames + 1))
        else:
            if image.format == PNG.pillow:
                num_frames -= bool(getattr(image, "default_image", False))
                durations = [frame.duration_s for frame in _png_frames(stream)]
            else:
                durations = list(_webp_durations(stream))
            shown = np.array([_INSTEAD_S if each <= _TOO_SHORT_S else each for each in durations] or [0.0])
            times, last_s = np.cumsum(shown) - shown, float(shown[-1])
        return Animation(upright_size(image), times, last_s, num_frames)


def animation_frames(
    source: MediaSource, indices: Sequence[int], limits: MediaLimits, color: ColorMode
) -> Iterator[tuple[int, Image.Image]]:
    """Yields (index, frame) for rising `indices`, upright and in mode RGB. Ends at the first undecodable frame.

    Raises:
        MediaError: the source can't be opened.
    """
    with opened_image(source, limits) as image:
        frames = _composed(image) if image.format == PNG.pillow else _pillow_frames(image, indices)
        last = indices[-1] if indices else -1
        try:
            for index, frame in frames:
                if index in indices:
                    yield index, decoded_rgb(frame, color)
                if index >= last:
                    return
        except MemoryError:
            raise
        # Pillow raises many types for damaged files. Later frames build on earlier ones, so stop.
        except Exception:
            return


def _pillow_frames(image: Image.Image, indices: Sequence[int]) -> Iterator[tuple[int, Image.Image]]:
    for index in indices:
        image.seek(index)
        yield index, image


def _decoded_times(image: Image.Image, num_frames: int) -> tuple[np.ndarray, float]:
    times = []
    for index in range(num_frames):
        try:
            image.seek(index)
            image.load()
        except MemoryError:
            raise
        # Pillow raises many types for damaged files.
        except Exception:
            break
        times.append(image.info["timestamp"] / 1000)
    return np.array(times or [0.0]), image.info.get("duration", 0) / 1000


def _webp_durations(stream: BinaryIO) -> Iterator[float]:
    stream.seek(12)
    while len(head := stream.read(8)) == 8:
        name, size = head[:4], int.from_bytes(head[4:], "little")
        start = stream.tell()
        if name == b"ANMF":
            yield int.from_bytes(stream.read(15)[12:], "little") / 1000
        stream.seek(start + size + size % 2)


def _stream_of(image: Image.Image) -> BinaryIO:
    assert isinstance(image, ImageFile.ImageFile)
    assert image.fp is not None
    return cast(BinaryIO, image.fp)


class _PngFrame(NamedTuple):
    """A PNG frame: its place, blending and disposal from its `fcTL` chunk, and its compressed data."""

    duration_s: float
    width: int
    height: int
    left: int
    top: int
    disposal: int
    blending: int
    data: list[bytes]


_BACKGROUND, _PREVIOUS, _OVER = 1, 2, 1
_PNG_START = b"\x89PNG\r\n\x1a\n"


def _png_chunks(stream: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    stream.seek(len(_PNG_START))
    while len(head := stream.read(8)) == 8:
        size, name = struct.unpack(">I4s", head)
        data = stream.read(size)
        stream.seek(4, io.SEEK_CUR)
        if len(data) == size:
            yield name, data


def _png_frames(stream: BinaryIO) -> Iterator[_PngFrame]:
    """Yields the frames that have data. A picture before the first `fcTL` chunk is not a frame."""
    frame: _PngFrame | None = None
    for name, data in _png_chunks(stream):
        if name == b"fcTL" and len(data) == 26:
            if frame is not None and frame.data:
                yield frame
            width, height, left, top, delay, per_s, disposal, blending = struct.unpack_from(">4I2H2B", data, 4)
            frame = _PngFrame(delay / (per_s or 100), width, height, left, top, disposal, blending, [])
        elif name in (b"IDAT", b"fdAT") and frame is not None:
            frame.data.append(data if name == b"IDAT" else data[4:])
    if frame is not None and frame.data:
        yield frame


def _composed(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Yields the composed frames of an animated PNG in RGBA, with the file's colour information."""
    stream = _stream_of(image)
    shared: dict[bytes, bytes] = {}
    for name, data in _png_chunks(stream):
        if name == b"IDAT":
            break
        shared[name] = data
    about = {name: value for name, value in image.info.items() if name != "transparency"}
    canvas = Image.new("RGBA", image.size)
    for index, frame in enumerate(_png_frames(stream)):
        box = (frame.left, frame.top, frame.left + frame.width, frame.top + frame.height)
        if box[2] > canvas.width or box[3] > canvas.height:
            return
        size = struct.pack(">2I", frame.width, frame.height)
        chunks = [(b"IHDR", size + shared[b"IHDR"][8:])]
        chunks += [(name, shared[name]) for name in (b"PLTE", b"tRNS") if name in shared]
        chunks += [(b"IDAT", b"".join(frame.data)), (b"IEND", b"")]
        whole = _PNG_START + b"".join(_chunk(*chunk) for chunk in chunks)
        stored = Image.open(io.BytesIO(whole), formats=(PNG.pillow or "",))
        fit_transparency(stored)
        part = with_alpha(stored)
        before = canvas.copy()
        if frame.blending == _OVER:
            canvas.alpha_composite(part, box[:2])
        else:
            canvas.paste(part, box)
        picture = canvas.copy()
        picture.format, picture.info = image.format, dict(about)
        yield index, picture
        if frame.disposal == _BACKGROUND:
            canvas.paste((0, 0, 0, 0), box)
        elif frame.disposal == _PREVIOUS:
            canvas = before


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
