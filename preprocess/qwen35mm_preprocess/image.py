"""Images: recognises them by content, checks the header, decodes upright RGB, resizes and cuts into patches."""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageFile, TiffImagePlugin

from qwen35mm_preprocess import libtiff
from qwen35mm_preprocess.avif import clean_aperture, with_one_association
from qwen35mm_preprocess.color import code_points, is_srgb
from qwen35mm_preprocess.errors import (
    MediaChangedError,
    MediaDecodeError,
    MediaError,
    MediaFormatError,
    MediaLimitError,
)
from qwen35mm_preprocess.formats import AVIF, HEAD_BYTES, HEIC, JPEG_XL, PNG, SUPPORTED_IMAGES, TIFF
from qwen35mm_preprocess.jxl import JpegXlFile
from qwen35mm_preprocess.media import MediaSource, describe, open_stream, read_format
from qwen35mm_preprocess.media_plan import MediaPlan
from qwen35mm_preprocess.patches import Patches, empty_patches, unit_digest, write_frame
from qwen35mm_preprocess.rgb import CODE_POINTS, UPRIGHT, fit_transparency, resized, to_rgb
from qwen35mm_preprocess.say import Said, decimal, english, say
from qwen35mm_preprocess.types import ColorMode, ImageProcessing, MediaLimits, Size

_strict_loading_lock = threading.Lock()
# None of them contains a JPEG marker.
_OTHER_BITS = tuple(bits * 4096 for bits in (b"\0", b"\xfe", b"\xaa", b"\x5b\xed"))
# The key in an opened picture's `info` for the result of `clean_aperture`.
_SHOWN_PART = "shown part"


@dataclass(frozen=True)
class ImageInfo:
    """What an image's header says.

    size            (height, width) upright
    num_pictures    pictures in the file
    format          Pillow's name for the file's format; None for a PIL image
    is_plain        every decoder gives the same picture as `load_image`: one opaque 8-bit grey or RGB picture in sRGB,
                    stored upright and shown whole; never JPEG XL, whose header is only read in part
    is_turned       EXIF has it turned or mirrored
    is_part         the file stores more than the part to show
    """

    size: Size
    num_pictures: int
    format: str | None
    is_plain: bool
    is_turned: bool = False
    is_part: bool = False


def probe_image(source: MediaSource, limits: MediaLimits) -> ImageInfo:
    """Reads the header only.

    Raises:
        MediaError: the source is not a supported image, is damaged or is over a limit.
    """
    with opened_image(source, limits) as image:
        num_pictures = _num_pictures(image, source)
        info = image.info
        is_turned, is_part = _orientation(image) != 1, _SHOWN_PART in info
        is_opaque = image.mode in ("L", "RGB") and info.get("transparency") is None and image.format != JPEG_XL.pillow
        is_plain = (
            is_opaque
            and is_srgb(image.mode, info, info.get(CODE_POINTS))
            and num_pictures == 1
            and not is_turned
            and not is_part
        )
        return ImageInfo(upright_size(image), num_pictures, image.format, is_plain, is_turned, is_part)


def load_image(
    source: MediaSource, limits: MediaLimits, color: ColorMode = "srgb", plan: MediaPlan | None = None
) -> Image.Image:
    """Decodes the (first) picture, upright, in mode RGB, after the checks of `probe_image`.

    Args:
        plan: resizes to its size, with the same values as a resize of the whole picture in a fraction of the memory.
            None keeps the size.

    Raises:
        MediaChangedError: the plan was made for another size.
        MediaError: the source is not a supported image, is damaged or cut off, or is over a limit.
    """
    with opened_image(source, limits) as image, _damage_in_words(source):
        if plan is not None:
            check_same_image(upright_size(image), plan, source)
        return decoded_rgb(image, color, None if plan is None else plan.size)


def load_small(source: str | Path | bytes, limits: MediaLimits, max_side: int) -> Image.Image:
    """As `load_image`, with sides of at most `max_side` pixels. A JPEG is decoded in a lower resolution."""
    with opened_image(source, limits) as image, _damage_in_words(source):
        height, width = upright_size(image)
        scale = min(1.0, max_side / max(height, width))
        image.draft(None, (max_side, max_side))
        return decoded_rgb(image, "srgb", (max(1, round(height * scale)), max(1, round(width * scale))))


@contextmanager
def _damage_in_words(source: MediaSource) -> Iterator[None]:
    try:
        yield
    except (MediaError, MemoryError):
        raise
    # Pillow raises many types for damaged files: OSError, SyntaxError, struct.error, ...
    except Exception:
        raise MediaDecodeError(
            say(
                "{name} is damaged or cut off: its pixels could not all be decoded. Copy or upload it again, or "
                "save it anew.",
                name=describe(source),
            )
        ) from None


def decoded_rgb(image: Image.Image, color: ColorMode, size: Size | None = None) -> Image.Image:
    """The opened image's current picture, upright, in mode RGB, resized to `size` (height, width) if given.

    Raises any of Pillow's errors for damaged data.
    """
    turn = UPRIGHT.get(_orientation(image))
    with _strict_loading():
        decoded = _decoded(image)
        if size is not None:
            return resized(decoded, turn, color, size)
        rgb = to_rgb(decoded, color)
    return rgb if turn is None else rgb.transpose(turn)


def check_same_image(size: Size, plan: MediaPlan, source: MediaSource) -> None:
    """Raises MediaChangedError if the plan was made for a picture of another size."""
    if size != plan.source_size:
        raise MediaChangedError(
            say(
                "{name} is not the image that was planned: {w} x {h} pixels were expected, {width} x {height} came. "
                "Bring the old file back, or send the new one in a new message.",
                name=describe(source),
                w=str(plan.source_size[1]),
                h=str(plan.source_size[0]),
                width=str(size[1]),
                height=str(size[0]),
            )
        )


def image_patches(
    source: MediaSource, plan: MediaPlan, processing: ImageProcessing, limits: MediaLimits
) -> tuple[Patches, str]:
    """Decodes, resizes and patchifies an image as its plan says: (patches, digest).

    At the checkpoint's own size, the values equal those of transformers' Qwen2VLImageProcessorPil bit for bit.

    Raises:
        MediaChangedError: the plan was made for another size.
        MediaError: see `load_image`.
    """
    frame = np.asarray(load_image(source, limits, plan.color, plan))
    patches = empty_patches(plan.grid_thw, processing, num_frames=1)
    write_frame(frame, patches, plan.grid_thw, processing, unit=0)
    return patches, unit_digest(processing, plan.size, [frame])


def check_source_size(size: Size, name: Said, limits: MediaLimits) -> None:
    """Checks the header's size against the limits before decoding. Raises MediaError."""
    height, width = size
    if min(size) < 1:
        raise MediaDecodeError(
            say(
                "{name} is damaged: its header gives a size of {width} x {height} pixels.",
                name=name,
                width=str(width),
                height=str(height),
            )
        )
    if height * width > limits.max_source_pixels:
        raise MediaLimitError(
            say(
                "{name} has {width} x {height} pixels; at most {millions} million are decoded. Make it smaller, or "
                "raise the limit (--max-pixels).",
                name=name,
                width=str(width),
                height=str(height),
                millions=decimal(limits.max_source_pixels / 1000000.0),
            )
        )
    if max(size) > limits.max_aspect_ratio * min(size):
        raise MediaLimitError(
            say(
                "{name} has {width} x {height} pixels: one side is more than {ratio} times the other. Crop it.",
                name=name,
                width=str(width),
                height=str(height),
                ratio=decimal(limits.max_aspect_ratio),
            )
        )


@contextmanager
def opened_image(source: MediaSource, limits: MediaLimits) -> Iterator[Image.Image]:
    """The image with its header checked and its pixels not yet decoded."""
    name = describe(source)
    if isinstance(source, Image.Image):
        check_source_size(upright_size(source), name, limits)
        yield source
        return
    with open_stream(source, "image", limits) as stream:
        found = read_format(stream, source)
        if found.pillow is None:
            raise MediaFormatError(
                say(
                    "{name} is a video ({format}) where an image was expected: {formats}. Add it as a video.",
                    name=name,
                    format=found.name,
                    formats=SUPPORTED_IMAGES,
                )
            )
        if found is HEIC:
            _know_heif()
        try:
            image = JpegXlFile(stream, "") if found is JPEG_XL else _open_header(stream, found.pillow)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise MediaLimitError(
                say(
                    "{name} is too large: its header gives more pixels than are decoded ({millions} million). Make it "
                    "smaller.",
                    name=name,
                    millions=decimal(limits.max_source_pixels / 1000000.0),
                )
            ) from None
        except MemoryError:
            raise
        except Exception:
            raise MediaDecodeError(
                say(
                    "{name} starts like a {format} file but is damaged or cut off, or of an unusual kind. Copy or "
                    "upload it again, or save it anew.",
                    name=name,
                    format=found.name,
                )
            ) from None
        with image, libtiff.named(english(name)) if found is TIFF else nullcontext():
            # The clean aperture is the still picture's: it doesn't hold for an animation's frames.
            if found is AVIF and getattr(image, "n_frames", 1) == 1:
                check_source_size(upright_size(image), name, limits)
                if part := clean_aperture(stream, *image.size):
                    image.info[_SHOWN_PART] = part
            check_source_size(upright_size(image), name, limits)
            if found is PNG:
                fit_transparency(image)
            if found in (PNG, AVIF):
                image.info[CODE_POINTS] = code_points(stream, found.pillow)
            elif found is HEIC and (nclx := image.info.get("nclx_profile")) and "icc_profile" not in image.info:
                image.info[CODE_POINTS] = int(nclx["color_primaries"]), int(nclx["transfer_characteristics"])
            yield image


def _open_header(stream: BinaryIO, format: str) -> Image.Image:
    """Like `Image.open`, but without its pixel limit, which is global to the process."""
    if format not in Image.OPEN:
        Image.init()
    factory, accepts = Image.OPEN[format]
    is_such = accepts is None or accepts(stream.read(HEAD_BYTES))
    stream.seek(0)
    if is_such is not True:
        raise SyntaxError(f"no {format} that is read here")
    try:
        return factory(stream, "")
    except SyntaxError:
        stream.seek(0)
        joined = with_one_association(stream.read()) if format == "AVIF" else None
        if joined is None:
            raise
        return factory(io.BytesIO(joined), "")


@functools.lru_cache(maxsize=1)
def _know_heif() -> None:
    """Registers HEIF with Pillow. Pictures come upright, with matching EXIF."""
    import pi_heif

    # One thread: several pictures are read in parallel.
    pi_heif.register_heif_opener(decode_threads=1, thumbnails=False)


def _decoded(image: Image.Image) -> Image.Image:
    """Loads the image's pixels. A JPEG may lack its end marker, as some cameras and downloads leave it out."""
    file = getattr(image, "fp", None)
    if isinstance(image, TiffImagePlugin.TiffImageFile) and image._im is None:
        # Without a buffer, Pillow would check the size against its global limit again.
        image.im = Image.core.new(image.mode, image._tile_size)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        image.load()
        if image.info.get("compression") == "group4" and libtiff.has_failed():
            # libtiff leaves the rest of such a strip as the memory was: each decoding gives other pixels.
            raise OSError("the fax data is damaged")
        return image if (part := image.info.get(_SHOWN_PART)) is None else image.crop(part)
    except OSError:
        if image.format not in ("JPEG", "MPO") or file is None or file.closed:
            raise
        file.seek(0)
        data = file.read().rstrip(b"\xff")
        # Decoders ignore data after the last pixel. If no pixel is missing, any bits there give the same picture.
        first, *others = (Image.open(io.BytesIO(data + bits + b"\xff\xd9"), formats=("JPEG",)) for bits in _OTHER_BITS)
        if any(other.tobytes() != first.tobytes() for other in others):
            raise
        return first


def upright_size(image: Image.Image) -> Size:
    """(height, width) of the shown part after EXIF's rotation."""
    left, top, right, bottom = image.info.get(_SHOWN_PART, (0, 0, *image.size))
    width, height = right - left, bottom - top
    return (width, height) if _orientation(image) >= 5 else (height, width)


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation, 1 to 8; 1 if it is missing, damaged or applied by Pillow (TIFF)."""
    if image.format == "TIFF":
        return 1
    try:
        # EXIF alone, as in viewers: Pillow's `getexif` also reads XMP and ImageMagick data, and decodes a PNG's pixels
        # to find EXIF data after them.
        exif = Image.Exif()
        exif.load(image.info.get("exif", b""))
        value = exif.get(ExifTags.Base.Orientation, 1)
    except Exception:
        return 1
    return value if value in UPRIGHT else 1


def _num_pictures(image: Image.Image, source: MediaSource) -> int:
    # The caller chose a PIL image's picture. A JPEG's other pictures are depth maps and previews.
    if isinstance(source, Image.Image) or image.format in ("JPEG", "MPO"):
        return 1
    try:
        return getattr(image, "n_frames", 1)
    except Exception:
        return 1


@contextmanager
def _strict_loading() -> Iterator[None]:
    """Makes a cut-off image an error even if another library told Pillow to fill the rest with grey."""
    if not ImageFile.LOAD_TRUNCATED_IMAGES:
        yield
        return
    with _strict_loading_lock:
        ImageFile.LOAD_TRUNCATED_IMAGES = False
        try:
            yield
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = True
