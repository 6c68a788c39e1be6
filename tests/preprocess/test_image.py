"""Images against transformers' Qwen2VLImageProcessorPil, and how their modes and orientations become upright RGB."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from qwen35mm_preprocess import (
    ImageProcessing,
    MediaBudget,
    MediaLimits,
    MediaProcessor,
    MediaSource,
    VideoProcessing,
)
from qwen35mm_preprocess.image import load_image, probe_image, to_rgb
from qwen35mm_preprocess.media import HAS_AVIF
from tests.preprocess import oracles
from tests.preprocess.media_files import HALF, PHOTOGRAPHS, encode_image, pixel

LIMITS = MediaLimits()
DEFAULT = ImageProcessing(16, 2, 2, HALF, HALF, min_pixels=65536, max_pixels=16777216)
SMALL = ImageProcessing(16, 2, 2, HALF, HALF, min_pixels=12288, max_pixels=16384)
PICTURES = sorted(path for path in PHOTOGRAPHS.iterdir() if path.suffix in (".png", ".jpg", ".gif"))
# Top left red, top right green, bottom left blue, bottom right white; wider than high.
CORNERS = Image.fromarray(
    np.array([[[200, 0, 0], [0, 200, 0]], [[0, 0, 200], [255, 255, 255]]], np.uint8).repeat(16, 0).repeat(32, 1)
)


def _assert_equals_oracle(source: MediaSource, picture: Image.Image, processing: ImageProcessing) -> None:
    processor = MediaProcessor(processing, VideoProcessing(16, 2, 2, HALF, HALF), MediaBudget())
    media = processor.prepare(source, kind="image")
    expected = oracles.image_processor(processing)(picture, return_tensors="np")
    assert list(media.plan.grid_thw) == expected["image_grid_thw"][0].tolist()
    assert media.pixel_values.dtype == np.float32
    np.testing.assert_array_equal(media.pixel_values, expected["pixel_values"])


def _assert_upright(rgb: Image.Image) -> None:
    """The picture shows CORNERS, give or take what a lossy format costs away from the edges."""
    assert (rgb.mode, rgb.size) == ("RGB", CORNERS.size)
    for x, y in ((16, 8), (48, 8), (16, 24), (48, 24)):
        np.testing.assert_allclose(pixel(rgb, x, y), pixel(CORNERS, x, y), atol=12)


def test_the_wheel_carries_photographs() -> None:
    assert {"astronaut.png", "chelsea.png", "retina.jpg", "rocket.jpg"} <= {path.name for path in PICTURES}


@pytest.mark.parametrize("processing", [DEFAULT, SMALL], ids=["default", "small"])
@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_photographs_equal_the_oracle(path: Path, processing: ImageProcessing) -> None:
    with Image.open(path) as picture:
        _assert_equals_oracle(path, picture, processing)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 99), st.sampled_from([DEFAULT, SMALL]))
def test_odd_sizes_equal_the_oracle(height: int, width: int, seed: int, processing: ImageProcessing) -> None:
    height, width = max(height, -(-width // 200)), max(width, -(-height // 200))
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    picture = Image.fromarray(pixels)
    _assert_equals_oracle(picture, picture, processing)


def test_every_kind_of_source_gives_the_same(tmp_path: Path, processor: MediaProcessor) -> None:
    data = encode_image(CORNERS, "PNG")
    path = tmp_path / "corners.png"
    path.write_bytes(data)
    sources = [path, str(path), data, "data:;base64," + base64.b64encode(data).decode(), CORNERS]
    media = [processor.prepare(source) for source in sources]
    assert len({each.plan.digest for each in media}) == 1
    assert all(np.array_equal(media[0].pixel_values, each.pixel_values) for each in media)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_formats(format: str) -> None:
    if format == "AVIF" and not HAS_AVIF:
        pytest.skip("Pillow has no AVIF here")
    rgb = load_image(encode_image(CORNERS, format), LIMITS)
    _assert_upright(rgb)


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "jpeg"])
def test_tiff_compressions(compression: str | None) -> None:
    data = encode_image(CORNERS, "TIFF", compression=compression)
    _assert_upright(load_image(data, LIMITS))


def test_first_picture_of_several() -> None:
    red, blue = (Image.new("RGB", (40, 40), colour) for colour in ((220, 0, 0), (0, 0, 220)))
    for format in ("GIF", "WEBP", "TIFF", "PNG"):
        data = encode_image(red, format, save_all=True, append_images=[blue])
        np.testing.assert_allclose(pixel(load_image(data, LIMITS), 20, 20), (220, 0, 0), atol=12)
        assert probe_image(data, LIMITS).num_pictures == 2


def test_a_note_says_that_others_are_left_out(processor: MediaProcessor) -> None:
    data = encode_image(CORNERS, "TIFF", save_all=True, append_images=[CORNERS])
    assert processor.plan(data).notes == ("the uploaded data holds 2 pictures; the first is used.",)


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


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_exif_orientation(format: str, orientation: int, processor: MediaProcessor) -> None:
    if format == "AVIF" and not HAS_AVIF:
        pytest.skip("Pillow has no AVIF here")
    turn = STORED[orientation]
    stored = CORNERS if turn is None else CORNERS.transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode_image(stored, format, exif=exif)
    assert processor.plan(data).source_size == (32, 64)
    _assert_upright(load_image(data, LIMITS))
    with Image.open(io.BytesIO(data)) as picture:
        assert processor.prepare(picture).plan.digest == processor.prepare(data).plan.digest


@pytest.mark.parametrize("exif", [b"Exif\0\0MM\0*", b"Exif\0\0\xff\xff\xff", b"Exif\0\0II*\0\x08\0\0\0\xff\xff"])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_is_no_orientation(exif: bytes) -> None:
    assert load_image(encode_image(CORNERS, "JPEG", exif=exif), LIMITS).size == CORNERS.size


def _ramp(dtype: type, factor: float) -> np.ndarray:
    return (np.arange(256).reshape(16, 16) * factor).astype(dtype)


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        (Image.new("1", (2, 2), 1), (255, 255, 255)),
        (Image.new("L", (2, 2), 90), (90, 90, 90)),
        (Image.new("LA", (2, 2), (0, 51)), (204, 204, 204)),
        (Image.new("La", (2, 2), (0, 51)), (204, 204, 204)),
        (Image.new("RGBA", (2, 2), (200, 0, 0, 0)), (255, 255, 255)),
        (Image.new("RGBA", (2, 2), (200, 0, 0, 255)), (200, 0, 0)),
        (Image.new("RGBa", (2, 2), (0, 0, 0, 0)), (255, 255, 255)),
        (Image.new("RGBX", (2, 2), (200, 10, 20, 0)), (200, 10, 20)),
        (Image.new("CMYK", (2, 2), (0, 255, 255, 0)), (255, 0, 0)),
        (Image.new("YCbCr", (2, 2), (90, 128, 128)), (90, 90, 90)),
        (Image.new("LAB", (2, 2), (255, 128, 128)), (255, 255, 255)),
        (Image.new("HSV", (2, 2), (0, 255, 255)), (255, 0, 0)),
        (Image.new("I;16", (2, 2), 257 * 90), (90, 90, 90)),
        (Image.new("I;16B", (2, 2), 257 * 90), (90, 90, 90)),
        (Image.new("I", (2, 2), 70000), (255, 255, 255)),
        (Image.new("F", (2, 2), 12.0), (12, 12, 12)),
    ],
    ids=lambda value: value.mode if isinstance(value, Image.Image) else "",
)
def test_modes(picture: Image.Image, expected: tuple[int, int, int]) -> None:
    rgb = to_rgb(picture)
    assert rgb.mode == "RGB"
    np.testing.assert_allclose(pixel(rgb, 1, 1), expected, atol=1)


def test_palette_with_a_transparent_colour_and_with_alpha() -> None:
    palette = Image.new("P", (2, 1))
    palette.putpalette([200, 0, 0, 0, 0, 200])
    palette.putpixel((1, 0), 1)
    assert [to_rgb(palette).getpixel((x, 0)) for x in (0, 1)] == [(200, 0, 0), (0, 0, 200)]
    data = encode_image(palette, "PNG", transparency=1)
    assert [load_image(data, LIMITS).getpixel((x, 0)) for x in (0, 1)] == [(200, 0, 0), (255, 255, 255)]
    assert to_rgb(Image.new("PA", (1, 1), (0, 0))).getpixel((0, 0)) == (255, 255, 255)


def test_rgb_with_a_transparent_colour() -> None:
    data = encode_image(Image.new("RGB", (2, 2), (1, 2, 3)), "PNG", transparency=(1, 2, 3))
    assert load_image(data, LIMITS).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bit_grey_files(format: str) -> None:
    data = encode_image(Image.fromarray(_ramp(np.uint16, 257)), format)
    np.testing.assert_array_equal(np.asarray(load_image(data, LIMITS))[..., 0], _ramp(np.uint8, 1))


@pytest.mark.parametrize(("dtype", "factor"), [(np.int32, 1000), (np.float32, 0.001)])
def test_greys_without_a_scale_are_stretched(dtype: type, factor: float) -> None:
    data = encode_image(Image.fromarray(_ramp(dtype, factor)), "TIFF")
    np.testing.assert_array_equal(np.asarray(load_image(data, LIMITS))[..., 0], _ramp(np.uint8, 1))


def test_numbers_that_are_none_become_black() -> None:
    values = np.array([[0.0, np.nan], [np.inf, 1.0]], np.float32)
    assert np.asarray(to_rgb(Image.fromarray(values)))[..., 0].tolist() == [[0, 0], [0, 255]]
