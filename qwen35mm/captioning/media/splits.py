"""Where a video is split into parts: at its cuts, every few seconds, or as trainers take windows of frames from it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from qwen35mm.errors import CaptioningError
from qwen35mm_preprocess.video_probe import VideoInfo

_FORMS = (
    "scenes, scenes:30s, 30s, head:81, middle:81, chunk:81, slide:81/40 or uniform:81*4 (the last five also with @16)"
)

# No part is shorter, unless the video is: a cut so near to another one is left out.
_MIN_LENGTH_S = 0.6
_LENGTH = re.compile(r"(scenes:)?(\d+(?:\.\d+)?)(s|m)")
_WINDOWS = re.compile(r"(head|middle|chunk):(\d+)()()|(slide):(\d+)/(\d+)()|(uniform):(\d+)\*(\d+)()")
_RATE = re.compile(r"(.+)@(\d+(?:\.\d+)?)")

WindowKind = Literal["head", "middle", "chunk", "slide", "uniform"]


@dataclass(frozen=True)
class Windows:
    """Windows of frames, as trainers cut them.

    musubi-tuner's `frame_extraction` has head, chunk, slide and uniform; diffusion-pipe's `video_clip_mode` has
    single_beginning (head) and single_middle (middle). A video with fewer frames stays whole.

    Attributes:
        num_frames: of a window.
        number: frames from one start to the next for slide, windows for uniform.
        fps: the rate at which frames are counted; None for the video's own.
    """

    kind: WindowKind
    num_frames: int
    number: int = 1
    fps: float | None = None


@dataclass(frozen=True)
class Split:
    """How videos are split.

    Attributes:
        text: as a person wrote it, without spaces.
        at_cuts: whether parts end at the cuts between shots.
        most_s: the most seconds of a part; None for any number.
        windows: None for parts that follow each other.
    """

    text: str
    at_cuts: bool = False
    most_s: float | None = None
    windows: Windows | None = None


def parse_split(text: str) -> Split | None:
    """Reads a form of `_FORMS`; None for `never`. Raises CaptioningError for other texts."""
    text = "".join(text.lower().split())
    if text == "never":
        return None
    if text == "scenes":
        return Split(text, at_cuts=True)
    if found := _LENGTH.fullmatch(text):
        most_s = float(found[2]) * (60 if found[3] == "m" else 1)
        if most_s >= _MIN_LENGTH_S:
            return Split(text, at_cuts=found[1] is not None, most_s=most_s)
    rate = _RATE.fullmatch(text)
    if found := _WINDOWS.fullmatch(text if rate is None else rate[1]):
        kind, num_frames, number, *_ = (group for group in found.groups() if group is not None)
        fps = None if rate is None else float(rate[2])
        windows = Windows(kind, int(num_frames), int(number or 1), fps)  # pyright: ignore[reportArgumentType]
        if windows.num_frames and windows.number and fps != 0:
            return Split(text, windows=windows)
    raise CaptioningError(f"--split must be never, {_FORMS}; got '{text}'.")


def split_frames(
    split: Split, info: VideoInfo, find_cuts: Callable[[], list[int]], *, at_keys: bool = False
) -> list[range]:
    """The frames of each part; a single range if the video stays whole.

    Args:
        find_cuts: returns the first frame of each shot but the first.
        at_keys: whether boundaries that aren't cuts move to the nearest key frame, where a file can be cut.
    """
    if split.windows is not None:
        return _windows(split.windows, info)
    starts = [0]
    for cut in find_cuts() if split.at_cuts else ():
        if min(info.times_s[cut] - info.times_s[starts[-1]], info.duration_s - info.times_s[cut]) >= _MIN_LENGTH_S:
            starts.append(cut)
    ends = [*starts[1:], info.num_frames]
    parts = [range(start, end) for start, end in zip(starts, ends, strict=True)]
    if split.most_s is None:
        return parts
    return [each for part in parts for each in _shorter(part, split, info, at_keys=at_keys)]


def _shorter(part: range, split: Split, info: VideoInfo, *, at_keys: bool) -> list[range]:
    """A part in parts of at most `most_s`: equal ones of a shot, otherwise whole ones and the rest."""
    assert split.most_s is not None
    begin_s = float(info.times_s[part.start])
    length_s = _time(info, part.stop) - begin_s
    step_s = length_s / -(-length_s // split.most_s) if split.at_cuts else split.most_s
    moments = begin_s + np.arange(step_s, length_s - _MIN_LENGTH_S, step_s)
    found = np.searchsorted(info.times_s, moments - 1e-6)
    keys = np.flatnonzero(info.is_key)
    if at_keys and len(keys):
        after = np.searchsorted(keys, found).clip(1, max(len(keys) - 1, 1))
        sides = keys[np.stack([after - 1, np.minimum(after, len(keys) - 1)])]
        nearest = np.abs(info.times_s[sides] - info.times_s[found.clip(0, info.num_frames - 1)]).argmin(axis=0)
        found = sides[nearest, np.arange(len(found))]
    cuts = np.unique(found[(found > part.start) & (found < part.stop)]).tolist()
    return [range(start, end) for start, end in itertools.pairwise([part.start, *cuts, part.stop])]


def joined_at_keys(parts: Sequence[range], info: VideoInfo) -> list[range]:
    """The parts, where one without a key frame, from which no clip can begin, is joined with the one before it."""
    joined: list[range] = []
    for part in parts:
        if joined and not all(info.is_key[each.start : each.stop].any() for each in (joined[-1], part)):
            joined[-1] = range(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined


def _windows(windows: Windows, info: VideoInfo) -> list[range]:
    num_frames, length = info.num_frames, windows.num_frames
    if windows.fps is not None:
        # The last frame is shown until the video's end.
        num_frames = int(info.duration_s * windows.fps + 1e-6)
    last = num_frames - length
    if last < 0:
        return [range(info.num_frames)]
    if windows.kind == "uniform":
        starts = np.unique(np.linspace(0, last, windows.number).astype(int)).tolist() if windows.number > 1 else [0]
    elif windows.kind in ("chunk", "slide"):
        starts = range(0, last + 1, length if windows.kind == "chunk" else windows.number)
    else:
        starts = [last // 2 if windows.kind == "middle" else 0]
    if windows.fps is None:
        return [range(start, start + length) for start in starts]
    places = np.array([[start, start + length] for start in starts]) / windows.fps
    found = np.searchsorted(info.times_s, places - 1e-6).tolist()
    return [range(start, max(end, start + 1)) for start, end in found if start < info.num_frames]


def _time(info: VideoInfo, frame: int) -> float:
    """When a frame begins; the video's end for the one after the last."""
    return float(info.times_s[frame]) if frame < info.num_frames else info.duration_s


def times_of(parts: list[range], info: VideoInfo) -> list[tuple[float, float]]:
    """Start and end of each part in seconds, to the millisecond; its end is the next frame's start."""
    return [(round(float(info.times_s[part.start]), 3), round(_time(info, part.stop), 3)) for part in parts]
