"""The soak's verdict, by numbers that were made up, and a short run of it."""

from __future__ import annotations

import json
import random
import sys

import pytest

from benchmarks import soak
from benchmarks.soak import Sample, growth, judge


def samples(*, per_hour: float = 0.0, files: float = 0.0, noise: float = 1.0, minutes: float = 30.0) -> list[Sample]:
    """One every ten seconds; the first minutes fill caches."""
    chance, found = random.Random(1), []
    for number in range(int(6 * minutes)):
        at_s = 10.0 * number
        rss = 300 + min(at_s, 300) / 3 + per_hour * at_s / 3600 + chance.gauss(0, noise)
        found.append(Sample(at_s, rss, 20 + int(files * at_s / 3600), 10, 0, 0, number))
    return found


@pytest.mark.parametrize("per_hour", [0.0, 12.0, -3.0, 200.0])
def test_a_slope_is_told_with_its_range(per_hour: float) -> None:
    found = growth([(each.time_s, each.rss_mib) for each in samples(per_hour=per_hour) if each.time_s >= 300])
    assert abs(found.per_hour - per_hour) <= found.plus_minus < 3
    assert abs(growth([(at, 5 * at / 3600) for at in range(10)]).per_hour - 5) < 1e-6


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
    told = judge(samples(**how), 300, 30.0)
    assert (told["rss"], told["files"], told["threads"]) == (
        rss,
        files,
        "too short" if files == "too short" else "constant",
    )


@pytest.mark.parametrize(
    "front", ["chat", *(pytest.param(name, marks=pytest.mark.slow) for name in ("serve", "review"))]
)
def test_a_short_run_ends_in_one_json_line(
    front: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--minutes", "0.05", "--every", "0.3", "--clients", "2", "--front", front, "--warm-up", "1"]
    monkeypatch.setattr(sys, "argv", ["soak", *options])
    soak.main()
    *table, last = capsys.readouterr().out.splitlines()
    data = json.loads(last)
    assert (data["benchmark"], data["errors"]) == ("soak", {})
    assert len(data["samples"]) >= 2
    assert sum(data["answers"].values()) > 0
    assert any(line.startswith("| minute") for line in table)
