"""Thumbnails and other pictures of media for the page, and the media types for browsers."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from qwen35mm.chat.media.crops import frame_at
from qwen35mm_preprocess import MediaError, MediaLimits, detect_kind
from qwen35mm_preprocess.formats import AVIF, BMP, GIF, HEAD_BYTES, JPEG, MATROSKA, MP4, PNG, WEBP, MediaFormat, sniff
from qwen35mm_preprocess.image import load_image, load_small, probe_image
from qwen35mm_preprocess.say import say
from qwen35mm_preprocess.video import first_frame

MAX_SIDE = 640
# Formats that browsers show.
_SHOWN = (JPEG, PNG, GIF, BMP, WEBP, AVIF, MP4, MATROSKA)


def make_thumbnail(path: Path, limits: MediaLimits, max_side: int = MAX_SIDE) -> bytes:
    """A JPEG of a picture, or of a video's first frame, with sides of at most `max_side` pixels.

    Raises:
        MediaError: the file can't be read.
    """
    try:
        is_image = detect_kind(path, limits) == "image"
        picture = load_small(path, limits, max_side) if is_image else first_frame(path, limits)
    # In a chat the file's name is a digest.
    except MediaError:
        raise MediaError(say("There is no picture of this file.")) from None
    picture.thumbnail((max_side, max_side))
    return _encoded(picture, quality=82)


def shown_picture(path: Path, limits: MediaLimits) -> bytes | None:
    """A JPEG in original size if some browsers don't show the picture, or not upright; None if the file will do.

    Raises:
        MediaError: the file can't be read.
    """
    found = _format(path)
    if found in _SHOWN:
        try:
            info = probe_image(path, limits)
        except MediaError:
            raise MediaError(say("The picture can't be read.")) from None
        # Browsers differ in which other formats they turn. Chromium mostly ignores the crop of an AVIF.
        if found is JPEG or not (info.is_turned or info.is_part):
            return None
    return _encoded(load_image(path, limits))


def make_frame(path: Path, time_s: float, limits: MediaLimits) -> bytes:
    """A JPEG in original size of a video's frame `time_s` seconds after its first.

    Raises:
        MediaError: the video can't be read.
    """
    return _encoded(frame_at(path, time_s, limits)[0])


def _encoded(picture: Image.Image, **how: int) -> bytes:
    data = io.BytesIO()
    picture.save(data, "JPEG", **(how or {"quality": 95, "subsampling": 0}))
    return data.getvalue()


def media_type(path: Path) -> str:
    """The media type by the first bytes; application/octet-stream for what browsers don't show."""
    found = _format(path)
    return found.media_type if found in _SHOWN else "application/octet-stream"


def _format(path: Path) -> MediaFormat | None:
    with path.open("rb") as file:
        return sniff(file.read(HEAD_BYTES))
