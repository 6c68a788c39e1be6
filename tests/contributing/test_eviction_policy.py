"""Which states stay is decided in policy.py alone, and which segment leaves first in segment_index.py; whatever they
say, a warm answer has a cold one's bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from qwen35mm.cache import Chain
from qwen35mm.cache.segment_index import CachedSegment, SegmentIndex
from qwen35mm.engine import Engine, Request, prefill
from qwen35mm.prompt import Segment
from tests.engine.exact import (
    DENSE,
    SETTINGS,
    Chat,
    assert_same,
    cache_settings,
    chat_model,
    cold,
    dialog,
    serve,
    user,
    words,
)

unpinned = SegmentIndex.unpinned


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(chat_model(DENSE))


def conversation(chat: Chat, name: str, num_turns: int) -> Request:
    return chat.request(dialog([user(words(name, turn, count=40)) for turn in range(num_turns)]))


def last_alone(segments: Sequence[Segment], *, system_stop: int = 0) -> frozenset[int]:
    return frozenset({len(segments) - 1})


def test_a_policy_of_states_is_one_function(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    for policy in (prefill.states_to_keep, last_alone):
        monkeypatch.setattr(prefill, "states_to_keep", policy)
        engine = Engine(chat.loaded, SETTINGS, cache_settings(chat.loaded))
        serve(engine, conversation(chat, "one", 4))
        longer = conversation(chat, "one", 5)
        (answer,) = serve(engine, longer)
        assert_same(answer, cold(chat.loaded, longer))
        assert answer.result.cache.num_cached_tokens > 0
        kept.append(len(engine.runtime.prefixes.states.addresses))
    assert kept[0] > kept[1]


def newest_first(self: SegmentIndex) -> Iterator[CachedSegment]:
    oldest_first = list(unpinned(self))
    # A child leaves before its parent.
    chains: dict[bytes, list[CachedSegment]] = {}
    for segment in oldest_first:
        root = segment
        while (parent := self.find(root.parent)) is not None:
            root = parent
        chains.setdefault(root.address, []).append(segment)
    for chain in reversed(chains.values()):
        yield from chain


@pytest.mark.parametrize(("order", "stays"), [(unpinned, "second"), (newest_first, "first")])
def test_an_order_of_segments_is_one_function(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, order: object, stays: str
) -> None:
    monkeypatch.setattr(SegmentIndex, "unpinned", order)
    engine = Engine(chat.loaded, SETTINGS, cache_settings(chat.loaded, num_tokens=1024))
    for name in ("first", "second", "third"):
        serve(engine, conversation(chat, name, 4))
    assert [name for name in ("first", "second") if is_whole(engine, chat, name)] == [stays]


def is_whole(engine: Engine, chat: Chat, name: str) -> bool:
    """Whether nothing of a conversation was evicted."""
    chain = Chain.of(conversation(chat, name, 4).prompt, engine.runtime.root)
    start = engine.runtime.prefixes.begin(chain)
    start.sequence.free()
    engine.runtime.prefixes.unpin(start)
    return start.num_segments == len(chain)
