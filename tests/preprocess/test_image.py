"""Images against the oracle, bit for bit, and every format, mode and orientation."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from qwen35mm_preprocess import (
    ImageProcessing,
    MediaBudget,
    MediaDecodeError,
    MediaError,
    MediaLimitError,
    MediaProcessor,
    MediaSource,
)
from qwen35mm_preprocess import rgb as rgb_module
from qwen35mm_preprocess.formats import HAS_AVIF, HAS_HEIF, HAS_JXL
from qwen35mm_preprocess.image import load_image, probe_image
from qwen35mm_preprocess.rgb import UPRIGHT, resized, to_rgb
from qwen35mm_preprocess.types import ColorMode, MediaLimits
from tests.preprocess import oracles
from tests.preprocess.media_files import IMAGE, LIMITS, PHOTOGRAPHS, SMALL_IMAGE, VIDEO, encode_image, pixel

# Of each mode and format some, in sizes of their own.
PICTURES = [
    *("astronaut.png", "cell.png", "chelsea.png", "horse.png", "hubble_deep_field.jpg", "logo.png"),
    *("microaneurysms.png", "no_time_for_that_tiny.gif", "rocket.jpg", "text.png"),
]
# Top left red, top right green, bottom left blue, bottom right white; wider than high.
CORNERS = Image.fromarray(
    np.array([[[200, 0, 0], [0, 200, 0]], [[0, 0, 200], [255, 255, 255]]], np.uint8).repeat(16, 0).repeat(32, 1)
)
# CORNERS with EXIF orientation 6, by pillow-heif 1.4 (`Image.save(..., "HEIF", quality=60)`); what reads can't write.
HEIC = (
    "AAAAHGZ0eXBoZWljAAAAAG1pZjFoZWljbWlhZgAAAchtZXRhAAAAAAAAACFoZGxyAAAAAAAAAABwaWN0AAAAAAAAAAAAAAAAAAAAADRpbG9jAA"
    "AAAERAAAIAAQAAAAAB7AABAAAAAAAAAI8AAgAAAAACewABAAAAAAAAACQAAAA4aWluZgAAAAAAAgAAABVpbmZlAgAAAAABAABodmMxAAAAABVp"
    "bmZlAgAAAQACAABFeGlmAAAAAA5waXRtAAAAAAABAAABB2lwcnAAAADmaXBjbwAAAHZodmNDAQNwAAAAkAAAAAAAHvAA/P34+AAADwNgAAEAGE"
    "ABDAH//wNwAAADAJAAAAMAAAMAHroCQGEAAQAqQgEBA3AAAAMAkAAAAwAAAwAeoCCBBZbq5Ka5uAhoMCAAAAMDIAAAAwAhYgABAAZEAcFzwIkA"
    "AAATY29scm5jbHgAAQANAAaAAAAAFGlzcGUAAAAAAAAAQAAAAEAAAAAoY2xhcAAAACAAAAABAAAAQAAAAAH////gAAAAAgAAAAAAAAACAAAAEH"
    "BpeGkAAAAAAwgICAAAAAlpcm90AwAAABlpcG1hAAAAAAAAAAEAAQaBAgMFhIYAAAAaaXJlZgAAAAAAAAAOY2RzYwACAAEAAQAAALttZGF0AAAA"
    "iygBrwngITk0H/+3lv/922f/+XJm8LfulFF35CRN/zvqMXCUA8UtsvihF0qk2H6CMSiVqDt1s5LJBNp3/5OWpHfIsVI0835qjfhiKBrclX5bdJ"
    "U5yENX/6fDs/uWy2/NQuCq/9mivP1pqv1CUhI59UkXX7KR3mDGNd1AKw+KNqv02r2mdjqtu4cWyeAAAAAGRXhpZgAATU0AKgAAAAgAAQESAAMA"
    "AAABAAYAAAAAAAA="
)
# Without a loss, by imagecodecs 2026.3 (libjxl 0.11). The first: 64 x 16, left half (200, 100, 50), right half
# (30, 140, 90), its header rewritten to say Display P3 by number; the second: an animation of two frames.
P3_JXL = "/woDDgjI5EYIBAEAgABLGIsVANQZM8YYJ/MCIQAAEqRAQRIQTA0DJ7gz7W64TQ=="
MOVING_JXL = "/wpBBE0AICYIBAEAPABLGIsVgF3U/wAYkq6aQAIIBAUAPABLGIsVgB3U/wAY0K+aIAE="
NO_AVIF = pytest.mark.skipif(not HAS_AVIF, reason="Pillow has no AVIF here")
AVIF, AVIF_TURNED = pytest.param("AVIF", marks=NO_AVIF), pytest.param("AVIF", 6, marks=NO_AVIF)


def _assert_equals_oracle(source: MediaSource, picture: Image.Image, processing: ImageProcessing) -> None:
    media = MediaProcessor(processing, VIDEO, MediaBudget(color="checkpoint")).prepare(source, kind="image")
    expected = oracles.image_processor(processing)(picture, return_tensors="np")
    assert list(media.plan.grid_thw) == expected["image_grid_thw"][0].tolist()
    assert media.pixel_values.dtype == np.float32
    np.testing.assert_array_equal(media.pixel_values, expected["pixel_values"])


def _assert_upright(rgb: Image.Image) -> None:
    """The picture shows CORNERS, give or take what a lossy format costs away from the edges."""
    assert (rgb.mode, rgb.size) == ("RGB", CORNERS.size)
    for x, y in ((16, 8), (48, 8), (16, 24), (48, 24)):
        np.testing.assert_allclose(pixel(rgb, x, y), pixel(CORNERS, x, y), atol=12)


@pytest.mark.parametrize(
    ("name", "processing"), [(name, (SMALL_IMAGE, IMAGE)[number % 2]) for number, name in enumerate(PICTURES)]
)
def test_photographs_equal_the_oracle(name: str, processing: ImageProcessing) -> None:
    with Image.open(PHOTOGRAPHS / name) as picture:
        _assert_equals_oracle(PHOTOGRAPHS / name, picture, processing)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 99), st.sampled_from([IMAGE, SMALL_IMAGE]))
def test_odd_sizes_equal_the_oracle(height: int, width: int, seed: int, processing: ImageProcessing) -> None:
    height, width = max(height, -(-width // 200)), max(width, -(-height // 200))
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    picture = Image.fromarray(pixels)
    _assert_equals_oracle(picture, picture, processing)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "TIFF tiff_lzw", "TIFF jpeg", AVIF])
def test_formats(format: str) -> None:
    format, _, compression = format.partition(" ")
    options = {"compression": compression} if compression else {}
    _assert_upright(load_image(encode_image(CORNERS, format, **options), LIMITS))


@pytest.mark.parametrize("format", ["GIF", "WEBP", "TIFF", "PNG"])
def test_the_first_picture_of_several_is_used_with_a_note(format: str, processor: MediaProcessor) -> None:
    red, blue = (Image.new("RGB", (40, 40), colour) for colour in ((220, 0, 0), (0, 0, 220)))
    data = encode_image(red, format, save_all=True, append_images=[blue])
    np.testing.assert_allclose(pixel(load_image(data, LIMITS), 20, 20), (220, 0, 0), atol=12)
    assert tuple(map(str, processor.plan(data, "image").notes)) == (
        "the uploaded data holds 2 pictures; the first is used.",
    )


# What the camera stored so that the viewer's turn puts CORNERS upright.
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize(
    ("format", "orientation"), [*(("JPEG", each) for each in STORED), ("PNG", 6), ("WEBP", 5), ("TIFF", 8), AVIF_TURNED]
)
def test_exif_orientation(format: str, orientation: int, processor: MediaProcessor) -> None:
    turn = STORED[orientation]
    stored = CORNERS if turn is None else CORNERS.transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode_image(stored, format, exif=exif)
    assert processor.plan(data).source_size == (32, 64)
    _assert_upright(load_image(data, LIMITS))
    with Image.open(io.BytesIO(data)) as picture:
        _assert_upright(load_image(picture, LIMITS))


@pytest.mark.skipif(not HAS_HEIF, reason="the extra heif isn't installed")
def test_a_phones_picture(processor: MediaProcessor) -> None:
    data = base64.b64decode(HEIC)
    _assert_upright(load_image(data, LIMITS))
    media = processor.prepare(data)
    assert (media.plan.kind, media.plan.source_size) == ("image", CORNERS.size[::-1])
    with pytest.raises(MediaDecodeError):
        load_image(data[:-200], LIMITS)
    with pytest.raises(MediaDecodeError):
        probe_image(data[:100], LIMITS)


@pytest.mark.skipif(not HAS_JXL, reason="the extra jxl isn't installed")
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA"])
def test_jpeg_xl_without_a_loss(mode: str, processor: MediaProcessor) -> None:
    data = _jpeg_xl(CORNERS.convert(mode), exif=b"", lossless=True)
    np.testing.assert_array_equal(load_image(data, LIMITS), to_rgb(CORNERS.convert(mode)))
    media = processor.prepare(data)
    assert (media.plan.kind, media.plan.source_size, *media.plan.notes) == ("image", CORNERS.size[::-1])
    for length in range(0, len(data) - 1, 7):
        with pytest.raises(MediaError):
            load_image(data[:length], LIMITS)


@pytest.mark.skipif(not HAS_JXL, reason="the extra jxl isn't installed")
@pytest.mark.parametrize("width", [1, 8, 40, 100])
@pytest.mark.parametrize("use_container", [False, True])
def test_the_size_of_a_jpeg_xl_is_known_before_its_pixels(width: int, use_container: bool) -> None:
    # The header has words of their own for the ratios 1:1, 12:10, 4:3, 3:2, 16:9, 5:4 and 2:1.
    for height in {
        width,
        width * 10 // 12,
        width * 3 // 4,
        width * 2 // 3,
        width * 9 // 16,
        width * 4 // 5,
        width // 2,
    }:
        picture = Image.new("RGB", (width, max(1, height)))
        data = _jpeg_xl(picture, lossless=True, use_container=use_container)
        assert probe_image(data, LIMITS).size == picture.size[::-1]
    no_pixels = b"\xff\n" + (2 << 1 | (20_000 - 1) << 3 | 1 << 21 | 1 << 24).to_bytes(18, "little")
    with pytest.raises(MediaLimitError, match="20000 x 20000"):
        probe_image(no_pixels, LIMITS)


@pytest.mark.skipif(not HAS_JXL, reason="the extra jxl isn't installed")
def test_a_jpeg_xl_is_turned_and_coloured_as_it_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    CORNERS.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "a.jpg", quality=100, exif=exif)
    with Image.open(tmp_path / "a.jpg") as jpeg:
        data = _jpeg_xl(jpeg, lossless_jpeg=True)
    assert probe_image(data, LIMITS).size == CORNERS.size[::-1]
    _assert_upright(load_image(data, LIMITS))
    # EXIF by itself says nothing: a file says in its header how it is turned.
    _assert_upright(load_image(_jpeg_xl(CORNERS, exif=exif.tobytes()), LIMITS))
    shown = load_image(base64.b64decode(P3_JXL), LIMITS)
    np.testing.assert_allclose([pixel(shown, 5, 5), pixel(shown, 50, 5)], [(215, 93, 31), (0, 143, 85)], atol=2)


@pytest.mark.skipif(not HAS_JXL, reason="the extra jxl isn't installed")
def test_an_animated_jpeg_xl_is_refused() -> None:
    with pytest.raises(MediaDecodeError, match="unusual kind"):
        probe_image(base64.b64decode(MOVING_JXL), LIMITS)


def _jpeg_xl(picture: Image.Image, **options: Any) -> bytes:
    import pillow_jxl  # noqa: F401  Pillow can write the format from here on.

    return encode_image(picture, "JXL", **options)


@pytest.mark.parametrize("exif", [b"Exif\0\0MM\0*", b"Exif\0\0\xff\xff\xff", b"Exif\0\0II*\0\x08\0\0\0\xff\xff"])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_is_no_orientation(exif: bytes) -> None:
    assert load_image(encode_image(CORNERS, "JPEG", exif=exif), LIMITS).size == CORNERS.size


@pytest.mark.parametrize(
    ("mode", "value", "expected"),
    [
        ("1", 1, (255, 255, 255)),
        ("L", 90, (90, 90, 90)),
        ("LA", (0, 51), (204, 204, 204)),
        ("La", (0, 51), (204, 204, 204)),
        ("PA", (0, 0), (255, 255, 255)),
        ("RGBA", (200, 0, 0, 0), (255, 255, 255)),
        ("RGBA", (200, 0, 0, 255), (200, 0, 0)),
        ("RGBa", (0, 0, 0, 0), (255, 255, 255)),
        ("RGBX", (200, 10, 20, 0), (200, 10, 20)),
        ("CMYK", (0, 255, 255, 0), (255, 0, 0)),
        ("YCbCr", (90, 128, 128), (90, 90, 90)),
        ("LAB", (255, 128, 128), (255, 255, 255)),
        ("HSV", (0, 255, 255), (255, 0, 0)),
        ("I;16", 257 * 90, (90, 90, 90)),
        ("I;16B", 257 * 90, (90, 90, 90)),
        ("I", 40000, (156, 156, 156)),
        ("I", 12, (12, 12, 12)),
        ("F", 0.25, (64, 64, 64)),
        ("F", 12.0, (12, 12, 12)),
    ],
)
def test_modes(mode: str, value: Any, expected: tuple[int, int, int]) -> None:
    rgb = to_rgb(Image.new(mode, (2, 2), value))
    assert rgb.mode == "RGB"
    np.testing.assert_allclose(pixel(rgb, 1, 1), expected, atol=1)


def test_a_transparent_colour_lies_on_white() -> None:
    palette = Image.new("P", (2, 1))
    palette.putpalette([200, 0, 0, 0, 0, 200])
    palette.putpixel((1, 0), 1)
    assert [to_rgb(palette).getpixel((x, 0)) for x in (0, 1)] == [(200, 0, 0), (0, 0, 200)]
    data = encode_image(palette, "PNG", transparency=1)
    assert [load_image(data, LIMITS).getpixel((x, 0)) for x in (0, 1)] == [(200, 0, 0), (255, 255, 255)]
    data = encode_image(Image.new("RGB", (2, 2), (1, 2, 3)), "PNG", transparency=(1, 2, 3))
    assert load_image(data, LIMITS).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("bits", "kind", "clear", "pixels", "shown"),
    [
        (1, 0, (1,), bytes([0b10_000000]), 0),
        (2, 0, (1,), bytes([0b01_10_0000]), 170),
        (4, 0, (5,), b"\x5a", 170),
        (8, 0, (5,), b"\x05\xaa", 170),
        (16, 0, (1000,), struct.pack(">2H", 1000, 43690), 170),
        (16, 2, (1000, 2000, 3000), struct.pack(">6H", 1000, 2000, 3000, *[43690] * 3), 170),
    ],
)
def test_a_pngs_transparent_colour_has_the_bits_of_its_pixels(
    bits: int, kind: int, clear: tuple[int, ...], pixels: bytes, shown: int
) -> None:
    chunks = [
        (b"IHDR", struct.pack(">2I5B", 2, 1, bits, kind, 0, 0, 0)),
        (b"tRNS", struct.pack(f">{len(clear)}H", *clear)),
        (b"IDAT", zlib.compress(b"\0" + pixels)),
        (b"IEND", b""),
    ]
    made = (
        struct.pack(">I", len(data)) + name + data + zlib.crc32(name + data).to_bytes(4, "big") for name, data in chunks
    )
    rgb = load_image(b"\x89PNG\r\n\x1a\n" + b"".join(made), LIMITS)
    assert [rgb.getpixel((x, 0)) for x in (0, 1)] == [(255,) * 3, (shown,) * 3]


@pytest.mark.parametrize(
    ("format", "dtype", "factor"),
    [
        ("PNG", np.uint16, 257),
        ("TIFF", np.uint16, 257),
        ("TIFF", np.int32, 1),
        ("TIFF", np.int32, 257),
        ("TIFF", np.int32, (2**31 - 1) / 255),
        ("TIFF", np.float32, 1 / 255),
        ("TIFF", np.float32, 1),
        ("TIFF", np.float32, 257),
    ],
)
def test_wide_greys_become_8_bits(format: str, dtype: type, factor: float) -> None:
    ramp = np.arange(256).reshape(16, 16)
    data = encode_image(Image.fromarray((ramp * factor).astype(dtype)), format)
    np.testing.assert_array_equal(np.asarray(load_image(data, LIMITS))[..., 0], ramp)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_one_hot_pixel_leaves_the_others_as_they_are(dtype: type) -> None:
    values = np.full((64, 64), 100, dtype)
    values[0, 0] = 1_000_000
    picture = Image.fromarray(values)
    assert pixel(load_image(encode_image(picture, "TIFF"), LIMITS), 9, 9) == [100, 100, 100]
    assert pixel(load_image(encode_image(picture, "TIFF"), LIMITS, "checkpoint"), 9, 9) == [0, 0, 0]


def test_a_range_that_a_tiff_tells_is_its_range() -> None:
    values = np.linspace(-2.0, 6.0, 256, dtype=np.float32).reshape(16, 16)
    data = encode_image(Image.fromarray(values), "TIFF", tiffinfo={340: -2.0, 341: 6.0})
    np.testing.assert_array_equal(np.asarray(load_image(data, LIMITS))[..., 0], np.arange(256).reshape(16, 16))


def test_numbers_that_are_none_become_black() -> None:
    values = np.array([[0.0, np.nan], [np.inf, 1.0]], np.float32)
    assert np.asarray(to_rgb(Image.fromarray(values)))[..., 0].tolist() == [[0, 0], [0, 255]]


@pytest.mark.parametrize("turn", [None, *UPRIGHT.values()])
@pytest.mark.parametrize(("mode", "color"), [("RGB", "srgb"), ("RGBA", "srgb"), ("I;16", "srgb"), ("F", "checkpoint")])
def test_strips_of_a_picture_give_what_the_whole_gives(
    monkeypatch: pytest.MonkeyPatch, turn: Image.Transpose | None, mode: str, color: ColorMode
) -> None:
    values = np.random.default_rng(0).integers(0, 256, (61, 83, 4), np.uint8)
    picture = Image.fromarray(values).convert("RGB") if mode == "RGB" else Image.fromarray(values)
    if mode in ("I;16", "F"):
        picture = Image.fromarray(values[..., 0].astype(np.uint16 if mode == "I;16" else np.float32) * 257)
    whole = to_rgb(picture, color)
    whole = whole if turn is None else whole.transpose(turn)
    for size in ((32, 96), (224, 32)):
        monkeypatch.setattr(rgb_module, "_PIXELS_AT_ONCE", 500)
        strips = resized(picture, turn, color, size)
        expected = whole.resize((size[1], size[0]), Image.Resampling.BICUBIC)
        assert strips.tobytes() == expected.tobytes()


def test_no_limit_but_ours_counts() -> None:
    """Pillow's own one would refuse 200 megapixels."""
    png = encode_image(Image.new("1", (1, 1)), "PNG")
    header = b"IHDR" + struct.pack(">II", 16320, 12240) + png[24:29]
    png = png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:]
    assert probe_image(png, MediaLimits(max_source_pixels=200_000_000)).size == (12240, 16320)
