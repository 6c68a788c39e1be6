"""The table of the demo model's card: shares with intervals, by skill and split, and the wrong answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import demo_skills
from benchmarks.demo_skills import wilson
from qwen35mm.evaluation import cases
from qwen35mm.evaluation.cases import TYPED_SKILL, Case


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    # Newcombe 1998, table I, method 3: 81 of 263 and 0 of 20; and the other end.
    [(81, 263, 25.53, 36.62), (15, 148, 6.24, 16.05), (0, 20, 0.0, 16.11), (20, 20, 83.89, 100.0)],
)
def test_intervals_are_wilsons(right: int, count: int, low: float, high: float) -> None:
    assert wilson(right, count) == pytest.approx((low, high), abs=0.01)


def test_every_case_is_judged_by_its_own_grader(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(model: object, asked: list[Case], kv_dtype: str) -> list[str]:
        assert (model, kv_dtype) == ("model", "int8")
        found = [case.expected for case in asked]
        return [
            "Bananas." if case.skill == "color" and n % 2 else text
            for n, (case, text) in enumerate(zip(asked, found, strict=True))
        ]

    monkeypatch.setattr(demo_skills, "answer_cases", answers)
    names = ("color", "reading up to 5", "yes no", TYPED_SKILL)
    table, misses = demo_skills.measure("model", 4, names, "int8")
    assert list(table) == list(names)
    color = table["color"]
    assert {key: color[key] for key in ("aim", "seen", "combos", "count", "right")} == {
        "aim": 97.0, "seen": 50.0, "combos": 50.0, "count": 8, "right": 50.0,
    }  # fmt: skip
    assert color["low"] < 50 < color["high"]
    assert table["reading up to 5"]["letter_error"] == 0
    assert table["yes no"]["right"] == 100
    # One list, which is held out as a whole.
    assert table[TYPED_SKILL]["count"] == 40
    assert "seen" not in table[TYPED_SKILL]
    assert len(misses) == 4
    assert all(line.startswith("color (") and "got 'Bananas.'" in line for line in misses)


def test_the_command_prints_a_table_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: dict[str, Any] = {}

    def loaded(folder: Path, **options: Any) -> str:
        taken.update(options, folder=folder)
        return "model"

    monkeypatch.setattr(demo_skills, "load", loaded)
    monkeypatch.setattr(demo_skills, "answer_cases", lambda model, asked, kv: ["Bananas."] * len(asked))
    command = ["demo_skills", "--model", "somewhere", "--n", "1", "--skills", "color", "place", "--weights", "int4"]
    monkeypatch.setattr("sys.argv", [*command, "--kv-dtype", "int8", "--misses", "1"])
    demo_skills.main()
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "| skill | seen | held out | 95% interval | aim |",
        "|---|---|---|---|---|",
        "| color | 0 | 0 | 0 to 66 | 97 |",
        "| place | 0 | 0 | 0 to 66 | 97 |",
    ]
    assert sum("got 'Bananas.'" in line for line in lines) == 2
    figures = json.loads(last)
    assert (figures["weights"], figures["kv_dtype"], figures["n"]) == ("int4", "int8", 1)
    assert figures["skills"]["color"]["right"] == 0
    assert taken == {"folder": Path("somewhere"), "dtype": "bfloat16", "device": "cpu", "weights": "int4"}
    assert cases.NAMES[-1] == TYPED_SKILL


def test_another_seed_asks_other_questions_and_thinking_can_be_off(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Case] = []

    def answers(model: object, given: list[Case], kv_dtype: str) -> list[str]:
        asked.extend(given)
        return [case.expected for case in given]

    monkeypatch.setattr(demo_skills, "answer_cases", answers)
    for seed, thinking in ((cases.EVAL_SEED, True), (cases.EVAL_SEED, False), (77, True)):
        demo_skills.measure("model", 3, ["count, thinking"], seed=seed, thinks=thinking)
    usual, silent, others = asked[:6], asked[6:12], asked[12:]
    assert [case.messages for case in usual] == [case.messages for case in silent]
    assert all(case.enable_thinking for case in usual + others)
    assert not any(case.enable_thinking for case in silent)
    assert not any(case.messages in [each.messages for each in usual] for case in others)
