"""Which models are loaded: on demand, within the memory, never without the one that answers. Backends are stand-ins."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from qwen35mm.backends.shelf import LentBackend, Offer, Shelf
from qwen35mm.contract import Progress
from qwen35mm.errors import CheckpointError, EngineError, QueueFullError


class Model:
    """A backend, and how often it was loaded and closed."""

    def __init__(self, name: str, num_bytes: int = 1) -> None:
        self.name, self.num_bytes = name, num_bytes
        self.num_loads = self.num_closes = 0
        self.trouble: Exception | None = None
        self.is_good, self.has_room = True, True
        self.has_ended = False
        self.go_on = asyncio.Event()

    def offer(self) -> Offer:
        return Offer(self.name, self.num_bytes, self._load, self._check, lambda: self.has_room)

    def _check(self) -> None:
        if not self.is_good:
            raise CheckpointError("its config.json is cut off")

    def _load(self) -> Any:
        if self.trouble is not None:
            raise self.trouble
        self.num_loads += 1
        self.has_ended = False
        return self

    def close(self) -> None:
        self.num_closes += 1

    def without_weights(self) -> Model:
        return Model(f"{self.name} without weights")

    async def stream(self, words: str) -> Any:
        yield words
        await self.go_on.wait()
        yield "end"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


Make = Callable[..., tuple[Shelf, list[Model]]]


@pytest.fixture
def make(clock: Clock) -> Make:
    def make(*sizes: int, memory: int, **options: Any) -> tuple[Shelf, list[Model]]:
        models = [Model(name, size) for name, size in zip("abc", sizes, strict=False)]
        return Shelf([each.offer() for each in models], memory, clock=clock, **options), models

    return make


async def use(shelf: Shelf, *names: str) -> None:
    for name in names:
        async with shelf.lease(name):
            pass


async def settled() -> None:
    """Lets the tasks of this loop go as far as they can, those with threads, too."""
    for _ in range(20):
        await asyncio.to_thread(lambda: None)


def states(shelf: Shelf) -> list[str]:
    return [shelf.state(each.name) for each in shelf.offers]


async def test_a_model_is_loaded_when_it_is_asked_for_and_stays(make: Make) -> None:
    shelf, (a, b) = make(1, 1, memory=2)
    assert states(shelf) == ["unloaded", "unloaded"]
    await use(shelf, "a", "b", "a", "b")
    assert (a.num_loads, b.num_loads, states(shelf)) == (1, 1, ["loaded", "loaded"])
    shelf.close()
    assert (a.num_closes, b.num_closes) == (1, 1)
    with pytest.raises(EngineError, match="shutting down"):
        await use(shelf, "a")


async def test_two_answer_at_once(make: Make) -> None:
    shelf, _ = make(1, 1, memory=2)
    one, two = LentBackend(shelf, "a").stream("hello"), LentBackend(shelf, "b").stream("hi")  # type: ignore
    for stream, words in ((one, "hello"), (two, "hi")):
        assert [await anext(stream), await anext(stream)] == [Progress("load", 0, 0), words]
    await one.aclose()
    await two.aclose()


async def test_the_least_recently_used_one_leaves(make: Make, clock: Clock) -> None:
    shelf, (a, b, c) = make(1, 1, 1, memory=2)
    for name in "ab":
        clock.now += 1
        await use(shelf, name)
    clock.now += 1
    await use(shelf, "a", "c")
    assert states(shelf) == ["loaded", "unloaded", "loaded"]
    assert (a.num_closes, b.num_closes, c.num_closes) == (0, 1, 0)
    assert shelf.used_bytes == 2


async def test_one_that_answers_never_leaves_and_new_requests_wait_behind(make: Make) -> None:
    shelf, (a, b) = make(1, 1, memory=1)
    order: list[str] = []

    async def ask(name: str, label: str) -> None:
        async with shelf.lease(name):
            order.append(label)
            await asyncio.to_thread(lambda: None)

    async with shelf.lease("a"):
        waiting = [asyncio.ensure_future(ask("b", "b1"))]
        await settled()
        # It came later, so it doesn't hold up the other model.
        waiting.append(asyncio.ensure_future(ask("a", "a2")))
        waiting.append(asyncio.ensure_future(ask("b", "b2")))
        await settled()
        assert (order, a.num_closes, states(shelf)) == ([], 0, ["loaded", "loading"])
        assert shelf.num_waiting == 3
    await asyncio.gather(*waiting)
    # All that wait for one model are answered together.
    assert order == ["b1", "b2", "a2"]
    assert (a.num_loads, b.num_loads) == (2, 1)


async def test_nobody_is_held_up_by_someone_who_left(make: Make) -> None:
    shelf, (a, b) = make(1, 1, memory=1)
    async with shelf.lease("a"):
        gone = asyncio.ensure_future(use(shelf, "b"))
        await settled()
        other = asyncio.ensure_future(use(shelf, "a"))
        await settled()
        assert not other.done()
        gone.cancel()
        await other
        assert shelf.num_waiting == 0
    assert (a.num_loads, b.num_loads) == (1, 0)
    with contextlib.suppress(asyncio.CancelledError):
        await gone


async def test_a_lease_that_was_given_while_its_owner_left_is_given_back(make: Make) -> None:
    shelf, (a, b) = make(1, 1, memory=1)
    one = asyncio.ensure_future(shelf.take("a"))
    while not a.num_loads:
        await asyncio.sleep(0)
    while shelf.num_waiting:
        await asyncio.sleep(0)
    one.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        if await one:
            shelf.give_back("a")
    await use(shelf, "b")
    assert (a.num_closes, b.num_loads) == (1, 1)


async def test_an_idle_one_is_unloaded_after_a_while(make: Make, clock: Clock) -> None:
    shelf, (a, b) = make(1, 1, memory=2, keep_alive_s=600, keeps_prompts=True)
    await use(shelf, "a")
    clock.now = 300
    async with shelf.lease("b"):
        clock.now = 700
        await shelf.unload_idle()
        assert states(shelf) == ["unloaded", "loaded"], "the one that answers stays"
    clock.now = 1299
    await shelf.unload_idle()
    assert b.num_closes == 0
    clock.now = 1300
    await shelf.unload_idle()
    assert (a.num_closes, b.num_closes) == (1, 1)
    assert shelf.known("a").name == "a without weights"  # type: ignore
    await use(shelf, "a")
    assert shelf.known("a") is a


async def test_with_no_time_to_keep_it_leaves_at_once(make: Make) -> None:
    shelf, (a,) = make(1, memory=1, keep_alive_s=0)
    await use(shelf, "a")
    while not a.num_closes:
        await asyncio.sleep(0)
    assert states(shelf) == ["unloaded"]


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        (CheckpointError("a tensor is missing"), "'b' can't be loaded: a tensor is missing"),
        (MemoryError(), "'b' can't be loaded: there isn't enough memory"),
        (ZeroDivisionError(), "'b' can't be loaded: "),
    ],
)
async def test_trouble_with_one_leaves_the_other_alone(make: Make, trouble: Exception, told: str) -> None:
    shelf, (a, b) = make(1, 1, memory=2)
    b.trouble = trouble
    async with shelf.lease("a"):
        asked = await asyncio.gather(use(shelf, "b"), use(shelf, "b"), use(shelf, "a"), return_exceptions=True)
    assert [type(each) for each in asked] == [EngineError, EngineError, type(None)]
    assert told in str(asked[0])
    assert states(shelf) == ["loaded", "failed"]
    assert a.num_loads == 1
    b.trouble = None
    await use(shelf, "b")
    assert (states(shelf), shelf.error("b")) == (["loaded", "loaded"], None)


async def test_a_damaged_one_costs_no_other_its_place(make: Make) -> None:
    shelf, (a, b) = make(1, 1, memory=1)
    await use(shelf, "a")
    b.is_good = False
    with pytest.raises(EngineError, match=r"its config\.json is cut off"):
        await use(shelf, "b")
    assert a.num_closes == 0


async def test_others_leave_too_where_the_machine_has_less_memory_than_planned(make: Make) -> None:
    shelf, (a, b) = make(1, 1, memory=2)
    await use(shelf, "a")
    b.has_room = False
    await use(shelf, "b")
    assert (a.num_closes, states(shelf)) == (1, ["unloaded", "loaded"])


async def test_a_failed_engine_is_replaced(make: Make) -> None:
    shelf, (a,) = make(1, memory=1)
    await use(shelf, "a")
    a.has_ended = True
    await use(shelf, "a")
    assert a.num_loads == 2


async def test_too_many_in_the_line_are_refused(make: Make) -> None:
    shelf, _ = make(1, 1, memory=1, max_waiting=1)
    async with shelf.lease("a"):
        waits = asyncio.ensure_future(use(shelf, "b"))
        await settled()
        with pytest.raises(QueueFullError, match="1 request is waiting already"):
            await use(shelf, "b")
    await waits
