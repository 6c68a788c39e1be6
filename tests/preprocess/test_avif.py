"""The part of an AVIF that is to be shown, and its turns: Pillow's picture of the whole, cut; libheif for a HEIC."""

from __future__ import annotations

import base64
import io
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, UnidentifiedImageError

from qwen35mm.chat.media.thumbnails import make_thumbnail, shown_picture
from qwen35mm_preprocess import MediaProcessor
from qwen35mm_preprocess.avif import clean_aperture
from qwen35mm_preprocess.formats import HAS_AVIF, HAS_HEIF
from qwen35mm_preprocess.image import load_image, probe_image
from tests.preprocess.media_files import LIMITS, clap, encode_image, scene, with_property
from tests.preprocess.test_image import HEIC

WIDTH, HEIGHT = SIZE = (96, 64)
pytestmark = pytest.mark.skipif(not HAS_AVIF, reason="Pillow has no AVIF here")


@pytest.fixture(scope="module")
def avif() -> bytes:
    return encode_image(Image.fromarray(scene(3, (HEIGHT, WIDTH))), "AVIF", quality=90)


@pytest.mark.parametrize("part", [(20, 10, 48, 32), (0, 0, 48, 32), (95, 63, 1, 1), (1, 0, 94, 64), (0, 3, 96, 61)])
def test_the_part_that_a_file_names_is_what_is_seen(
    avif: bytes, part: tuple[int, ...], processor: MediaProcessor
) -> None:
    left, top, width, height = part
    data = with_property(avif, clap(part, SIZE))
    whole = load_image(avif, LIMITS)
    np.testing.assert_array_equal(load_image(data, LIMITS), whole.crop((left, top, left + width, top + height)))
    assert processor.plan(data).source_size == (height, width)
    assert probe_image(avif, LIMITS).is_plain
    assert (probe_image(data, LIMITS).is_plain, probe_image(data, LIMITS).is_part) == (False, True)


@pytest.mark.parametrize(
    ("turn", "operation"),
    [
        (b"irot\1", Image.Transpose.ROTATE_90),
        (b"irot\2", Image.Transpose.ROTATE_180),
        (b"irot\3", Image.Transpose.ROTATE_270),
        (b"imir\0", Image.Transpose.FLIP_TOP_BOTTOM),
        (b"imir\1", Image.Transpose.FLIP_LEFT_RIGHT),
    ],
)
def test_it_is_cut_before_it_is_turned(avif: bytes, turn: bytes, operation: Image.Transpose) -> None:
    whole = load_image(avif, LIMITS)
    np.testing.assert_array_equal(load_image(with_property(avif, turn), LIMITS), whole.transpose(operation))
    data = with_property(with_property(avif, clap((20, 10, 48, 32), SIZE)), turn)
    expected = whole.crop((20, 10, 68, 42)).transpose(operation)
    np.testing.assert_array_equal(load_image(data, LIMITS), expected)
    assert probe_image(data, LIMITS).size == expected.size[::-1]


@pytest.mark.parametrize(
    "content",
    [
        clap((0, 0, 96, 64), SIZE),
        clap((0, 0, 97, 64), SIZE),
        clap((-1, 0, 48, 32), SIZE),
        clap((60, 0, 48, 32), SIZE),
        clap((0, 0, 0, 32), SIZE),
        clap((Fraction(1, 2), 0, 48, 32), SIZE),
        b"clap" + struct.pack(">4IiIiI", 48, 1, 32, 1, 0, 0, 0, 1),
        b"clap\0\0\0\x30",
    ],
    ids=["all", "wider", "left of it", "right of it", "empty", "half pixels", "by zero", "short"],
)
def test_what_is_no_part_is_passed_over(avif: bytes, content: bytes) -> None:
    data = with_property(avif, content)
    assert clean_aperture(io.BytesIO(data), *SIZE) is None
    assert not probe_image(avif, LIMITS).is_part


@pytest.mark.parametrize("comes_first", [True, False])
def test_another_items_part_is_not_the_pictures(avif: bytes, comes_first: bool) -> None:
    data = with_property(avif, clap((20, 10, 48, 32), SIZE), item=2, comes_first=comes_first)
    assert clean_aperture(io.BytesIO(data), *SIZE) is None
    with_both = with_property(avif, clap((0, 0, 8, 8), SIZE))
    assert clean_aperture(io.BytesIO(with_both), *SIZE) == (0, 0, 8, 8)


@given(cut=st.integers(0, 400), at=st.integers(0, 400), value=st.integers(0, 255))
def test_damage_is_no_part_or_one_within_the_picture(avif: bytes, cut: int, at: int, value: int) -> None:
    data = bytearray(with_property(avif, clap((20, 10, 48, 32), SIZE)))
    data[at] = value
    for stream in (io.BytesIO(data), io.BytesIO(data[:cut])):
        stream.seek(5)
        left, top, right, bottom = clean_aperture(stream, *SIZE) or (0, 0, *SIZE)
        assert 0 <= left < right <= WIDTH
        assert 0 <= top < bottom <= HEIGHT
        assert stream.tell() == 5


@pytest.mark.skipif(not HAS_HEIF, reason="the extra heif isn't installed")
@pytest.mark.parametrize("part", [(0, 0, 64, 32), (10, 20, 40, 30), (62, 62, 2, 2), (8, 0, 6, 64)])
def test_libheif_cuts_the_same_part(part: tuple[int, ...]) -> None:
    heic = base64.b64decode(HEIC)
    at = heic.index(b"clap")

    def with_part(part: tuple[int, ...]) -> bytes:
        content = clap(part, (64, 64))
        return heic[:at] + content + heic[at + len(content) :]

    # Even edges: libheif cuts before it brings colours to the size of the picture.
    box = clean_aperture(io.BytesIO(with_part(part)), 64, 64)
    assert box is not None
    turn_back = Image.Transpose.ROTATE_90
    whole = load_image(with_part((0, 0, 64, 64)), LIMITS).transpose(turn_back)
    shown = load_image(with_part(part), LIMITS).transpose(turn_back)
    np.testing.assert_array_equal(shown, whole.crop(box))


def test_the_page_shows_what_the_model_sees(avif: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.avif"
    path.write_bytes(avif)
    assert shown_picture(path, LIMITS) is None
    path.write_bytes(with_property(avif, clap((20, 10, 48, 32), SIZE)))
    shown = shown_picture(path, LIMITS)
    assert shown is not None
    for picture in (shown, make_thumbnail(path, LIMITS)):
        assert Image.open(io.BytesIO(picture)).size == (48, 32)


def test_properties_in_a_box_an_item_are_joined() -> None:
    """As older encoders wrote a picture with an alpha plane; libavif refuses it."""
    picture = Image.fromarray(scene(3, (HEIGHT, WIDTH))).convert("RGBA")
    picture.putalpha(Image.linear_gradient("L").resize(SIZE))
    whole = encode_image(picture, "AVIF", quality=90)
    at = whole.index(b"ipma") - 4
    end = at + int.from_bytes(whole[at : at + 4], "big")
    first = at + 16 + 3 + whole[at + 18]
    head = whole[at + 4 : at + 12] + struct.pack(">I", 1)
    split = b"".join(
        struct.pack(">I", len(one) + 16) + head + one for one in (whole[at + 16 : first], whole[first:end])
    )
    data = bytearray(whole[:at] + split + whole[end:])
    for name in (b"iprp", b"meta"):
        place = data.index(name) - 4
        struct.pack_into(">I", data, place, int.from_bytes(data[place : place + 4], "big") + 16)
    # The places of the picture's and the alpha plane's pixels.
    for place in (data.index(b"iloc") + 18, data.index(b"iloc") + 32):
        struct.pack_into(">I", data, place, int.from_bytes(data[place : place + 4], "big") + 16)
    with pytest.raises(UnidentifiedImageError):
        Image.open(io.BytesIO(data))
    assert load_image(bytes(data), LIMITS).tobytes() == load_image(whole, LIMITS).tobytes()


def test_a_box_that_ends_before_its_version_names_no_part(avif: bytes) -> None:
    at = avif.index(b"pitm") - 4
    meta = avif.index(b"meta") - 4
    boxes = avif[meta + 12 : at] + avif[avif.index(b"iprp") - 4 :][:8] + b"\0\0\0\x08pitm"
    short = struct.pack(">I4s4x", len(boxes) + 12, b"meta") + boxes
    assert clean_aperture(io.BytesIO(avif[:meta] + short), *SIZE) is None
