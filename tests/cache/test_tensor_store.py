"""What is new stays on its device until it is to stay at all, and until nobody waits for a first token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


def on_card(monkeypatch: pytest.MonkeyPatch) -> list[Tensors]:
    """Kept states are on the card from now on; those that were made."""
    made: list[Tensors] = []
    keep = StatePool.keep

    def keep_there(pool: StatePool, slot: int) -> Tensors:
        made.append({name: OnCard(tensor) for name, tensor in keep(pool, slot).items()})
        return made[-1]

    monkeypatch.setattr(StatePool, "keep", keep_there)
    return made


def where(store: TensorStore) -> dict[bytes, str]:
    """The type of the device that each entry is given from."""
    return {name: entry["conv"].device.type for name in store.addresses if (entry := store.get(name)) is not None}


def test_an_entry_is_copied_by_offload(card: Card) -> None:
    store = TensorStore("state", max_bytes=1000)
    entered(store, b"first", b"second")
    assert store.needs_offload
    assert len(card.transfers) == 0
    store.make_room(40)
    assert (len(card.transfers), store.needs_offload) == (1, True)
    store.offload()
    store.offload()
    assert (len(card.transfers), store.needs_offload, store.num_on_device) == (2, False, 0)
    store.check_integrity()


def test_the_newest_cuts_stay_on_the_card_and_have_a_copy_before_they_leave(card: Card) -> None:
    store = TensorStore("state", max_bytes=1000, device_bytes=120)
    entered(store, b"old chat", b"first cut", b"second cut")
    store.touch([b"first cut", b"second cut"])
    store.offload()
    assert (len(card.transfers), store.num_on_device, store.needs_offload) == (3, 3, False)
    assert where(store) == {b"old chat": "cuda", b"first cut": "cuda", b"second cut": "cuda"}
    gone: set[bytes] = set()
    for fresh, left in ((b"third cut", b"first cut"), (b"another chat", b"old chat")):
        store.make_room(40)
        entered(store, fresh)
        gone.add(left)
        assert {name for name, device in where(store).items() if device == "cpu"} == gone
    assert len(card.transfers) == 3, "what is in host memory already is only dropped"
    store.leave_device()
    assert (len(card.transfers), set(where(store).values())) == (5, {"cpu"})
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
    made = on_card(monkeypatch)
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


def test_a_prompt_that_finds_a_full_card_is_begun_again_without_the_kept_states(
    monkeypatch: pytest.MonkeyPatch, card: Card
) -> None:
    on_card(monkeypatch)
    loaded = chat_model(DENSE)
    chat, engine = Chat(loaded), Engine(loaded, SETTINGS)
    states = engine.runtime.prefixes.states
    states.device_bytes = states.max_bytes
    serve(engine, chat.request([user(words("first", count=80))]))
    while engine.has_work:
        engine.step()
    assert set(where(states).values()) == {"cuda"}
    by_layers, full = type(loaded.model).by_layers, [True]

    def out_of_memory(self: Any, *args: Any) -> Any:
        if full:
            full.pop()
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return by_layers(self, *args)

    monkeypatch.setattr(type(loaded.model), "by_layers", out_of_memory)
    request = chat.request([user(words("second", count=60))])
    (answer,) = serve(engine, request)
    assert not full
    assert set(where(states).values()) == {"cpu", "cuda"}, "those of the first chat left, and the second's came"
    assert_same(answer, cold(loaded, request))
    engine.check_integrity()
    states.leave_device()
    full.append(True)
    with pytest.raises(AssertionError, match="Memory ran out"):
        serve(engine, chat.request([user("third")]))
