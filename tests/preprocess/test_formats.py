"""Formats are told apart by content."""

from __future__ import annotations

import pytest
from PIL import Image

from qwen35mm_preprocess import formats
from qwen35mm_preprocess.formats import sniff
from tests.preprocess.media_files import encode_image, encode_video, scene

PICTURE = Image.new("RGB", (8, 8), (200, 10, 10))


@pytest.mark.parametrize("found", [formats.JPEG, formats.PNG, formats.WEBP, formats.BMP, formats.TIFF, formats.GIF])
def test_images(found: formats.MediaFormat) -> None:
    assert found.pillow is not None
    assert sniff(encode_image(PICTURE, found.pillow)[: formats.HEAD_BYTES]) is found


def _name(head: bytes) -> str | None:
    found = sniff(head)
    return found and found.name


def test_avif_by_any_of_its_brands() -> None:
    assert _name(b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf") == "AVIF"
    assert _name(b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf") == "AVIF"


@pytest.mark.parametrize("brand", [b"heic", b"heix", b"mif1"])
def test_heic_is_known_but_not_read(brand: bytes) -> None:
    assert sniff(b"\0\0\0\x18ftyp" + brand + b"\0\0\0\0mif1heic") is formats.HEIC
    assert formats.HEIC.pillow is None


@pytest.mark.parametrize(
    ("container", "codec", "found"),
    [
        ("mp4", "mpeg4", formats.MP4),
        ("mov", "mpeg4", formats.MP4),
        ("matroska", "mpeg4", formats.MATROSKA),
        ("webm", "libvpx", formats.MATROSKA),
        ("avi", "mpeg4", formats.AVI),
        ("mpegts", "mpeg2video", formats.MPEG_TS),
        ("gif", "gif", formats.GIF),
    ],
)
def test_videos(container: str, codec: str, found: formats.MediaFormat) -> None:
    data = encode_video([scene(0), scene(1)], container=container, codec=codec, fps=25)
    assert sniff(data[: formats.HEAD_BYTES]) is found


def test_quicktime_without_ftyp() -> None:
    assert sniff(b"\0\0\0\x08wide\0\0\x10\0mdat") is formats.MP4


@pytest.mark.parametrize("header_bytes", [12, 40, 52, 56, 64, 108, 124])
def test_a_bitmap_by_its_second_header(header_bytes: int) -> None:
    assert sniff(b"BM" + b"\x46\0\0\0\0\0\0\0\x36\0\0\0" + bytes([header_bytes, 0, 0, 0])) is formats.BMP


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"G",
        b"hello",
        b"#EXTM3U\n#EXT-X-VERSION:3\n",
        b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\n",
        b"ffconcat version 1.0\nfile x.mp4\n",
        b"<?xml version='1.0'?><MPD/>",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7",
        b"RIFF\0\0\0\0WAVEfmt ",
        b"ID3\x04",
        b"OggS",
        b"BMW on a wide road",
        b"The wide road to the sea",
        b"The free seats, the skip and the bin",
    ],
)
def test_anything_else_is_unknown(head: bytes) -> None:
    assert sniff(head) is None
