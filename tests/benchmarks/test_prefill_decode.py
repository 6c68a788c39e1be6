"""The benchmark runs, and ends in one JSON line that agrees with its table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import transformers

from benchmarks.report import Spread, print_table
from tests.benchmarks.conftest import Report


def test_both_engines_are_measured_in_one_run(run_here: Callable[..., Report]) -> None:
    options = ["--peer", "transformers", "--lengths", "8,20", "--decode-tokens", "2", "--repeats", "2"]
    data, table, _ = run_here("prefill_decode", *options)
    if hasattr(transformers.integrations, "use_kernel_func_from_hub_with_fallback"):
        assert data["peer_operations"]["chunk_gated_delta_rule"].startswith(("transformers.", "fla."))
    rows = [(result["engine"], result["length"]) for result in data["results"]]
    assert rows == [("qwen35mm", 8), ("transformers", 8), ("qwen35mm", 20), ("transformers", 20)]
    for result in data["results"]:
        prefill, decode = result["prefill_tokens_per_s"], result["decode_tokens_per_s"]
        assert 0 < prefill["low"] <= prefill["median"] <= prefill["high"]
        assert (prefill["count"], decode["count"]) == (2, 4)
        assert result["peak_gib"] > 0.05
    assert [row[0] for row in table] == [engine for engine, _ in rows]


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
