"""What is read in another process is what is read here, to the bit: the direct way is the oracle."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qwen35mm.assets import asset_path, demo_model_path
from qwen35mm.backends.remote.apart import encode_by
from qwen35mm.backends.remote.media import default_media, encode_medium
from qwen35mm.chat.media.crops import cut
from qwen35mm.chat.media.thumbnails import make_frame, make_thumbnail, shown_picture
from qwen35mm.chat.store.records import Attachment
from qwen35mm.contract import Image as ImagePart
from qwen35mm.contract import Video
from qwen35mm.decoding import Decoders, DecodingProcessor
from qwen35mm.decoding.processor import check_picture_by, kind_by, picture_by
from qwen35mm_preprocess import (
    MediaBudget,
    MediaChangedError,
    MediaError,
    MediaPlanError,
    MediaProcessor,
    VideoClip,
    detect_kind,
)
from qwen35mm_preprocess.formats import HAS_AVIF, HAS_HEIF, HAS_JXL
from qwen35mm_preprocess.image import load_image
from qwen35mm_preprocess.media import NamedBytes
from tests.preprocess.media_files import PHOTOGRAPHS, encode_image, encode_video, scene
from tests.preprocess.test_image import CORNERS, HEIC, P3_JXL

PROCESSOR = MediaProcessor.from_pretrained(demo_model_path(), budget=MediaBudget.for_gpu())
# One of each format and shape.
NAMES = ("tall.png", "wide.jpg", "moves-left.gif", "moves-right.mp4", "moves-down.webm")
SAMPLES = [asset_path("samples") / name for name in NAMES]
CLIP = asset_path("samples") / "moves-right.mp4"
WIDE = np.random.default_rng(0).integers(0, 1 << 16, (40, 60), np.uint16)
VIDEOS = [
    *(("mp4", "libx264"), ("mov", "mpeg4"), ("matroska", "libx264"), ("webm", "libvpx-vp9"), ("webm", "libvpx")),
    *(("avi", "libx264"), ("avi", "mpeg4"), ("mpegts", "libx264"), ("gif", "gif"), ("mpeg", "mpeg1video")),
    *(("vob", "mpeg2video"), ("asf", "wmv2"), ("flv", "flv"), ("avi", "huffyuv"), ("matroska", "ffv1")),
    *(("mov", "qtrle"), ("avi", "rawvideo"), ("avi", "msmpeg4v2")),
]


def media_of_all_formats() -> dict[str, Callable[[], bytes]]:
    """Names, and what makes the medium."""

    def exif(format: str) -> bytes:
        turned = Image.Exif()
        turned[0x0112] = 6
        return encode_image(CORNERS, format, exif=turned)

    def animated(format: str) -> bytes:
        frames = [Image.fromarray(scene(index)) for index in range(5)]
        return encode_image(frames[0], format, save_all=True, append_images=frames[1:], duration=100)

    def video(container: str, codec: str) -> bytes:
        return encode_video([scene(index) for index in range(12)], container=container, codec=codec, fps=25)

    formats = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "PPM", "TGA", *(["AVIF"] if HAS_AVIF else [])]
    found: dict[str, Callable[[], bytes]] = {each: partial(encode_image, CORNERS, each) for each in formats}
    found |= {f"turned {each}": partial(exif, each) for each in ("JPEG", "PNG", "WEBP", "TIFF")}
    found |= {f"moving {each}": partial(animated, each) for each in ("PNG", "WEBP", *(["AVIF"] if HAS_AVIF else []))}
    for mode in ("L", "LA", "RGBA", "P", "CMYK"):
        format = "TIFF" if mode == "CMYK" else "PNG"
        found[f"{mode} {format}"] = partial(encode_image, CORNERS.convert("RGB").convert(mode), format)
    found["16 bits"] = lambda: encode_image(Image.fromarray(WIDE), "PNG")
    found["32 bits"] = lambda: encode_image(Image.fromarray(WIDE.astype(np.float32)), "TIFF")
    found["LZW TIFF"] = lambda: encode_image(CORNERS, "TIFF", compression="tiff_lzw")
    if HAS_HEIF:
        found["HEIC"] = lambda: base64.b64decode(HEIC)
    if HAS_JXL:
        found["JPEG XL"] = lambda: base64.b64decode(P3_JXL)
    return found | {f"{codec} in {container}": partial(video, container, codec) for container, codec in VIDEOS}


FORMATS = media_of_all_formats()


@pytest.fixture(scope="module")
def media(decoders: Decoders) -> DecodingProcessor:
    return DecodingProcessor.of(PROCESSOR, decoders)


def assert_same(source: Any, media: DecodingProcessor, **how: Any) -> None:
    plan, kind = PROCESSOR.plan(source, **how), detect_kind(source)
    assert (media.plan(source, **how), kind_by(media, source)) == (plan, kind)
    assert media.plan(source, kind, **how) == plan
    read = PROCESSOR.prepare(source, **how)
    for given in (None, plan, read.plan):
        again = media.prepare(source, given, **how)
        assert (again.plan, again.warnings) == (read.plan, read.warnings)
        assert again.patches.temporal_patch_size == read.patches.temporal_patch_size
        assert again.patches.pixels.shape == read.patches.pixels.shape
        assert np.array_equal(again.patches.pixels, read.patches.pixels)
        assert np.array_equal(again.patches.table, read.patches.table)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_samples(path: Path, media: DecodingProcessor) -> None:
    named = NamedBytes(path.read_bytes())
    named.name = path.name
    uri = f"data:application/octet-stream;base64,{base64.b64encode(named).decode()}"
    assert_same(path, media)
    expected, kind = PROCESSOR.prepare(path), detect_kind(path)
    for source in (str(path), bytes(named), named, uri):
        again = media.prepare(source)
        assert (again.plan, kind_by(media, source)) == (expected.plan, kind)
        assert np.array_equal(again.patches.pixels, expected.patches.pixels)


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, media: DecodingProcessor) -> None:
    assert_same(FORMATS[name](), media)


@pytest.mark.parametrize("name", ["retina.jpg", "logo.png", "no_time_for_that_tiny.gif"])
def test_photographs(name: str, media: DecodingProcessor) -> None:
    assert_same(PHOTOGRAPHS / name, media)


def test_clips_budgets_and_colours(media: DecodingProcessor) -> None:
    clip = CLIP
    assert_same(clip, media, clip=VideoClip(0.4, 1.4, 4))
    still = encode_video([scene(index // 16) for index in range(32)], fps=4)
    for budget in (
        MediaBudget(drop_similar=True),
        MediaBudget(max_frames=3, max_video_tokens=400),
        MediaBudget(color="checkpoint"),
    ):
        for source in (still, clip):
            here, there = (replace(each, budget=budget) for each in (PROCESSOR, media))
            read, again = here.prepare(source), there.prepare(source)
            assert again.plan == read.plan
            assert np.array_equal(again.patches.pixels, read.patches.pixels)
            assert there.prepare(source, here.plan(source)).plan == read.plan


def test_frames_that_are_lost_are_told(media: DecodingProcessor) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (30, 48, 64, 3), np.uint8)
    data = bytearray(encode_video(list(noise), codec="mjpeg", container="mov"))
    start, step = data.index(b"mdat"), len(data) // 30
    data[start + 12 * step : start + 18 * step] = bytes(6 * step)
    here, there = (replace(each, budget=MediaBudget(fps=10)) for each in (PROCESSOR, media))
    for plan in (None, here.plan(bytes(data))):
        read, again = here.prepare(bytes(data), plan), there.prepare(bytes(data), plan)
        assert (again.plan, again.warnings) == (read.plan, read.warnings)
        assert again.warnings
        assert np.array_equal(again.patches.pixels, read.patches.pixels)


def test_a_plan_that_is_another_mediums_is_refused_in_the_same_words(media: DecodingProcessor) -> None:
    one, two, *_ = SAMPLES
    plan = PROCESSOR.prepare(one).plan
    for given, error in ((plan, MediaChangedError), (replace(plan, size=(64_000, 64_000)), MediaPlanError)):
        told = []
        for each in (PROCESSOR, media):
            with pytest.raises(error) as caught:
                each.prepare(two, given)
            told.append(caught.value.args)
        assert told[0] == told[1]
    with pytest.raises(MediaPlanError, match="is for image, not video"):
        media.prepare(one, plan, "video")


def test_a_picture_of_this_process_is_read_here(media: DecodingProcessor) -> None:
    picture = Image.fromarray(scene(3))
    assert media.prepare(picture).plan == PROCESSOR.prepare(picture).plan


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_what_a_page_shows_and_what_a_server_is_sent(path: Path, media: DecodingProcessor) -> None:
    assert picture_by(media, path, make_thumbnail, media.limits) == make_thumbnail(path, media.limits)
    file = Attachment("0" * 64, "image", path.name, 1)
    box = (0.25, 0.5, 0.75, 1.0)
    assert cut(path, file, media, box, 0.5) == cut(path, file, PROCESSOR, box, 0.5)
    if detect_kind(path) == "image":
        check_picture_by(media, path)
        assert picture_by(media, path, shown_picture, media.limits) == shown_picture(path, media.limits)
        part: Any = ImagePart(path)
    else:
        assert picture_by(media, path, make_frame, 0.5, media.limits) == make_frame(path, 0.5, PROCESSOR.limits)
        part = Video(path, clip=VideoClip(num_frames=3))
    server = default_media(None, None, "frames")
    there = DecodingProcessor.of(server, media.decoders)
    # Also by a plan that was made for a model in a process.
    for each in (part, replace(part, plan=PROCESSOR.plan(path, part.kind, part.clip))):
        sent, expected = encode_by(each, there, "frames"), encode_medium(each, server, "frames")
        assert (sent.parts, sent.plan, sent.warnings) == (expected.parts, expected.plan, expected.warnings)


def test_a_picture_that_no_browser_shows(media: DecodingProcessor, tmp_path: Path) -> None:
    (tmp_path / "a.tif").write_bytes(FORMATS["LZW TIFF"]())
    shown = picture_by(media, tmp_path / "a.tif", shown_picture, media.limits)
    assert shown == shown_picture(tmp_path / "a.tif", media.limits)
    assert shown is not None
    with Image.open(io.BytesIO(shown)) as picture:
        assert picture.size == load_image(tmp_path / "a.tif", media.limits).size


@pytest.mark.parametrize(
    ("source", "num_bytes"),
    [
        (CLIP, CLIP.stat().st_size),
        (str(CLIP), CLIP.stat().st_size),
        (b"abc", 3),
        ("data:,abc", 9),
        ("/no/such/file", 0),
        ("a\0b", 0),
    ],
)
def test_the_time_for_a_medium_is_by_its_own_size(
    source: str | bytes | Path, num_bytes: int, media: DecodingProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def timeout_for(size: int, *_: Any, **__: Any) -> float:
        asked.append(size)
        return 60.0

    monkeypatch.setattr("qwen35mm.decoding.processor.timeout_for", timeout_for)
    with contextlib.suppress(MediaError):
        media.plan(source)
    assert asked == [num_bytes]
