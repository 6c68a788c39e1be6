"""Clips as a player shows them: spliced, trimmed, with fields, with pixels that aren't square."""

from __future__ import annotations

import io
from contextlib import ExitStack
from fractions import Fraction

import av
import numpy as np
import pytest
from av.stream import Disposition
from PIL import Image

from qwen35mm_preprocess import MediaProcessor, detect_kind
from qwen35mm_preprocess.video import decode_frames, first_frame
from qwen35mm_preprocess.video_probe import probe_video
from tests.preprocess.media_files import LIMITS, encode_video, pixel, scene, scene_index, turned

SCENES = [scene(index) for index in range(30)]


def shown(data: bytes) -> list[int]:
    """Which scene each frame shows."""
    info = probe_video(data, LIMITS)
    frames = decode_frames(data, info, range(info.num_frames), LIMITS)
    return [scene_index(np.asarray(frame)) for _, frame in frames]


@pytest.mark.parametrize("bframes", ["0", "2"])
def test_a_spliced_transport_stream_goes_on_where_its_times_begin_anew(bframes: str, processor: MediaProcessor) -> None:
    first, second = (
        encode_video(part, container="mpegts", options={"bf": bframes}) for part in (SCENES[:12], SCENES[10:30])
    )
    data = first + second
    info = probe_video(data, LIMITS)
    # A decoder may hold a frame back where its stream changes without a word.
    assert 30 <= info.num_frames <= 32
    assert np.all(np.diff(info.times_s) > 0)
    assert info.times_s[-1] == pytest.approx(3.1, abs=0.25)
    found = shown(data)
    assert len(found) >= 30
    assert (found[0], found[-1]) == (0, 29)
    media = processor.prepare(data)
    assert media.plan.frame_indices is not None
    assert len(media.patches) == media.plan.grid_thw.num_patches


def test_a_trim_that_copies_packets_isnt_cut_off() -> None:
    """What a player doesn't show is no loss: the edit list says from where on."""
    whole = encode_video(SCENES, options={"g": "30", "bf": "0"})
    file = io.BytesIO()
    with av.open(io.BytesIO(whole)) as source, av.open(file, "w", format="mp4") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        ticks = int(Fraction(11, 10) / source.streams.video[0].time_base)  # pyright: ignore[reportOperatorIssue]
        for packet in source.demux(video=0):
            if packet.size:
                assert packet.pts is not None
                assert packet.dts is not None
                packet.pts, packet.dts, packet.stream = packet.pts - ticks, packet.dts - ticks, stream
                target.mux(packet)
    info = probe_video(file.getvalue(), LIMITS)
    assert (info.num_frames, info.warnings) == (19, ())
    assert shown(file.getvalue())[0] == 11


@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts"])
def test_pixels_that_arent_square(container: str, processor: MediaProcessor) -> None:
    """A disc of anamorphic PAL is a disc again."""
    height, width, aspect = 96, 120, Fraction(64, 45)
    y, x = np.mgrid[:height, :width]
    disc = ((x - width / 2) * float(aspect)) ** 2 + (y - height / 2) ** 2 < 40**2
    frame = np.where(disc[..., None], np.uint8(220), np.uint8(20)).repeat(3, axis=-1)
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream("libx264", rate=10, options={"crf": "5"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.sample_aspect_ratio = aspect
        for index in range(4):
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            picture.pts = index
            output.mux(stream.encode(picture))
        output.mux(stream.encode())
    data = file.getvalue()
    assert probe_video(data, LIMITS).size == (96, round(120 * aspect))
    bright = np.asarray(first_frame(data, LIMITS).convert("L")) > 128
    across, down = bright.any(axis=0).sum(), bright.any(axis=1).sum()
    assert abs(int(across) - int(down)) <= 3
    plan = processor.plan(data)
    assert plan.size[1] / plan.size[0] == pytest.approx(171 / 96, rel=0.2)
    if container == "mp4":
        assert probe_video(turned(data, (0, 1, -1, 0)), LIMITS).size == (round(120 * aspect), 96)
        assert first_frame(turned(data, (0, 1, -1, 0)), LIMITS).size == (96, round(120 * aspect))


def interlaced(top: np.ndarray, bottom: np.ndarray) -> bytes:
    """A clip whose frames have lines of two moments, and say so."""
    woven = top.copy()
    woven[1::2] = bottom[1::2]
    file = io.BytesIO()
    with av.open(file, "w", format="mpegts") as output:
        stream = output.add_stream("mpeg2video", rate=25, options={"flags": "+ildct+ilme", "b": "6000000"})
        stream.width, stream.height, stream.pix_fmt = top.shape[1], top.shape[0], "yuv420p"
        for index in range(3):
            picture = av.VideoFrame.from_ndarray(woven, format="rgb24")
            picture.pts = index
            output.mux(stream.encode(picture))
        output.mux(stream.encode())
    return file.getvalue()


def test_fields_of_two_moments_are_no_comb() -> None:
    top = np.full((96, 128, 3), 30, np.uint8)
    bottom = top.copy()
    top[20:70, 30:60], bottom[20:70, 50:80] = 220, 220
    data = interlaced(top, bottom)
    found = np.asarray(first_frame(data, LIMITS).convert("L")).astype(int)
    inside = found[30:60]
    assert np.abs(np.diff(inside, axis=0)).mean() < 2
    assert np.abs(inside[:, 35:45] - 220).mean() < 20
    assert np.abs(inside[:, 65:75] - 30).mean() < 20
    as_before = np.asarray(first_frame(data, LIMITS, "checkpoint").convert("L")).astype(int)[30:60]
    assert np.abs(np.diff(as_before, axis=0)).mean() > 40


def test_a_moment_in_both_fields_keeps_all_its_lines() -> None:
    frame = np.asarray(Image.effect_mandelbrot((128, 96), (-2, -1.2, 1, 1.2), 60).convert("RGB"))
    found = np.asarray(first_frame(interlaced(frame, frame), LIMITS)).astype(int)
    assert np.abs(found - frame).mean() < 6


@pytest.mark.parametrize(
    ("container", "codec", "size"),
    [
        ("mpeg", "mpeg1video", (48, 64)),
        ("vob", "mpeg2video", (48, 64)),
        ("mpeg2video", "mpeg2video", (48, 64)),
        ("asf", "wmv2", (48, 64)),
        ("flv", "flv", (48, 64)),
        ("avi", "msmpeg4", (48, 64)),
        ("avi", "msmpeg4v2", (48, 64)),
        ("avi", "huffyuv", (48, 64)),
        ("avi", "rawvideo", (48, 64)),
        ("matroska", "ffv1", (48, 64)),
        ("mov", "qtrle", (48, 64)),
        ("dv", "dvvideo", (576, 720)),
    ],
)
def test_containers_and_codecs_of_cameras_and_archives(container: str, codec: str, size: tuple[int, int]) -> None:
    frames = [scene(index, size) for index in range(6)]
    data = encode_video(frames, container=container, codec=codec, fps=25)
    info = probe_video(data, LIMITS)
    assert detect_kind(data) == "video"
    shown = [scene_index(np.asarray(frame)) for _, frame in decode_frames(data, info, range(info.num_frames), LIMITS)]
    assert shown == list(range(6))
    np.testing.assert_allclose(info.times_s, np.arange(6) / 25, atol=2e-3)


def test_a_transport_stream_of_a_camera_has_its_time_before_each_packet() -> None:
    plain = encode_video([scene(index) for index in range(6)], container="mpegts", codec="mpeg2video", fps=25)
    packets = [plain[at : at + 188] for at in range(0, len(plain), 188)]
    data = b"".join(b"\0\0\1\2" + packet for packet in packets)
    info, expected = probe_video(data, LIMITS), probe_video(plain, LIMITS)
    np.testing.assert_array_equal(info.pts, expected.pts)
    assert len(list(decode_frames(data, info, range(6), LIMITS))) == 6


@pytest.mark.parametrize("codec", ["libvpx", "libvpx-vp9"])
def test_alpha_of_a_webm_is_laid_over_white(codec: str) -> None:
    values = np.zeros((48, 64, 4), np.uint8)
    values[:, :32], values[:, 32:] = (200, 0, 0, 255), (0, 200, 0, 0)
    values[24:, :, 3] //= 2
    data = webm_with_alpha([values] * 3, codec)
    info = probe_video(data, LIMITS)
    for _, frame in [*decode_frames(data, info, [0, 2], LIMITS), (0, first_frame(data, LIMITS))]:
        for place, expected in (((8, 8), (200, 0, 0)), ((56, 8), (255, 255, 255)), ((8, 40), (227, 128, 128))):
            np.testing.assert_allclose(pixel(frame, *place), expected, atol=6)
    np.testing.assert_allclose(pixel(first_frame(data, LIMITS, "checkpoint"), 56, 8), (0, 200, 0), atol=6)


def webm_with_alpha(frames: list[np.ndarray], codec: str) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as output:
        stream = output.add_stream(codec, rate=10, options={"auto-alt-ref": "0", "crf": "4"})
        stream.width, stream.height, stream.pix_fmt = frames[0].shape[1], frames[0].shape[0], "yuva420p"
        for values in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(values, format="rgba")))
        output.mux(stream.encode())
    return file.getvalue()


def test_the_default_track_is_what_is_seen() -> None:
    """As players do, also where it isn't the first."""
    videos = [encode_video(part) for part in (SCENES[:4], SCENES[10:14])]
    file = io.BytesIO()
    with ExitStack() as stack:
        target = stack.enter_context(av.open(file, "w", format="matroska"))
        sources = [stack.enter_context(av.open(io.BytesIO(video))) for video in videos]
        streams = [target.add_stream_from_template(source.streams.video[0]) for source in sources]
        streams[0].disposition, streams[1].disposition = Disposition(0), Disposition.default
        for source, stream in zip(sources, streams, strict=True):
            for packet in source.demux(video=0):
                if packet.size:
                    packet.stream = stream
                    target.mux(packet)
    assert shown(file.getvalue()) == [10, 11, 12, 13]
