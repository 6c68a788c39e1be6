"""Smart resize against both of transformers' functions, and the strict bound under a budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from qwen35mm_preprocess import ImageProcessing, VideoProcessing
from qwen35mm_preprocess.sizes import image_size, shrink_to_tokens, video_size
from tests.preprocess import oracles
from tests.preprocess.media_files import HALF, IMAGE, SMALL_IMAGE, SMALL_VIDEO, VIDEO

_sides = st.one_of(st.integers(1, 100), st.integers(1, 9000))
IMAGES = [
    IMAGE,
    SMALL_IMAGE,
    ImageProcessing(14, 2, 2, HALF, HALF, min_pixels=3136, max_pixels=1003520),
]
VIDEOS = [
    VIDEO,
    SMALL_VIDEO,
    replace(VIDEO, max_frame_tokens=64),
]


@given(_sides, _sides, st.sampled_from(IMAGES))
def test_image_size_equals_the_oracle(height: int, width: int, processing: ImageProcessing) -> None:
    assume(max(height, width) <= 200 * min(height, width))
    expected = smart_resize(height, width, processing.factor, processing.min_pixels, processing.max_pixels)
    assert image_size((height, width), processing) == expected


@given(st.integers(1, 800), _sides, _sides, st.sampled_from(VIDEOS[:2]))
@example(1, 480, 640, VIDEO)
def test_video_size_equals_the_oracle(frames: int, height: int, width: int, processing: VideoProcessing) -> None:
    assume(max(height, width) <= 150 * min(height, width))
    # One frame has the size of two.
    expected = oracles.video_size(max(frames, 2), height, width, processing)
    assert video_size((height, width), frames, processing) == expected


@given(st.integers(2, 800), st.integers(32, 4000), st.integers(32, 4000), st.sampled_from(VIDEOS))
def test_video_patches_equal_the_oracle(frames: int, height: int, width: int, processing: VideoProcessing) -> None:
    size = video_size((height, width), frames, processing)
    num_patches = -(-frames // 2) * (size[0] // 16) * (size[1] // 16)
    assert num_patches == oracles.num_video_patches(frames, height, width, processing)


@given(_sides, _sides, st.integers(1, 5000), st.sampled_from(IMAGES))
def test_shrunk_size_keeps_its_bound(height: int, width: int, max_tokens: int, processing: ImageProcessing) -> None:
    assume(max(height, width) <= 200 * min(height, width))
    factor = processing.factor
    size = image_size((height, width), processing)
    shrunk = shrink_to_tokens(size, (height, width), factor, max_tokens)
    assert shrunk[0] * shrunk[1] <= max_tokens * factor**2
    assert all(0 < side <= limit and side % factor == 0 for side, limit in zip(shrunk, size, strict=True))
    if size[0] * size[1] <= max_tokens * factor**2:
        assert shrunk == size


@pytest.mark.parametrize(
    ("source", "max_tokens", "expected"),
    [
        ((3000, 4000), 1280, (30 * 32, 41 * 32)),
        ((32, 6400), 50, (32, 50 * 32)),
        ((6400, 32), 50, (50 * 32, 32)),
        ((1000, 1000), 1, (32, 32)),
    ],
)
def test_shrunk_sizes(source: tuple[int, int], max_tokens: int, expected: tuple[int, int]) -> None:
    assert shrink_to_tokens(image_size(source, IMAGES[0]), source, 32, max_tokens) == expected
