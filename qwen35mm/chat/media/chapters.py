"""Chapters of a long video: the ranges between lasting changes of its picture, found on key frames alone."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from qwen35mm.decoding import Answer
from qwen35mm.decoding.answers import Data, read_list, require
from qwen35mm_preprocess import MediaLimits
from qwen35mm_preprocess.shots import change_points, layout_of
from qwen35mm_preprocess.types import Progress
from qwen35mm_preprocess.video import decode_frames
from qwen35mm_preprocess.video_probe import probe_video

MIN_VIDEO_S = 60.0
MAX_CHAPTERS = 12
_MAX_LOOKS = 240
# With fewer key frames, other frames are looked at too.
_MIN_KEYS = 24
_MIN_SHARE = 1 / 60
_PICTURE_SIDE = 160
_MAX_BISECTIONS = 8


class Chapter(NamedTuple):
    """A range of a video, with a JPEG of its middle."""

    start_s: float
    end_s: float
    picture: bytes


def find_chapters(path: Path, limits: MediaLimits, progress: Progress) -> Answer:
    """The chapters of a video, for `read_chapters`; none if it is short, animated or shows one scene.

    Raises:
        MediaError: the video can't be read.
    """
    info = probe_video(path, limits)
    if info.is_animation or info.duration_s < MIN_VIDEO_S:
        return Answer([])
    keys = np.flatnonzero(info.is_key)
    frames = keys if len(keys) >= _MIN_KEYS else np.arange(info.num_frames)
    # Places in `frames`, and what was seen there.
    looks = np.unique(np.linspace(0, len(frames) - 1, min(len(frames), _MAX_LOOKS)).round().astype(int))
    layouts: dict[int, np.ndarray] = {}
    pictures: dict[int, bytes] = {}

    def look(places: Sequence[int]) -> None:
        at = {int(frames[place]): place for place in places}
        for index, frame in decode_frames(path, info, sorted(at), limits):
            place = at[index]
            layouts[place] = layout_of(frame)
            pictures[place] = _jpeg(frame)
            progress(len(layouts), max(_MAX_LOOKS + MAX_CHAPTERS * _MAX_BISECTIONS, len(layouts)))

    look(looks.tolist())
    seen = sorted(layouts)
    if not seen:
        return Answer([])
    least = max(round(len(seen) * _MIN_SHARE), 1)
    cuts = change_points(np.array([layouts[place] for place in seen]), least, MAX_CHAPTERS)
    ends = [0, *cuts, len(seen)]
    means = [np.mean([layouts[place] for place in seen[a:b]], axis=0) for a, b in itertools.pairwise(ends)]
    # A change lies between two looks: bisect.
    gaps = [[seen[cut - 1], seen[cut]] for cut in cuts]
    for _ in range(_MAX_BISECTIONS):
        wide = [(gap, at) for at, gap in enumerate(gaps) if gap[1] - gap[0] > 1]
        look([sum(gap) // 2 for gap, _ in wide])
        for gap, at in wide:
            middle = sum(gap) // 2
            if middle in layouts:
                before, after = (float(np.abs(layouts[middle] - means[at + each]).sum()) for each in (0, 1))
                gap[before > after] = middle
    changes = frames[[high for _, high in gaps]]
    begin_s = info.times_s[changes]
    # A part includes the frame at its end, so it ends a little before the next one.
    end_s = begin_s - np.minimum(begin_s - info.times_s[changes - 1], 0.1) / 2
    middles = [seen[(a + b) // 2] for a, b in itertools.pairwise(ends)]
    shown = [pictures[middle] for middle in middles] if cuts else []
    times = zip([0.0, *begin_s.tolist()], [*end_s.tolist(), info.duration_s], shown, strict=False)
    values = [[start_s, stop_s, len(picture)] for start_s, stop_s, picture in times]
    return Answer(values, shown)


def read_chapters(values: Any, data: Data) -> list[Chapter]:
    """Reads the answer of `find_chapters`."""
    found = read_list(values)
    require(len(found) <= MAX_CHAPTERS, "more chapters than there may be")
    pictures = data.take(len(found) * 4 * _PICTURE_SIDE**2)
    chapters, at, before = [], 0, 0.0
    for start_s, end_s, num_bytes in found:
        require(type(start_s) is float and type(end_s) is float and math.isfinite(end_s), "no chapter")
        require(before <= start_s < end_s and type(num_bytes) is int and num_bytes >= 0, "no chapter")
        chapters.append(Chapter(start_s, end_s, pictures[at : at + num_bytes]))
        at, before = at + num_bytes, end_s
    require(at == len(pictures), "pictures of other sizes")
    return chapters


def _jpeg(frame: Image.Image) -> bytes:
    frame.thumbnail((_PICTURE_SIDE, _PICTURE_SIDE))
    data = io.BytesIO()
    frame.save(data, "JPEG", quality=70)
    return data.getvalue()
