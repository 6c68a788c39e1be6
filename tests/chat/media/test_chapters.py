"""Chapters of long videos."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qwen35mm.chat.media import chapters
from qwen35mm.chat.media.chapters import find_chapters, read_chapters
from qwen35mm.decoding.answers import NonsenseError, read_here
from qwen35mm_preprocess import MediaLimits
from qwen35mm_preprocess.shots import change_points
from qwen35mm_preprocess.video_probe import VideoInfo
from tests.preprocess.media_files import HOUR_SCENES_S, encode_video, hour_video, scene


def test_an_hour_is_looked_at_on_few_frames_and_cut_where_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hour.mp4"
    path.write_bytes(hour_video())
    asked: list[int] = []
    real = chapters.decode_frames

    def counting(source: Path, info: VideoInfo, indices: list[int], limits: MediaLimits) -> object:
        asked.extend(indices)
        assert info.is_key[indices].all(), "key frames are decoded without those before them"
        return real(source, info, indices, limits)

    monkeypatch.setattr(chapters, "decode_frames", counting)
    done: list[int] = []
    answer = find_chapters(path, MediaLimits(), lambda number, total: done.append(number))
    assert done == list(range(1, len(asked) + 1))
    assert len(asked) < 260
    found = read_here(read_chapters, answer)
    starts = [each.start_s for each in found]
    # To the next key frame.
    assert starts == pytest.approx(HOUR_SCENES_S, abs=15)
    assert all(start >= wanted for start, wanted in zip(starts, HOUR_SCENES_S, strict=True))
    assert [each.end_s for each in found] == [*(pytest.approx(start - 0.05) for start in starts[1:]), 3600]
    assert all(each.picture.startswith(b"\xff\xd8") for each in found)


def test_a_short_video_has_no_chapters(tmp_path: Path) -> None:
    path = tmp_path / "short.mp4"
    path.write_bytes(encode_video([scene(index) for index in range(20)]))
    assert read_here(read_chapters, find_chapters(path, MediaLimits(), print)) == []


def test_a_chapter_of_one_frame_lasts_as_long_as_it_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "slides.mp4"
    slides = [np.full((48, 64, 3), grey, np.uint8) for grey in (0, 120, 240)]
    path.write_bytes(encode_video(slides, fps=1, pts=[0, 100, 101]))
    found = read_here(read_chapters, find_chapters(path, MediaLimits(), print))
    times = [(each.start_s, each.end_s) for each in found]
    assert times[:2] == [(0, pytest.approx(99.95)), (100, pytest.approx(100.95))]
    assert times[2][0] == 101


def test_parts_last_and_differ() -> None:
    dark, light = np.zeros((40, 192)), np.full((40, 192), 100.0)
    flicker = np.where(np.arange(80)[:, None] % 2, 100.0, 0.0) * np.ones(192)
    assert change_points(np.concatenate([dark, light]), 4, 9) == [40]
    assert change_points(np.concatenate([dark, light, dark]), 4, 9) == [40, 80]
    assert change_points(np.concatenate([dark, dark + 5]), 4, 9) == [], "too much alike"
    assert change_points(flicker, 4, 9) == [], "nothing lasts"
    steps = np.repeat(np.arange(30) * 40.0, 5)[:, None] * np.ones(192)
    assert len(change_points(steps, 1, 9)) == 8


@pytest.mark.parametrize(
    "values", [[[0.0, 9.0, 1]], [[9.0, 1.0, 0]], [["0", 1.0, 0]], [[0.0, 5.0, 0], [1.0, 9.0, 0]], 7]
)
def test_nonsense_of_a_decoder_is_refused(values: object) -> None:
    with pytest.raises(NonsenseError):
        read_here(read_chapters, chapters.Answer(values))
