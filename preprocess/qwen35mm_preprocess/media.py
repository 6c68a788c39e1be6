"""Media sources (path, bytes, data URI, PIL image): opens them with a byte limit and recognises them by content.

Never trusts a file's name or declared type.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import stat
from pathlib import Path
from typing import BinaryIO, TypeGuard
from urllib.parse import unquote_to_bytes

from PIL import Image

from qwen35mm_preprocess.errors import MediaDecodeError, MediaFormatError, MediaLimitError, MediaSourceError
from qwen35mm_preprocess.formats import (
    EXTRAS,
    GIF,
    HEAD_BYTES,
    SUPPORTED_IMAGES,
    SUPPORTED_VIDEOS,
    TIFF,
    MediaFormat,
    may_be_animated,
    raw_format,
    sniff,
)
from qwen35mm_preprocess.say import Said, decimal, say
from qwen35mm_preprocess.types import MediaKind, MediaLimits

# A str is a path or a `data:` URI. Bytes are a whole file.
MediaSource = str | Path | bytes | Image.Image


class NamedBytes(bytes):
    """A whole file's bytes, with a name for messages."""

    name: str = ""


_MAX_NAME = 80
# The escapes that occur in base64, by their digits.
_ESCAPES = {"2B": "+", "2F": "/", "3D": "=", "2D": "-", "5F": "_", "0A": "\n", "0D": "\r", "20": " "}
# `unquote_to_bytes` takes some 80 times its text's memory.
_UNQUOTED_CHARS = 65_536
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")


def is_data_uri(source: object) -> TypeGuard[str]:
    """Whether it is a `data:` URI. Any other text is opened as a path, so every caller must use this check."""
    return isinstance(source, str) and source[:5].lower() == "data:"


def describe(source: MediaSource) -> Said:
    """The medium's name in messages: a file's last component, never its folder."""
    if isinstance(source, Image.Image):
        return say("the picture")
    if isinstance(source, bytes) and not isinstance(source, NamedBytes):
        return say("the uploaded data")
    if is_data_uri(source):
        return say("the data URI")
    if not isinstance(source, str | Path | NamedBytes):
        return say("the medium")
    name = source.name if isinstance(source, Path | NamedBytes) else Path(source).name
    return f"'{name}'" if len(name) <= _MAX_NAME else f"'{name[:_MAX_NAME]}...'"


def detect_kind(source: MediaSource, limits: MediaLimits | None = None) -> MediaKind:
    """Whether a source is an image or a video, by its content. An animated picture is a video.

    Raises:
        MediaError: it can't be opened, is over the byte limit or has an unsupported format.
    """
    if isinstance(source, Image.Image):
        return "image"
    with open_stream(source, None, limits or MediaLimits()) as stream:
        found = read_format(stream, source)
        return "video" if is_animated(stream, source, found) else found.kind


def open_stream(source: str | Path | bytes, kind: MediaKind | None, limits: MediaLimits) -> BinaryIO:
    """A seekable stream of the source's bytes. Applies the byte limit of `kind`, or the larger one.

    Raises:
        MediaSourceError: the file is missing, empty or not a regular file.
        MediaLimitError: it has more bytes than `limits` allow.
    """
    name = describe(source)
    max_bytes = limits.max_bytes(kind)
    if isinstance(source, bytes):
        check_num_bytes(len(source), max_bytes, source)
        return io.BytesIO(source)
    if is_data_uri(source):
        return io.BytesIO(_data_uri_bytes(source, max_bytes))
    if isinstance(source, str) and _URL.match(source):
        raise MediaSourceError(
            "An address on the network is not opened here. Download the file and pass its path, or its bytes."
        )
    if not isinstance(source, str | Path):
        raise MediaSourceError(
            f"A medium is a path, bytes, a data URI or a PIL image, not {type(source).__name__}. Pass one of these."
        )
    path = source if isinstance(source, Path) else Path(source)
    try:
        status = path.stat()
        # A named pipe or a device could block for ever or never end.
        if not stat.S_ISREG(status.st_mode):
            raise MediaSourceError(say("{name} is not a file. Pass the path of an image or a video.", name=name))
        check_num_bytes(status.st_size, max_bytes, source)
        return path.open("rb")
    except (OSError, ValueError) as error:
        if isinstance(error, MediaSourceError | MediaLimitError):
            raise
        is_missing = isinstance(error, FileNotFoundError)
        reason = say("there is no such file") if is_missing else say("the file can't be read")
        raise MediaSourceError(
            say("{name} could not be opened: {reason}. Check its path and permissions.", name=name, reason=reason)
        ) from None


def read_format(stream: BinaryIO, source: MediaSource) -> MediaFormat:
    """The format of an open stream. Leaves the stream at its start. Raises MediaFormatError."""
    stream.seek(0)
    found = sniff(stream.read(HEAD_BYTES))
    if found == TIFF:
        found = raw_format(stream) or found
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
    if found.name in EXTRAS and found.pillow is None:
        raise MediaFormatError(
            say(
                "{name} is {format}, which needs an optional extra: {command}. Or convert it to JPEG.",
                name=describe(source),
                format=found.name,
                command=f"pip install 'qwen35mm[{EXTRAS[found.name]}]'",
            )
        )
    if found.is_raw:
        raise MediaFormatError(
            say(
                "{name} is a camera's raw file ({format}), which is not read here. Export it as JPEG or TIFF.",
                name=describe(source),
                format=found.name,
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
            if found.kind == "image"
            else say(
                "{name} is {format}, which is not read here: expected {formats}. Convert it to MP4.",
                name=describe(source),
                format=found.name,
                formats=SUPPORTED_VIDEOS,
            )
        )
    return found


def is_animated(stream: BinaryIO, source: MediaSource, found: MediaFormat) -> bool:
    """Whether an open stream of this format is an animated picture. Leaves the stream at its start.

    Raises:
        MediaDecodeError: a GIF is damaged.
    """
    head = stream.read(HEAD_BYTES)
    stream.seek(0)
    if found.pillow is None or not may_be_animated(found, head):
        return False
    try:
        with Image.open(stream, formats=(found.pillow,)) as image:
            # A PNG's first picture may be a fallback for viewers without animation.
            return getattr(image, "n_frames", 1) > 1 + bool(getattr(image, "default_image", False))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        # Treated as still: the pixel limit refuses it later with a clear message.
        return False
    except MemoryError:
        raise
    # Pillow raises many types for damaged files, including IndexError and struct.error.
    except Exception:
        # For other formats, reading the picture reports the damage.
        if found != GIF:
            return False
        raise MediaDecodeError(
            say("{name} is a damaged GIF. Save it again, or choose another file.", name=describe(source))
        ) from None
    finally:
        stream.seek(0)


def check_num_bytes(num_bytes: int, max_bytes: int, source: MediaSource) -> None:
    """Raises MediaSourceError for zero bytes and MediaLimitError for more than `max_bytes`."""
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
    """The payload of `data:[type][;base64],...`. Ignores the declared type."""
    header, comma, payload = uri.partition(",")
    if not comma:
        raise MediaSourceError(
            "The data URI has no comma: expected 'data:image/png;base64,...'. Check how it was made."
        )
    is_base64 = header.rstrip().lower().endswith(";base64")
    if is_base64:
        return from_base64(payload, max_bytes)
    _check_num_chars(payload, max_bytes)
    data = _unquoted(payload)
    check_num_bytes(len(data), max_bytes, uri)
    return data


def from_base64(text: str, max_bytes: int) -> bytes:
    """The bytes of a base64 text, also URL-safe, percent-encoded, without padding or with white space.

    Raises:
        MediaSourceError: it is no base64.
        MediaLimitError: it has more than `max_bytes`.
    """
    _check_num_chars(text, max_bytes)
    if "%" in text:
        for code, character in _ESCAPES.items():
            text = text.replace(f"%{code}", character).replace(f"%{code.lower()}", character)
    text = "".join(text.split()).replace("-", "+").replace("_", "/").rstrip("=")
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise MediaSourceError("The data URI's base64 text is damaged. Check how it was made.") from None
    check_num_bytes(len(data), max_bytes, "data:")
    return data


def _unquoted(text: str) -> bytes:
    data = bytearray()
    at = 0
    while at < len(text):
        end = at + _UNQUOTED_CHARS
        if end < len(text) and (escape := text.rfind("%", end - 2, end)) >= 0:
            end = escape
        data += unquote_to_bytes(text[at:end])
        at = end
    return bytes(data)


def _check_num_chars(text: str, max_bytes: int) -> None:
    # Before copying: 4 characters of base64 hold 3 bytes, a percent-encoded byte takes 1 to 3 characters.
    if len(text) > 4 * max_bytes:
        check_num_bytes(len(text) * 3 // 4, max_bytes, "data:")
