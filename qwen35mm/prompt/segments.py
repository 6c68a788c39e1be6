"""Cuts a prompt into segments: a pure function of its tokens, from left to right.

See docs/architecture.md. A prompt that extends another by whole turns has the shorter one's cuts, so it can use its
cached segments.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

SegmentEnd = Literal["turn", "media", "run"]

DEFAULT_MIN_SEGMENT = 128
MAX_RUN = 2_048
MAX_UNCUT_SPAN = 4_096


@dataclass(frozen=True)
class Segment:
    """Tokens `start` to `stop` of a prompt; `span_indices` are the media spans that it overlaps.

    `end` is the reason for the cut: a turn begins, a turn's media end, or the run is too long.
    """

    start: int
    stop: int
    span_indices: tuple[int, ...] = ()
    end: SegmentEnd = "run"


def cut_segments(
    num_tokens: int,
    turn_starts: Sequence[int],
    spans: Sequence[tuple[int, int]],
    *,
    min_segment: int = DEFAULT_MIN_SEGMENT,
    max_run: int = MAX_RUN,
    max_uncut_span: int = MAX_UNCUT_SPAN,
) -> tuple[tuple[Segment, ...], int]:
    """Cuts a prompt of `num_tokens` tokens.

    Cuts fall before each turn and after each turn's last media span, if at least `min_segment` tokens follow the last
    cut, and every `max_run` tokens in between. A cut of the last kind inside a span of up to `max_uncut_span` tokens
    moves to the span's end; longer spans are cut.

    Args:
        turn_starts: ascending places of `<|im_start|>`; ends with `num_tokens` if a turn would begin there.
        spans: ascending, disjoint (start, stop) of the media spans.

    Returns:
        The segments, in order and without gaps, and the start of the tail, the tokens after the last cut. The tail is
        empty only if `num_tokens` is a turn's start.
    """
    assert 1 <= min_segment <= max_run
    ends: dict[int, SegmentEnd] = {
        **dict.fromkeys(_last_span_stops(turn_starts, spans), "media"),
        **dict.fromkeys(turn_starts, "turn"),
    }
    natural = sorted(ends)
    span_stops = [stop for _, stop in spans]
    cuts: list[int] = []
    last = 0
    while True:
        forced = last + max_run
        if (index := bisect_right(span_stops, forced)) < len(spans):
            start, stop = spans[index]
            if start < forced and stop - start <= max_uncut_span:
                forced = stop
        at = bisect_left(natural, last + min_segment)
        cut = min([forced, *natural[at : at + 1]])
        if cut > num_tokens or (cut == num_tokens and num_tokens not in turn_starts[-1:]):
            break
        cuts.append(cut)
        last = cut
    span_starts = [start for start, _ in spans]
    segments = (
        Segment(
            start,
            stop,
            tuple(range(bisect_right(span_stops, start), bisect_left(span_starts, stop))),
            ends.get(stop, "run"),
        )
        for start, stop in pairwise([0, *cuts])
    )
    return tuple(segments), last


def _last_span_stops(turn_starts: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[int]:
    """The end of each turn's last span."""
    turns = [bisect_right(turn_starts, start) for start, _ in spans]
    return [
        stop for (_, stop), turn, following in zip(spans, turns, [*turns[1:], None], strict=False) if turn != following
    ]
