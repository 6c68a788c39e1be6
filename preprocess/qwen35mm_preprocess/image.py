"""Images: opened by content, checked from the header, decoded upright to RGB, resized, cut into patches.

How every mode becomes RGB:
    1, L, P, RGB, CMYK, YCbCr, HSV, LAB     Pillow's conversion, and from what the file says its colours are to sRGB
    alpha (LA, PA, RGBA, La, RGBa) or a
    transparent colour (GIF, PNG)           laid over white
    16-bit grey (I;16...)                   0..65535 scaled to 0..255
    I, F (32-bit grey)                      by the range that the file tells; else by the first of 1 (F), 255, 65535
                                            and the type's own that nearly all values lie in
With "checkpoint", in the colours of the checkpoint's own processing, profiles are not applied, and the least and the
greatest value of I and F become 0 and 255.
"""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from PIL import ExifTags, Image, ImageFile

from qwen35mm_preprocess.color import code_points, is_srgb, to_srgb
from qwen35mm_preprocess.errors import (
    MediaChangedError,
    MediaDecodeError,
    MediaError,
    MediaFormatError,
    MediaLimitError,
)
from qwen35mm_preprocess.media import AVIF, HEIC, PNG, SUPPORTED_IMAGES, MediaSource, describe, open_stream, read_format
from qwen35mm_preprocess.media_plan import MediaPlan
from qwen35mm_preprocess.patches import Patches, empty_patches, unit_digest, write_frame
from qwen35mm_preprocess.say import Said, decimal, say
from qwen35mm_preprocess.types import ColorMode, ImageProcessing, MediaLimits, Size

# EXIF's orientation to the operation that puts the picture upright; 5 to 8 swap width and height.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_strict_loading_lock = threading.Lock()
# TIFF's tags for the values that are black and white.
_MIN, _MAX, _S_MIN, _S_MAX = 280, 281, 340, 341
_NEARLY_ALL = 0.999
_CODE_POINTS = "code points"
# None of them holds a marker of a JPEG's.
_OTHER_BITS = tuple(bits * 4096 for bits in (b"\0", b"\xfe", b"\xaa", b"\x5b\xed"))


@dataclass(frozen=True)
class ImageInfo:
    """What an image's header says.

    size            (height, width) upright
    num_pictures    how many the file holds
    format          Pillow's name for the file's format; None for a PIL image
    is_plain        every decoder makes the same picture of it as `load_image`: 8-bit grey or RGB, upright as stored,
                    nothing transparent, one picture, colours in sRGB
    """

    size: Size
    num_pictures: int
    format: str | None
    is_plain: bool


def probe_image(source: MediaSource, limits: MediaLimits) -> ImageInfo:
    """Reads the header only.

    Raises:
        MediaError: not an image that is read here, damaged, or over a limit.
    """
    with _opened(source, limits) as image:
        num_pictures = _num_pictures(image, source)
        info = image.info
        is_opaque = image.mode in ("L", "RGB") and info.get("transparency") is None
        is_plain = (
            is_opaque
            and is_srgb(image.mode, info, info.get(_CODE_POINTS))
            and num_pictures == 1
            and _orientation(image) == 1
        )
        return ImageInfo(_upright_size(image), num_pictures, image.format, is_plain)


def load_image(source: MediaSource, limits: MediaLimits, color: ColorMode = "srgb") -> Image.Image:
    """Decodes the (first) picture, upright, in mode RGB; the checks of `probe_image` come before the pixels.

    Raises:
        MediaError: not an image that is read here, damaged or cut off, or over a limit.
    """
    with _opened(source, limits) as image:
        orientation = _orientation(image)
        try:
            with _strict_loading():
                rgb = to_rgb(_decoded(image), color)
        except (MediaError, MemoryError):
            raise
        # Pillow's decoders raise whatever the damage leads them to: OSError, SyntaxError, struct.error, ...
        except Exception:
            raise MediaDecodeError(
                say(
                    "{name} is damaged or cut off: its pixels could not all be decoded. Copy or upload it again, or "
                    "save it anew.",
                    name=describe(source),
                )
            ) from None
    return rgb.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else rgb


def check_same_image(picture: Image.Image, plan: MediaPlan, source: MediaSource) -> None:
    """Raises MediaChangedError where the picture isn't the one that the plan was made for."""
    if (picture.height, picture.width) != plan.source_size:
        raise MediaChangedError(
            say(
                "{name} is not the image that was planned: {w} x {h} pixels were expected, {width} x {height} came. "
                "Bring the old file back, or send the new one in a new message.",
                name=describe(source),
                w=str(plan.source_size[1]),
                h=str(plan.source_size[0]),
                width=str(picture.width),
                height=str(picture.height),
            )
        )


def image_patches(
    source: MediaSource, plan: MediaPlan, processing: ImageProcessing, limits: MediaLimits
) -> tuple[Patches, str]:
    """Decodes, resizes and patchifies an image as its plan says: (patches, digest).

    Their values equal those of transformers' Qwen2VLImageProcessorPil bit for bit when the plan's size is the
    checkpoint's own.

    Raises:
        MediaChangedError: its size is not the one that the plan was made for.
        MediaError: see `load_image`.
    """
    picture = load_image(source, limits, plan.color)
    check_same_image(picture, plan, source)
    height, width = plan.size
    frame = np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC))
    patches = empty_patches(plan.grid_thw, processing, num_frames=1)
    write_frame(frame, patches, plan.grid_thw, processing, unit=0)
    return patches, unit_digest(processing, plan.size, [frame])


def to_rgb(image: Image.Image, color: ColorMode = "srgb") -> Image.Image:
    """The picture in mode RGB by the rule at the top of this file."""
    info = image.info
    if image.mode.startswith("I;16"):
        wide = np.asarray(image).astype(np.uint32)
        image = Image.fromarray(((wide * 255 + 32767) // 65535).astype(np.uint8))
    elif image.mode in ("I", "F"):
        values = np.nan_to_num(np.asarray(image, np.float64), nan=0.0, posinf=0.0, neginf=0.0)
        least, greatest = _own_range(image, values) if color == "srgb" else (values.min(), values.max())
        image = _scaled(values, least, greatest)
    has_alpha = any(band in "Aa" for band in image.getbands()) or info.get("transparency") is not None
    if color == "checkpoint":
        return _over_white(_with_alpha(image)) if has_alpha else image.convert("RGB")
    alpha = None
    if has_alpha:
        image = _with_alpha(image)
        alpha = image.getchannel("A")
        image = image.convert("RGB")
    elif image.mode not in ("L", "RGB", "CMYK", "LAB"):
        image = image.convert("RGB")
    shown = to_srgb(image, info, info.get(_CODE_POINTS))
    if alpha is not None:
        shown.putalpha(alpha)
        shown = _over_white(shown)
    # What is saved of it mustn't carry the profile that it had.
    shown.info = {}
    return shown


def _with_alpha(image: Image.Image) -> Image.Image:
    return (image.convert("LA") if image.mode == "La" else image).convert("RGBA")


def _over_white(image: Image.Image) -> Image.Image:
    return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")


def _own_range(image: Image.Image, values: np.ndarray) -> tuple[float, float]:
    """What is black and what is white in grey of 32 bits. One hot pixel mustn't turn the others black."""
    tags = getattr(image, "tag_v2", {})
    for names in ((_S_MIN, _S_MAX), (_MIN, _MAX)):
        least, greatest = (np.ravel(tags.get(name, np.nan))[:1].astype(np.float64) for name in names)
        if np.isfinite(least).all() and np.isfinite(greatest).all() and float(least[0]) < float(greatest[0]):
            return float(least[0]), float(greatest[0])
    nearly_all = np.quantile(values, _NEARLY_ALL)
    ranges = (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0)
    return 0.0, next((top for top in ranges if nearly_all <= top), float(2**31 - 1))


def _scaled(values: np.ndarray, least: float, greatest: float) -> Image.Image:
    if least == greatest:
        return Image.fromarray(np.full(values.shape, np.clip(least, 0, 255), np.uint8))
    scaled = np.clip((values - least) / (greatest - least), 0, 1) * 255
    return Image.fromarray(scaled.round().astype(np.uint8))


def check_source_size(size: Size, name: Said, limits: MediaLimits) -> None:
    """Refuses a picture or a video's frames by the size that the header gives, before decoding. Raises MediaError."""
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
                "{name} has {width} x {height} pixels; at most {millions} million are decoded. Make it smaller.",
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
def _opened(source: MediaSource, limits: MediaLimits) -> Iterator[Image.Image]:
    """The image with its header read and checked, its pixels not yet decoded."""
    name = describe(source)
    if isinstance(source, Image.Image):
        check_source_size(_upright_size(source), name, limits)
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
            image = Image.open(stream, formats=(found.pillow,))
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
        with image:
            check_source_size(_upright_size(image), name, limits)
            if found in (PNG, AVIF):
                image.info[_CODE_POINTS] = code_points(stream, found.pillow)
            elif found is HEIC and (nclx := image.info.get("nclx_profile")) and "icc_profile" not in image.info:
                image.info[_CODE_POINTS] = int(nclx["color_primaries"]), int(nclx["transfer_characteristics"])
            yield image


@functools.lru_cache(maxsize=1)
def _know_heif() -> None:
    """Teaches Pillow the format; a picture comes upright, and its EXIF says so."""
    import pi_heif

    # One thread: several pictures are read at a time.
    pi_heif.register_heif_opener(decode_threads=1, thumbnails=False)


def _decoded(image: Image.Image) -> Image.Image:
    """The image with its pixels; a JPEG may lack its end marker, as those of some cameras and downloads do."""
    file = getattr(image, "fp", None)
    try:
        image.load()
        return image
    except OSError:
        if image.format not in ("JPEG", "MPO") or file is None or file.closed:
            raise
        file.seek(0)
        data = file.read().rstrip(b"\xff")
        # What follows the last pixel is passed over: where none is missing, anything there gives the same picture.
        first, *others = (Image.open(io.BytesIO(data + bits + b"\xff\xd9"), formats=("JPEG",)) for bits in _OTHER_BITS)
        if any(other.tobytes() != first.tobytes() for other in others):
            raise
        return first


def _upright_size(image: Image.Image) -> Size:
    width, height = image.size
    return (width, height) if _orientation(image) >= 5 else (height, width)


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation, 1 to 8; 1 where there is none, it is damaged, or Pillow applies it itself (TIFF)."""
    if image.format == "TIFF":
        return 1
    try:
        # EXIF alone, as viewers do: Pillow's `getexif` takes XMP's and ImageMagick's word, too, and of a PNG it would
        # decode the pixels to look for EXIF data behind them.
        exif = Image.Exif()
        exif.load(image.info.get("exif", b""))
        value = exif.get(ExifTags.Base.Orientation, 1)
    except Exception:
        return 1
    return value if value in _UPRIGHT else 1


def _num_pictures(image: Image.Image, source: MediaSource) -> int:
    # A PIL image was put on the picture that is wanted. A JPEG's others are depth maps and previews.
    if isinstance(source, Image.Image) or image.format in ("JPEG", "MPO"):
        return 1
    try:
        return getattr(image, "n_frames", 1)
    except Exception:
        return 1


@contextmanager
def _strict_loading() -> Iterator[None]:
    """Keeps a cut-off image an error, where another library has told Pillow to fill the rest with grey."""
    if not ImageFile.LOAD_TRUNCATED_IMAGES:
        yield
        return
    with _strict_loading_lock:
        ImageFile.LOAD_TRUNCATED_IMAGES = False
        try:
            yield
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = True
