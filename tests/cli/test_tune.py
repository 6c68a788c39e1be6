"""`qwen35mm tune` before it trains: what it says, and what it refuses. Trainings are in tests/tuning."""

from __future__ import annotations

import json
import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from rich.console import Console

from qwen35mm.cli.tune import _Shown
from tests.cli.conftest import Run
from tests.review.test_training import EVENTS
from tests.tuning.conftest import write

if TYPE_CHECKING:
    from qwen35mm.tuning.training import Plan, Tuned


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(qwen35mm: Run, tmp_path: Path) -> None:
    photos, out = write(tmp_path / "photos", range(12)), tmp_path / "adapter"
    (photos / "11.txt").unlink()
    (photos / "bad.png").write_bytes(b"no picture")
    (photos / "bad.txt").write_text("Something.\n")
    done = qwen35mm("tune", photos, "--out", out, "--prompt", "What?", "--epochs", 2, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "Left out: bad.png." in done.stderr
    assert "1 media have no caption" in done.stderr
    assert "Learns from " in done.stderr
    assert "of memory:" in done.stderr
    assert "Asked: What?" in done.stderr
    assert not out.exists()


def test_wrong_options_and_a_missing_extra_are_refused_in_words(
    qwen35mm: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos, out = write(tmp_path / "photos", range(3)), tmp_path / "adapter"
    assert "--preset must be captions or chat" in qwen35mm("tune", photos, "--out", out, "--preset", "x").stderr
    assert "device must be auto, cpu or cuda" in qwen35mm("tune", photos, "--out", out, "--device", "x").stderr
    long = qwen35mm("tune", photos, "--out", out, "--max-tokens", 16)
    assert (long.returncode, "every sample was left out" in long.stderr) == (1, True)
    monkeypatch.setitem(sys.modules, "qwen35mm.tuning.training", None)
    missing = qwen35mm("tune", photos, "--out", out)
    assert (missing.returncode, "pip install 'qwen35mm[tune]'" in missing.stderr) == (1, True)


def test_the_review_page_is_told_as_it_expects(capsys: pytest.CaptureFixture[str]) -> None:
    plan, tuned = (
        SimpleNamespace(resumes_at=0, num_steps=4, seconds=9.0),
        SimpleNamespace(step=4, before=2.5, after=0.5),
    )
    with _Shown(Console(file=StringIO()), as_json=True) as shown:
        shown.evaluated(0, 2.5, False)
        shown.shown("a.png", "red", "a red circle")
        shown.planned(cast("Plan", plan))
        shown.stepped(4, 4, float("inf"), 0.0)
        shown.evaluated(4, 0.5, True)
        shown.shown("a.png", "a red circle", "a red circle")
        shown.ended(cast("Tuned", tuned))
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == EVENTS
