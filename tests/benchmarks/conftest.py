"""Runs a benchmark in this process on the bundled model; writes narrow random checkpoints."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks import make_random
from qwen35mm.assets import demo_model_path


class InProcess:
    """In place of `Worker`: the same engine in this process. What goes in and out is pickled all the same."""

    load_s = 0.5

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._engine = make(*pickle.loads(pickle.dumps(arguments)))

    def ask(self, method: str, *values: Any) -> Any:
        return pickle.loads(pickle.dumps(getattr(self._engine, method)(*pickle.loads(pickle.dumps(values)))))

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if hasattr(self._engine, "close"):
            self._engine.close()


RunHere = Callable[..., dict[str, Any]]


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[RunHere]:
    """Runs a benchmark by its name and options. Checks its report, and gives the JSON line.

    Every table of the JSON line stands above it with as many rows.
    """
    num_threads = torch.get_num_threads()

    def run(name: str, *options: str) -> dict[str, Any]:
        module = importlib.import_module(f"benchmarks.{name}")
        monkeypatch.setattr(module, "Worker", InProcess, raising=False)
        monkeypatch.setattr(sys, "argv", [name, "--threads", "1", *options])
        module.main()
        lines = capsys.readouterr().out.splitlines()
        data = json.loads(lines[-1])
        assert (data["benchmark"], data["machine"]["threads"]) == (name, 1)
        shown = [line for line in lines if line.startswith("|") and not line.startswith("|-")]
        tables = [rows for rows in data["tables"].values() if rows]
        assert len(shown) == sum(len(rows) + 1 for rows in tables) > len(tables)
        return data

    yield run
    torch.set_num_threads(num_threads)


@pytest.fixture
def on_demo(run_here: RunHere) -> RunHere:
    """`run_here` with the bundled model in float32."""
    model = ("--model", str(demo_model_path()), "--dtype", "float32")
    return lambda name, *options: run_here(name, *model, *options)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `make_random` write small checkpoints, in several shards."""
    full_config = make_random.make_config

    def make_config(size: str, dtype: str) -> dict[str, Any]:
        data = full_config(size, dtype)
        sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 16, "num_experts": 16}
        layers = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
        data["text_config"] |= {**sizes, **layers, "vocab_size": 2000}
        data["vision_config"] |= {"depth": 1, "hidden_size": 64, "num_heads": 4, "out_hidden_size": 64}
        return data

    monkeypatch.setattr(make_random, "make_config", make_config)
    monkeypatch.setattr(make_random, "SHARD_BYTES", 200_000)
