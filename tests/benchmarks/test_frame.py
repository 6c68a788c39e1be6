"""The frame: spreads, tables, turns, and engines in processes of their own."""

from __future__ import annotations

import json
import multiprocessing
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import frame
from benchmarks.frame import Spread, Worker, ask_in_turns, cell, print_table, report
from tests import forked  # noqa: F401 - says what the processes of "forkserver" find imported


def test_a_spread_is_median_and_range() -> None:
    assert Spread.of(iter([3.0, 1.0, 2.0, 10.0])) == Spread(2.5, 1.0, 10.0, 4)
    with pytest.raises(ValueError, match="no measurements"):
        Spread.of([])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234.56, "1,235"),
        (12.345, "12.3"),
        (0.0012345, "0.00123"),
        (0.0, "0"),
        (7, "7"),
        (None, "-"),
        ("x", "x"),
        (Spread(2.5, 1.0, 10.0, 4), "2.50 (1.00-10.00)"),
        (Spread(2.5, 2.5, 2.5, 1), "2.50"),
    ],
)
def test_numbers_have_three_digits(value: object, text: str) -> None:
    assert cell(value) == text


def test_tables_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([{"a": "wide cell", "long name": 1}, {"a": "x"}])
    assert capsys.readouterr().out.splitlines() == [
        "| a         | long name |",
        "|-----------|-----------|",
        "| wide cell | 1         |",
        "| x         | -         |",
    ]


def test_a_report_ends_in_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"Times": [{"s": Spread(2.5, 1.0, 10.0, 4)}], "Empty": []}
    report("name", Namespace(model=Path("x"), threads=None), rows, note="a word", count=3)
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[0] == "model x"
    assert lines[2:] == [
        "",
        "Times",
        "| s                 |",
        "|-------------------|",
        "| 2.50 (1.00-10.00) |",
        "a word",
    ]
    data = json.loads(last)
    assert data["tables"]["Times"] == [{"s": {"median": 2.5, "low": 1.0, "high": 10.0, "count": 4}}]
    assert (data["benchmark"], data["model"], data["note"], data["count"]) == ("name", "x", "a word", 3)
    assert data["machine"]["torch"]


class Noted:
    """In place of a worker: notes who is asked."""

    asked: list[str]

    def __init__(self, name: str) -> None:
        self._name = name

    def ask(self, method: str, number: int) -> dict[str, Any]:
        self.asked.append(self._name)
        return {method: number}


def test_a_first_round_warms_up_and_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noted, "asked", [], raising=False)
    workers: Any = {"a": Noted("a"), "warm": Noted("warm")}
    assert ask_in_turns(workers, 2, "add", 8, warm=["warm"]) == {"a": [{"add": 8}] * 2, "warm": [{"add": 8}] * 2}
    assert Noted.asked == ["a", "a", "warm", "a", "warm"]


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


@pytest.mark.parametrize(
    ("start", "fails"),
    [
        *(("forkserver", fails) for fails in (None, "make", "add", "close")),
        pytest.param("spawn", None, marks=pytest.mark.slow),
    ],
)
def test_a_worker_answers_or_its_end_is_reported(
    monkeypatch: pytest.MonkeyPatch, start: str, fails: str | None
) -> None:
    monkeypatch.setattr(frame, "_spawn", multiprocessing.get_context(start))

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
