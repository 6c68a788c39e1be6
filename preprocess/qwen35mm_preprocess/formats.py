"""Which file formats are read, told apart by content: a file's name and declared type are never trusted."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import features

from qwen35mm_preprocess.types import MediaKind

HEAD_BYTES = 512
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_AVIF_BRANDS = (b"avif", b"avis")
_QUICKTIME_ATOMS = (b"moov", b"mdat", b"pnot")
# Padding atoms are words that a text can have there too; their size is written in four bytes, and small.
_QUICKTIME_PADDING = (b"wide", b"free", b"skip")
# The sizes of a bitmap's second header, by which its versions are told apart.
_BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)
_TS_PACKET = 188


@dataclass(frozen=True)
class MediaFormat:
    """A format, its decoder in Pillow and its demuxer in libav; None where that library is not asked."""

    name: str
    kind: MediaKind
    pillow: str | None = None
    libav: str | None = None


JPEG = MediaFormat("JPEG", "image", pillow="JPEG")
PNG = MediaFormat("PNG", "image", pillow="PNG")
WEBP = MediaFormat("WebP", "image", pillow="WEBP")
BMP = MediaFormat("BMP", "image", pillow="BMP")
TIFF = MediaFormat("TIFF", "image", pillow="TIFF")
AVIF = MediaFormat("AVIF", "image", pillow="AVIF")
# A still GIF is an image and an animated one a video; the first frame of either can be asked for as an image.
GIF = MediaFormat("GIF", "image", pillow="GIF", libav="gif")
MP4 = MediaFormat("MP4/MOV", "video", libav="mov")
MATROSKA = MediaFormat("WebM/MKV", "video", libav="matroska")
AVI = MediaFormat("AVI", "video", libav="avi")
MPEG_TS = MediaFormat("MPEG-TS", "video", libav="mpegts")
# Recognised only to say so.
HEIC = MediaFormat("HEIC", "image")

# Pillow knows AVIF since 11.3, and only where it was built with it.
HAS_AVIF = "avif" in features.modules and bool(features.check("avif"))
SUPPORTED_IMAGES = "JPEG, PNG, WebP, GIF, BMP, TIFF" + (" or AVIF" if HAS_AVIF else "")
SUPPORTED_VIDEOS = "MP4, MOV, WebM, MKV, AVI, MPEG-TS or animated GIF"


def sniff(head: bytes) -> MediaFormat | None:
    """The format of a file that starts with `head` (HEAD_BYTES of it are enough), or None."""
    for magic, found in (
        (b"\xff\xd8\xff", JPEG),
        (b"\x89PNG\r\n\x1a\n", PNG),
        (b"GIF87a", GIF),
        (b"GIF89a", GIF),
        (b"II*\x00", TIFF),
        (b"MM\x00*", TIFF),
        (b"II+\x00", TIFF),
        (b"MM\x00+", TIFF),
        (b"\x1aE\xdf\xa3", MATROSKA),
    ):
        if head.startswith(magic):
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
    if any(brand in _AVIF_BRANDS for brand in brands[:1]) or (
        brands[0] in _HEIF_BRANDS and any(brand in _AVIF_BRANDS for brand in brands)
    ):
        return AVIF if HAS_AVIF else MediaFormat("AVIF", "image")
    return HEIC if brands[0] in _HEIF_BRANDS else MP4
