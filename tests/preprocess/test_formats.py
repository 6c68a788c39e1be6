"""What each format's entry says, and that everything that lists formats takes them from there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qwen35mm_preprocess.formats import (
    AMBIGUOUS_SUFFIXES,
    EXTRAS,
    FORMATS,
    SUPPORTED_IMAGES,
    SUPPORTED_VIDEOS,
    MediaFormat,
    sniff,
    suffixes_of,
)

COMPOSER = Path(__file__).parents[2] / "assets" / "web" / "compose" / "composer.js"
# The first bytes of formats that no fixed beginning tells.
HEADS = {
    "WebP": b"RIFF\0\0\0\0WEBPVP8 ",
    "AVI": b"RIFF\0\0\0\0AVI LIST",
    "BMP": b"BM" + bytes(12) + b"\x28\0\0\0",
    "PPM": b"P6 4 4 255\n",
    "TGA": bytes(2) + b"\x02" + bytes(9) + b"\x04\0\x04\0\x18\0" + bytes(40),
    "AVIF": b"\0\0\0\x18ftypavif\0\0\0\0avifmif1",
    "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
    "MP4/MOV": b"\0\0\0\x18ftypisom\0\0\0\0isomiso2",
    "MPEG-TS": (b"G" + bytes(187)) * 3,
    "Ogg": b"OggS" + bytes(24) + b"\x80theora",
}


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_every_format_is_told_by_its_first_bytes(format: MediaFormat) -> None:
    for head in format.magic or (HEADS[format.name],):
        found = sniff(head + bytes(64))
        assert found is not None
        assert found.name == format.name


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_every_format_has_a_reader_a_type_and_suffixes_of_its_own(format: MediaFormat) -> None:
    assert format.name in EXTRAS or format.pillow or format.libav
    assert re.fullmatch(r"(image|video|application)/[a-z0-9.-]+", format.media_type)
    own = {*format.suffixes, *format.other_suffixes}
    assert format.suffixes
    assert all(re.fullmatch(r"\.[a-z0-9]+", suffix) for suffix in own)
    assert not any(own & {*each.suffixes, *each.other_suffixes} for each in FORMATS if each != format)


def test_messages_name_every_format() -> None:
    said = {"image": SUPPORTED_IMAGES.split(", "), "video": SUPPORTED_VIDEOS.split(", ")}
    missing = [each.name for each in FORMATS if not {*each.name.split("/")} <= {*said[each.kind]}]
    assert [name for name in missing if name not in ("AVIF", *EXTRAS)] == []


def test_the_page_offers_every_clip() -> None:
    """A system's file chooser hides what it doesn't know by its type."""
    offered = re.search(r'const CLIPS =\s+"([^"]+)"', COMPOSER.read_text("utf-8"))
    assert offered is not None
    assert offered[1].split(",") == sorted(suffixes_of("video"))


def test_a_suffix_that_mostly_means_something_else_is_one_of_a_format() -> None:
    assert suffixes_of("image") | suffixes_of("video") >= AMBIGUOUS_SUFFIXES
