"""Animated WebP, PNG and AVIF: what was put in comes out, at its times; PNG as libav composes it."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
from PIL import Image

from qwen35mm_preprocess import MediaError, MediaLimits, MediaProcessor, detect_kind
from qwen35mm_preprocess.formats import HAS_AVIF
from qwen35mm_preprocess.video import decode_frames, first_frame
from qwen35mm_preprocess.video_probe import probe_video
from tests.preprocess.media_files import encode_image, encode_video, pixel, scene

LIMITS = MediaLimits()
FORMATS = ("WEBP", "PNG", pytest.param("AVIF", marks=pytest.mark.skipif(not HAS_AVIF, reason="Pillow without AVIF")))
# The first frame is blank, as it often is.
FRAMES = [
    Image.new("RGBA", (64, 48), color) for color in ((255, 0, 0, 0), (0, 255, 0, 255), (0, 0, 255, 128), (9, 9, 9, 255))
]
SHOWN = ((255, 255, 255), (0, 255, 0), (127, 127, 255), (9, 9, 9))


def animated(format: str, durations: list[int], **options: object) -> bytes:
    exact: dict[str, object] = {"lossless": True} if format == "WEBP" else {"quality": 95, "subsampling": "4:4:4"}
    extra = {} if format == "PNG" else exact
    return encode_image(
        FRAMES[0], format, save_all=True, append_images=FRAMES[1:], duration=durations, **extra, **options
    )


@pytest.mark.parametrize("format", FORMATS)
def test_an_animated_picture_is_a_clip_at_its_times(format: str, processor: MediaProcessor) -> None:
    data = animated(format, [100, 500, 100, 300])
    assert detect_kind(data) == "video"
    info = probe_video(data, LIMITS)
    assert (info.num_frames, info.size, info.is_constant) == (4, (48, 64), False)
    np.testing.assert_allclose(info.times_s, [0, 0.1, 0.6, 0.7])
    assert info.duration_s == pytest.approx(1.0)
    assert not info.warnings
    for index, frame in decode_frames(data, info, [0, 1, 2, 3], LIMITS):
        assert frame.mode == "RGB"
        np.testing.assert_allclose(pixel(frame, 30, 20), SHOWN[index], atol=4)
    ((_, last),) = decode_frames(data, info, [3], LIMITS)
    np.testing.assert_allclose(pixel(last, 30, 20), SHOWN[3], atol=4)
    assert first_frame(data, LIMITS).size == (64, 48)
    assert processor.prepare(data, kind="video").plan.source_frames == 4


@pytest.mark.parametrize("format", FORMATS)
def test_a_still_one_is_a_picture(format: str) -> None:
    data = encode_image(FRAMES[1], format)
    assert detect_kind(data) == "image"
    with pytest.raises(MediaError, match="is an image"):
        probe_video(data, LIMITS)


def test_a_frame_without_a_time_is_shown_as_browsers_show_it() -> None:
    info = probe_video(animated("WEBP", [0, 10, 11, 100]), LIMITS)
    np.testing.assert_allclose(info.times_s, [0, 0.1, 0.2, 0.211])


def test_a_png_is_composed_as_libav_does() -> None:
    # Parts of pictures, over one another and over nothing, after a picture that isn't one of the animation's.
    generator = np.random.default_rng(0)
    frames = []
    for _ in range(4):
        values = np.zeros((48, 64, 4), np.uint8)
        top, left = generator.integers(0, 24, 2)
        values[top : top + 20, left : left + 30] = generator.integers(0, 256, 4)
        frames.append(Image.fromarray(values))
    for disposal in (0, 1, 2):
        for blend in (0, 1):
            options = {"disposal": disposal, "blend": blend, "default_image": True, "duration": [50, 30, 200, 70]}
            data = encode_image(
                Image.new("RGBA", (64, 48), "red"), "PNG", save_all=True, append_images=frames, **options
            )
            with av.open(io.BytesIO(data), format="apng") as container:
                expected = [(frame.time, frame.to_ndarray(format="rgba")) for frame in container.decode(video=0)]
            info = probe_video(data, LIMITS)
            np.testing.assert_allclose(info.times_s, [time for time, _ in expected], atol=1e-4)
            for index, frame in decode_frames(data, info, range(info.num_frames), LIMITS):
                values = expected[index][1].astype(float)
                alpha = values[..., 3:] / 255
                np.testing.assert_allclose(np.asarray(frame), values[..., :3] * alpha + 255 * (1 - alpha), atol=2)


@pytest.mark.parametrize("format", ["WEBP", "PNG"])
def test_limits_and_damage(format: str) -> None:
    data = animated(format, [100, 500, 100, 300])
    for limits in (MediaLimits(max_source_frames=3), MediaLimits(max_duration_s=0.9), MediaLimits(max_source_pixels=9)):
        with pytest.raises(MediaError, match=r"Cut it|smaller"):
            probe_video(data, limits)
    for end in range(0, len(data), 7):
        try:
            info = probe_video(data[:end], LIMITS)
        except MediaError:
            continue
        assert len(list(decode_frames(data[:end], info, range(info.num_frames), LIMITS))) <= 4


def test_other_videos_are_read_as_before() -> None:
    data = encode_video([scene(index) for index in range(3)], codec="mpeg4")
    assert not probe_video(data, LIMITS).is_animation
