"""Recognises media formats by content: the decoder of each, and the formats that are refused by name."""

from __future__ import annotations

import importlib.util
import re
import struct
from dataclasses import dataclass, replace
from typing import BinaryIO

from PIL import features

from qwen35mm_preprocess.types import MediaKind

HEAD_BYTES = 512
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_AVIF_BRANDS = (b"avif", b"avis")
_QUICKTIME_ATOMS = (b"moov", b"mdat", b"pnot")
# A text may have these padding words there too. An atom is small, so its size begins with a zero byte.
_QUICKTIME_PADDING = (b"wide", b"free", b"skip")
# Sizes of a bitmap's second header, one for each version.
_BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)
_TS_PACKET = 188
# A number must follow: two characters are not enough.
_PNM_HEAD = re.compile(rb"P[1-6]\s+(#[^\n]*\n\s*)*\d+\s")
_CLASSIC_TIFF = 42
_SUBFILE_TYPE, _PHOTOMETRIC, _SUB_DIRECTORIES, _DNG_VERSION = _RAW_TAGS = 254, 262, 330, 50706
# Colour filter array and linear raw.
_SENSOR = (32803, 34892)
_MAX_DIRECTORIES = 16
# A flag in a WebP's first chunk.
_WEBP_ANIMATION = 0x02


@dataclass(frozen=True)
class MediaFormat:
    """A media format and its decoder.

    Attributes:
        media_type: the registered media type.
        suffixes: usual file suffixes. Media with none of them get the first.
        other_suffixes: further known suffixes, replaced by the first of `suffixes`.
        pillow, libav: its decoder in Pillow and its demuxer in libav; None if that library is not used.
        magic: first bytes of its files; empty if these don't identify it.
        is_raw: a camera's raw sensor data with a thumbnail.
    """

    name: str
    kind: MediaKind
    media_type: str
    suffixes: tuple[str, ...]
    other_suffixes: tuple[str, ...] = ()
    pillow: str | None = None
    libav: str | None = None
    magic: tuple[bytes, ...] = ()
    is_raw: bool = False


JPEG = MediaFormat(
    "JPEG", "image", "image/jpeg", (".jpg", ".jpeg"), (".jpe", ".jfif"), pillow="JPEG", magic=(b"\xff\xd8\xff",)
)
PNG = MediaFormat("PNG", "image", "image/png", (".png",), (".apng",), pillow="PNG", magic=(b"\x89PNG\r\n\x1a\n",))
WEBP = MediaFormat("WebP", "image", "image/webp", (".webp",), pillow="WEBP")
BMP = MediaFormat("BMP", "image", "image/bmp", (".bmp",), (".dib",), pillow="BMP")
_TIFF_MAGIC = (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")
TIFF = MediaFormat("TIFF", "image", "image/tiff", (".tif", ".tiff"), pillow="TIFF", magic=_TIFF_MAGIC)
AVIF = MediaFormat("AVIF", "image", "image/avif", (".avif",), pillow="AVIF")
# A still GIF is an image and an animated one a video, as with PNG, WebP and AVIF. The first frame of either can be read
# as an image.
GIF = MediaFormat("GIF", "image", "image/gif", (".gif",), pillow="GIF", libav="gif", magic=(b"GIF87a", b"GIF89a"))
MP4 = MediaFormat("MP4/MOV", "video", "video/mp4", (".mp4", ".mov", ".m4v"), (".qt", ".3gp", ".3g2"), libav="mov")
MATROSKA = MediaFormat(
    "WebM/MKV", "video", "video/webm", (".webm", ".mkv"), libav="matroska", magic=(b"\x1aE\xdf\xa3",)
)
AVI = MediaFormat("AVI", "video", "video/x-msvideo", (".avi",), libav="avi")
MPEG_TS = MediaFormat("MPEG-TS", "video", "video/mp2t", (".ts", ".m2ts", ".mts"), libav="mpegts")
MPEG_PS = MediaFormat("MPEG-PS", "video", "video/mpeg", (".mpg", ".mpeg", ".vob"), libav="mpeg", magic=(b"\0\0\1\xba",))
_OTHER_VIDEOS = (
    MediaFormat("MPEG video", "video", "video/mpeg", (".m2v",), libav="mpegvideo", magic=(b"\0\0\1\xb3",)),
    MediaFormat("WMV/ASF", "video", "video/x-ms-asf", (".wmv", ".asf"), libav="asf", magic=(b"0&\xb2u\x8ef\xcf\x11",)),
    MediaFormat("FLV", "video", "video/x-flv", (".flv",), libav="flv", magic=(b"FLV\x01",)),
    MediaFormat("DV", "video", "video/dv", (".dv",), libav="dv", magic=(b"\x1f\x07\0", b"\x9f\x07\0")),
    MediaFormat(
        "MXF", "video", "application/mxf", (".mxf",), libav="mxf", magic=(b"\x06\x0e+4\x02\x05\x01\x01\r\x01\x02",)
    ),
)
_OGG = MediaFormat("Ogg", "video", "video/ogg", (".ogv",), libav="ogg")
TGA = MediaFormat("TGA", "image", "image/x-tga", (".tga",), pillow="TGA")
PNM = MediaFormat("PPM", "image", "image/x-portable-anymap", (".ppm", ".pgm", ".pbm", ".pnm"), pillow="PPM")
_JP2_MAGIC = (b"\0\0\0\x0cjP  \r\n\x87\n", b"\xffO\xffQ\0")
# Only in Pillow builds with OpenJPEG.
JPEG_2000 = MediaFormat(
    "JPEG 2000",
    "image",
    "image/jp2",
    (".jp2", ".j2k"),
    pillow="JPEG2000" if features.check("jpg_2000") else None,
    magic=_JP2_MAGIC,
)


def _not_read(kind: MediaKind, name: str, suffix: str, *magic: bytes, is_raw: bool = False) -> MediaFormat:
    return MediaFormat(name, kind, "application/octet-stream", (suffix,), magic=magic, is_raw=is_raw)


# Refused by name.
_NOT_READ = (
    _not_read("image", "JPEG XR", ".jxr", b"II\xbc"),
    _not_read("image", "JPEG-LS", ".jls", b"\xff\xd8\xff\xf7"),
    _not_read("image", "PSD", ".psd", b"8BPS"),
    _not_read("image", "OpenEXR", ".exr", b"v/1\x01"),
    _not_read("image", "Radiance HDR", ".hdr", b"#?RADIANCE", b"#?RGBE"),
    _not_read("image", "DDS", ".dds", b"DDS |\0\0\0"),
    _not_read("image", "QOI", ".qoi", b"qoif"),
    _not_read("image", "PAM", ".pam", b"P7\nWIDTH", b"P7\nDEPTH", b"P7\nHEIGHT"),
    _not_read("video", "RealMedia", ".rm", b".RMF"),
    _not_read("image", "Fujifilm RAF", ".raf", b"FUJIFILMCCD-RAW", is_raw=True),
    _not_read("image", "Olympus ORF", ".orf", b"IIRO", b"IIRS", b"MMOR", is_raw=True),
    _not_read("image", "Panasonic RW2", ".rw2", b"IIU\0", is_raw=True),
    _not_read("image", "Canon CR2", ".cr2", b"II*\0\x10\0\0\0CR", is_raw=True),
    _not_read("image", "Canon CRW", ".crw", b"II\x1a\0\0\0HEAPCCDR", is_raw=True),
    _not_read("image", "Sigma X3F", ".x3f", b"FOVb", is_raw=True),
    _not_read("image", "Minolta MRW", ".mrw", b"\0MRM", is_raw=True),
)
_NOT_READ_BRANDS = {
    b"crx ": _not_read("image", "Canon CR3", ".cr3", is_raw=True),
    b"mif3": _not_read("image", "HEIF/AVIF with the short header (mif3)", ".avif"),
}
_DNG = _not_read("image", "DNG", ".dng", is_raw=True)
_IIQ = _not_read("image", "Phase One IIQ", ".iiq", is_raw=True)
_TIFF_RAW = _not_read("image", "NEF, ARW, PEF, ...", ".nef", is_raw=True)

# Phones make these. Pillow needs a further package, the extra `heif`.
HEIC = MediaFormat("HEIC", "image", "image/heic", (".heic", ".heif", ".hif"), pillow="HEIF")
# Needs the extra `jxl`.
_JXL_MAGIC = (b"\xff\n", b"\0\0\0\x0cJXL \r\n\x87\n")
JPEG_XL = MediaFormat("JPEG XL", "image", "image/jxl", (".jxl",), pillow="JXL", magic=_JXL_MAGIC)
# The optional extra that reads each format.
EXTRAS = {HEIC.name: "heif", JPEG_XL.name: "jxl"}

# Only some builds of Pillow have AVIF.
HAS_AVIF = "avif" in features.modules and bool(features.check("avif"))
HAS_HEIF = importlib.util.find_spec("pi_heif") is not None
HAS_JXL = importlib.util.find_spec("pillow_jxl") is not None


def _is_installed(found: MediaFormat) -> bool:
    return {AVIF.name: HAS_AVIF, HEIC.name: HAS_HEIF, JPEG_XL.name: HAS_JXL}.get(found.name, True)


# Supported formats, the only list of formats and suffixes.
FORMATS = (
    *(JPEG, PNG, WEBP, GIF, BMP, TIFF, JPEG_2000, PNM, TGA, AVIF, HEIC, JPEG_XL),
    *(MP4, MATROSKA, AVI, MPEG_TS, MPEG_PS, *_OTHER_VIDEOS, _OGG),
)
# Other kinds of files use it far more often.
AMBIGUOUS_SUFFIXES = frozenset((".ts",))


def suffixes_of(kind: MediaKind) -> frozenset[str]:
    """All suffixes of a kind's formats, in lower case. Animated pictures count as images here."""
    return frozenset(
        suffix for each in FORMATS if each.kind == kind for suffix in (*each.suffixes, *each.other_suffixes)
    )


def _names(kind: MediaKind) -> list[str]:
    return [name for each in FORMATS if each.kind == kind and _is_installed(each) for name in each.name.split("/")]


SUPPORTED_IMAGES = ", ".join(_names("image"))
SUPPORTED_VIDEOS = ", ".join([*_names("video"), "animated GIF, WebP, PNG or AVIF"])


def sniff(head: bytes) -> MediaFormat | None:
    """The format of a file that starts with `head` (HEAD_BYTES of it are enough), or None."""
    for found in (*_NOT_READ, *FORMATS):
        if head.startswith(found.magic):
            return _readable(found)
    # Every stream begins on the first pages. Most Ogg files are music.
    if head.startswith(b"OggS"):
        return _OGG if b"theora" in head else None
    if head.startswith(b"RIFF"):
        return {b"WEBP": WEBP, b"AVI ": AVI}.get(head[8:12])
    if head[4:8] == b"ftyp":
        return _sniff_ftyp(head)
    # Two letters are not enough: a text may begin with "BMW".
    if head.startswith(b"BM") and int.from_bytes(head[14:18], "little") in _BMP_HEADERS:
        return BMP
    if head[4:8] in _QUICKTIME_ATOMS or (head[4:8] in _QUICKTIME_PADDING and head[0] == 0):
        return MP4
    # Cameras write four bytes of time before each packet.
    for start in (0, 4):
        if len(head) > start + 2 * (step := _TS_PACKET + start) and head[start::step][:3] == b"GGG":
            return MPEG_TS
    if _PNM_HEAD.match(head):
        return PNM
    return TGA if _is_tga(head) else None


def _is_tga(head: bytes) -> bool:
    """Whether the header fits TGA, which has no magic. No other format's first bytes pass these checks."""
    if len(head) < 18:
        return False
    has_colors, image_type, num_colors, color_bits = head[1], head[2], head[5] | head[6] << 8, head[7]
    sides, bits, descriptor = head[12:16], head[16], head[17]
    if has_colors:
        fits = image_type in (1, 9) and bits == 8 and color_bits in (15, 16, 24, 32) and 0 < num_colors <= 256
    else:
        fits = image_type in (2, 3, 10, 11) and bits in (8, 15, 16, 24, 32) and not any(head[3:8])
    return has_colors < 2 and fits and any(sides[:2]) and any(sides[2:]) and descriptor & 0xC0 == 0


def raw_format(stream: BinaryIO) -> MediaFormat | None:
    """The camera raw format of an open TIFF stream; None if it is a picture."""
    stream.seek(0)
    head = stream.read(8)
    order = "<" if head[:2] == b"II" else ">"
    if len(head) < 8 or struct.unpack(f"{order}H", head[2:4])[0] != _CLASSIC_TIFF:
        return None
    if stream.read(4) in (b"IIII", b"MMMM"):
        return _IIQ
    places, seen = [struct.unpack(f"{order}I", head[4:])[0]], 0
    while places and seen < _MAX_DIRECTORIES:
        tags, following = _tiff_tags(stream, order, places.pop(0))
        # A picture's first directory is never a thumbnail.
        is_preview = seen == 0 and tags.get(_SUBFILE_TYPE, (0,))[0] & 1 and _SUB_DIRECTORIES in tags
        if _DNG_VERSION in tags:
            return _DNG
        if is_preview or tags.get(_PHOTOMETRIC, (0,))[0] in _SENSOR:
            return _TIFF_RAW
        seen += 1
        places += [*tags.get(_SUB_DIRECTORIES, ()), *following]
    return None


def _tiff_tags(stream: BinaryIO, order: str, place: int) -> tuple[dict[int, tuple[int, ...]], list[int]]:
    """The tags in `_RAW_TAGS` of the directory at `place`, and the place of the next directory."""
    stream.seek(place)
    count = int.from_bytes(stream.read(2), "little" if order == "<" else "big")
    entries = stream.read(12 * count + 4)
    found = {}
    for at in range(0, len(entries) - 11, 12):
        tag, kind, number = struct.unpack_from(f"{order}HHI", entries, at)
        letter = {1: "B", 3: "H", 4: "I", 13: "I"}.get(kind)
        if tag not in _RAW_TAGS or letter is None or not 0 < number <= _MAX_DIRECTORIES:
            continue
        value, size = entries[at + 8 : at + 12], number * struct.calcsize(letter)
        if size > len(value):
            stream.seek(struct.unpack(f"{order}I", value)[0])
            value = stream.read(size)
        if len(value) >= size:
            found[tag] = struct.unpack_from(f"{order}{number}{letter}", value)
    after = entries[12 * count :]
    return found, [place for place in struct.unpack(f"{order}I", after) if place] if len(after) == 4 else []


def _sniff_ftyp(head: bytes) -> MediaFormat | None:
    """The format of an ISO base media file: HEIF and AVIF share MP4's container."""
    size = int.from_bytes(head[:4], "big")
    brands = [head[8:12], *(head[at : at + 4] for at in range(16, min(size, len(head)), 4))]
    is_heif = brands[0] in _HEIF_BRANDS
    if brands[0] in _AVIF_BRANDS or (is_heif and any(brand in _AVIF_BRANDS for brand in brands)):
        return _readable(AVIF)
    if brands[0] in _NOT_READ_BRANDS:
        return _NOT_READ_BRANDS[brands[0]]
    if not is_heif:
        return MP4
    return _readable(HEIC)


def _readable(found: MediaFormat) -> MediaFormat:
    """The format, without a reader if its library is missing."""
    return found if _is_installed(found) else replace(found, pillow=None)


def may_be_animated(found: MediaFormat, head: bytes) -> bool:
    """Whether a file of this format that starts with `head` may be animated. Later bytes decide."""
    if found == PNG:
        # `acTL` comes before the pixels. A long profile may push both past `head`.
        return b"acTL" in head or b"IDAT" not in head
    if found == WEBP:
        return head[12:16] == b"VP8X" and any(flags & _WEBP_ANIMATION for flags in head[20:21])
    if found == AVIF:
        return b"avis" in head[8 : int.from_bytes(head[:4], "big")]
    return found == GIF
