"""The command that writes a card's table, without a card: what it measures is made up, everything else is real."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no package for this platform")

from benchmarks import tune_kernels, tuning_spaces
from benchmarks.kernel_cases import SHAPES, Shapes
from benchmarks.report import Spread
from benchmarks.tune_kernels import log, main, tune_all
from benchmarks.tuning import Outcome, Refused, Wrong
from benchmarks.tuning_spaces import OPERATIONS
from qwen35mm_kernels.gpu import launch
from qwen35mm_kernels.gpu.tables import Config, Table, read_table, write_table

KERNELS = ["rms_norm", "mrope_cos_sin"]
NORM, ANGLES = ("rms_norm", "D256"), ("mrope_cos_sin", "R64")
MODELS = [Shapes("small", 256, 2, 1, 4, k_heads=2)]
FAST = Config({"BLOCK_ROWS": 4}, num_warps=8, num_stages=1)


class Pool:
    """Compiles nothing, at once; but not one configuration."""

    def submit(self, function: Any, workloads: Any, configs: Table) -> Future[str | None]:
        done: Future[str | None] = Future()
        done.set_result("CompilationError" if configs.get(NORM) == Config({"BLOCK_ROWS": 2}, 4, 1) else None)
        return done


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels on a few rows; FAST takes half the time, and every other configuration the same."""
    few = {name: dataclasses.replace(operation, sizes=((3,), (5,))) for name, operation in OPERATIONS.items()}
    monkeypatch.setattr(tuning_spaces, "OPERATIONS", few)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(tune_kernels, "processes", lambda capability, count: contextlib.nullcontext(Pool()))

    def time_ms(run: object, *, graph: bool, repeats: int) -> Spread:
        active = launch._trial.get()
        assert active is not None
        assert graph
        return Spread.of([0.5 if active.configs.get(NORM) == FAST else 1.0])

    monkeypatch.setattr(tune_kernels, "time_ms", time_ms)


def tuned(path: Path, kernels: list[str] = KERNELS, budget_s: float = 60) -> list[Outcome]:
    with torch.inference_mode():
        return list(tune_all(kernels, MODELS, path, {"card": "Some Card"}, 1, budget_s, "cpu"))


def test_what_is_faster_is_in_the_table_and_the_rest_is_not(card: None, tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    norm, angles = tuned(path)
    assert (norm.kernel, norm.shape, norm.chosen, norm.ratio) == (*NORM, FAST, 0.5)
    assert (angles.kernel, angles.shape, angles.chosen) == (*ANGLES, None)
    assert [str(reason) for _, reason in norm.refused] == ["doesn't compile: CompilationError"]
    assert read_table(path) == {NORM: FAST}
    assert json.loads(path.read_text())["card"] == "Some Card"


def test_another_run_replaces_what_it_tunes(card: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "card.json"
    slow, other = Config({"BLOCK_T": 2}, 2, 1), Config({"BLOCK_V": 16}, 4, 2)
    kept: Table = {("gdn_scan", "Hv4_K128_V128_16"): other, ("mrope_cos_sin", "R32"): slow}
    stale: Table = {("gone", "D64"): other, ("rms_norm", "D64"): Config({"ROWS": 1})}
    write_table(path, {**kept, **stale, ANGLES: slow, NORM: Config({"BLOCK_ROWS": 1}, 4, 1)}, {})
    tuned(path, ["rms_norm"])
    assert read_table(path) == {**kept, ANGLES: slow, NORM: FAST}
    assert "gone D64: dropped" in capsys.readouterr().err
    tuned(path, ["mrope_cos_sin"])
    assert read_table(path) == {**kept, NORM: FAST}


def test_when_the_time_is_over_the_table_stays(card: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "card.json"
    assert tuned(path, budget_s=-1) == []
    assert not path.exists()
    assert "The time is over: rms_norm D256" in capsys.readouterr().err


def test_each_shape_is_in_the_table_before_the_next_begins(
    card: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "card.json"
    with torch.inference_mode():
        outcomes = tune_all(KERNELS, MODELS, path, {}, 1, 60, "cpu")
        assert next(outcomes).chosen == FAST
        assert read_table(path) == {NORM: FAST}


def test_a_wrong_result_is_loud(capsys: pytest.CaptureFixture[str]) -> None:
    refused = [(FAST, Wrong("wrong: off by 1")), (Config({"BLOCK_ROWS": 1}), Refused("too large"))]
    log(Outcome(*NORM, FAST, None, 1.0, 9, refused))
    wrong, large, last = capsys.readouterr().err.splitlines()
    assert wrong == "  !!! rms_norm D256, BLOCK_ROWS=4 warps=8 stages=1: wrong: off by 1"
    assert large.startswith("  rms_norm D256, BLOCK_ROWS=1")
    assert last == "rms_norm D256: the default stays (x1.000; 7 of 9 candidates timed at every size, 2 out)"


def test_a_dry_run_needs_no_card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["tune_kernels.py", "--dry-run", "--only", "norm"])
    main()
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:-1]]
    hidden = {f"D{shapes.hidden}" for shapes in SHAPES.values()}
    assert {shape for kernel, shape, *_ in rows if kernel == "rms_norm"} == hidden
    assert {kernel for kernel, *_ in rows} == {"norm_linear", "qk_norm_rope_write", "rms_norm", "gated_rms_norm"}
    total = sum(int(row[3]) for row in rows)
    assert lines[-1].startswith(f"{total} candidates and ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Tuning needs an NVIDIA card"),
        (["--models", "7B"], "2"),
        (["--only", "nothing"], "2"),
    ],
)
def test_what_cannot_run_is_told(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["tune_kernels.py", *arguments])
    with pytest.raises(SystemExit, match=message):
        main()
