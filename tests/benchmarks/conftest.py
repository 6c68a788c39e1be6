"""What the tests of several benchmarks share: a benchmark's engines in this process."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from qwen35mm.assets import demo_model_path


class InProcess:
    """In place of `Worker`: the same engine, asked by calls. What goes to and fro is pickled all the same."""

    load_s = 0.5

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._engine = make(*pickle.loads(pickle.dumps(arguments)))

    def ask(self, method: str, *values: Any) -> Any:
        return pickle.loads(pickle.dumps(getattr(self._engine, method)(*pickle.loads(pickle.dumps(values)))))

    def close(self) -> None:
        if hasattr(self._engine, "close"):
            self._engine.close()

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
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Report]]:
    """Runs a benchmark by its name and options, on the demo model (if not another) and in this process."""
    num_threads = torch.get_num_threads()

    def run(name: str, *options: str, model: tuple[str, ...] = ("--model", str(demo_model_path()))) -> Report:
        module = importlib.import_module(f"benchmarks.{name}")
        monkeypatch.setattr(module, "Worker", InProcess, raising=False)
        monkeypatch.setattr(sys, "argv", [name, *model, "--dtype", "float32", "--threads", "1", *options])
        module.main()
        lines = capsys.readouterr().out.splitlines()
        data = json.loads(lines[-1])
        assert (data["benchmark"], data["machine"]["threads"]) == (name, 1)
        tables = [line for line in lines if line.startswith("|")]
        headers = [tables[i - 1] for i, line in enumerate(tables) if line.startswith("|-")]
        rows = [line for line in tables if line not in headers and not line.startswith("|-")]
        return Report(data, [[cell.strip() for cell in line.split("|")[1:-1]] for line in rows], lines)

    yield run
    torch.set_num_threads(num_threads)
