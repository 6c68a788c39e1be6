"""The soak's verdict on made-up numbers, and a short run."""

from __future__ import annotations

import random

import pytest

from benchmarks.frame import Rows
from benchmarks.soak import growth, judge
from tests.benchmarks.conftest import RunHere


def samples(*, per_hour: float = 0.0, files: float = 0.0, noise: float = 1.0, minutes: float = 30.0) -> Rows:
    """One every ten seconds; the first minutes fill caches."""
    chance, found = random.Random(1), []
    for number in range(int(6 * minutes)):
        at_s = 10.0 * number
        rss = 300 + min(at_s, 300) / 3 + per_hour * at_s / 3600 + chance.gauss(0, noise)
        counts = {"files": 20 + int(files * at_s / 3600), "threads": 10, "children": 0, "temporary": 0}
        found.append({"minute": at_s / 60, "RSS, MiB": rss, **counts})
    return found


@pytest.mark.parametrize("per_hour", [0.0, 12.0, -3.0, 200.0])
def test_a_slope_is_told_with_its_range(per_hour: float) -> None:
    rest = [(each["minute"], each["RSS, MiB"]) for each in samples(per_hour=per_hour) if each["minute"] >= 5]
    found, plus_minus = growth(rest)
    assert abs(found - per_hour) <= plus_minus < 3
    assert abs(growth([(at, 5 * at / 60) for at in range(10)])[0] - 5) < 1e-6


@pytest.mark.parametrize(
    ("how", "rss", "files"),
    [
        ({}, "constant", "constant"),
        ({"per_hour": 200.0}, "grows", "constant"),
        ({"files": 60.0}, "constant", "grows"),
        ({"noise": 30.0, "minutes": 7.0}, "too short", "constant"),
        ({"minutes": 5.5}, "too short", "too short"),
    ],
)
def test_what_grows_is_told(how: dict[str, float], rss: str, files: str) -> None:
    verdict = judge(samples(**how), 5, 30.0)
    threads = "too short" if files == "too short" else "constant"
    assert (verdict["memory"], verdict["files"], verdict["threads"]) == (rss, files, threads)


@pytest.mark.parametrize(
    "front", ["chat", *(pytest.param(name, marks=pytest.mark.slow) for name in ("serve", "review"))]
)
def test_a_short_run(front: str, run_here: RunHere) -> None:
    options = ["--minutes", "0.02", "--every", "0.2", "--clients", "2", "--front", front, "--warm-up", "1"]
    data = run_here("soak", *options)
    front_samples, requests, verdict = data["tables"].values()
    assert data["errors"] == {}
    assert len(front_samples) >= 2
    assert sum(row["times"] for row in requests) > 0
    assert verdict[0]["memory"] == "too short"
