"""The captioning benchmark gives all engines the same work, and ends in one JSON line that agrees with its table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.captioning import _check_captions, _check_work, write_pictures
from tests.benchmarks.conftest import Report


@pytest.mark.slow
def test_all_engines_are_measured_on_the_same_work(run_here: Callable[..., Report]) -> None:
    data, rows, _ = run_here("captioning", "--slots", "2", "--items", "4", "--max-tokens", "3", "--size", "64x48")
    engines = ["transformers", "slots: 2"]
    assert [result["engine"] for result in data["results"]] == [row[0] for row in rows] == engines
    peer = data["results"][0]
    for result, row in zip(data["results"], rows, strict=True):
        items, tokens = result["items_per_s"], result["tokens_per_s"]
        assert 0 < items["low"] <= items["median"] <= items["high"]
        assert items["count"] == tokens["count"] == 3
        assert tokens["median"] == pytest.approx(3 * items["median"])
        assert result["num_generated_tokens"] == 4 * 3
        assert result["num_prompt_tokens"] == peer["num_prompt_tokens"]
        assert row[1].startswith(f"{items['median']:.2f} (")
        assert row[3] == f"{items['median'] / peer['items_per_s']['median']:.2f}x"
    assert 0 < data["results"][1]["slots_waited"]["median"] < 1
    assert 0 < data["results"][1]["engine_busy"]["median"] < 1


@pytest.mark.slow
def test_memory_of_a_run(run_here: Callable[..., Report]) -> None:
    data, rows, _ = run_here("captioning", "--memory", "12")
    (result,), (row,) = data["memory"], rows
    assert (result["num_files"], row[0]) == (12, "12")
    assert row[3] == f"{result['resumed_s']:.1f}"
    assert row[5] == f"{result['peak_bytes'] / 2**20:.0f}"
    assert 0 < result["first_s"] < result["seconds"]
    assert 2**25 < result["worker_peak_bytes"] < result["peak_bytes"]
    assert all(2**26 < held <= result["peak_bytes"] for held in result["resident_bytes"])


def test_pictures_are_told_apart_by_seed_and_number(tmp_path: Path) -> None:
    for seed in range(2):
        write_pictures(tmp_path / str(seed), 5, seed, (64, 48))
    files = list(tmp_path.rglob("*.jpg"))
    assert len({path.read_bytes() for path in files}) == len(files) == 10
    assert Image.open(files[0]).size == (64, 48)


def test_unequal_work_is_refused(tmp_path: Path) -> None:
    samples = {"a": [{"num_prompt_tokens": 8, "num_generated_tokens": 4}]}
    _check_work({**samples, "b": samples["a"]})
    with pytest.raises(SystemExit, match="num_generated_tokens of b"):
        _check_work({**samples, "b": [{"num_prompt_tokens": 8, "num_generated_tokens": 3}]})
    (tmp_path / "0.txt").write_text("A caption.")
    (tmp_path / "1.txt").touch()
    _check_captions("a", tmp_path, 1)
    with pytest.raises(SystemExit, match="1 captions of 2"):
        _check_captions("a", tmp_path, 2)
