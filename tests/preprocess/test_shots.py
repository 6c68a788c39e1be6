"""Cuts are found; motion, a flash and a flicker are none; a long video is held for a few seconds only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qwen35mm_preprocess import MediaLimits
from qwen35mm_preprocess.shots import cuts_of, find_cuts, layout_of
from qwen35mm_preprocess.video_probe import probe_video
from tests.preprocess.media_files import encode_video

FPS = 25.0


def world(seed: int, side: int = 400) -> Image.Image:
    """A wide picture of coarse and fine structure."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
    fine = rng.integers(-20, 20, (side // 4, side // 4, 3)).repeat(4, 0).repeat(4, 1)
    picture = np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC), np.int16)
    return Image.fromarray((picture + fine).clip(0, 255).astype(np.uint8))


def shot(seed: int, num_frames: int, speed: float = 0.0) -> list[np.ndarray]:
    """Layouts of a camera that moves over a picture, by so many pixels a frame."""
    picture = world(seed)
    return [
        layout_of(picture.crop((round(speed * t) % 200, 50, round(speed * t) % 200 + 160, 140)))
        for t in range(num_frames)
    ]


def found(layouts: list[np.ndarray]) -> list[int]:
    return list(cuts_of(layouts, FPS))


def test_cuts_between_still_and_moving_shots() -> None:
    shots = [shot(1, 40), shot(2, 60, 2.0), shot(3, 30, 1.5), shot(4, 300)]
    assert found([layout for each in shots for layout in each]) == [40, 100, 130]


def test_blocks_are_not_seen_in_the_result() -> None:
    lengths = [40, 213, 3 * 25, 256, 500, 17, 31]
    layouts = [layout for seed, length in enumerate(lengths) for layout in shot(seed, length)]
    assert found(layouts) == list(itertools.accumulate(lengths[:-1]))


@pytest.mark.parametrize("speed", [0.5, 2.0, 4.0])
def test_a_moving_camera_is_no_cut(speed: float) -> None:
    assert found(shot(5, 49, speed)) == []


def test_flashes_and_flickers_are_no_cuts() -> None:
    layouts = shot(1, 100)
    for at in (30, 31, 60):
        layouts[at] = layouts[at] * 0.2 + 200
    assert found(layouts) == []
    rng = np.random.default_rng(0)
    assert found([layout * rng.uniform(0.7, 1.0) for layout in shot(2, 100)]) == []


def test_dissolves_and_fades_are_cuts() -> None:
    before, after = shot(1, 80), shot(2, 80)
    mixed = [before[-1] * (1 - share) + after[0] * share for share in np.linspace(0, 1, 15)]
    assert found([*before, *mixed, *after]) == pytest.approx([87], abs=4)
    dark = [before[-1] * share for share in np.linspace(1, 0, 12)] + [
        after[0] * share for share in np.linspace(0, 1, 12)
    ]
    assert found([*before, *dark, *after]) == pytest.approx([92], abs=6)


def test_a_short_or_empty_sequence_has_no_cuts() -> None:
    assert found([]) == []
    assert found(shot(1, 1)) == found(shot(1, 5)) == []


def test_hours_are_held_for_some_seconds() -> None:
    """Layouts that were given and aren't freed yet; two hours at 25 frames a second would be 180,000."""
    alive = most = 0

    class Counted(np.ndarray):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def layouts() -> Iterator[np.ndarray]:
        nonlocal alive, most
        pictures = [shot(seed, 1)[0] for seed in range(2)]
        for frame in range(5000):
            alive += 1
            most = max(most, alive)
            yield pictures[frame // 1000 % 2].copy().view(Counted)

    assert list(cuts_of(layouts(), FPS)) == [1000, 2000, 3000, 4000]
    assert most < 1000


@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts"])
def test_cuts_of_a_file(tmp_path: Path, container: str) -> None:
    frames = [np.asarray(world(seed, 96)) for seed in (1, 2, 3) for _ in range(20)]
    path = tmp_path / "video"
    path.write_bytes(encode_video(frames, container=container))
    info = probe_video(path, MediaLimits())
    assert find_cuts(path, info, MediaLimits()) == [20, 40]
