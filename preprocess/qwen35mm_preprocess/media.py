"""Media sources: a path, bytes, a data URI or a PIL image, opened with a byte limit and recognised by content.

A file's name and declared type are never trusted.
"""

from __future__ import annotations

import base64
import binascii
import importlib.util
import io
import re
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote_to_bytes

from PIL import Image, features

from qwen35mm_preprocess.errors import MediaDecodeError, MediaFormatError, MediaLimitError, MediaSourceError
from qwen35mm_preprocess.say import Said, decimal, say
from qwen35mm_preprocess.types import MediaKind, MediaLimits

HEAD_BYTES = 512
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_AVIF_BRANDS = (b"avif", b"avis")
_QUICKTIME_ATOMS = (b"moov", b"mdat", b"pnot")
# Padding atoms are words that a text can have there too; their size is written in four bytes, and small.
_QUICKTIME_PADDING = (b"wide", b"free", b"skip")
# The sizes of a bitmap's second header, by which its versions are told apart.
_BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)
_TS_PACKET = 188
# Of the flags of a WebP's first chunk.
_WEBP_ANIMATION = 0x02


@dataclass(frozen=True)
class MediaFormat:
    """A format: what others call it, and what reads it.

    Attributes:
        media_type: the registered one.
        suffixes: of its files' names; the first is given to media that have none of them.
        pillow, libav: its decoder in Pillow and its demuxer in libav; None where that library is not asked.
        magic: what its files start with; empty where that doesn't tell it.
    """

    name: str
    kind: MediaKind
    media_type: str
    suffixes: tuple[str, ...]
    pillow: str | None = None
    libav: str | None = None
    magic: tuple[bytes, ...] = ()


JPEG = MediaFormat("JPEG", "image", "image/jpeg", (".jpg", ".jpeg"), pillow="JPEG", magic=(b"\xff\xd8\xff",))
PNG = MediaFormat("PNG", "image", "image/png", (".png",), pillow="PNG", magic=(b"\x89PNG\r\n\x1a\n",))
WEBP = MediaFormat("WebP", "image", "image/webp", (".webp",), pillow="WEBP")
BMP = MediaFormat("BMP", "image", "image/bmp", (".bmp",), pillow="BMP")
_TIFF_MAGIC = (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")
TIFF = MediaFormat("TIFF", "image", "image/tiff", (".tif", ".tiff"), pillow="TIFF", magic=_TIFF_MAGIC)
AVIF = MediaFormat("AVIF", "image", "image/avif", (".avif",), pillow="AVIF")
# A still one is an image and an animated one a video, as with PNG, WebP and AVIF; the first frame of either can be
# asked for as an image.
GIF = MediaFormat("GIF", "image", "image/gif", (".gif",), pillow="GIF", libav="gif", magic=(b"GIF87a", b"GIF89a"))
MP4 = MediaFormat("MP4/MOV", "video", "video/mp4", (".mp4", ".mov", ".m4v"), libav="mov")
MATROSKA = MediaFormat(
    "WebM/MKV", "video", "video/webm", (".webm", ".mkv"), libav="matroska", magic=(b"\x1aE\xdf\xa3",)
)
AVI = MediaFormat("AVI", "video", "video/x-msvideo", (".avi",), libav="avi")
MPEG_TS = MediaFormat("MPEG-TS", "video", "video/mp2t", (".ts", ".m2ts", ".mts"), libav="mpegts")
# What phones make. Pillow reads it by a package of its own, the extra `heif`.
HEIC = MediaFormat("HEIC", "image", "image/heic", (".heic", ".heif", ".hif"), pillow="HEIF")

# Pillow knows AVIF only where it was built with it.
HAS_AVIF = "avif" in features.modules and bool(features.check("avif"))
HAS_HEIF = importlib.util.find_spec("pi_heif") is not None
_MORE = [format.name for format, is_read in ((AVIF, HAS_AVIF), (HEIC, HAS_HEIF)) if is_read]
SUPPORTED_IMAGES = ", ".join(["JPEG, PNG, WebP, GIF, BMP, TIFF", *_MORE])
SUPPORTED_VIDEOS = "MP4, MOV, WebM, MKV, AVI, MPEG-TS, animated GIF"


def sniff(head: bytes) -> MediaFormat | None:
    """The format of a file that starts with `head` (HEAD_BYTES of it are enough), or None."""
    for found in (JPEG, PNG, GIF, TIFF, MATROSKA):
        if head.startswith(found.magic):
            return found
    if head.startswith(b"RIFF"):
        return {b"WEBP": WEBP, b"AVI ": AVI}.get(head[8:12])
    if head[4:8] == b"ftyp":
        return _sniff_ftyp(head)
    # Two letters are not enough: a text may begin with "BMW".
    if head.startswith(b"BM") and int.from_bytes(head[14:18], "little") in _BMP_HEADERS:
        return BMP
    if head[4:8] in _QUICKTIME_ATOMS or (head[4:8] in _QUICKTIME_PADDING and head[0] == 0):
        return MP4
    if len(head) > 2 * _TS_PACKET and all(head[at] == 0x47 for at in (0, _TS_PACKET, 2 * _TS_PACKET)):
        return MPEG_TS
    return None


def _sniff_ftyp(head: bytes) -> MediaFormat | None:
    """ISO base media: HEIF and AVIF pictures share the container of MP4."""
    size = int.from_bytes(head[:4], "big")
    brands = [head[8:12], *(head[at : at + 4] for at in range(16, min(size, len(head)), 4))]
    is_heif = brands[0] in _HEIF_BRANDS
    if brands[0] in _AVIF_BRANDS or (is_heif and any(brand in _AVIF_BRANDS for brand in brands)):
        return AVIF if HAS_AVIF else replace(AVIF, pillow=None)
    if not is_heif:
        return MP4
    return HEIC if HAS_HEIF else replace(HEIC, pillow=None)


# A str is a path or a `data:` URI. Bytes are a whole file.
MediaSource = str | Path | bytes | Image.Image


class NamedBytes(bytes):
    """A whole file's bytes that messages call by its name."""

    name: str = ""


_MAX_NAME = 80
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")


def describe(source: MediaSource) -> Said:
    """The medium's name in messages: a file's last component, never its folder."""
    if isinstance(source, Image.Image):
        return say("the picture")
    if isinstance(source, bytes) and not isinstance(source, NamedBytes):
        return say("the uploaded data")
    if isinstance(source, str) and source.startswith("data:"):
        return say("the data URI")
    if not isinstance(source, str | Path | NamedBytes):
        return say("the medium")
    name = source.name if isinstance(source, NamedBytes) else Path(source).name
    return f"'{name}'" if len(name) <= _MAX_NAME else f"'{name[:_MAX_NAME]}...'"


def detect_kind(source: MediaSource, limits: MediaLimits | None = None) -> MediaKind:
    """Whether a source is an image or a video, by its content. An animated picture is a video.

    Raises:
        MediaError: it can't be opened, is over the byte limit or is of a format that is not read.
    """
    if isinstance(source, Image.Image):
        return "image"
    with open_stream(source, None, limits or MediaLimits()) as stream:
        found = read_format(stream, source)
        return "video" if is_animated(stream, source, found) else found.kind


def open_stream(source: str | Path | bytes, kind: MediaKind | None, limits: MediaLimits) -> BinaryIO:
    """A seekable stream of the source's bytes; the byte limit is that of `kind`, or the larger one.

    Raises:
        MediaSourceError: there is no such file, it is not a regular file, or it is empty.
        MediaLimitError: it has more bytes than `limits` allow.
    """
    name = describe(source)
    max_bytes = limits.max_bytes(kind)
    if isinstance(source, bytes):
        check_num_bytes(len(source), max_bytes, source)
        return io.BytesIO(source)
    if isinstance(source, str) and source.startswith("data:"):
        return io.BytesIO(_data_uri_bytes(source, max_bytes))
    if isinstance(source, str) and _URL.match(source):
        raise MediaSourceError(
            "An address on the network is not opened here. Download the file and pass its path, or its bytes."
        )
    if not isinstance(source, str | Path):
        raise MediaSourceError(
            f"A medium is a path, bytes, a data URI or a PIL image, not {type(source).__name__}. Pass one of these."
        )
    try:
        status = Path(source).stat()
        # A named pipe or a device could block for ever, or never end.
        if not stat.S_ISREG(status.st_mode):
            raise MediaSourceError(say("{name} is not a file. Pass the path of an image or a video.", name=name))
        check_num_bytes(status.st_size, max_bytes, source)
        return Path(source).open("rb")
    except (OSError, ValueError) as error:
        if isinstance(error, MediaSourceError | MediaLimitError):
            raise
        is_missing = isinstance(error, FileNotFoundError)
        reason = say("there is no such file") if is_missing else say("the file can't be read")
        raise MediaSourceError(
            say("{name} could not be opened: {reason}. Check its path and permissions.", name=name, reason=reason)
        ) from None


def read_format(stream: BinaryIO, source: MediaSource) -> MediaFormat:
    """The format of an open stream, which is left at its start. Raises MediaFormatError."""
    stream.seek(0)
    found = sniff(stream.read(HEAD_BYTES))
    stream.seek(0)
    if found is None:
        raise MediaFormatError(
            say(
                "{name} is not an image or a video that is read here: expected {images} for an image, {videos} for a "
                "video. Convert it, or choose another file.",
                name=describe(source),
                images=SUPPORTED_IMAGES,
                videos=SUPPORTED_VIDEOS,
            )
        )
    if found.name == HEIC.name and found.pillow is None:
        raise MediaFormatError(
            say(
                "{name} is HEIC, which needs an optional extra: {command}. Or convert it to JPEG.",
                name=describe(source),
                command="pip install 'qwen35mm[heif]'",
            )
        )
    if found.pillow is None and found.libav is None:
        raise MediaFormatError(
            say(
                "{name} is {format}, which is not read here: expected {formats}. Convert it to JPEG or PNG.",
                name=describe(source),
                format=found.name,
                formats=SUPPORTED_IMAGES,
            )
        )
    return found


def may_be_animated(found: MediaFormat, head: bytes) -> bool:
    """Whether a file of this format that starts with `head` may hold an animation, which later bytes decide."""
    if found == PNG:
        # It is said before the first pixels, of which there may be a profile.
        return b"acTL" in head or b"IDAT" not in head
    if found == WEBP:
        return head[12:16] == b"VP8X" and bool(head[20] & _WEBP_ANIMATION)
    if found == AVIF:
        return b"avis" in head[8 : int.from_bytes(head[:4], "big")]
    return found == GIF


def is_animated(stream: BinaryIO, source: MediaSource, found: MediaFormat) -> bool:
    """Whether an open stream of this format is an animated picture; the stream is left at its start.

    Raises:
        MediaDecodeError: a GIF is damaged.
    """
    head = stream.read(HEAD_BYTES)
    stream.seek(0)
    if found.pillow is None or not may_be_animated(found, head):
        return False
    try:
        with Image.open(stream, formats=(found.pillow,)) as image:
            # A PNG's first picture may be for those who don't know animations.
            return getattr(image, "n_frames", 1) > 1 + bool(getattr(image, "default_image", False))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        # A still one is refused by its pixels, in words that say so.
        return False
    except MemoryError:
        raise
    # As with pixels: Pillow raises whatever the damage leads it to, IndexError and struct.error among them.
    except Exception:
        # Of the others, what reads the picture says what is wrong.
        if found != GIF:
            return False
        raise MediaDecodeError(
            say("{name} is a damaged GIF. Save it again, or choose another file.", name=describe(source))
        ) from None
    finally:
        stream.seek(0)


def check_num_bytes(num_bytes: int, max_bytes: int, source: MediaSource) -> None:
    """Raises MediaSourceError for nothing, MediaLimitError for too many."""
    name = describe(source)
    if num_bytes == 0:
        raise MediaSourceError(
            say("{name} is empty: it has 0 bytes. Check that it was written or uploaded completely.", name=name)
        )
    if num_bytes > max_bytes:
        raise MediaLimitError(
            say(
                "{name} has {n} MiB; at most {most} MiB are read. Make it smaller, or raise the limit "
                "(--max-image-size, --max-video-size).",
                name=name,
                n=decimal(num_bytes / 2**20, 1),
                most=decimal(max_bytes / 2**20, 1),
            )
        )


def _data_uri_bytes(uri: str, max_bytes: int) -> bytes:
    """The payload of `data:[type][;base64],...`; the declared type is not looked at."""
    header, comma, payload = uri.partition(",")
    if not comma:
        raise MediaSourceError(
            "The data URI has no comma: expected 'data:image/png;base64,...'. Check how it was made."
        )
    is_base64 = header.rstrip().lower().endswith(";base64")
    # Before any copy is made: 4 characters of base64 hold 3 bytes, a percent-encoded byte has 1 to 3 characters.
    if len(payload) > 4 * max_bytes:
        check_num_bytes(len(payload) * 3 // 4, max_bytes, uri)
    try:
        data = base64.b64decode("".join(payload.split()), validate=True) if is_base64 else unquote_to_bytes(payload)
    except (binascii.Error, ValueError):
        raise MediaSourceError("The data URI's base64 text is damaged. Check how it was made.") from None
    check_num_bytes(len(data), max_bytes, uri)
    return data
