"""The table: shares with their intervals, by skill and split, and the answers that were wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.evaluation import cases
from qwen35mm.evaluation.cases import TYPED_SKILL, Case
from training import evaluate
from training.evaluate import wilson

CARD = (Path(__file__).parents[2] / "assets" / "demo" / "README.md").read_text()


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    # Newcombe 1998, table I, method 3: 81 of 263 and 0 of 20; and the other end.
    [(81, 263, 25.53, 36.62), (15, 148, 6.24, 16.05), (0, 20, 0.0, 16.11), (20, 20, 83.89, 100.0), (0, 0, 0.0, 100.0)],
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

    monkeypatch.setattr(evaluate, "answer_cases", answers)
    names = ("color", "reading up to 5", "yes no", TYPED_SKILL)
    table, misses = evaluate.evaluate("model", 4, names, "int8")
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
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: dict[str, Any] = {}

    def loaded(folder: Path, **options: Any) -> str:
        taken.update(options, folder=folder)
        return "model"

    monkeypatch.setattr(evaluate, "load", loaded)
    monkeypatch.setattr(evaluate, "answer_cases", lambda model, asked, kv: ["Bananas."] * len(asked))
    out = tmp_path / "figures.json"
    command = ["evaluate", "--model", "somewhere", "--n", "1", "--skills", "color", "place", "--weights", "int4"]
    monkeypatch.setattr("sys.argv", [*command, "--kv-dtype", "int8", "--misses", "1", "--json", str(out)])
    evaluate.main()
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["skill", "color", "place"]
    assert sum("got 'Bananas.'" in line for line in lines) == 2
    figures = json.loads(last)
    assert figures == json.loads(out.read_text())
    assert (figures["weights"], figures["kv_dtype"], figures["n"]) == ("int4", "int8", 1)
    assert figures["skills"]["color"]["right"] == 0
    assert taken == {"folder": Path("somewhere"), "dtype": "bfloat16", "device": "cpu", "weights": "int4"}
    assert cases.NAMES[-1] == TYPED_SKILL


def test_another_seed_asks_other_questions_and_thinking_can_be_off(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Case] = []

    def answers(model: object, given: list[Case], kv_dtype: str) -> list[str]:
        asked.extend(given)
        return [case.expected for case in given]

    monkeypatch.setattr(evaluate, "answer_cases", answers)
    for seed, thinking in ((cases.EVAL_SEED, True), (cases.EVAL_SEED, False), (77, True)):
        evaluate.evaluate("model", 3, ["count, thinking"], seed=seed, thinking=thinking)
    usual, silent, others = asked[:6], asked[6:12], asked[12:]
    assert [case.messages for case in usual] == [case.messages for case in silent]
    assert all(case.enable_thinking for case in usual + others)
    assert not any(case.enable_thinking for case in silent)
    assert not any(case.messages in [each.messages for each in usual] for case in others)


def test_a_card_gets_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(evaluate, "load", lambda *_, **__: "model")
    monkeypatch.setattr(
        evaluate, "answer_cases", lambda model, asked, kv: [case.expected for case in asked[:-1]] + [""]
    )
    monkeypatch.setattr(cases, "NAMES", ("color", "reading up to 5", TYPED_SKILL))
    card = tmp_path / "README.md"
    card.write_text(CARD)
    monkeypatch.setattr("sys.argv", ["evaluate", "--n", "2", "--card", str(card), "--skills", *cases.NAMES])
    evaluate.main()
    before, after = CARD.splitlines(), card.read_text().splitlines()
    start = before.index("| skill | seen | held out | 95% interval | aim |")
    end = next(i for i, line in enumerate(before) if line.startswith("Below it"))
    length = len(after) - len(before) + end - start + 1
    assert after[:start] == before[:start]
    assert after[start + length :] == before[end + 1 :]
    assert after[start : start + length] == [
        "| skill | seen | held out | 95% interval | aim |",
        "|---|---|---|---|---|",
        "| color | 100 | 100 | 51 to 100 | 97 |",
        "| reading up to 5 | 100 | 100 | 51 to 100 | 92 |",
        "| typed questions |  | 95 | 76 to 99 | 90 |",
        "",
        "Mean of all rows but the typed questions: 100.0. Letters wrong: 0.0% in reading up to 5.",
        "At or over their aim: color, reading up to 5, typed questions.",
        "Below it, in points: .",
    ]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (CARD, ["--seed", "77"]),
        (CARD, ["--no-thinking"]),
        (CARD, ["--skills", "color"]),
        ("# Another model\n", []),
    ],
)
def test_a_card_takes_the_usual_questions_and_a_table(
    text: str, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    card = tmp_path / "README.md"
    card.write_text(text)
    monkeypatch.setattr("sys.argv", ["evaluate", "--card", str(card), *options])
    with pytest.raises(SystemExit):
        evaluate.main()
    assert "--card takes all skills, no --seed or --no-thinking, and a card with a table" in capsys.readouterr().err
    assert card.read_text() == text
