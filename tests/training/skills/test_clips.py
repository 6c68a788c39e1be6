"""What is said of a clip is what its frames show: the pixels of those that the prompt holds."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from qwen35mm.evaluation.drawing import render_clip
from qwen35mm.evaluation.scenes import Split, is_held_out
from qwen35mm.evaluation.skills import clips
from qwen35mm.evaluation.skills.base import Shown

pytestmark = pytest.mark.usefixtures("plainly")
SPLITS: tuple[Split, ...] = ("train", "seen", "combos")


def frames_of(shown: Shown) -> tuple[list[np.ndarray], list[float]]:
    """The frames in pairs, an odd last one repeated, and each pair's time."""
    times = shown.times_s + shown.times_s[-1:] * (len(shown.times_s) % 2)
    images = render_clip(shown.clip, [time / shown.clip.duration_s for time in times])
    return [np.asarray(image, dtype=int) for image in images], [
        sum(times[i : i + 2]) / 2 for i in range(0, len(times), 2)
    ]


def cases(skill: str, count: int) -> list[tuple[Shown, clips.Turn, Split]]:
    rng = random.Random(skill)
    found = []
    while len(found) < count:
        split = rng.choice(SPLITS)
        shown = clips.random_shown(rng, split, rng.choice(clips.EVENTS_OF[skill]))
        turn = clips.clip_turn(rng, shown, split, skill)
        if turn is not None:
            found.append((shown, turn, split))
    return found


def test_when_is_the_time_of_the_first_frames_that_show_it() -> None:
    for shown, turn, _ in cases("when", 60):
        frames, times = frames_of(shown)
        (told,) = re.findall(r"at (\d+\.\d) seconds", turn.answer)
        changed = next(i for i, frame in enumerate(frames) if not np.array_equal(frame, frames[0]))
        assert told == f"{times[changed // 2]:.1f}"
        verb = {"appear": "appears", "vanish": "disappears", "change": "changes"}[shown.clip.event]
        assert verb in turn.answer


def moved(shown: Shown) -> str:
    """Where what isn't there at the other end lies, by pixels: 'to the left', 'up', ..., or '' where nothing moves."""
    first, last = (np.asarray(image, dtype=int) for image in render_clip(shown.clip, [0.0, 1.0]))
    ground = np.asarray(render_clip(shown.clip, [0.0])[0], dtype=int)
    assert ground.shape == last.shape
    rgb = np.array(shown.clip.start.rgb)
    centres = []
    for frame, other in ((first, last), (last, first)):
        there = (np.abs(frame - rgb).max(-1) < 3) & (np.abs(other - rgb).max(-1) >= 3)
        if not there.any():
            return ""
        rows, columns = np.nonzero(there)
        centres.append((rows.mean() / frame.shape[0], columns.mean() / frame.shape[1]))
    down, right = (centres[1][i] - centres[0][i] for i in (0, 1))
    if abs(right) > abs(down):
        return "to the right" if right > 0 else "to the left"
    return "down" if down > 0 else "up"


@pytest.mark.parametrize("skill", ["motion", "clip caption"])
def test_directions_are_those_of_the_pixels(skill: str) -> None:
    for shown, turn, _ in cases(skill, 80):
        event = shown.clip.event
        told = next((way for way in clips.MOTION_PHRASES.values() if f"moves {way}." in turn.answer), "")
        # What appears, vanishes or changes lies in one place.
        assert told == (moved(shown) if event in clips.MOTIONS else ""), turn
        if not told and skill == "motion":
            assert "does not move" in turn.answer
            assert not (set(turn.answer.split()) & {"Yes,"})
        if event == "still":
            assert not shown.clip.others, "of two that stand still, neither is meant"


@pytest.mark.parametrize("skill", [name for name in clips.EVENTS_OF if name not in ("when", "motion")])
def test_answers_name_what_something_happens_to(skill: str) -> None:
    for shown, turn, split in cases(skill, 80):
        clip, said = shown.clip, turn.answer.lower()
        start, end = clip.at(0.0), clip.at(1.0)
        # By what is there at both ends: the others are, and are as they were.
        (item, *_) = [i for i in (*start, *end) if i not in clip.others]
        assert is_held_out(item.color, item.shape, clip.event) == (split == "combos")
        if skill == "others":
            assert said == (f"there is also a{'n' * (clip.others[0].color[0] in 'aeiou')} {clip.others[0].name}."
                            if clip.others else "there is nothing else.")  # fmt: skip
            continue
        assert all(item.shape != other.shape and item.color != other.color for other in clip.others)
        if skill in ("clip caption", "clip shape"):
            assert item.shape in said
        if clip.event == "change" and skill != "clip shape":
            (after,) = [i for i in end if i not in clip.others]
            assert f"from {item.color} to {after.color}" in said
        elif skill in ("clip caption", "clip color"):
            assert item.color in said
