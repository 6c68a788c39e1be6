"""Addresses: equal for equal content, and changed by every change from the changed segment on."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from qwen35mm.cache.chain import segment_addresses, vision_address
from qwen35mm.prompt import Prompt, Segment, Span, cut_segments
from qwen35mm_preprocess import GridTHW

ROOT = hashlib.sha256(b"root").digest()
OTHER_ROOT = hashlib.sha256(b"other root").digest()
PAD = 7  # the placeholders' token id in made-up prompts


def make_prompt(token_ids: np.ndarray, spans: list[Span], segments: tuple[Segment, ...]) -> Prompt:
    tail_start = segments[-1].stop if segments else 0
    positions = np.zeros((3, len(token_ids)), dtype=np.int64)
    return Prompt(np.array(token_ids), tuple(spans), positions, 0, segments, tail_start)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Made-up prompts of a few segments, some of which cut through a span."""
    runs = draw(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), min_size=1, max_size=8))
    ids: list[int] = []
    spans: list[Span] = []
    for is_span, length in runs:
        if is_span:
            grid = GridTHW(1, 2, 2 * length)
            spans.append(Span(len(ids), len(ids) + length, grid, f"digest-{draw(st.integers(0, 3))}", len(spans)))
        ids += [PAD] * length if is_span else draw(st.lists(st.integers(0, 9), min_size=length, max_size=length))
    ids += [1, 2, 3]  # the tail
    turn_starts = sorted(draw(st.sets(st.integers(0, len(ids) - 1), max_size=4)))
    bounds = [(span.start, span.stop) for span in spans]
    segments, _ = cut_segments(len(ids), turn_starts, bounds, min_segment=2, max_run=8, max_uncut_span=6)
    assume(segments)
    return make_prompt(np.array(ids), spans, segments)


def first_difference(prompt: Prompt, other: Prompt, **options) -> int:
    """Index of the first segment whose address differs; all before it agree and all after it differ."""
    return checked(segment_addresses(prompt, ROOT), segment_addresses(other, ROOT, **options))


def checked(ours: tuple[bytes, ...], theirs: tuple[bytes, ...]) -> int:
    assert len(ours) == len(theirs)
    same = [a == b for a, b in zip(ours, theirs, strict=True)]
    first = same.index(False) if False in same else len(same)
    assert not any(same[first:]), "an address does not depend on its parent"
    return first


def segment_at(prompt: Prompt, token: int) -> int:
    """The segment of a token; the number of segments for the tail."""
    return sum(segment.stop <= token for segment in prompt.segments)


def with_span(prompt: Prompt, index: int, **changes) -> Prompt:
    spans = [*prompt.spans[:index], replace(prompt.spans[index], **changes), *prompt.spans[index + 1 :]]
    return replace(prompt, spans=tuple(spans))


@given(prompts())
def test_equal_prompts_have_equal_addresses(prompt):
    again = make_prompt(prompt.token_ids.copy(), list(prompt.spans), prompt.segments)
    addresses = segment_addresses(prompt, ROOT)
    assert addresses == segment_addresses(again, ROOT)
    assert len(addresses) == len(set(addresses)) == len(prompt.segments)
    assert {len(address) for address in addresses} == {32}


@given(prompts(), st.data())
def test_a_changed_token_changes_its_segment_and_what_follows(prompt, data):
    token = data.draw(st.integers(0, len(prompt.token_ids) - 1))
    ids = prompt.token_ids.copy()
    ids[token] += data.draw(st.sampled_from([1, 256, 1 << 32]))
    assert first_difference(prompt, replace(prompt, token_ids=ids)) == segment_at(prompt, token)


@given(prompts(), st.data())
def test_a_changed_span_changes_every_segment_that_it_touches(prompt, data):
    assume(prompt.spans)
    index = data.draw(st.integers(0, len(prompt.spans) - 1))
    span = prompt.spans[index]
    first = segment_at(prompt, span.start)
    t, h, w = span.grid_thw
    for changes in (
        {"digest": f"{span.digest}0"},
        {"grid_thw": GridTHW(t, w, h)},
        {"grid_thw": GridTHW(t, h, w + 2)},
        {"unit_index": span.unit_index + 1},
        {"start": span.start + 1},
        {"stop": span.stop + 1},
    ):
        assume(span.grid_thw != changes.get("grid_thw"))
        changed = with_span(prompt, index, **changes)
        assert first_difference(prompt, changed) == first
        for number, segment in enumerate(prompt.segments):
            if index in segment.span_indices:
                alone, other = (replace(p, segments=(prompt.segments[number],)) for p in (prompt, changed))
                assert first_difference(alone, other) == 0, "the span itself is part of the address"


@given(prompts(), st.data())
def test_a_removed_or_swapped_span_changes_its_segment(prompt, data):
    index = data.draw(st.integers(0, len(prompt.segments) - 1))
    segment = prompt.segments[index]
    assume(segment.span_indices)
    segments = list(prompt.segments)
    segments[index] = replace(segment, span_indices=segment.span_indices[1:])
    assert first_difference(prompt, replace(prompt, segments=tuple(segments))) == index
    segments[index] = replace(segment, span_indices=segment.span_indices[::-1])
    expected = index if len(segment.span_indices) > 1 else len(segments)
    assert first_difference(prompt, replace(prompt, segments=tuple(segments))) == expected


@given(prompts(), st.data())
def test_other_cuts_are_other_addresses(prompt, data):
    """Another cut is another computation: rows run beside other rows."""
    index = data.draw(st.integers(0, len(prompt.segments) - 1))
    segment = prompt.segments[index]
    assume(segment.stop - segment.start > 1)
    shorter = replace(segment, stop=segment.stop - 1)
    merged = replace(prompt, segments=(*prompt.segments[:index], shorter))
    ours = segment_addresses(prompt, ROOT)
    assert checked(ours[: index + 1], segment_addresses(merged, ROOT)) == index


@given(prompts())
def test_the_root_and_the_parent_change_every_address(prompt):
    ours = segment_addresses(prompt, ROOT)
    assert checked(ours, segment_addresses(prompt, OTHER_ROOT)) == 0
    # A segment's address is its parent's root and its own content: the chain can be continued from any place.
    for index in range(1, len(prompt.segments)):
        rest = replace(prompt, segments=prompt.segments[index:])
        assert segment_addresses(rest, ours[index - 1]) == ours[index:]


@given(prompts(), st.data())
def test_the_salt_enters_at_the_tenants_first_segment(prompt, data):
    salt_from = data.draw(st.integers(0, len(prompt.token_ids)))
    first = segment_at(prompt, salt_from)
    assert first_difference(prompt, prompt, salt=b"tenant", salt_from=salt_from) == first
    assert first_difference(prompt, prompt, salt=b"", salt_from=salt_from) == len(prompt.segments)
    one = segment_addresses(prompt, ROOT, salt=b"tenant", salt_from=salt_from)
    two = segment_addresses(prompt, ROOT, salt=b"tenant 2", salt_from=salt_from)
    assert checked(one, two) == first
    # Any token of the same segment is the same beginning.
    if first < len(prompt.segments):
        at_start = prompt.segments[first].start
        assert one == segment_addresses(prompt, ROOT, salt=b"tenant", salt_from=at_start)


@given(prompts(), st.data())
def test_a_prompt_that_extends_another_shares_its_addresses(prompt, data):
    more = data.draw(st.lists(st.integers(0, 9), min_size=8, max_size=20))
    ids = np.concatenate([prompt.token_ids, more])
    last = Segment(prompt.tail_start, len(ids))
    longer = make_prompt(ids, list(prompt.spans), (*prompt.segments, last))
    assert segment_addresses(longer, ROOT)[: len(prompt.segments)] == segment_addresses(prompt, ROOT)


def test_a_salt_is_not_a_token():
    """The salt's bytes can't be traded for the content's: fields carry their lengths."""
    prompt = make_prompt(np.array([1, 2, 3, 4]), [], (Segment(0, 2),))
    shifted = make_prompt(np.array([2, 3, 4]), [], (Segment(0, 1),))
    salt = np.array([1], dtype="<i8").tobytes()
    assert segment_addresses(prompt, ROOT) != segment_addresses(shifted, ROOT, salt=salt)
    assert segment_addresses(prompt, ROOT + salt) != segment_addresses(prompt, ROOT, salt=salt)


def test_a_span_needs_its_digest():
    span = Span(0, 2, GridTHW(1, 2, 4), None, 0)
    prompt = make_prompt(np.array([PAD, PAD, 1]), [span], (Segment(0, 2, (0,)),))
    with pytest.raises(ValueError, match="Span 0 of the prompt has no digest"):
        segment_addresses(prompt, ROOT)
    # A span in the tail is computed, not addressed.
    tail = replace(prompt, segments=(), tail_start=0)
    assert segment_addresses(tail, ROOT) == ()


def test_a_negative_salt_from_is_refused():
    with pytest.raises(ValueError, match="0 or more; got -1"):
        segment_addresses(make_prompt(np.array([1]), [], ()), ROOT, salt_from=-1)


def test_a_temporal_patch_among_others_is_another_one():
    """Its features are computed beside other patches, and that decides their last bits."""
    spans = [Span(2 * n, 2 * n + 2, GridTHW(1, 2, 4), f"patch-{n}", 0, n) for n in range(3)]
    segments = (Segment(0, 2, (0,)),)
    whole = make_prompt(np.full(6, PAD), spans, segments)
    shorter = make_prompt(np.full(4, PAD), spans[:2], segments)
    assert first_difference(whole, shorter) == 0


def test_vision_addresses():
    digests = ("a", "b")
    address = vision_address(ROOT, b"", digests, (2, 30, 100))
    assert address == vision_address(ROOT, b"", list(digests), GridTHW(2, 30, 100))
    others = [
        vision_address(OTHER_ROOT, b"", digests, (2, 30, 100)),
        vision_address(ROOT, b"tenant", digests, (2, 30, 100)),
        vision_address(ROOT, b"", ("b", "a"), (2, 30, 100)),
        vision_address(ROOT, b"", ("ab", ""), (2, 30, 100)),
        vision_address(ROOT, b"", ("a", "c"), (2, 30, 100)),
        vision_address(ROOT, b"", digests, (2, 100, 30)),
        vision_address(ROOT, b"", ("a",), (1, 30, 100)),
    ]
    assert len({address, *others}) == len(others) + 1
    for units in ((), ("a",)):
        with pytest.raises(ValueError, match=f"came with {len(units)} digests"):
            vision_address(ROOT, b"", units, (2, 30, 100))
