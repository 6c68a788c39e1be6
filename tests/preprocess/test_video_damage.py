"""Damaged videos: usable frames and a warning, or a refusal in words; never anything else."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm_preprocess import MediaDecodeError, MediaError, MediaProcessor
from tests.preprocess.media_files import encode_video, scene

NOISE = np.random.default_rng(0).integers(0, 60, (12, 48, 64, 3), np.uint8)
FRAMES = [scene(index) // 2 + noise for index, noise in enumerate(NOISE)]
FILES = [
    encode_video(FRAMES, container=container, codec=codec)
    for container, codec in (
        ("mp4", "libx264"),
        ("mov", "mpeg4"),
        ("matroska", "libx264"),
        ("webm", "libvpx-vp9"),
        ("avi", "mpeg4"),
        ("mpegts", "libx264"),
        ("gif", "gif"),
    )
]


def test_cut_off_gives_usable_frames_and_a_warning(long_clip: bytes, processor: MediaProcessor) -> None:
    media = processor.prepare(long_clip[: len(long_clip) * 2 // 3])
    num_frames = media.plan.source_frames or 0
    assert 0 < num_frames < 120
    warning = f"the uploaded data seems to be cut off: {num_frames} of its 120 frames could be read."
    assert (str(media.plan.notes[0]), str(media.warnings[0])) == (warning, warning)
    assert np.isfinite(media.pixel_values).all()
    assert len(media.pixel_values) == media.plan.grid_thw.num_patches


def test_unreadable_frames_are_left_out_and_pinned(processor: MediaProcessor) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (30, 48, 64, 3), np.uint8)
    data = bytearray(encode_video(list(noise), codec="mjpeg", container="mov"))
    start = data.index(b"mdat")
    step = len(data) // 30
    data[start + 12 * step : start + 18 * step] = bytes(6 * step)
    processor = replace(processor, video_processing=replace(processor.video_processing, fps=10))
    plan = processor.plan(bytes(data))
    assert plan.frame_indices == tuple(range(30))
    media = processor.prepare(bytes(data), plan)
    kept = media.plan.frame_indices or ()
    assert 20 <= len(kept) < 28
    assert not {14, 15} & set(kept)
    assert tuple(map(str, media.warnings)) == (f"{30 - len(kept)} of 30 frames could not be decoded and are left out.",)
    assert media.plan.num_tokens == media.plan.grid_thw.num_tokens()
    assert media.plan.num_prompt_tokens < plan.num_prompt_tokens
    assert len(media.pixel_values) == media.plan.grid_thw.num_patches
    again = processor.prepare(bytes(data), media.plan)
    assert again.plan == media.plan
    np.testing.assert_array_equal(again.pixel_values, media.pixel_values)


def test_no_readable_frame(processor: MediaProcessor) -> None:
    data = bytearray(encode_video([scene(0)] * 5))
    start = data.index(b"mdat") + 4
    stop = data.index(b"moov") - 4
    data[start:stop] = bytes(stop - start)
    with pytest.raises(MediaDecodeError, match="none of its frames is readable"):
        processor.prepare(bytes(data))


@given(st.sampled_from(FILES), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=8), st.data())
def test_damage_never_raises_anything_else(
    processor: MediaProcessor, file: bytes, changes: list[tuple[int, int]], data: st.DataObject
) -> None:
    damaged = bytearray(file)
    # Headers are short and matter most.
    for at, value in changes:
        damaged[at % (600 if at % 2 else len(file))] = value
    stop = data.draw(st.one_of(st.just(len(file)), st.integers(1, len(file))))
    with contextlib.suppress(MediaError):
        media = processor.prepare(bytes(damaged[:stop]), kind="video")
        assert len(media.pixel_values) == media.plan.grid_thw.num_patches
        assert np.isfinite(media.pixel_values).all()
