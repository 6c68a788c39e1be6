"""What a server receives of pictures and videos."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as PILImage

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.remote.media import default_media, encode_medium
from qwen35mm.contract import Image, MediaPlanned, Message, Progress, Text, Video
from qwen35mm.errors import PromptError
from qwen35mm_preprocess import (
    ImageProcessing,
    MediaBudget,
    MediaChangedError,
    MediaDecodeError,
    MediaError,
    MediaLimits,
    MediaPlanError,
    MediaProcessor,
    MediaSourceError,
    VideoClip,
    VideoProcessing,
)
from qwen35mm_preprocess.image import load_image, probe_image
from tests.backends.remote.asking import Asker, events_of
from tests.backends.remote.server import ModelServer
from tests.preprocess.media_files import PHOTOGRAPHS, encode_image, encode_video, scene, scene_index
from tests.preprocess.test_color import P3, profile

LIMITS = MediaLimits()
HALVES = (0.5, 0.5, 0.5)
PHOTO = PILImage.open(PHOTOGRAPHS / "rocket.jpg").convert("RGB").crop((0, 0, 160, 120))
PHOTO.info = {}  # a profile: what is said of colours has tests of its own


def uri_bytes(uri: str) -> tuple[str, bytes]:
    head, _, data = uri.partition(";base64,")
    return head, base64.b64decode(data, validate=True)


def picture(part: dict[str, Any]) -> PILImage.Image:
    """The picture of a content part, as a decoder sees it that knows nothing but pixels."""
    assert part["type"] == "image_url"
    return PILImage.open(io.BytesIO(uri_bytes(part["image_url"]["url"])[1]))


def encoded(source: Any, budget: MediaBudget | None = None) -> dict[str, Any]:
    """The one part of a picture."""
    (part,) = encode_medium(Image(source), default_media(budget, None, "frames"), "frames").parts
    return part


def same(part: dict[str, Any], source: Any) -> bool:
    sent = picture(part)
    return sent.mode == "RGB" and np.array_equal(np.asarray(sent), np.asarray(load_image(source, LIMITS)))


async def test_a_picture_arrives_as_it_is(server: ModelServer, asker: Asker, tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(encode_image(PHOTO, "JPEG"))
    events = await events_of(asker.backend(), [Message("user", (Image(path), Text("What is this?")))])
    image, text = server.bodies[0]["messages"][0]["content"]
    assert uri_bytes(image["image_url"]["url"]) == ("data:image/jpeg", path.read_bytes())
    assert text == {"type": "text", "text": "What is this?"}
    assert events[0] == Progress("read", 0, 1)
    (planned,) = (event for event in events if isinstance(event, MediaPlanned))
    assert planned.plans[0] is not None
    assert planned.plans[0].source_size == (120, 160)


async def test_a_text_stands_in_place_of_a_damaged_picture(server: ModelServer, asker: Asker) -> None:
    whole = encode_image(PHOTO, "PNG")
    pictures = (Image(whole[: len(whole) // 2], stand_in="[gone]"), Image(whole, stand_in="[gone]"))
    backend = asker.backend()
    events = await events_of(backend, [Message("user", pictures)])
    gone, image = server.bodies[-1]["messages"][0]["content"]
    assert gone == {"type": "text", "text": "[gone]"}
    assert uri_bytes(image["image_url"]["url"])[1] == whole
    (planned,) = (event for event in events if isinstance(event, MediaPlanned))
    assert [plan is None for plan in planned.plans] == [True, False]
    await backend.connect()
    headless = Image(whole[:8] + b"x", stand_in="[gone]")
    assert backend.count_tokens([Message("user", headless)]) == backend.count_tokens([Message("user", "[gone]")])
    with pytest.raises(MediaDecodeError):
        await events_of(backend, [Message("user", Image(pictures[0].source))])


def test_files_that_every_decoder_reads_alike_go_out_unchanged() -> None:
    for format, mode in (("JPEG", "RGB"), ("JPEG", "L"), ("PNG", "RGB"), ("PNG", "L")):
        data = encode_image(PHOTO.convert(mode), format)
        assert uri_bytes(encoded(data)["image_url"]["url"]) == (f"data:image/{format.lower()}", data)


def test_a_picture_of_other_colours_is_sent_in_srgb() -> None:
    """A server passes over profiles."""
    data = encode_image(PHOTO, "PNG", icc_profile=profile(P3, 2.2))
    sent = uri_bytes(encoded(data)["image_url"]["url"])[1]
    assert sent != data
    with PILImage.open(io.BytesIO(sent)) as picture:
        assert "icc_profile" not in picture.info
        assert same_pixels(picture, load_image(data, LIMITS))
    as_it_is = encoded(data, MediaBudget(color="checkpoint"))
    with PILImage.open(io.BytesIO(uri_bytes(as_it_is["image_url"]["url"])[1])) as picture:
        assert same_pixels(picture, PHOTO)


def same_pixels(picture: PILImage.Image, expected: PILImage.Image) -> bool:
    return np.array_equal(np.asarray(picture), np.asarray(expected))


def turned_jpeg() -> bytes:
    exif = PILImage.Exif()
    exif[0x0112] = 6
    return encode_image(PHOTO, "JPEG", exif=exif.tobytes())


def half_clear_png() -> bytes:
    picture = PHOTO.convert("RGBA")
    picture.putalpha(PILImage.linear_gradient("L").resize(picture.size))
    return encode_image(picture, "PNG")


LOSSLESS = {
    "alpha": half_clear_png(),
    "transparent colour": encode_image(PHOTO, "PNG", transparency=PHOTO.getpixel((0, 0))),
    "palette": encode_image(PHOTO.quantize(), "PNG"),
    "16 bits": encode_image(PILImage.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64) * 16), "PNG"),
    "WebP": encode_image(PHOTO, "WEBP"),
    "GIF": encode_image(PHOTO, "GIF"),
    "BMP": encode_image(PHOTO, "BMP"),
    "TIFF": encode_image(PHOTO, "TIFF"),
    "animated PNG": encode_image(PHOTO, "PNG", save_all=True, append_images=[PHOTO.rotate(180)]),
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_what_decoders_read_in_different_ways_is_decoded_here(name: str) -> None:
    part = encoded(LOSSLESS[name])
    assert uri_bytes(part["image_url"]["url"])[0] == "data:image/png"
    assert same(part, LOSSLESS[name])
    assert not probe_image(LOSSLESS[name], LIMITS).is_plain or name in ("WebP", "BMP", "TIFF")


def test_a_turned_photograph_is_sent_upright() -> None:
    sent = picture(encoded(turned_jpeg()))
    assert (sent.size, sent.getexif().get(0x0112)) == ((120, 160), None)
    difference = np.asarray(sent, float) - np.asarray(load_image(turned_jpeg(), LIMITS), float)
    assert np.abs(difference).mean() < 3


def test_a_pil_image_is_sent_whole() -> None:
    assert same(encoded(PHOTO), PHOTO)


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_a_large_picture_is_made_as_small_as_the_budget_says(format: str) -> None:
    data = encode_image(PHOTO.resize((640, 480)), format)
    part = encoded(data, MediaBudget(max_image_tokens=82))
    sent = picture(part)
    assert uri_bytes(part["image_url"]["url"])[0] == f"data:image/{format.lower()}"
    assert sent.size == (320, 224)
    difference = np.asarray(sent, float) - np.asarray(load_image(data, LIMITS).resize(sent.size), float)
    assert np.abs(difference).mean() < 4
    # At the limit, which counts the marks around it, nothing is touched.
    assert uri_bytes(encoded(data, MediaBudget(max_image_tokens=302))["image_url"]["url"])[1] == data


def test_bad_pictures_are_never_sent(tmp_path: Path) -> None:
    data = encode_image(PHOTO, "JPEG")
    small = default_media(None, MediaLimits(max_source_pixels=100), "frames")
    with pytest.raises(MediaDecodeError, match="cut off"):
        encoded(data[: len(data) // 2])
    with pytest.raises(MediaError, match="at most"):
        encode_medium(Image(data), small, "frames")
    with pytest.raises(MediaSourceError, match="no such file"):
        encoded(tmp_path / "nothing.png")


async def test_a_bad_picture_fails_before_the_server_is_asked(server: ModelServer, asker: Asker) -> None:
    with pytest.raises(MediaDecodeError):
        await asker.ask([Message("user", (Image(encode_image(PHOTO, "PNG")[:200]),))])
    assert server.bodies == []


async def test_a_prepared_medium_cannot_be_sent(asker: Asker) -> None:
    prepared = default_media(None, None, "frames").prepare(PHOTO)
    with pytest.raises(MediaSourceError, match="Pass its file"):
        await asker.ask([Message("user", (Image(prepared),))])


async def test_a_medium_that_is_encoded_already_is_sent_as_it_is(server: ModelServer, asker: Asker) -> None:
    medium = encode_medium(Image(PHOTO), default_media(None, None, "frames"), "frames")
    await asker.ask([Message("user", (Image(medium),))])
    assert server.bodies[0]["messages"][0]["content"] == list(medium.parts)
    with pytest.raises(PromptError, match="prepared as image"):
        Video(medium)


async def test_a_video_arrives_as_frames_with_their_times(server: ModelServer, asker: Asker) -> None:
    video = encode_video([scene(index, (96, 128)) for index in range(30)], fps=10)
    events = await events_of(asker.backend(), [Message("user", (Video(video), Text("What happens?")))])
    (planned,) = (event for event in events if isinstance(event, MediaPlanned))
    plan = planned.plans[0]
    *frames, question = server.bodies[0]["messages"][0]["content"]
    assert question["text"] == "What happens?"
    assert plan is not None
    assert plan.frame_times_s is not None
    assert [part["text"] for part in frames[::2]] == [f"<{time:.1f} seconds>" for time in plan.frame_times_s]
    shown = [scene_index(np.asarray(picture(part))) for part in frames[1::2]]
    assert shown == list(plan.frame_indices or ())
    assert len(shown) == 6
    assert picture(frames[1]).size == (128, 96)
    assert (plan.duration_s, plan.grid_thw.t) == (3.0, 6)


def test_frames_are_few_and_small_enough_for_the_budget() -> None:
    video = Video(encode_video([scene(index, (192, 256)) for index in range(30)], fps=1))
    medium = encode_medium(video, default_media(MediaBudget(max_frames=5), None, "frames"), "frames")
    assert len(medium.parts) == 10
    medium = encode_medium(video, default_media(MediaBudget(max_video_tokens=300), None, "frames"), "frames")
    sizes = {picture(part).size for part in medium.parts[1::2]}
    assert sizes == {(medium.plan.size[1], medium.plan.size[0])}
    assert medium.plan.num_prompt_tokens <= 300


def test_a_part_is_sent_as_its_frames() -> None:
    video = Video(encode_video([scene(index) for index in range(30)], fps=10), clip=VideoClip(1.0, 2.0, 3))
    media = default_media(None, None, "frames")
    medium = encode_medium(video, media, "frames")
    assert [part["text"] for part in medium.parts[::2]] == ["<1.0 seconds>", "<1.5 seconds>", "<2.0 seconds>"]
    with pytest.raises(MediaSourceError, match="Send the video as its frames"):
        encode_medium(video, media, "video_url")


def test_unreadable_frames_are_left_out_and_told() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (30, 48, 64, 3), np.uint8)
    data = bytearray(encode_video(list(noise), codec="mjpeg", container="mov"))
    start, step = data.index(b"mdat"), len(data) // 30
    data[start + 12 * step : start + 18 * step] = bytes(6 * step)
    media = default_media(MediaBudget(fps=10), None, "frames")
    medium = encode_medium(Video(bytes(data)), media, "frames")
    kept = len(medium.plan.frame_indices or ())
    assert 20 <= kept < 28
    assert medium.plan.grid_thw.t == len(medium.parts) // 2 == kept
    assert tuple(map(str, medium.warnings)) == (f"{30 - kept} of 30 frames could not be decoded and are left out.",)
    start, stop = data.index(b"mdat") + 4, data.index(b"moov") - 4
    data[start:stop] = bytes(stop - start)
    with pytest.raises(MediaDecodeError, match="none of its frames is readable"):
        encode_medium(Video(bytes(data)), media, "frames")


async def test_a_video_can_be_sent_whole(server: ModelServer, asker: Asker) -> None:
    for container, codec, media_type in (("mp4", "libx264", "video/mp4"), ("webm", "libvpx", "video/webm")):
        video = encode_video([scene(index) for index in range(8)], container=container, codec=codec)
        await asker.ask([Message("user", (Video(video),))], video="video_url")
        (part,) = server.bodies[-1]["messages"][0]["content"]
        assert part["type"] == "video_url"
        assert uri_bytes(part["video_url"]["url"]) == (f"data:{media_type}", video)


def test_frames_are_those_of_the_plan_whatever_the_budget_is_by_then() -> None:
    video = encode_video([scene(index, (192, 256)) for index in range(30)], fps=10)
    first = encode_medium(Video(video), default_media(MediaBudget(max_frames=5), None, "frames"), "frames")
    later = default_media(MediaBudget(max_frames=3, max_video_tokens=100), None, "frames")
    again = encode_medium(Video(video, first.plan), later, "frames")
    assert (again.parts, again.plan) == (first.parts, first.plan)
    assert encode_medium(Video(video), later, "frames").parts != first.parts


def test_a_picture_is_as_large_as_its_plan_says() -> None:
    photo = encode_image(PHOTO.resize((640, 480)), "PNG")
    small = encode_medium(Image(photo), default_media(MediaBudget(max_image_tokens=82), None, "frames"), "frames")
    roomy = default_media(None, None, "frames")
    again = encode_medium(Image(photo, small.plan), roomy, "frames")
    assert again.parts == small.parts
    whole = encode_medium(Image(photo), roomy, "frames")
    frugal = default_media(MediaBudget(max_image_tokens=82), None, "frames")
    assert encode_medium(Image(photo, whole.plan), frugal, "frames").parts == whole.parts


@pytest.mark.parametrize("mode", ["frames", "video_url"])
def test_a_plan_of_a_model_in_a_process_holds_and_stays_complete(mode: Any) -> None:
    video = encode_video([scene(index, (192, 256)) for index in range(30)], fps=10)
    server = default_media(MediaBudget(max_frames=4), None, mode)
    local = MediaProcessor(ImageProcessing(16, 2, 2, HALVES, HALVES), VideoProcessing(16, 2, 2, HALVES, HALVES))
    for part, source in ((Video, video), (Image, PHOTO)):
        plan = local.prepare(source, kind="video" if part is Video else "image").plan
        assert plan.digest is not None
        medium = encode_medium(part(source, plan), server, mode)
        assert medium.plan is plan
        if part is Video and mode == "frames":
            assert len(medium.parts) // 2 == len(plan.frame_indices or ()) > 4


def test_a_server_plan_is_no_promise_to_a_model_in_a_process() -> None:
    video = encode_video([scene(index, (192, 256)) for index in range(30)], fps=10)
    frames = encode_medium(Video(video), default_media(None, None, "frames"), "frames").plan
    photo = PHOTO.resize((1200, 900))
    picture = encode_medium(Image(photo), default_media(None, None, "frames"), "frames").plan
    demo = MediaProcessor.from_pretrained(demo_model_path())
    assert demo.kept(frames, video) is None
    assert demo.kept(picture, photo) is None, "it is larger than the demo sees any"
    own = demo.plan(photo, "image")
    assert demo.kept(own, photo) is own
    with pytest.raises(MediaPlanError):
        demo.prepare(video, plan=frames)


def test_another_file_than_the_plan_s_is_refused() -> None:
    media = default_media(None, None, "frames")
    video = encode_video([scene(index, (192, 256)) for index in range(30)], fps=10)
    other = encode_video([scene(index, (192, 256)) for index in range(20)], fps=10)
    plan = encode_medium(Video(video), media, "frames").plan
    with pytest.raises(MediaChangedError, match="is not the video that was planned"):
        encode_medium(Video(other, plan), media, "frames")
    plan = encode_medium(Image(PHOTO), media, "frames").plan
    with pytest.raises(MediaChangedError, match="is not the image that was planned"):
        encode_medium(Image(PHOTO.resize((320, 240)), plan), media, "frames")
    with pytest.raises(MediaPlanError):
        encode_medium(Image(PHOTO, replace(plan, size=(64000, 64000))), media, "frames")
