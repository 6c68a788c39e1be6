"""Which states stay: few, the useful ones, and never one again that was dropped before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.cache.policy import MAX_STATES_PER_CHAIN, states_to_keep
from qwen35mm.prompt import Segment, SegmentEnd

ENDS: st.SearchStrategy[SegmentEnd] = st.sampled_from(("turn", "turn", "media", "run"))


def chain(ends: list[SegmentEnd]) -> list[Segment]:
    return [Segment(100 * i, 100 * (i + 1), (), end) for i, end in enumerate(ends)]


def test_the_useful_places_of_a_long_chat_stay() -> None:
    turns: list[SegmentEnd] = ["turn"] * 30
    ends: list[SegmentEnd] = ["turn", "media", *turns]
    kept = states_to_keep(chain(ends), system_stop=100)
    assert {0, 1, 29, 30, 31} <= kept
    assert len(kept) == MAX_STATES_PER_CHAIN
    assert states_to_keep([]) == frozenset()


@given(st.lists(ENDS, min_size=1, max_size=60), st.booleans())
def test_few_stay_and_always_the_last(ends: list[SegmentEnd], has_system: bool) -> None:
    kept = states_to_keep(chain(ends), system_stop=100 if has_system else 0)
    assert len(kept) <= MAX_STATES_PER_CHAIN
    assert len(ends) - 1 in kept
    if has_system:
        assert 0 in kept


@given(st.integers(0, 2), st.integers(2, 80))
def test_a_chat_that_grows_never_wants_a_state_back(num_media: int, num_turns: int) -> None:
    media: list[SegmentEnd] = ["media"] * num_media
    ends: list[SegmentEnd] = ["turn", *media]
    held: set[int] = set()
    for _ in range(num_turns):
        ends.append("turn")
        wanted = states_to_keep(chain(ends), system_stop=100)
        new = {len(ends) - 1} if held else set(range(len(ends)))
        assert wanted <= held | new
        held = set(wanted)
    if num_turns > 8:
        older = [index for index in held if 1 + num_media < index < len(ends) - 3]
        assert older or num_media == 2
