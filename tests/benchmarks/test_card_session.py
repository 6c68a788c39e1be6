"""The script for a lent card: it keeps its limits and what was measured, and its steps run, here with tiny models."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no package for this platform")

from benchmarks import card_session
from benchmarks.card_session import FIXED, BareEngine, Step, config_of, filled, run_steps, steps
from qwen35mm.engine import tower
from qwen35mm_kernels.gpu import early
from tests.engine.exact import DENSE, chat_model

CPU = torch.device("cpu")


def shell(name: str, code: str, limit_s: float = 60.0, **environment: str) -> Step:
    return Step(name, ["-S", "-c", code], limit_s, environment)


def test_a_step_that_hangs_or_fails_costs_only_its_own_time(tmp_path: Path) -> None:
    hangs = "import subprocess; print('begun'); subprocess.run(['sleep', '60'])"
    chosen = [
        shell("hangs", hangs, limit_s=3),
        shell("fails", "print('no card'); raise SystemExit(3)"),
        shell("works", "import os; print(os.environ['SETTING'])", SETTING="of its own"),
    ]
    lines = run_steps(chosen, tmp_path / "new", 600)
    assert [line["result"] for line in lines] == ["over its limit", "failed with 3", "done"]
    assert [json.loads(line) for line in (tmp_path / "new" / "session.jsonl").read_text().splitlines()] == lines
    texts = [path.read_text().strip() for path in sorted((tmp_path / "new").glob("*.txt"))]
    assert texts == ["begun", "no card", "of its own"]


def test_nothing_begins_when_the_time_is_over(tmp_path: Path) -> None:
    lines = run_steps([shell("slow", "import time; time.sleep(60)"), shell("late", "")], tmp_path, 0.5)
    assert [line["result"] for line in lines] == ["over its limit", "no time left"]
    assert lines[0]["limit_s"] <= 0.5
    # A second session adds to the first one's lines.
    run_steps([shell("again", "")], tmp_path, 60)
    assert len((tmp_path / "session.jsonl").read_text().splitlines()) == 3


def test_the_steps_come_in_order_and_fit_about_ten_minutes(tmp_path: Path) -> None:
    found = steps(tmp_path)
    names = [step.name for step in found]
    assert len(set(names)) == len(names)
    for first, second in (("prefill-9B", "rows"), ("rows", "tune-gdn_scan"), ("tune-gdn_scan", "tests")):
        assert names.index(first) < names.index(second)
    assert names.index("make") < names.index("first-token") < names.index("captions")
    # Most steps end before their limits. What is cut off by the whole is the least wanted.
    assert 500 <= sum(step.limit_s for step in found) <= 900
    assert [step.environment for step in found if step.name == "rows-fixed"] == [FIXED]
    assert all("--dry" in step.command for step in steps(tmp_path, dry=True))


def test_every_step_is_a_command_whose_arguments_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Parsed(Exception):
        pass

    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *args: Any) -> Any:
        parse_args(self, *args)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    for step in steps(tmp_path):
        _, name, *options = step.command
        if name == "pytest":
            continue
        monkeypatch.setattr(sys, "argv", [name, *options])
        with pytest.raises(Parsed):
            importlib.import_module(name).main()


@pytest.fixture(scope="module")
def engine() -> BareEngine:
    return filled(BareEngine(config_of("0.8B", tiny=True), device=CPU, num_tokens=1024))


def test_own_steps_measure(engine: BareEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_session, "median_ms", lambda run, device: run() or 2.0)
    found = list(card_session.prefill(engine, (8, 64), (0, 64)))
    assert [(row["rows"], row["behind"], row["tok/s"]) for row in found] == [
        (8, 0, 4000),
        (64, 0, 32_000),
        (8, 64, 4000),
        (64, 64, 32_000),
    ]
    assert all(row["same bits"] for row in found)
    assert [row["replies"] for row in card_session.decode(engine, (1, 8), num_steps=3)] == [1, 8]
    assert engine.pools.kv.allocator.num_free == engine.pools.kv.allocator.num_blocks


def test_the_tower_is_measured_launched_and_as_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_session, "median_ms", lambda run, device: len(run()))
    engine: Any = SimpleNamespace(model=chat_model(DENSE).model, device=CPU)
    assert [*card_session.tower(engine, [(1, 4, 4)])] == [{"grid": "(1, 4, 4)", "launched, ms": 4}]
    monkeypatch.setattr(tower, "runs_triton", lambda device: True)
    monkeypatch.setattr(tower, "capture", lambda device, compute, memory: compute)
    (row,) = card_session.tower(engine, [(2, 2, 4)])
    assert (row["launched, ms"], row["graph, ms"], row["same bits"]) == (4, 4, True)


def test_every_part_of_a_step_can_be_left_out(engine: BareEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_session, "_step_ms", lambda engine, size, num_steps: 2.0)
    found = list(card_session.parts(engine))
    assert [row["without"] for row in found] == ["nothing", *card_session.OPERATIONS]
    calls = []
    ops = card_session.select_backend(CPU)
    monkeypatch.setattr(ops, "swiglu", lambda x: calls.append(x) or x)
    with card_session._left_out(engine, "swiglu"):
        for rows in (1, 1, 2, 1):
            ops.swiglu(torch.zeros(rows, 4))
    assert [len(x) for x in calls] == [1, 2]


def test_a_step_is_measured_without_what_makes_its_launches_fewer(
    engine: BareEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, matrix, ops = torch.randn(2, 8), torch.randn(4, 8), card_session.select_backend(CPU)
    forms, asked = [], []
    monkeypatch.setattr(ops, "norm_linear", lambda *args: asked.append(args) or (x, x))
    monkeypatch.setattr(early, "capability", lambda device: 90)
    monkeypatch.setattr(early, "_IS_INTERPRETED", False)

    def step_ms(engine: BareEngine, size: int, num_steps: int) -> float:
        _, out = ops.norm_linear(x, None, None, 1e-6, matrix)
        ops.norm_linear(x, None, x[0], 1e-6, matrix)
        forms.append((early.starts_early(CPU), torch.equal(out, torch.nn.functional.linear(x, matrix))))
        return 2.0

    monkeypatch.setattr(card_session, "_step_ms", step_ms)
    found = list(card_session.launches(engine, (1, 8)))
    assert [(row["without"], row["replies"]) for row in found[::2]] == [
        ("nothing", 1),
        ("early starts", 1),
        ("products of few rows", 1),
    ]
    assert forms[::2] == [(True, False), (False, False), (True, True)]
    assert len(asked) == 10


def test_a_row_with_other_bits_is_found(engine: BareEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_session, "median_ms", lambda run, device: 1.0)
    linear = torch.nn.functional.linear

    def otherwise(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear(x, weight) + (len(x) == 16)

    monkeypatch.setattr(card_session.F, "linear", otherwise)
    found = list(card_session.row_bits(engine, (8, 16, 64)))
    assert len(found) >= 4
    assert {row["other bits at"] for row in found} == {"[16]"}


def test_a_dry_session_from_its_options_to_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of its steps is a process; here one that ends at once."""
    monkeypatch.setattr(card_session, "steps", lambda out, dry: [shell("prefill", "print(1)"), shell("rows", "")])
    monkeypatch.setattr(sys, "argv", ["card_session", "--out", str(tmp_path), "--dry", "--only", "pre"])
    card_session.main()
    assert (tmp_path / "00-prefill.txt").read_text() == "1\n"
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tables"]["Steps"][0]["result"] == "done"


@pytest.mark.slow
def test_a_dry_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real processes."""
    lines = run_steps(steps(tmp_path, dry=True), tmp_path, 600)
    assert [line["result"] for line in lines] == ["done"] * len(lines)
    assert all("| " in path.read_text() for path in tmp_path.glob("*.txt"))
