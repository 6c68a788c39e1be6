"""The loop of scripts: one for the whole program, whoever waits for it."""

from __future__ import annotations

import asyncio
import gc
import os
import threading

import pytest

from qwen35mm.backends.scripting import loop

PATIENCE_S = 60


async def where() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


async def fail(error: BaseException) -> None:
    raise error


async def test_it_is_one_thread_for_all() -> None:
    assert loop.run(where()) == await loop.arun(where()) == "qwen35mm-scripts"
    assert await asyncio.to_thread(loop.run, where()) == "qwen35mm-scripts"


async def test_errors_come_back_as_they_are() -> None:
    for error in (ValueError("a"), TimeoutError("b"), asyncio.CancelledError()):
        with pytest.raises(type(error)) as caught:
            loop.run(fail(error))
        assert isinstance(error, asyncio.CancelledError) or caught.value is error
        with pytest.raises(type(error)):
            await loop.arun(fail(error))


def test_nobody_is_told_of_a_cancelled_task_s_error(caplog: pytest.LogCaptureFixture) -> None:
    async def cancel() -> None:
        waiting = asyncio.create_task(loop.arun(asyncio.sleep(PATIENCE_S)))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})

    asyncio.run(cancel())
    gc.collect()
    assert not caplog.records


def test_what_was_cancelled_before_it_began_never_runs() -> None:
    ran = []

    async def run() -> None:
        ran.append(1)

    job = loop.Job(run())
    job.cancel()
    job.begin()
    with pytest.raises(asyncio.CancelledError):
        job.ended.result(PATIENCE_S)
    assert ran == []
    twice = loop.Job(run())
    twice.begin()
    twice.begin()
    twice.wait()
    assert ran == [1]


def test_what_runs_on_it_can_t_wait_for_it() -> None:
    async def ask() -> None:
        with pytest.raises(RuntimeError, match="can't wait for another answer"):
            loop.run(inner)

    inner = where()
    loop.run(ask())
    inner.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_a_loop_of_its_own() -> None:
    assert loop.run(where())
    child = os.fork()
    if child == 0:
        try:
            assert loop.run(where()) == "qwen35mm-scripts"
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
