"""Thumbnails and other pictures of media for the page, and the media types for browsers."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

from PIL import ExifTags, Image, ImageOps

from qwen35mm.chat.media.crops import frame_at
from qwen35mm_preprocess import MediaError, MediaLimits, detect_kind, libtiff
from qwen35mm_preprocess.formats import AVIF, BMP, GIF, HEAD_BYTES, JPEG, MATROSKA, MP4, PNG, WEBP, sniff
from qwen35mm_preprocess.image import load_image, probe_image
from qwen35mm_preprocess.say import say
from qwen35mm_preprocess.video import first_frame

MAX_SIDE = 640
# Formats that browsers show.
_SHOWN = (JPEG, PNG, GIF, BMP, WEBP, AVIF, MP4, MATROSKA)


def make_thumbnail(path: Path, max_side: int = MAX_SIDE) -> bytes:
    """A JPEG of a picture, or of a video's first frame, with sides of at most `max_side` pixels.

    Raises:
        MediaError: the file can't be read.
    """
    try:
        kind = detect_kind(path, MediaLimits())
    except MediaError:
        raise MediaError(say("There is no picture of this file.")) from None
    picture = _picture(path, max_side) if kind == "image" else _first_frame(path)
    picture.thumbnail((max_side, max_side))
    if picture.mode != "RGB":
        flat = Image.new("RGB", picture.size, "white")
        with_alpha = picture.convert("RGBA")
        flat.paste(with_alpha, mask=with_alpha.getchannel("A"))
        picture = flat
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=82)
    return data.getvalue()


def shown_picture(path: Path) -> bytes | None:
    """A JPEG in original size if some browsers don't show the picture, or not upright; None if the file will do.

    Raises:
        MediaError: the file can't be read.
    """
    if media_type(path) != "application/octet-stream":
        with _read_in_words(path), Image.open(path) as picture:
            is_turned = picture.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
            is_avif = picture.format == AVIF.pillow
        # Browsers differ in which other formats they turn. Chromium mostly ignores the crop of an AVIF.
        is_shown = picture.format in ("JPEG", "MPO") or not is_turned
        if is_shown and not (is_avif and probe_image(path, MediaLimits()).is_part):
            return None
    return _encoded(load_image(path, MediaLimits()))


def make_frame(path: Path, time_s: float, limits: MediaLimits) -> bytes:
    """A JPEG in original size of a video's frame `time_s` seconds after its first.

    Raises:
        MediaError: the video can't be read.
    """
    return _encoded(frame_at(path, time_s, limits)[0])


def _encoded(picture: Image.Image) -> bytes:
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=95, subsampling=0)
    return data.getvalue()


def media_type(path: Path) -> str:
    """The media type by the first bytes; application/octet-stream for what browsers don't show."""
    with path.open("rb") as file:
        found = sniff(file.read(HEAD_BYTES))
    return found.media_type if found in _SHOWN else "application/octet-stream"


def _picture(path: Path, max_side: int) -> Image.Image:
    with _read_in_words(path), Image.open(path) as picture:
        if picture.format == AVIF.pillow:
            return load_image(path, MediaLimits())
        if picture.width * picture.height > MediaLimits().max_source_pixels:
            raise MediaError(say("The picture is too large to be shown."))
        picture.draft("RGB", (max_side, max_side))
        return ImageOps.exif_transpose(picture)


@contextlib.contextmanager
def _read_in_words(path: Path) -> Iterator[None]:
    try:
        with libtiff.named(f"'{path.name}'"):
            yield
    except MediaError:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        raise MediaError(say("The picture can't be read.")) from None


def _first_frame(path: Path) -> Image.Image:
    try:
        return first_frame(path, MediaLimits())
    except MediaError:
        raise MediaError(say("The video can't be read.")) from None
