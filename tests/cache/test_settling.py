"""States of new cuts stay on their device until they are to stay at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from qwen35mm.cache import prefix_cache
from qwen35mm.cache.chain import Checkpoint
from qwen35mm.cache.policy import MAX_STATES_PER_CHAIN
from qwen35mm.cache.segment_index import CachedSegment
from qwen35mm.cache.state_store import StateStore
from qwen35mm.engine import Engine
from tests.engine.exact import SETTINGS, Chat, assert_same, assistant, chat_model, cold, serve, user, words
from tests.tiny import DENSE


class OnCard(torch.Tensor):
    """A tensor that says that it is on a device which this machine may not have, and counts its copies to the host."""

    num_copies = 0

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.device("cuda", 0)

    def to(self, *args: Any, **options: Any) -> torch.Tensor:
        assert args == ("cpu",)
        OnCard.num_copies += 1
        return self.as_subclass(torch.Tensor)


@pytest.fixture(autouse=True)
def _no_copies_yet() -> None:
    OnCard.num_copies = 0


def on_card(tensor: torch.Tensor) -> OnCard:
    return tensor.as_subclass(OnCard)


def entered(store: StateStore, *names: str) -> list[CachedSegment]:
    """Segments with a state of 40 bytes each on the card."""
    segments = []
    for name in names:
        segments.append(CachedSegment(name.encode(), b"", np.arange(1), 0))
        store.keep(segments[-1], Checkpoint(1, 0, {"conv": on_card(torch.rand(10))}))
    return segments


def test_a_state_is_copied_once_it_settles() -> None:
    store = StateStore(max_bytes=1000, on_drop=lambda segment: None)
    first, second = entered(store, "first", "second")
    assert store.has_unsettled
    assert OnCard.num_copies == 0
    store.settle(but_newest=True)
    assert (OnCard.num_copies, store.has_unsettled) == (1, True)
    store.settle()
    store.settle()
    assert (OnCard.num_copies, store.has_unsettled) == (2, False)
    assert all(segment.state is not None and segment.state.is_on_host for segment in (first, second))
    store.check_integrity([first, second])


def test_a_state_that_left_is_not_copied() -> None:
    dropped: list[CachedSegment] = []

    def take_off(segment: CachedSegment) -> None:
        segment.state = None
        dropped.append(segment)

    store = StateStore(max_bytes=80, on_drop=take_off)
    first, second, third = entered(store, "first", "second", "third")
    store.drop(second)
    store.settle()
    assert dropped == [first]
    assert OnCard.num_copies == 1
    assert third.state is not None


def test_a_prompt_of_many_cuts_copies_the_states_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []

    def stack(rows: Sequence[torch.Tensor]) -> torch.Tensor:
        made.append(on_card(torch.stack(list(rows))))
        return made[-1]

    monkeypatch.setattr(prefix_cache, "stack_in_place", stack)
    loaded = chat_model(DENSE)
    chat, engine = Chat(loaded), Engine(loaded, SETTINGS)
    messages = [message for turn in range(16) for message in (user(words(turn, count=22)), assistant("yes"))]
    messages.append(user("at last"))
    (answer,) = serve(engine, chat.request(messages))
    num_cuts = len(made) // 2
    assert num_cuts > MAX_STATES_PER_CHAIN + 1
    while engine.has_work:
        engine.step()
    assert not engine.runtime.has_unsettled
    assert OnCard.num_copies == 2 * MAX_STATES_PER_CHAIN
    assert_same(answer, cold(loaded, chat.request(messages)))
    # The next turn goes on from one of them, bit for bit.
    more = [*messages, assistant(answer.result.text), user(words("and", count=20))]
    (again,) = serve(engine, chat.request(more))
    assert again.result.cache.num_cached_tokens > 0
    assert_same(again, cold(loaded, chat.request(more)))
    engine.check_integrity()
