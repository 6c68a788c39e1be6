"""Pools of threads: apart by kind, fair among people, and work that ends with whom it is for."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest

from qwen35mm.pools import Asker, Pool


async def test_one_person_s_work_waits_for_its_own() -> None:
    pool, ended = Pool("test", 2, each=1), threading.Event()
    running: list[str] = []

    def work(name: str) -> str:
        running.append(name)
        ended.wait()
        return name

    asked = [asyncio.create_task(pool.run_for("ann", work, f"ann {n}")) for n in range(3)]
    asked.append(asyncio.create_task(pool.run_for("bob", work, "bob")))
    while len(running) < 2:
        await asyncio.sleep(0.001)
    assert sorted(running) == ["ann 0", "bob"]
    # Who doesn't wait any more loses the place in line.
    asked.pop(1).cancel()
    ended.set()
    assert await asyncio.gather(*asked) == ["ann 0", "ann 2", "bob"]
    assert "ann 1" not in running


async def test_a_call_that_nobody_waits_for_keeps_its_place_until_it_ends() -> None:
    pool, ended = Pool("test", 2, each=1), threading.Event()
    running: list[str] = []

    def work(name: str) -> None:
        running.append(name)
        ended.wait()

    async def begin(person: str) -> asyncio.Task[None]:
        task = asyncio.create_task(pool.run_for(person, work, person))
        for _ in range(20):
            await asyncio.sleep(0)
        return task

    try:
        for _ in range(3):
            task = await begin("ann")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        ben, later = await begin("ben"), await begin("ann")
        with anyio.fail_after(20):
            while "ben" not in running:
                await asyncio.sleep(0.001)
    finally:
        ended.set()
    await asyncio.gather(ben, later)
    assert running == ["ann", "ben", "ann"]


async def test_errors_and_the_lone_person() -> None:
    pool, both = Pool("test", 2, each=1), threading.Barrier(2)
    with pytest.raises(ZeroDivisionError):
        await pool.run_for("ann", lambda: 1 // 0)
    # None is the one person at the machine: nobody else waits.
    await asyncio.gather(*(pool.run_for(None, both.wait, 60) for _ in range(2)))


def test_what_was_begun_ends_when_its_asker_leaves() -> None:
    asker = Asker()
    ends: list[str] = []
    with asker.ending(lambda: ends.append("done")):
        pass
    with asker.ending(lambda: ends.append("first")):
        asker.leave()
        with asker.ending(lambda: ends.append("second")):
            pass
    asker.leave()
    assert ends == ["first", "second"]
