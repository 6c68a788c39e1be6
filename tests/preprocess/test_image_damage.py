"""Pictures that must be refused: cut off, damaged, too large, too long, or no pictures at all."""

from __future__ import annotations

import contextlib
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile

from qwen35mm_preprocess import (
    MediaDecodeError,
    MediaError,
    MediaFormatError,
    MediaLimitError,
    MediaLimits,
    MediaProcessor,
    detect_kind,
)
from qwen35mm_preprocess.formats import HAS_AVIF
from qwen35mm_preprocess.image import load_image
from tests.preprocess.media_files import LIMITS, PHOTOGRAPHS, encode_image

with Image.open(PHOTOGRAPHS / "chelsea.png") as photograph:
    PHOTO = photograph.convert("RGB").resize((225, 150))
FILES = {
    **{format: encode_image(PHOTO, format) for format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")},
    **({"AVIF": encode_image(PHOTO, "AVIF")} if HAS_AVIF else {}),
    **{name: encode_image(PHOTO, "TIFF", compression=name) for name in ("tiff_lzw", "tiff_deflate", "jpeg")},
}
SILENT = ("jpeg", 0.95)
HALF_A_JPEG = FILES["JPEG"][: len(FILES["JPEG"]) // 2]


# What is missing at the end of a JPEG inside a TIFF, libtiff makes up.
@pytest.mark.parametrize(
    ("name", "share"), [(name, share) for name in FILES for share in (0.02, 0.5, 0.95) if (name, share) != SILENT]
)
@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_cut_off_is_refused(name: str, share: float, lenient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another library told Pillow to fill what is missing with grey."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", lenient)
    data = FILES[name]
    with pytest.raises(MediaDecodeError, match="damaged or cut off"):
        load_image(data[: int(len(data) * share)], LIMITS)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is lenient


@pytest.mark.parametrize("name", FILES)
@pytest.mark.filterwarnings("ignore:Corrupt EXIF", "ignore:Truncated File")
def test_a_head_of_any_length_is_refused_in_words(name: str) -> None:
    """VP8X is WebP's extended head, which says whether it is animated."""
    for data in (FILES[name], FILES[name][:12] + b"VP8X\n\0\0\0\2\0\0\0"):
        for length in range(min(len(data), 200)):
            with pytest.raises(MediaError):
                _detected_and_loaded(data[:length])


def _detected_and_loaded(data: bytes) -> None:
    detect_kind(data)
    load_image(data, LIMITS)


def test_a_damaged_fax_gives_one_picture_or_none() -> None:
    """The bits after damage in a group 4 strip depend on the memory; those of other kinds do not."""
    page = PHOTO.convert("1")
    for name in ("group4", "group3", "tiff_ccitt"):
        whole = encode_image(page, "TIFF", compression=name)
        assert load_image(whole, LIMITS).tobytes() == page.convert("RGB").tobytes()
        damaged = bytearray(whole)
        damaged[len(whole) // 4] ^= 0x5A
        if name == "group4":
            with pytest.raises(MediaDecodeError, match="damaged"):
                load_image(bytes(damaged), LIMITS)
        else:
            assert load_image(bytes(damaged), LIMITS) == load_image(bytes(damaged), LIMITS)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_jpeg_that_lacks_its_end_marker_is_whole(mode: str, progressive: bool) -> None:
    """And one that lacks more is refused, or shows every pixel all the same: nothing is made up."""
    data = encode_image(PHOTO.resize((90, 60)).convert(mode), "JPEG", progressive=progressive)
    whole = load_image(data, LIMITS)
    assert load_image(data[:-2], LIMITS) == load_image(data[:-1], LIMITS) == whole
    assert load_image(data[:-2] + b"\xff\xff", LIMITS) == whole
    num_refused = 0
    for missing in (3, 4, 6, 10, 20, 50, 100, 300):
        try:
            assert load_image(data[:-missing], LIMITS) == whole
        except MediaDecodeError:
            num_refused += 1
    assert num_refused >= 5


def test_messages_name_the_file_and_no_folder(tmp_path: Path, processor: MediaProcessor) -> None:
    path = tmp_path / "half.jpg"
    path.write_bytes(HALF_A_JPEG)
    with pytest.raises(MediaDecodeError, match=r"'half\.jpg' is damaged") as caught:
        processor.prepare(path)
    assert str(tmp_path) not in str(caught.value)
    assert caught.value.__cause__ is None
    with Image.open(path) as half, pytest.raises(MediaDecodeError, match="the picture is damaged or cut off"):
        processor.prepare(half)


@given(st.sampled_from(list(FILES)), st.integers(0, 10**6), st.binary(min_size=1, max_size=40))
def test_damage_never_raises_anything_else(name: str, at: int, patch: bytes) -> None:
    data = bytearray(FILES[name])
    at %= len(data)
    data[at : at + len(patch)] = patch
    with contextlib.suppress(MediaError):
        assert load_image(bytes(data), LIMITS).mode == "RGB"


def _png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixels: whoever decodes it fails in another way."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return header + struct.pack(">I", 4) + b"IDAT" + b"\0\0\0\0" + struct.pack(">I", zlib.crc32(b"IDAT\0\0\0\0"))


@pytest.mark.parametrize(("width", "height"), [(11000, 10000), (60000, 60000), (2**31 - 1, 2**31 - 1)])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_decompression_bomb_is_refused_by_its_header(width: int, height: int, processor: MediaProcessor) -> None:
    for step in (processor.plan, processor.prepare):
        with pytest.raises(MediaLimitError, match="Make it smaller"):
            step(_png_header(width, height))


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        ((100, 51), MediaLimitError, "100 x 51 pixels"),
        ((201, 1), MediaLimitError, "more than 200 times"),
        ((1, 201), MediaLimitError, "more than 200 times"),
        ((402, 2), MediaLimitError, "more than 200 times"),
        ((0, 5), MediaDecodeError, "0 x 5"),
    ],
)
def test_a_picture_over_a_limit_is_refused(size: tuple[int, int], error: type[MediaError], message: str) -> None:
    with pytest.raises(error, match=message):
        load_image(Image.new("L", size), MediaLimits(max_source_pixels=5000))


@pytest.mark.parametrize("size", [(100, 50), (200, 1)])
def test_limits_are_exact(size: tuple[int, int]) -> None:
    assert load_image(Image.new("L", size), MediaLimits(max_source_pixels=5000)).size == size


def test_a_video_is_not_an_image(clip: bytes, processor: MediaProcessor) -> None:
    with pytest.raises(MediaFormatError, match=r"is a video \(MP4/MOV\) where an image was expected"):
        processor.plan(clip, kind="image")


def test_the_pixels_are_not_decoded_for_a_plan(processor: MediaProcessor) -> None:
    data = bytearray(FILES["PNG"])
    middle = len(data) // 2
    data[middle : middle + 1000] = bytes(1000)
    assert processor.plan(bytes(data)).source_size == PHOTO.size[::-1]
    with pytest.raises(MediaDecodeError):
        processor.prepare(bytes(data))
