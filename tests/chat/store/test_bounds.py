"""What a store gives up where it may keep only so much."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen35mm.chat.store.bounds import Bounds
from qwen35mm.chat.store.store import ConversationStore
from tests.chat.helpers import ME, OTHER, attach, create, node

HOUR_S = 3600.0
ALL = Bounds(num_bytes=10**9, conversations=100, age_s=HOUR_S)


class Clock:
    now_s = 1_000_000.0

    def __call__(self) -> float:
        self.now_s += 1
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> ConversationStore:
    return ConversationStore(tmp_path, clock=clock)


def said(store: ConversationStore, owner: str, num_bytes: int, file: bytes = b"") -> str:
    """A new conversation with so much text; its id."""
    made = create(store, owner)
    files = (attach(store, file, "a.png"),) if file else ()
    store.add(owner, made.id, node(text="x" * num_bytes, attachments=files))
    return made.id


def kept(store: ConversationStore, owner: str) -> list[str]:
    return [conversation.id for conversation in store.find(owner)][::-1]


def test_what_was_left_alone_longest_goes_first(store: ConversationStore, clock: Clock) -> None:
    first, second, third = (said(store, ME, 10) for _ in range(3))
    other = said(store, OTHER, 10)
    store.add(ME, first, node(text="gone on with"))
    assert store.trim(ALL) == 0
    assert store.trim(Bounds(ALL.num_bytes, 2, ALL.age_s)) == 1
    assert (kept(store, ME), kept(store, OTHER)) == ([third, first], [other])
    clock.now_s += HOUR_S
    new = said(store, ME, 10)
    assert store.trim(ALL) == 3
    assert (kept(store, ME), kept(store, OTHER)) == ([new], [])
    assert second != third


def test_whoever_has_most_gives_way(store: ConversationStore) -> None:
    mine = [said(store, ME, 400_000) for _ in range(4)]
    theirs = said(store, OTHER, 500_000)
    num_bytes = store.media.num_bytes()
    assert store.trim(Bounds(num_bytes - 600_000, 100, HOUR_S)) == 2
    assert (kept(store, ME), kept(store, OTHER)) == (mine[2:], [theirs])
    # The room that was given up counts no more, though the database's file keeps it.
    assert store.media.num_bytes() <= num_bytes - 600_000
    assert store.trim(Bounds(num_bytes - 600_000, 100, HOUR_S)) == 0


def test_files_count_and_go_with_the_last_message_that_has_them(store: ConversationStore) -> None:
    shared, own = b"s" * 300_000, b"o" * 300_000
    first, second = said(store, ME, 1, shared), said(store, ME, 1, own)
    third = said(store, ME, 1, shared)
    most = store.media.num_bytes() - 1
    # The first one's file stays for the third.
    assert store.trim(Bounds(most, 100, HOUR_S)) == 1
    assert kept(store, ME) == [second, third]
    while store.media.num_bytes() > 200_000:
        assert store.trim(Bounds(200_000, 100, HOUR_S))
    assert kept(store, ME) == []
    store.media.collect_garbage(min_age_s=0)
    assert not list(Path(store.media.path("0" * 64)).parent.parent.glob("??/*"))
    assert first != third
