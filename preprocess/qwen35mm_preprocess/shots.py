"""Finds where a video's picture changes: the cuts between shots, and the lasting changes between chapters.

Both compare layouts: a picture in a few coarse cells. A cut is an abrupt change that stands out from the motion around
it and lasts, which a flash doesn't. A dissolve or a fade is a change between two moments at which the picture is calm.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
from PIL import Image

from qwen35mm_preprocess.media import MediaSource
from qwen35mm_preprocess.types import MediaLimits, Progress
from qwen35mm_preprocess.video import small_frames
from qwen35mm_preprocess.video_probe import VideoInfo

LAYOUT_SIDE = 8
# Two layouts differ in this share of their cells by so many grey levels: what moves through a scene takes less.
_CHANGED_SHARE, _MIN_DIFFERENCE = 0.3, 8.0
# A change explains this share of a part's variance: in a flicker none does.
_MIN_EXPLAINED = 0.1
# A cut's difference is so many times the mean of those around it, within this time.
_MIN_RATIO, _AROUND_S = 4.0, 0.5
# What is before and after a cut or a dissolve is compared over this time. A dissolve takes at most twice as long.
_LASTS_S, _DISSOLVE_S = 0.2, 0.5
# Beside a dissolve, the picture changes by at most this share of what changes in it, and its middle is a blend.
_CALM_SHARE = 0.2
# A picture of a lower mean is dark.
_DARK = 12.0
_FRAMES_AT_ONCE = 256


def layout_of(image: Image.Image) -> np.ndarray:
    """A picture's layout, float64 [cells * 3]: RGB in grey levels."""
    side = (LAYOUT_SIDE, LAYOUT_SIDE)
    return np.asarray(image.resize(side, Image.Resampling.BOX), np.float64).ravel()


def differences(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """How many grey levels layouts differ by in `_CHANGED_SHARE` of their cells: [..., cells * 3] to [...]."""
    changed = np.abs(before - after)
    cells = changed.reshape(*changed.shape[:-1], -1, 3).mean(axis=-1)
    place = int((1 - _CHANGED_SHARE) * (cells.shape[-1] - 1))
    return np.partition(cells, place, axis=-1)[..., place]


def change_points(layouts: np.ndarray, least: int, most: int) -> list[int]:
    """Where a sequence changes for long: it is split again and again at the largest, longest difference of means.

    Args:
        layouts: float64 [N, cells * 3].
        least: the least length of a part.
        most: the most parts.
    """
    sums = np.concatenate([np.zeros((1, layouts.shape[1])), np.cumsum(layouts, axis=0)])
    squares = np.concatenate([[0.0], np.cumsum((layouts**2).sum(axis=1))])
    ends = [0, len(layouts)]
    while len(ends) <= most:
        best = (0.0, 0)
        for start, stop in itertools.pairwise(ends):
            cuts = np.arange(start + least, stop - least + 1)
            if not len(cuts):
                continue
            before, after = cuts - start, stop - cuts
            left = (sums[cuts] - sums[start]) / before[:, None]
            right = (sums[stop] - sums[cuts]) / after[:, None]
            difference = differences(left, right)
            weight = before * after / (stop - start)
            variance = squares[stop] - squares[start] - ((sums[stop] - sums[start]) ** 2).sum() / (stop - start)
            explains = ((left - right) ** 2).sum(axis=1) * weight >= _MIN_EXPLAINED * variance
            gains = np.where((difference >= _MIN_DIFFERENCE) & explains, difference**2 * weight, 0.0)
            best = max(best, (float(gains.max()), int(cuts[gains.argmax()])))
        if not best[0]:
            break
        ends = sorted([*ends, best[1]])
    return ends[1:-1]


def find_cuts(source: MediaSource, info: VideoInfo, limits: MediaLimits, progress: Progress | None = None) -> list[int]:
    """The first frame of every shot but the first. Decodes every frame; holds the layouts of a few seconds.

    Raises:
        MediaError: the source can't be opened.
    """
    indices: list[int] = []

    def layouts() -> Iterator[np.ndarray]:
        for index, pixels in small_frames(source, info, LAYOUT_SIDE, limits):
            # A frame that can't be decoded leaves a gap: places in the sequence aren't indices.
            indices.append(index)
            if progress is not None and len(indices) % _FRAMES_AT_ONCE == 0:
                progress(min(len(indices), info.num_frames), info.num_frames)
            yield pixels

    return [indices[cut] for cut in cuts_of(layouts(), info.fps)]


def cuts_of(layouts: Iterable[np.ndarray], fps: float) -> Iterator[int]:
    """Places of the cuts in a sequence of layouts, each [cells * 3] in grey levels; for a dissolve, its middle."""
    around, lasts, dissolve = (max(round(seconds * fps), least) for seconds, least in _WINDOWS)
    margin = max(3 * dissolve, around, lasts)
    remaining = iter(layouts)
    held: list[np.ndarray] = []
    first = last = 0
    is_end = False
    while not is_end:
        new = list(itertools.islice(remaining, _FRAMES_AT_ONCE))
        is_end = len(new) < _FRAMES_AT_ONCE
        if not held and new:
            # Before the first and after the last frame, the picture is as there.
            held = [new[0]] * margin
        held += new + ([new[-1] if new else held[-1]] * margin if is_end and held else [])
        if len(held) <= 2 * margin:
            continue
        # What was put in front and behind is still, which says nothing about a dissolve.
        wholly = range(margin + 3 * dissolve - first, len(held) - (margin + 3 * dissolve if is_end else 0))
        for cut in _cuts_between(np.array(held, np.float32), margin, around, lasts, dissolve, wholly):
            place = first + cut
            if place - last >= lasts:
                yield place
                last = place
        first += len(held) - 2 * margin
        held = held[len(held) - 2 * margin :]


_WINDOWS = ((_AROUND_S, 4), (_LASTS_S, 3), (_DISSOLVE_S, 4))


def _cuts_between(layouts: np.ndarray, margin: int, around: int, lasts: int, dissolve: int, wholly: range) -> list[int]:
    """The cuts among `layouts[margin:-margin]`, as places there; the middles of dissolves only `wholly` inside."""
    places = np.arange(margin, len(layouts) - margin)
    levels = layouts.mean(axis=1)
    # In equal light, too: a flicker is no cut.
    lit = layouts * (128 / (levels + _DARK))[:, None]
    steps = np.minimum(differences(layouts[:-1], layouts[1:]), differences(lit[:-1], lit[1:]))
    steps = np.concatenate([[0.0], steps])
    sums = np.concatenate([[0.0], np.cumsum(steps)])
    others = (sums[places + around + 1] - sums[places - around] - steps[places]) / (2 * around)
    candidates = places[(steps[places] >= _MIN_DIFFERENCE) & (steps[places] >= _MIN_RATIO * others)]
    cuts = [
        int(place)
        for place in candidates
        if steps[place] == steps[place - lasts : place + lasts + 1].max()
        and differences(np.median(layouts[place - lasts : place], 0), np.median(layouts[place : place + lasts], 0))
        >= _MIN_DIFFERENCE
    ]
    totals = np.concatenate([np.zeros((1, layouts.shape[1])), np.cumsum(layouts, axis=0, dtype=np.float64)])

    def mean(start: np.ndarray) -> np.ndarray:
        return (totals[start + dissolve] - totals[start]) / dissolve

    # Means over equal times, two on each side of a possible dissolve and one in its middle.
    before, near = mean(places - 3 * dissolve), mean(places - 2 * dissolve)
    after, far = mean(places + dissolve), mean(places + 2 * dissolve)
    changed = differences(near, after)
    drift = np.maximum(differences(before, near), differences(after, far))
    blend = differences(mean(places - dissolve // 2), (near + after) / 2)
    is_calm = (np.maximum(drift, blend) <= _CALM_SHARE * changed) & (places >= wholly.start) & (places < wholly.stop)
    # A fade: the light comes back.
    dark = levels < _DARK
    returns = dark[places - 1] & ~dark[places] & (levels[places - 2 * dissolve] >= _DARK)
    for at in np.flatnonzero(((changed >= 2 * _MIN_DIFFERENCE) & is_calm) | returns):
        window = changed[max(at - dissolve, 0) : at + dissolve + 1]
        place = int(places[at])
        if (returns[at] or changed[at] == window.max()) and all(abs(place - cut) > dissolve for cut in cuts):
            cuts.append(place)
    return sorted(cut - margin for cut in cuts)
