"""Where videos are split: seconds, cuts, and windows as trainers count them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from qwen35mm.captioning.items import Part
from qwen35mm.captioning.media.splits import parse_split, split_frames, times_of
from qwen35mm.errors import CaptioningError
from qwen35mm_preprocess.video_probe import VideoInfo


def info(num_frames: int, fps: float = 10.0, keys: int = 7) -> VideoInfo:
    """A video with a key frame every so many frames."""
    times = np.arange(num_frames) / fps
    is_key = np.arange(num_frames) % keys == 0
    size, pts = (64, 64), np.arange(num_frames)
    return VideoInfo(size, None, pts, is_key, times, fps, True, num_frames / fps, can_seek=True, warnings=())


def parts(text: str, video: VideoInfo, cuts: tuple[int, ...] = (), *, at_keys: bool = False) -> list[tuple[int, int]]:
    split = parse_split(text)
    assert split is not None
    return [(part.start, part.stop) for part in split_frames(split, video, lambda: list(cuts), at_keys=at_keys)]


@pytest.mark.parametrize(
    ("text", "num_frames", "expected"),
    [
        ("3s", 100, [(0, 30), (30, 60), (60, 90), (90, 100)]),
        ("3s", 95, [(0, 30), (30, 60), (60, 95)]),  # a rest under 0.6 s stays with the last part
        ("0.1m", 50, [(0, 50)]),
        ("head:17", 40, [(0, 17)]),
        ("head:41", 40, [(0, 40)]),
        ("middle:17", 40, [(11, 28)]),
        ("chunk:17", 40, [(0, 17), (17, 34)]),
        ("slide:17/10", 40, [(0, 17), (10, 27), (20, 37)]),
        ("uniform:17*3", 40, [(0, 17), (11, 28), (23, 40)]),
        ("uniform:17*1", 40, [(0, 17)]),
        ("chunk:8@5", 40, [(0, 16), (16, 32)]),
        ("head:33@20", 40, [(0, 17)]),
    ],
)
def test_parts_of_a_length_and_windows(text: str, num_frames: int, expected: list[tuple[int, int]]) -> None:
    assert parts(text, info(num_frames)) == expected


@pytest.mark.parametrize("text", ["scene", "30", "0s", "0.5s", "head:0", "slide:81/0", "uniform:81*0", "head:8@0", ""])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(CaptioningError, match="--split must be never, scenes"):
        parse_split(text)


def test_never_is_no_split_and_spaces_and_case_mean_nothing() -> None:
    assert parse_split("never") is None
    assert parse_split("Scenes: 30 s") == parse_split("scenes:30s")


def test_parts_end_at_cuts_that_are_not_too_near() -> None:
    assert parts("scenes", info(100), (3, 20, 24, 60, 97)) == [(0, 20), (20, 60), (60, 100)]
    assert parts("scenes", info(100)) == [(0, 100)]


def test_long_scenes_are_divided_evenly() -> None:
    assert parts("scenes:3s", info(100), (20,)) == [(0, 20), (20, 47), (47, 74), (74, 100)]


def test_boundaries_move_to_key_frames_and_cuts_do_not() -> None:
    assert parts("2s", info(70), at_keys=True) == [(0, 21), (21, 42), (42, 63), (63, 70)]
    assert parts("scenes", info(70), (20,), at_keys=True) == [(0, 20), (20, 70)]
    assert parts("1s", info(60, keys=40), at_keys=True) == [(0, 40), (40, 60)]


@pytest.mark.parametrize("fps", [10.0, 23.976, 25.0, 59.94, 240.0])
@pytest.mark.parametrize("text", ["3s", "1.7s", "chunk:13"])
def test_each_frame_is_in_one_part(text: str, fps: float) -> None:
    """As the decoder takes the frames of a range, from times that were rounded for the manifest."""
    video, split = info(1300, fps), parse_split(text)
    assert split is not None
    times = times_of(split_frames(split, video, list), video)
    clips = [Part(number, *each).clip for number, each in enumerate(times, 1)]
    frames = [video.within(clip.start_s, clip.end_s) for clip in clips if clip is not None]
    assert frames[0].start == 0
    assert all(before.stop == after.start for before, after in pairwise(frames))
    assert frames[-1].stop == 1300
