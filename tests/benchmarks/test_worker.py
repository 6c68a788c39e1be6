"""An engine in a process of its own: it is made there, answers by its methods, and its failures end the benchmark."""

from __future__ import annotations

import multiprocessing
import os
from argparse import Namespace
from typing import Any

import pytest

from benchmarks import worker
from benchmarks.worker import Worker, in_turns, rounds
from tests import forked  # noqa: F401 - says what the processes of "forkserver" find imported


class Engine:
    """Ends its process where it is told to."""

    def __init__(self, arguments: Namespace, offset: int) -> None:
        self._arguments, self._offset = arguments, offset
        self._exit("make")

    def add(self, number: int) -> dict[str, Any]:
        self._exit("add")
        return {"sum": number + self._offset, "pid": os.getpid()}

    def close(self) -> None:
        self._exit("close")

    def _exit(self, where: str) -> None:
        if self._arguments.fails == where:
            os._exit(4)


@pytest.mark.parametrize("start", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fails", [None, "make", "add", "close"])
def test_a_worker_answers_or_its_end_is_told(monkeypatch: pytest.MonkeyPatch, fails: str | None, start: str) -> None:
    monkeypatch.setattr(worker, "_spawn", multiprocessing.get_context(start))

    def ask() -> None:
        with Worker(Engine, Namespace(threads=1, fails=fails), 5) as engine:
            answer = engine.ask("add", 2)
            assert answer["sum"] == 7
            assert answer["pid"] != os.getpid()
            assert engine.load_s >= 0

    if fails is None:
        ask()
    else:
        with pytest.raises(SystemExit, match="ended with status 4"):
            ask()


def test_the_first_round_warms_up_those_that_need_it() -> None:
    asked: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self._name = name

        def ask(self, method: str, number: int) -> dict[str, Any]:
            asked.append(self._name)
            return {method: number}

    workers: Any = {"a": Noted("a"), "warm": Noted("warm")}
    found = rounds(workers, 2, "add", 8, warm=["warm"])
    assert next(found) == {"a": [{"add": 8}], "warm": [{"add": 8}]}
    assert asked == ["a", "a", "warm"]
    assert next(found) == {"a": [{"add": 8}] * 2, "warm": [{"add": 8}] * 2}
    assert not list(found)
    assert in_turns(workers, 1, "add", 8) == {"a": [{"add": 8}], "warm": [{"add": 8}]}
