"""The benchmark runs, and ends in one JSON line that agrees with its table; shares are those of the machine's rates."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from benchmarks import limits, prefill_decode
from benchmarks.make_random import make_config
from benchmarks.report import Spread, print_table
from qwen35mm.config import ModelConfig
from tests.benchmarks.conftest import Report
from tests.benchmarks.llama_bench import fake
from tests.benchmarks.test_llama_cpp import gguf

LLAMA_CPP = ["--peer", "llama.cpp"]


@pytest.fixture
def llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options for a stand-in of llama-bench and a GGUF."""
    monkeypatch.setenv("FAKE_LLAMA_BENCH", str(tmp_path / "notes"))
    (tmp_path / "q4_0.gguf").write_bytes(gguf(None))
    return [*LLAMA_CPP, "--llama-bench", str(fake(tmp_path)), "--gguf", str(tmp_path / "q4_0.gguf")]


@pytest.fixture
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "_RUNS_S", 0.0)


@pytest.mark.usefixtures("quick_limits")
def test_all_engines_are_measured_in_one_run(run_here: Callable[..., Report], llama_cpp: list[str]) -> None:
    options = ["--peer", "transformers", *llama_cpp, "--lengths", "8,20", "--decode-tokens", "2", "--repeats", "2"]
    data, table, _ = run_here("prefill_decode", *options, "--slots", "2", "--picture", "64")
    if hasattr(transformers.integrations, "use_kernel_func_from_hub_with_fallback"):
        assert data["peer_operations"]["chunk_gated_delta_rule"].startswith(("transformers.", "fla."))
    engines = [("qwen35mm", "float32"), ("transformers", "float32"), ("llama.cpp", "q4_0")]
    rows = [(result["engine"], result["weights"], result["length"]) for result in data["results"]]
    assert rows == [(*engine, length) for length in (8, 20) for engine in (("the machine", ""), *engines)]
    measured = [result for result in data["results"] if result["engine"] != "the machine"]
    for result in measured:
        for name in ("prefill_tokens_per_s", "decode_tokens_per_s"):
            rate = result[name]
            assert 0 < rate["low"] <= rate["median"] <= rate["high"]
            assert rate["count"] == 2
        assert result["prefill_share"] > 0
        assert result["decode_share"] > 0
        # llama.cpp's stand-in may be gone before anybody looks; test_llama_cpp has one that waits.
        assert result["peak_gib"] > 0.05 or result["engine"] == "llama.cpp"
    assert {result["build"] for result in measured} == {None, "0c1e570"}
    assert measured[2]["prefill_tokens_per_s"]["median"] == 250
    assert measured[2]["decode_tokens_per_s"]["median"] == 20
    assert [tuple(row[:2]) for row in table[:6]] == [engine for _ in range(2) for engine in engines]
    rest = [["1", "float32"], ["2", "float32"], ["qwen35mm", "float32"], ["transformers", "float32"]]
    assert [row[:2] for row in table[6:]] == rest
    assert [(result["num_slots"], result["tokens_per_s"]["count"]) for result in data["slots_results"]] == [
        (1, 2),
        (2, 2),
    ]
    assert all(result["share"] > 0 for result in data["tower_results"][1:])


class Constant:
    """In place of `Worker`: an engine or a machine that always does the same."""

    load_s = 0.5
    rates: dict[str, Any] = {"bfloat16_flops_per_s": 0.4e12, "float32_flops_per_s": 0.2e12}  # noqa: RUF012
    answers: dict[tuple[str, str], Any] = {  # noqa: RUF012
        ("Limits", "measure"): {**rates, "read_bytes_per_s": 20e9},
        ("Limits", "measure_tower"): rates,
        ("Ours", "measure"): {"prefill_s": 2.0, "decode_s": 1.6, "peak_bytes": 3 << 30},
        ("Ours", "measure_tower"): {"tower_s": 5.0},
        ("LlamaCpp", "measure"): {"prefill_s": 4.0, "decode_s": 0.8, "peak_bytes": 1 << 30, "build": "0c1e570"},
    }

    def __init__(self, make: Any, *arguments: Any) -> None:
        pickle.dumps(arguments)
        self._name = make.__name__

    def ask(self, method: str, *values: Any) -> Any:
        if method == "measure_slots":
            return {"decode_s": {1: 1.6, 4: 2.0}[values[0]]}
        return self.answers[self._name, method]


def test_shares_are_of_the_machines_rates(
    monkeypatch: pytest.MonkeyPatch, llama_cpp: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Random 0.8B: 512 tokens of 1,042.7 MFLOP each; 19.5 MB of states, 12 KiB of keys and values a token."""
    config = ModelConfig.from_dict(make_config("0.8B", "bfloat16"))
    monkeypatch.setattr(ModelConfig, "from_pretrained", lambda path: config)
    monkeypatch.setattr(prefill_decode, "Worker", Constant)
    options = ["--slots", "4", "--repeats", "2"]
    bench = prefill_decode.Bench(prefill_decode.parse(["--model", "x", *options, *llama_cpp]))
    _, ours, peer = prefill_decode.shown(bench.length(512), 2, prefill_decode.print_length)
    told = capsys.readouterr()
    assert told.err.count("256.0 (256.0-256.0)") == told.out.count("256.0 (256.0-256.0)") == 1, "after each round"
    # 256 tok/s of what 0.4 TFLOP/s allow, 383.6; 10 tok/s, each reading all weights, the states, and 520 tokens.
    assert ours["prefill_share"] == pytest.approx(256 / (0.4e12 / 1042.7e6), rel=1e-4)
    assert ours["decode_share"] == pytest.approx(10 * (2 * 752_393_024 + 19.538e6 + 520 * 12288) / 20e9, rel=1e-4)
    assert ours["peak_gib"] == 3
    assert peer["prefill_share"] == pytest.approx(ours["prefill_share"] / 2)
    # Its three tensors have 32 + 64 + 16 bytes.
    assert peer["bytes_read_per_token"] == 112 + 18 * (16 * 128 * 128 + 3 * 6144) * 4 + 520 * 12288
    assert peer["decode_share"] == pytest.approx(20 * peer["bytes_read_per_token"] / 20e9)
    (one, four) = bench.slots()
    assert (one["tokens_per_s"].median, one["multiple"]) == (10, 1)
    assert (four["tokens_per_s"].median, four["multiple"]) == (32, pytest.approx(3.2))
    *_, (_, tower) = bench.tower(1024)
    assert tower["share"] == pytest.approx(1.3497e12 / 0.4e12 / 5, rel=1e-4)


def test_spread_is_median_and_range() -> None:
    spread = Spread.of([3.0, 1.0, 2.0, 10.0])
    assert (spread.median, spread.low, spread.high, spread.count) == (2.5, 1.0, 10.0, 4)
    assert spread.text() == "2.5 (1.0-10.0)"
    with pytest.raises(ValueError, match="no measurements"):
        Spread.of([])


def test_tables_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["a", "long name"], [["wide cell", 1], ["x", 2.5]])
    assert capsys.readouterr().out.splitlines() == [
        "| a         | long name |",
        "|-----------|-----------|",
        "| wide cell | 1         |",
        "| x         | 2.5       |",
    ]
