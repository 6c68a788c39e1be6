"""Which models are loaded: on demand, within the memory, never without the one that answers. Backends are stand-ins."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch

from qwen35mm.backends.shelf import LentBackend, Offer, Shelf
from qwen35mm.contract import GenerationRequest, Message, Progress, Text
from qwen35mm.errors import CheckpointError, EngineError, QueueFullError

PATIENCE_S = 20.0


class Model:
    """A backend, and how often it was loaded and closed."""

    def __init__(self, name: str, num_bytes: int = 1) -> None:
        self.name, self.num_bytes = name, num_bytes
        self.num_loads = self.num_closes = 0
        self.trouble: Exception | None = None
        self.is_good = True
        self.has_room: Callable[[], bool] = lambda: True
        self.has_ended = False
        self.may_check = threading.Event()
        self.may_check.set()
        self.go_on = asyncio.Event()

    def offer(self) -> Offer:
        return Offer(self.name, self.num_bytes, self._load, self._check, lambda: self.has_room())

    def _check(self) -> None:
        assert self.may_check.wait(PATIENCE_S)
        if not self.is_good:
            raise CheckpointError("its config.json is cut off")

    def _load(self, progress: Any) -> Any:
        if self.trouble is not None:
            raise self.trouble
        self.num_loads += 1
        self.has_ended = False
        return self

    def close(self) -> None:
        self.num_closes += 1

    def without_weights(self) -> Model:
        return Model(f"{self.name} without weights")

    async def stream(self, request: GenerationRequest) -> Any:
        yield request.messages[0].text
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


async def until(condition: Callable[[], object]) -> None:
    with anyio.fail_after(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


def asked(words: str, **how: Any) -> GenerationRequest:
    return GenerationRequest([Message("user", (Text(words),))], **how)


def torch_s_shortage() -> Exception:
    """What torch raises where the host has too little memory."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    return caught.value


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
    one, two = LentBackend(shelf, "a").stream(asked("hello")), LentBackend(shelf, "b").stream(asked("hi"))
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
    await until(lambda: a.num_loads and not shelf.num_waiting)
    one.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        if await one:
            shelf.give_back("a")
    await use(shelf, "b")
    assert (a.num_closes, b.num_loads) == (1, 1)


async def test_an_idle_one_is_unloaded_after_a_while(make: Make, clock: Clock) -> None:
    shelf, (a, b) = make(1, 1, memory=2, keep_alive_s=600)
    shelf.shown = "a"
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
    with pytest.raises(EngineError, match="isn't loaded"):
        shelf.known("b")
    await use(shelf, "a")
    assert shelf.known("a") is a


async def test_with_no_time_to_keep_it_leaves_at_once(make: Make) -> None:
    shelf, (a,) = make(1, memory=1, keep_alive_s=0)
    await use(shelf, "a")
    await until(lambda: a.num_closes)
    assert states(shelf) == ["unloaded"]


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        (CheckpointError("a tensor is missing"), "'b' can't be loaded: a tensor is missing"),
        (MemoryError(), "'b' can't be loaded: there isn't enough memory"),
        (torch_s_shortage(), "'b' can't be loaded: there isn't enough memory"),
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
    b.has_room = lambda: a.num_closes == 1
    await use(shelf, "b")
    assert (a.num_closes, states(shelf)) == (1, ["unloaded", "loaded"])


async def test_one_that_the_machine_does_not_hold_is_not_loaded(make: Make) -> None:
    shelf, (a, b, c) = make(1, 1, 3, memory=2)
    await use(shelf, "a")
    b.has_room = c.has_room = lambda: False
    with pytest.raises(EngineError, match="'b' can't be loaded: there isn't enough memory"):
        await use(shelf, "b")
    assert (a.num_closes, b.num_loads, states(shelf)) == (1, 0, ["unloaded", "failed", "unloaded"])
    # A model that is larger than what seems free is tried, as a server with it alone does.
    await use(shelf, "c")
    assert c.num_loads == 1


async def test_a_failed_engine_is_replaced(make: Make) -> None:
    shelf, (a,) = make(1, memory=1)
    await use(shelf, "a")
    a.has_ended = True
    assert states(shelf) == ["unloaded"]
    await use(shelf, "a")
    assert (a.num_loads, a.num_closes, states(shelf)) == (2, 1, ["loaded"])


async def test_an_engine_that_fails_while_requests_wait_for_it_is_replaced_for_them(make: Make) -> None:
    shelf, (a, b) = make(1, 1, memory=1)
    async with shelf.lease("a"):
        other = asyncio.ensure_future(use(shelf, "b"))
        await until(lambda: not shelf.is_open("a"))
        waits = asyncio.ensure_future(use(shelf, "a"))
        await until(lambda: shelf.num_waiting == 2)
        a.has_ended = True
        other.cancel()
        await waits
    assert (a.num_loads, b.num_loads) == (2, 0)


async def test_no_model_moves_for_someone_who_left(make: Make) -> None:
    shelf, (a, b) = make(1, 1, memory=1)
    await use(shelf, "a")
    b.may_check.clear()
    gone = asyncio.ensure_future(use(shelf, "b"))
    await until(lambda: shelf.state("b") == "loading")
    gone.cancel()
    await asyncio.wait({gone})
    b.may_check.set()
    await until(lambda: shelf.state("b") == "unloaded")
    assert (a.num_closes, b.num_loads) == (0, 0)


async def test_settings_that_were_taken_back_while_others_waited_for_them_hold_up_nobody(make: Make) -> None:
    shelf, (a, b) = make(1, 1, memory=2)
    before = shelf.offers[0]
    await shelf.take("a")
    shelf.set(Model("a", 2).offer())
    changing, other = (asyncio.ensure_future(shelf.take("a")) for _ in range(2))
    await until(lambda: shelf.step("a")[0] == "wait")
    changing.cancel()
    shelf.set(before)
    with anyio.fail_after(PATIENCE_S):
        assert await other is a
        await use(shelf, "b")
    assert (a.num_closes, b.num_loads) == (0, 1)


@pytest.mark.parametrize("is_wanted", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
async def test_an_offer_is_taken_back_unless_a_request_waits_for_it(
    make: Make, is_first: bool, is_wanted: bool
) -> None:
    shelf, _ = make(1, 1, memory=1)
    new = Model("new")
    await shelf.take("a")
    first = None if is_first else asyncio.ensure_future(use(shelf, "b"))
    await settled()
    shelf.set(new.offer())

    async def choose() -> None:
        try:
            await shelf.take("new")
        finally:
            shelf.remove("new")

    chosen = asyncio.ensure_future(choose())
    program = asyncio.ensure_future(use(shelf, "new")) if is_wanted else None
    num_waiting = 1 + is_wanted + (not is_first)
    await until(lambda: shelf.num_waiting == num_waiting and shelf.step("new" if is_first else "b")[0] == "wait")
    chosen.cancel()
    with pytest.raises(asyncio.CancelledError):
        await chosen
    shelf.give_back("a")
    for each in filter(None, (first, program)):
        await each
    await settled()
    assert [each.name for each in shelf.offers] == ["a", "b", "new"][: 2 + is_wanted]
    assert new.num_loads == is_wanted
    shelf.close()
    assert new.num_closes == is_wanted


async def test_only_those_leave_whose_memory_is_needed(make: Make, clock: Clock) -> None:
    shelf, _ = make(1, 1, 1, memory=2)
    for _ in range(2):
        await shelf.take("a")
    clock.now = 1
    async with shelf.lease("b"):
        waits = asyncio.ensure_future(use(shelf, "c"))
        await until(lambda: not shelf.is_open("a"))
        # From now on the other one was used least recently.
        clock.now = 2
        shelf.give_back("a")
        await settled()
        assert (shelf.is_open("a"), shelf.is_open("b")) == (False, True)
        shelf.give_back("a")
        await waits
        assert states(shelf) == ["unloaded", "loaded", "loaded"]


async def test_as_many_leave_as_a_large_one_needs(make: Make) -> None:
    shelf, _ = make(1, 1, 2, memory=2)
    async with shelf.lease("a"), shelf.lease("b"):
        waits = asyncio.ensure_future(use(shelf, "c"))
        await until(lambda: not (shelf.is_open("a") or shelf.is_open("b")))
    await waits
    assert states(shelf) == ["unloaded", "unloaded", "loaded"]


async def test_one_timer_looks_after_each_idle_model(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, _ = make(1, memory=1, keep_alive_s=600)
    loop, timers = asyncio.get_running_loop(), []
    begun = loop.call_later
    monkeypatch.setattr(loop, "call_later", lambda *how: timers.append(begun(*how)) or timers[-1])
    await use(shelf, "a", "a", "a")
    assert sum(not each.cancelled() for each in timers if each.when() > loop.time() + 500) == 1


async def test_a_request_may_name_its_model_and_load_none(make: Make) -> None:
    shelf, (a, b) = make(1, 1, memory=1)
    backend = LentBackend(shelf, "a")
    with pytest.raises(EngineError, match="The model 'a' isn't loaded"):
        await anext(backend.stream(asked("a title", loads=False)))
    assert a.num_loads == 0
    # It was made for this one; another was chosen since.
    stream = backend.stream(asked("hi", model="b"))
    assert [await anext(stream), await anext(stream)] == [Progress("load", 0, 0), "hi"]
    assert (a.num_loads, b.num_loads) == (0, 1)
    waits = asyncio.ensure_future(use(shelf, "a"))
    await until(lambda: not shelf.is_open("b"))
    behind = backend.stream(asked("hi", model="b"))
    assert await anext(behind) == Progress("load", 0, 0), "who waits for one that leaves is told so, too"
    await behind.aclose()
    await stream.aclose()
    await waits


async def test_too_many_in_the_line_are_refused(make: Make) -> None:
    shelf, _ = make(1, 1, 1, memory=1, max_waiting=1)
    async with shelf.lease("a"):
        waits = asyncio.ensure_future(use(shelf, "b"))
        await settled()
        with pytest.raises(QueueFullError, match="1 request is waiting already"):
            await use(shelf, "b")
        # One model's line takes no place in another's.
        other = asyncio.ensure_future(use(shelf, "c"))
        await settled()
        assert not other.done()
    await asyncio.gather(waits, other)
