"""Colours as a viewer shows them, against numbers that were worked out from the specifications."""

from __future__ import annotations

import io
import itertools
import struct
import zlib
from collections.abc import Mapping, Sequence

import av
import numpy as np
import pytest
from PIL import Image, ImageCms

from qwen35mm_preprocess import MediaBudget, MediaProcessor
from qwen35mm_preprocess.color import Encoding, convert
from qwen35mm_preprocess.formats import HAS_AVIF
from qwen35mm_preprocess.image import load_image, probe_image
from qwen35mm_preprocess.video import first_frame
from tests.preprocess.media_files import IMAGE, LIMITS, VIDEO, encode_image, encode_video, pixel, scene

# Display P3's red, green and blue in XYZ of D50, as Apple's profile has them, and those of sRGB.
P3 = ((0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407))
SRGB_D50 = ((0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410))
# From linear Display P3 to linear sRGB (CSS Color 4, through XYZ of D65).
P3_TO_SRGB = ((1.2249, -0.2247, 0.0), (-0.0420, 1.0419, 0.0), (-0.0197, -0.0786, 1.0979))
COLORS = [(200, 100, 50), (30, 140, 90), (128, 128, 128), (250, 240, 230)]


def fixed(value: float) -> bytes:
    return struct.pack(">i", round(value * 65536))


def profile(colors: Sequence[Sequence[float]] | None, gamma: float, space: bytes = b"RGB ") -> bytes:
    """An ICC profile of version 2: a matrix and a gamma, or grey with a gamma."""
    curve = b"curv" + struct.pack(">IIH", 0, 1, round(gamma * 256)) + b"\0\0"
    xyz = {
        name: b"XYZ \0\0\0\0" + b"".join(map(fixed, value)) for name, value in zip("rgb", colors or (), strict=False)
    }
    white = b"XYZ \0\0\0\0" + b"".join(map(fixed, (0.9642, 1.0, 0.8249)))
    text = b"desc\0\0\0\0" + struct.pack(">I", 5) + b"test\0" + b"\0" * 78
    tags = {b"desc": text, b"wtpt": white, b"cprt": b"text\0\0\0\0none\0"}
    if colors is None:
        tags[b"kTRC"] = curve
    else:
        tags |= {f"{name}XYZ".encode(): value for name, value in xyz.items()}
        tags |= {f"{name}TRC".encode(): curve for name in "rgb"}
    return icc_file(tags, 2, space, b"XYZ ")


def icc_file(tags: Mapping[bytes, bytes], version: int, space: bytes, connection: bytes) -> bytes:
    table, data = struct.pack(">I", len(tags)), b""
    for name, value in tags.items():
        table += name + struct.pack(">II", 132 + 12 * len(tags) + len(data), len(value))
        data += value + b"\0" * (-len(value) % 4)
    length = 132 + 12 * len(tags) + len(data)
    head = struct.pack(">I4sI4s4s4s", length, b"test", version << 24, b"mntr", space, connection)
    head += b"\0" * 12 + b"acsp" + b"\0" * 28 + b"".join(map(fixed, (0.9642, 1.0, 0.8249)))
    return head.ljust(128, b"\0") + table + data


def grey_table(black: float) -> bytes:
    """A table of an ICC profile of version 4 that makes every colour grey: the lightness rises from `black` to 100."""
    lightness = [
        black + (100 - black) * (0.3 * r + 0.6 * g + 0.1 * b) for r, g, b in itertools.product((0, 1), repeat=3)
    ]
    corners = b"".join(struct.pack(">3H", round(each * 655.35), 0x8080, 0x8080) for each in lightness)
    curves = (b"curv" + bytes(8)) * 3
    grid = b"\2\2\2".ljust(16, b"\0") + b"\2\0\0\0" + corners
    return b"mAB \0\0\0\0\3\3\0\0" + struct.pack(">5I", 32, 0, 0, 68, 136) + curves + grid + curves


def chunk(png: bytes, name: bytes, content: bytes) -> bytes:
    """A PNG with one more chunk behind its header."""
    made = struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    return png[:33] + made + png[33:]


def plain(colors: Sequence[tuple[int, int, int]] = COLORS) -> Image.Image:
    return Image.fromarray(np.array([colors], np.uint8))


def light(values: np.ndarray) -> np.ndarray:
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def encoded(values: np.ndarray) -> np.ndarray:
    values = np.clip(values, 0, 1)
    return 255 * np.where(values <= 0.0031308, values * 12.92, 1.055 * values ** (1 / 2.4) - 0.055)


def shown(data: bytes) -> np.ndarray:
    return np.asarray(load_image(data, LIMITS))[0].astype(float)


@pytest.mark.parametrize("format", ["PNG", "TIFF", "JPEG"])
def test_a_wide_profile_becomes_srgb(format: str) -> None:
    data = encode_image(plain().resize((64, 16), 0), format, icc_profile=profile(P3, 2.2), quality=98)
    assert not probe_image(data, LIMITS).is_plain
    found = np.asarray(load_image(data, LIMITS))[8, [8, 24, 40, 56]]
    expected = encoded((np.array(COLORS) / 255) ** 2.2 @ np.array(P3_TO_SRGB).T)
    np.testing.assert_allclose(found, expected, atol=2 if format != "JPEG" else 5)
    np.testing.assert_allclose(np.asarray(load_image(data, LIMITS, "checkpoint"))[8, 8], COLORS[0], atol=4)


def test_a_profile_of_srgb_changes_nothing() -> None:
    ours = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for data in (encode_image(plain(), "PNG", icc_profile=each) for each in (ours, profile(SRGB_D50, 2.2)[:-4])):
        assert shown(data).tolist() == np.array(COLORS, float).tolist()
    assert probe_image(encode_image(plain(), "PNG", icc_profile=ours), LIMITS).is_plain


@pytest.mark.parametrize("icc", [b"", b"no profile", profile(P3, 2.2)[:200], profile(None, 1.0, b"GRAY")])
def test_a_profile_that_is_damaged_or_for_others_is_passed_over(icc: bytes) -> None:
    assert shown(encode_image(plain(), "PNG", icc_profile=icc)).tolist() == np.array(COLORS, float).tolist()


@pytest.mark.parametrize("rival", [None, b"A2B1", b"D2B1"])
def test_a_perceptual_table_is_taken_as_it_is(rival: bytes | None) -> None:
    """The darkest grey of a print stays above black, as Chromium shows it: 11 for a lightness of 3.1."""
    tags = {b"desc": b"mluc" + bytes(12), b"wtpt": b"XYZ \0\0\0\0" + b"".join(map(fixed, (0.9642, 1.0, 0.8249)))}
    tags[b"A2B0"] = grey_table(3.1373)
    if rival is not None:
        tags[rival] = grey_table(60)
    icc = icc_file(tags, 4, b"RGB ", b"Lab ")
    found = shown(
        encode_image(plain([(0, 0, 0), (64, 64, 64), (128, 128, 128), (255, 255, 255)]), "PNG", icc_profile=icc)
    )
    np.testing.assert_allclose(found, np.array([11, 65, 123, 255])[:, None].repeat(3, axis=1), atol=1)


def test_grey_has_profiles_too() -> None:
    grey = np.arange(0, 256, 2)
    data = encode_image(Image.fromarray(grey.astype(np.uint8)[None]), "PNG", icc_profile=profile(None, 1.5, b"GRAY"))
    np.testing.assert_allclose(shown(data)[:, 0], encoded((grey / 255) ** 1.5), atol=2)
    wide = encode_image(Image.fromarray((grey * 257).astype(np.uint16)[None]), "PNG")
    wide = chunk(wide, b"iCCP", b"x\0\0" + zlib.compress(profile(None, 1.5, b"GRAY")))
    np.testing.assert_allclose(shown(wide)[:, 0], encoded((grey / 255) ** 1.5), atol=2)


def test_what_is_transparent_keeps_its_colour_and_lies_on_white() -> None:
    data = encode_image(Image.new("RGBA", (1, 1), (*COLORS[0], 128)), "PNG", icc_profile=profile(P3, 2.2))
    color = encoded((np.array(COLORS[0]) / 255) ** 2.2 @ np.array(P3_TO_SRGB).T)
    np.testing.assert_allclose(shown(data)[0], (color * 128 + 255 * 127) / 255, atol=2)


def test_cmyk_without_a_profile_is_what_browsers_make_of_it() -> None:
    inks = np.array([[0, 255, 255, 0], [10, 100, 200, 60], [0, 0, 0, 128]], np.uint8)
    data = encode_image(Image.frombytes("CMYK", (3, 1), inks.tobytes()), "TIFF")
    expected = (255 - inks[:, :3].astype(float)) * (255 - inks[:, 3:].astype(float)) / 255
    np.testing.assert_allclose(shown(data), expected, atol=1)


@pytest.mark.parametrize("gamma", [1.0, 0.55, 0.3])
def test_a_pngs_gamma(gamma: float) -> None:
    data = chunk(encode_image(plain(), "PNG"), b"gAMA", struct.pack(">I", round(gamma * 100000)))
    np.testing.assert_allclose(shown(data), encoded((np.array(COLORS) / 255) ** (1 / gamma)), atol=1)
    # Whoever says sRGB means it, whatever is said besides.
    srgb = chunk(data, b"sRGB", b"\0")
    assert shown(srgb).tolist() == np.array(COLORS, float).tolist()


def test_a_pngs_usual_gamma_and_primaries_change_nothing() -> None:
    png = chunk(encode_image(plain(), "PNG"), b"gAMA", struct.pack(">I", 45455))
    usual = (31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000)
    assert shown(chunk(png, b"cHRM", struct.pack(">8I", *usual))).tolist() == np.array(COLORS, float).tolist()
    assert shown(chunk(png, b"cHRM", bytes(32))).tolist() == np.array(COLORS, float).tolist()
    p3 = (31270, 32900, 68000, 32000, 26500, 69000, 15000, 6000)
    found = shown(chunk(png, b"cHRM", struct.pack(">8I", *p3)))
    np.testing.assert_allclose(found, encoded(light(np.array(COLORS) / 255) @ np.array(P3_TO_SRGB).T), atol=1.5)


def test_a_pngs_code_points_come_first() -> None:
    data = chunk(encode_image(plain(), "PNG", icc_profile=profile(P3, 1.0)), b"cICP", bytes((12, 13, 0, 1)))
    np.testing.assert_allclose(shown(data), encoded(light(np.array(COLORS) / 255) @ np.array(P3_TO_SRGB).T), atol=1.5)
    srgb = chunk(encode_image(plain(), "PNG", icc_profile=profile(P3, 1.0)), b"cICP", bytes((1, 13, 0, 1)))
    assert shown(srgb).tolist() == np.array(COLORS, float).tolist()


@pytest.mark.skipif(not HAS_AVIF, reason="Pillow has no AVIF here")
def test_an_avifs_code_points() -> None:
    data = bytearray(encode_image(plain([(128, 128, 128)] * 4).resize((64, 64)), "AVIF", quality=95))
    at = data.index(b"colrnclx") + 8
    data[at : at + 4] = struct.pack(">HH", 9, 16)
    # In PQ half of the range is about 92 cd/m2, of 203 that are white.
    grey = np.asarray(load_image(bytes(data), LIMITS))[32, 32]
    np.testing.assert_allclose(grey, encoded(np.array(92.25 / 203)), atol=4)


@pytest.mark.parametrize(
    ("transfer", "value", "nits"),
    # 38% is the grey card of BT.2408's table 1, in both.
    [(16, 0.38, 26.0), (18, 0.38, 26.0), (16, 0.3, 10.04), (16, 0.44, 50.3)],
)
def test_dark_tones_of_a_high_dynamic_range_are_as_bright_as_they_say(transfer: int, value: float, nits: float) -> None:
    encoding = Encoding.of_code_points(9, transfer)
    assert encoding is not None
    grey = convert(np.full((1, 1, 3), round(value * 65535), np.uint16), encoding)
    np.testing.assert_allclose(grey[0, 0], encoded(np.array(nits / 203)), atol=2)


@pytest.mark.parametrize("transfer", [16, 18])
def test_bright_tones_are_told_apart_up_to_a_thousand(transfer: int) -> None:
    encoding = Encoding.of_code_points(9, transfer)
    assert encoding is not None
    top = 0.75 if transfer == 16 else 1.0
    ramp = np.repeat(np.linspace(0, 65535 * top, 64).astype(np.uint16)[None, :, None], 3, axis=-1)
    found = convert(ramp, encoding)[0, :, 0].astype(int)
    assert np.all(np.diff(found) >= 0)
    assert found[0] == 0
    assert found[-1] >= 253
    assert len(set(found.tolist())) >= 55


def _tagged(frame: np.ndarray, *, space: int, primaries: int, transfer: int, full: bool = False) -> bytes:
    """A clip of one frame whose numbers are RGB's in some matrix, with these tags."""
    file = io.BytesIO()
    height, width, _ = frame.shape
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=10, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv444p"
        context = stream.codec_context
        context.colorspace, context.color_primaries, context.color_trc = space, primaries, transfer
        context.color_range = 2 if full else 1
        picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
        matrix = {1: "ITU709", 2: "ITU709", 9: "BT2020"}[space]
        picture = picture.reformat(format="yuv444p", dst_colorspace=matrix, dst_color_range="JPEG" if full else "MPEG")
        picture.colorspace, picture.color_range = space, 2 if full else 1
        picture.pts = 0
        output.mux(stream.encode(picture))
        output.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("space", [1, 9])
def test_a_videos_matrix_and_range(space: int, full: bool) -> None:
    frame = scene(7, (96, 128))
    data = _tagged(frame, space=space, primaries=1, transfer=1, full=full)
    np.testing.assert_allclose(np.asarray(first_frame(data, LIMITS)), frame, atol=6)


def test_hd_that_tells_nothing_is_bt709() -> None:
    frame = np.zeros((720, 1280, 3), np.uint8) + np.array([200, 60, 30], np.uint8)
    data = _tagged(frame, space=2, primaries=2, transfer=2)
    np.testing.assert_allclose(pixel(first_frame(data, LIMITS), 640, 360), (200, 60, 30), atol=3)
    as_before = np.asarray(first_frame(data, LIMITS, "checkpoint"))[360, 640].astype(int)
    assert np.abs(as_before - (200, 60, 30)).max() > 8


def test_wide_primaries_of_a_video() -> None:
    frame = np.zeros((48, 64, 3), np.uint8) + np.array([60, 140, 90], np.uint8)
    found = first_frame(_tagged(frame, space=1, primaries=12, transfer=1), LIMITS)
    expected = encoded(light(np.array([60, 140, 90]) / 255) @ np.array(P3_TO_SRGB).T)
    np.testing.assert_allclose(pixel(found, 32, 24), expected, atol=4)


def test_a_plan_keeps_the_colours_that_it_was_made_with() -> None:
    """One from before there was a choice says nothing of them, and its pixels are those that it was sent with."""
    picture = encode_image(plain().resize((128, 64)), "PNG", icc_profile=profile(P3, 2.2))
    clip = encode_video([scene(index) for index in range(4)])
    old = MediaProcessor(IMAGE, VIDEO, MediaBudget(color="checkpoint"))
    new = MediaProcessor(IMAGE, VIDEO, MediaBudget())
    before, after = old.prepare(picture), new.prepare(picture)
    assert before.plan.digest != after.plan.digest
    assert new.prepare(picture, before.plan).plan.digest == before.plan.digest
    assert old.prepare(picture, after.plan).plan.digest == after.plan.digest
    assert old.prepare(clip).plan.digest == new.prepare(clip).plan.digest
