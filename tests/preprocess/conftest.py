"""Media that several tests read, made once a session."""

from __future__ import annotations

import pytest

from qwen35mm_preprocess import MediaBudget, MediaProcessor
from tests.preprocess.media_files import IMAGE, VIDEO, encode_video, scene


@pytest.fixture(scope="session")
def processor() -> MediaProcessor:
    """That of the Qwen3.5 checkpoints, without a budget."""
    return MediaProcessor(IMAGE, VIDEO, MediaBudget())


@pytest.fixture(scope="session")
def clip() -> bytes:
    """3 seconds at 10 fps, 64 x 48, H.264 with B-frames in an MP4."""
    return encode_video([scene(index) for index in range(30)])


@pytest.fixture(scope="session")
def long_clip() -> bytes:
    """12 seconds at 10 fps with a keyframe every 20 frames and its index in front; loops through 36 scenes."""
    return encode_video(
        [scene(index % 36) for index in range(120)],
        options={"g": "20", "keyint_min": "20", "sc_threshold": "0"},
        container_options={"movflags": "faststart"},
    )
