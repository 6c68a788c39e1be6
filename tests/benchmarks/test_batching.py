"""The batching benchmark runs both modes on the same requests, and ends in one JSON line that agrees with its table."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import batching
from tests.benchmarks.conftest import Report


@pytest.mark.slow
def test_both_modes_are_measured(run_here: Callable[..., Report]) -> None:
    options = ["--requests", "1,3", "--long-tokens", "600", "--prompt-tokens", "8"]
    data, rows, _ = run_here("batching", *options, "--decode-tokens", "9", "--repeats", "2")
    assert data["slots"] == 4
    cases = [(result["num_requests"], result["mode"]) for result in data["results"]]
    assert cases == [(1, "invariant"), (1, "plain"), (3, "invariant"), (3, "plain")]
    for result in data["results"]:
        for name in ("steady_tokens_per_s", "mixed_tokens_per_s", "steady_stall_s", "mixed_stall_s", "long_ttft_s"):
            spread = result[name]
            assert spread["count"] == 2, name
            assert 0 < spread["low"] <= spread["median"] <= spread["high"], name
    assert [(int(row[0]), row[1]) for row in rows] == cases
    for row, result in zip(rows, data["results"], strict=True):
        assert row[2].startswith(f"{result['steady_tokens_per_s']['median']:.1f} (")
        assert (row[3] == "+0.0%") or result["mode"] == "invariant"


@pytest.mark.parametrize(
    ("times", "since", "gap"),
    [
        ([], 0.0, 0.0),
        ([5.0], 0.0, 0.0),
        ([1.0, 2.0, 5.0, 6.0], 0.0, 3.0),
        ([1.0, 4.0, 5.0, 7.0], 4.0, 2.0),
        ([1.0, 5.0, 6.0], 2.0, 4.0),  # a wait that began before
        ([1.0, 5.0], 5.0, 0.0),
    ],
)
def test_the_longest_gap(times: list[float], since: float, gap: float) -> None:
    assert batching._longest_gap(times, since) == gap
