"""What the tests of several benchmarks share: a benchmark's workers in this process."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from qwen35mm.assets import demo_model_path


class InProcess:
    """In place of `Worker`: the same worker, asked by calls. What goes to and fro is JSON all the same."""

    def __init__(self, script: str, argv: list[str], role: str) -> None:
        module = importlib.import_module(f"benchmarks.{Path(script).stem}")
        self._worker = module.make_worker(role, module.parse([*argv, "--serve", role]))
        self.ready = json.loads(json.dumps(self._worker.ready))

    def ask(self, **request: Any) -> dict[str, Any]:
        return json.loads(json.dumps(self._worker.answer(**json.loads(json.dumps(request)))))

    def close(self) -> None:
        self._worker.close()

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Report(NamedTuple):
    """What a benchmark has printed: its last line's values, its tables' cells without headers, and all lines."""

    data: dict[str, Any]
    rows: list[list[str]]
    lines: list[str]


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Report]:
    """Runs a benchmark by its name and options, on the demo model and in this process."""

    def run(name: str, *options: str) -> Report:
        module = importlib.import_module(f"benchmarks.{name}")
        monkeypatch.setattr(module, "Worker", InProcess)
        common = ["--model", str(demo_model_path()), "--dtype", "float32", "--threads", "1"]
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *common, *options])
        module.main()
        lines = capsys.readouterr().out.splitlines()
        data = json.loads(lines[-1])
        assert (data["benchmark"], data["machine"]["threads"]) == (name, 1)
        tables = [line for line in lines if line.startswith("|")]
        headers = [tables[i - 1] for i, line in enumerate(tables) if line.startswith("|-")]
        rows = [line for line in tables if line not in headers and not line.startswith("|-")]
        return Report(data, [[cell.strip() for cell in line.split("|")[1:-1]] for line in rows], lines)

    return run
