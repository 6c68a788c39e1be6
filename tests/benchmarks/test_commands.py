"""Every benchmark of engines runs from its options to its last line, here with its workers in this process."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from qwen35mm.assets import demo_model_path

COMMON = ["--model", str(demo_model_path()), "--dtype", "float32", "--threads", "1"]
COMMANDS = {
    "batching": ["--requests", "2", "--long-tokens", "40", "--prompt-tokens", "8", "--decode-tokens", "6"],
    "first_token": ["--side", "64", "--warm-ups", "0"],
    "multi_turn": ["--turns", "2", "--history-tokens", "120", "--image-side", "64", "--min-segment", "64"],
    "prefill_decode": ["--lengths", "8", "--decode-tokens", "2"],
}


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


@pytest.fixture(autouse=True)
def _as_many_threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def module_of(name: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> ModuleType:
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(module, "Worker", InProcess)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *COMMON, *options])
    return module


@pytest.mark.parametrize("name", COMMANDS)
def test_a_table_comes_first_and_one_json_line_last(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repeats = ["--prefill-repeats", "1"] if name == "multi_turn" else []
    module_of(name, monkeypatch, *COMMANDS[name], "--repeats", "1", *repeats).main()
    *lines, last = capsys.readouterr().out.splitlines()
    data = json.loads(last)
    assert (data["benchmark"], data["machine"]["threads"]) == (name, 1)
    assert sum(line.startswith("| ") for line in lines) >= 2
    assert data["turns"] if name == "multi_turn" else data["results"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("batching", ["--decode-tokens", "5"], "at least 6"),
        ("batching", ["--requests", "1,4", "--slots", "4"], "needs a slot too"),
        ("captioning", ["--slots", "two"], "invalid numbers value"),
        ("first_token", ["--random", "9B"], "give --model or --random"),
        ("first_token", ["--side", "1000"], "multiple of 32"),
        ("first_token", ["--repeats", "0"], "at least 1"),
        ("multi_turn", ["--peer-url", "http://x"], "go together"),
        ("multi_turn", ["--turns", "1"], "at least 2"),
        ("prefill_decode", ["--peer", "another"], "invalid choice"),
    ],
)
def test_options_are_checked(
    name: str,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = module_of(name, monkeypatch, *options)
    with pytest.raises(SystemExit, match="2"):
        module.main()
    assert message in capsys.readouterr().err
