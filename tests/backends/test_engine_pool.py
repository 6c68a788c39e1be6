"""Requests to several engines, some of which die, come back, or refuse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from qwen35mm.backends import engine_pool
from qwen35mm.backends.engine_pool import MAX_LOST, EnginePool, Member
from qwen35mm.errors import ConfigError, EngineError, RefusedError, RequestError


@dataclass
class FakeEngine:
    """Answers with its name, once `opened` is set; `error` is raised instead."""

    name: str
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    refuses_at_return: bool = False
    num_asked: int = 0

    async def ask(self) -> str:
        self.num_asked += 1
        await self.opened.wait()
        if self.error is not None:
            raise self.error
        return self.name

    async def probe(self) -> None:
        if self.refuses_at_return:
            raise ConfigError("It has another model now.")
        if self.error is not None:
            raise EngineError("Not yet.")


@asynccontextmanager
async def opened(*slots: int, **options: Any) -> AsyncIterator[tuple[EnginePool[FakeEngine], list[FakeEngine]]]:
    """A pool of engines `a`, `b` and so on that answer at once; pauses take no time."""
    engines = [FakeEngine("abc"[i]) for i in range(len(slots))]
    for engine in engines:
        engine.opened.set()
    members = [Member(engine.name, engine, n) for engine, n in zip(engines, slots, strict=True)]
    pool = EnginePool(members, FakeEngine.probe, sleep=lambda _: asyncio.sleep(0), **options)
    async with aclosing(pool):
        yield pool, engines


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not holds():
            await asyncio.sleep(0)


async def test_the_least_busy_is_asked_first_and_none_beyond_its_slots() -> None:
    async with opened(4, 2) as (pool, engines):
        for engine in engines:
            engine.opened.clear()
        asked = [asyncio.create_task(pool.use(FakeEngine.ask)) for _ in range(7)]
        await until(lambda: sum(engine.num_asked for engine in engines) == 6)
        assert [member.num_active for member in pool.members] == [4, 2]
        # The share of its slots counts: of three requests, the larger engine has two.
        engines[1].opened.set()
        await until(lambda: engines[1].num_asked == 3)
        engines[0].opened.set()
        assert sorted(await asyncio.gather(*asked)) == ["a"] * 4 + ["b"] * 3
        assert [member.num_answered for member in pool.members] == [4, 3]
        assert [member.num_active for member in pool.members] == [0, 0]


async def test_what_a_dying_engine_had_goes_elsewhere_and_it_is_asked_again_once_it_answers() -> None:
    async with opened(2, 2) as (pool, (a, b)):
        a.opened.clear()
        b.opened.clear()
        asked = [asyncio.create_task(pool.use(FakeEngine.ask)) for _ in range(4)]
        await until(lambda: a.num_asked == b.num_asked == 2)
        a.error = EngineError("It broke off.")
        a.opened.set()
        await until(lambda: pool.members[0].state == "away")
        b.opened.set()
        assert await asyncio.gather(*asked) == ["b"] * 4
        assert (await pool.use(FakeEngine.ask), a.num_asked) == ("b", 2)
        a.error = None
        await until(lambda: pool.members[0].state == "here")
        assert {await pool.use(FakeEngine.ask) for _ in range(2)} == {"a", "b"}
        assert (pool.members[0].num_lost, pool.members[1].num_lost) == (2, 0)


async def test_a_request_that_ends_its_engines_fails_in_the_end() -> None:
    async with opened(1, 1) as (pool, _):
        num_asked = 0

        async def deadly(_: FakeEngine) -> str:
            nonlocal num_asked
            num_asked += 1
            raise EngineError("It broke off.")

        with pytest.raises(EngineError, match="broke off"):
            await pool.use(deadly)
        assert num_asked == MAX_LOST
        assert await pool.use(FakeEngine.ask) in "ab"


async def test_requests_wait_for_a_return_but_not_forever() -> None:
    async with opened(1, 1, patience_s=0.05) as (pool, engines):
        for engine in engines:
            engine.error = EngineError("It broke off.")
        with pytest.raises(EngineError, match=r"No engine came back in 0\.05 s: It broke off"):
            await pool.use(FakeEngine.ask)
        engines[1].error = None
        await until(lambda: pool.members[1].state == "here")
        assert await pool.use(FakeEngine.ask) == "b"


async def test_an_engine_that_refuses_is_left_for_good_but_not_the_last_one() -> None:
    async with opened(1, 1) as (pool, (a, b)):
        a.error = b.error = RequestError("The key is wrong.")
        with pytest.raises(RequestError, match="key"):
            await pool.use(FakeEngine.ask)
        assert [member.state for member in pool.members] == ["left", "here"]
        b.error = None
        assert (await pool.use(FakeEngine.ask), a.num_asked) == ("b", 1)


async def test_a_refusal_of_one_request_is_not_the_engines() -> None:
    async with opened(1, 1) as (pool, (a, _)):
        a.error = RefusedError("No such picture.")
        with pytest.raises(RefusedError):
            await pool.use(FakeEngine.ask)
        assert [member.state for member in pool.members] == ["here", "here"]


async def test_an_engine_that_comes_back_as_another_gets_nothing_and_without_any_requests_fail_at_once() -> None:
    async with opened(1, 1) as (pool, engines):
        for engine in engines:
            engine.error, engine.refuses_at_return = EngineError("It broke off."), True
        with pytest.raises(EngineError, match="No engine is left: It has another model now"):
            await pool.use(FakeEngine.ask)
        assert [member.state for member in pool.members] == ["left", "left"]


async def test_leaving_gives_the_slot_back() -> None:
    async with opened(1, 1) as (pool, engines):
        engines[0].opened.clear()
        task = asyncio.create_task(pool.use(FakeEngine.ask))
        await until(lambda: engines[0].num_asked == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert pool.members[0].num_active == 0


async def test_a_conversation_stays_with_its_engine_while_that_has_a_free_slot() -> None:
    async with opened(2, 2) as (pool, (a, b)):
        assert [await pool.use(FakeEngine.ask, each) for each in "xyxyx"] == ["a", "b", "a", "b", "a"]
        # Though the other one is idle.
        a.opened.clear()
        others = [asyncio.create_task(pool.use(FakeEngine.ask, "x")) for _ in range(2)]
        await until(lambda: pool.members[0].num_active == 2)
        # It is busy, and the conversation moves.
        assert await pool.use(FakeEngine.ask, "x") == "b"
        a.opened.set()
        assert await asyncio.gather(*others) == ["a", "a"]
        b.error = EngineError("It broke off.")
        assert await pool.use(FakeEngine.ask, "y") == "a"
        b.error = None
        await until(lambda: pool.members[1].state == "here")
        assert await pool.use(FakeEngine.ask, "y") == "a"


async def test_only_the_latest_conversations_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "_MOST_HELD", 2)
    async with opened(1, 1) as (pool, _):
        assert [await pool.use(FakeEngine.ask, each) for each in "xyzx"] == ["a", "b", "a", "b"]


async def test_a_bug_of_the_probe_loses_no_engine_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[None] = []

    async def probe(engine: FakeEngine) -> None:
        if not failed:
            failed.append(None)
            raise KeyError("bug")

    monkeypatch.setattr(FakeEngine, "probe", probe)
    async with opened(1) as (pool, _):
        pool.lose(pool.members[0], EngineError("It is gone."))
        await until(lambda: pool.members[0].state == "here")
    assert failed
