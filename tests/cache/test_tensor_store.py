"""What is new stays on its device until it is to stay at all, and until nobody waits for a first token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from qwen35mm.cache import StatePool
from qwen35mm.cache.disk_tier import Tensors
from qwen35mm.cache.policy import MAX_STATES_PER_CHAIN
from qwen35mm.cache.tensor_store import TensorStore, VisionCache
from qwen35mm.engine import Engine
from tests.card import Card, OnCard
from tests.engine.exact import SETTINGS, Chat, assert_same, assistant, chat_model, cold, serve, user, words
from tests.tiny import DENSE


@pytest.fixture
def card() -> Iterator[Card]:
    with Card() as card:
        yield card


def entered(store: TensorStore, *names: bytes) -> None:
    """Enters 40 bytes each that are on the card."""
    for name in names:
        store.put(name, {"conv": OnCard(torch.rand(10))})


def test_an_entry_is_copied_by_offload(card: Card) -> None:
    store = TensorStore("state", max_bytes=1000)
    entered(store, b"first", b"second")
    assert store.needs_offload
    assert len(card.transfers) == 0
    store.offload(but_newest=True)
    assert (len(card.transfers), store.needs_offload) == (1, True)
    store.offload()
    store.offload()
    assert (len(card.transfers), store.needs_offload) == (2, False)
    store.check_integrity()


def test_an_entry_that_left_is_not_copied(card: Card) -> None:
    evicted: list[bytes] = []
    store = TensorStore("state", max_bytes=80, on_evict=evicted.append)
    entered(store, b"first", b"second", b"third")
    store.drop(b"second")
    store.offload()
    assert evicted == [b"first"]
    assert len(card.transfers) == 1
    assert store.addresses == {b"third"}


def test_the_least_recently_used_goes_first_and_what_is_too_large_is_not_kept(card: Card) -> None:
    store = TensorStore("state", max_bytes=120)
    entered(store, b"a", b"b", b"c")
    store.touch([b"a", b"b"])
    entered(store, b"d")
    assert store.addresses == {b"a", b"b", b"d"}
    entered(store, b"e")
    assert store.addresses == {b"a", b"d", b"e"}
    store.put(b"large", {"conv": torch.rand(31)})
    assert store.addresses == {b"a", b"d", b"e"}
    store.check_integrity()


def test_host_features_need_no_copy() -> None:
    cache = VisionCache(max_bytes=1024)
    features = torch.rand(4, 8)
    cache.keep(b"a", features)
    assert not cache.needs_offload
    assert cache.features(b"a") is features
    assert cache.features(b"b") is None


def test_a_prompt_of_many_cuts_copies_the_states_that_stay(monkeypatch: pytest.MonkeyPatch, card: Card) -> None:
    made: list[Tensors] = []
    keep = StatePool.keep

    def keep_there(pool: StatePool, slot: int) -> Tensors:
        made.append({name: OnCard(tensor) for name, tensor in keep(pool, slot).items()})
        return made[-1]

    monkeypatch.setattr(StatePool, "keep", keep_there)
    loaded = chat_model(DENSE)
    chat, engine = Chat(loaded), Engine(loaded, SETTINGS)
    messages = [message for turn in range(16) for message in (user(words(turn, count=22)), assistant("yes"))]
    messages.append(user("at last"))
    (answer,) = serve(engine, chat.request(messages))
    assert len(made) > MAX_STATES_PER_CHAIN + 1
    while engine.has_work:
        engine.step()
    assert not engine.runtime.needs_offload
    assert len(card.transfers) == 2 * MAX_STATES_PER_CHAIN
    assert_same(answer, cold(loaded, chat.request(messages)))
    # The next turn goes on from one of them, bit for bit.
    more = [*messages, assistant(answer.result.text), user(words("and", count=20))]
    (again,) = serve(engine, chat.request(more))
    assert again.result.cache.num_cached_tokens > 0
    assert_same(again, cold(loaded, chat.request(more)))
    engine.check_integrity()
