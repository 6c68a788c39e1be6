from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.prompt import Segment, cut_segments

# Small sizes, so that the cases can be read: min_segment 4, max_run 16, max_uncut_span 32.
SIZES = {"min_segment": 4, "max_run": 16, "max_uncut_span": 32}
HAS_TAIL = 3  # tokens of a generation prompt


@pytest.mark.parametrize(
    ("num_tokens", "turn_starts", "spans", "cuts"),
    [
        pytest.param(0, [], [], [], id="nothing"),
        pytest.param(3, [0], [], [], id="shorter than a segment"),
        pytest.param(10, [0, 5], [], [5], id="two turns"),
        pytest.param(10, [0, 3, 7], [], [7], id="a turn that starts too early waits for the next"),
        pytest.param(12, [0, 4, 8], [], [4, 8], id="exactly min_segment is enough"),
        pytest.param(20, [0, 2, 4, 6, 8, 10, 12, 14, 16, 18], [], [4, 8, 12, 16], id="many short turns"),
        pytest.param(16, [0], [], [], id="a long run ends where the prompt does: no empty tail"),
        pytest.param(17, [0], [], [16], id="a long run is cut"),
        pytest.param(40, [0, 34], [], [16, 32], id="after a long run the count starts anew"),
        pytest.param(40, [0, 36], [], [16, 32, 36], id="a turn after a long run"),
        pytest.param(12, [0], [(1, 9)], [9], id="media at the start"),
        pytest.param(12, [0], [(0, 3)], [], id="a span that ends too early"),
        pytest.param(9, [0], [(1, 9)], [], id="a span that ends the prompt"),
        pytest.param(30, [0], [(1, 6), (7, 12), (13, 15)], [15], id="only after the last span of a turn"),
        pytest.param(30, [0, 12], [(1, 6), (13, 20)], [6, 12, 20], id="the last span of each turn"),
        pytest.param(14, [0, 8], [(1, 6)], [6], id="a turn right behind a span is too early"),
        pytest.param(40, [0], [(10, 30)], [30], id="a cut inside a span moves to its end"),
        pytest.param(60, [0], [(10, 30), (31, 50)], [30, 50], id="and the next one too"),
        pytest.param(40, [0], [(16, 30)], [16, 30], id="a span that begins at the cut"),
        pytest.param(40, [0], [(10, 16), (20, 24)], [16, 24], id="a span that ends at the cut"),
        pytest.param(50, [0], [(10, 42)], [42], id="the longest span that stays whole"),
        pytest.param(50, [0], [(10, 43)], [16, 32, 43], id="a longer span is cut"),
        pytest.param(90, [0], [(1, 40), (50, 82)], [16, 32, 48, 82], id="a long span, then a whole one"),
        pytest.param(30, [], [], [16], id="no turns at all"),
        # A history ends where a turn would begin.
        pytest.param(10, [0, 10], [], [10], id="the whole history is one segment"),
        pytest.param(10, [0, 8, 10], [], [8], id="a last turn too short for a segment"),
        pytest.param(32, [0, 32], [], [16, 32], id="a history that ends with a long run"),
    ],
)
def test_cuts(num_tokens, turn_starts, spans, cuts):
    segments, tail_start = cut_segments(num_tokens, turn_starts, spans, **SIZES)
    assert [segment.stop for segment in segments] == cuts
    assert [segment.start for segment in segments] == [0, *cuts][: len(cuts)]
    assert tail_start == (cuts[-1] if cuts else 0)


def test_segments_name_the_spans_that_they_touch():
    spans = [(1, 40), (44, 47), (49, 52)]
    segments, tail_start = cut_segments(60, [0, 42], spans, **SIZES)
    assert segments == (
        Segment(0, 16, (0,)),
        Segment(16, 32, (0,)),
        Segment(32, 40, (0,), "media"),
        Segment(40, 52, (1, 2), "media"),
    )
    assert tail_start == 52


def test_default_sizes():
    segments, _ = cut_segments(12_000, [0, 100, 200], [(300, 4396), (5000, 9097)])
    # 200: 100 is too early. 4396: a span of 4,096 stays whole, and it isn't its turn's last. A span of 4,097 is cut.
    assert [segment.stop for segment in segments] == [200, 4396, 6444, 8492, 9097, 11145]


@st.composite
def conversations(draw):
    """Turns, each a list of (is_span, length); the first run of a turn is text."""
    span = st.tuples(st.just(True), st.one_of(st.integers(1, 12), st.integers(28, 40)))
    text = st.tuples(st.just(False), st.one_of(st.integers(1, 6), st.integers(10, 40)))
    turn = st.lists(st.one_of(text, span), max_size=4)
    return [[(False, draw(st.integers(2, 8))), *runs] for runs in draw(st.lists(turn, min_size=1, max_size=8))]


def layout(turns):
    at, starts, spans = 0, [], []
    for turn in turns:
        starts.append(at)
        for is_span, length in turn:
            if is_span:
                spans.append((at, at + length))
            at += length
    return at, starts, spans


def cuts_of(num_tokens, starts, spans):
    segments, _ = cut_segments(num_tokens, starts, spans, **SIZES)
    return [segment.stop for segment in segments]


@given(conversations(), st.data())
def test_a_longer_conversation_shares_the_cuts_of_a_shorter_one(turns, data):
    kept = data.draw(st.integers(1, len(turns)))
    num_tokens, starts, spans = layout(turns)
    longer = cuts_of(num_tokens + HAS_TAIL, [*starts, num_tokens], spans)
    num_tokens, starts, spans = layout(turns[:kept])
    shorter = cuts_of(num_tokens + HAS_TAIL, [*starts, num_tokens], spans)
    history = cuts_of(num_tokens, [*starts, num_tokens], spans)
    assert longer[: len(shorter)] == shorter
    assert history == shorter


@given(conversations())
def test_rules_hold(turns):
    num_tokens, starts, spans = layout([*turns, [(False, HAS_TAIL)]])
    segments, tail_start = cut_segments(num_tokens, starts, spans, **SIZES)
    cuts = [0, *(segment.stop for segment in segments)]
    assert [(s.start, s.stop) for s in segments] == list(pairwise(cuts))
    assert tail_start == cuts[-1] < num_tokens
    for last, cut in pairwise(cuts):
        assert cut - last >= SIZES["min_segment"]
        inside = [span for span in spans if span[0] < cut < span[1]]
        assert all(stop - start > SIZES["max_uncut_span"] for start, stop in inside)
        assert not any(last + SIZES["min_segment"] <= start < cut for start in starts)
        if cut - last > SIZES["max_run"]:
            assert any(start < last + SIZES["max_run"] < stop == cut for start, stop in spans)
    for segment in segments:
        touched = [i for i, (start, stop) in enumerate(spans) if start < segment.stop and stop > segment.start]
        assert list(segment.span_indices) == touched
    assert not any(tail_start + SIZES["min_segment"] <= start < num_tokens for start in starts)
