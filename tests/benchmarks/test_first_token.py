"""The benchmark of the first token: the same questions for all, caches that do what they should, and its last line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.first_token import STAGES, check_work, num_agreeing, write_photo
from tests.benchmarks.conftest import Report
from tests.benchmarks.narrow import narrow_sizes

SIDE, NUM_PLACES = 128, 16
ROWS = [
    ["qwen35mm", "full", "cold"],
    ["qwen35mm", "full", "warm"],
    ["transformers", "full", "cold"],
    ["qwen35mm", "model", "cold"],
    ["qwen35mm", "model", "warm"],
    ["transformers", "model", "cold"],
]


def test_both_engines_answer_the_same_questions(run_here: Callable[..., Report]) -> None:
    options = ["--peer", "transformers", "--side", str(SIDE), "--warm-ups", "1", "--repeats", "2"]
    data, rows, output = run_here("first_token", *options)
    assert data["side"] == SIDE
    shown = rows[: len(ROWS)]
    assert [row[:3] for row in shown] == ROWS
    for result, row in zip(data["results"], shown, strict=True):
        assert [result["engine"], result["what"], result["picture"]] == row[:3]
        ttft = result["ttft_ms"]
        assert 0 < ttft["low"] <= ttft["median"] <= ttft["high"]
        assert ttft["count"] == 2
        assert row[3].startswith(f"{ttft['median']:.1f} (")
        assert result["first_s"] > 0
        assert NUM_PLACES < result["num_prompt_tokens"] < NUM_PLACES + 40
        cached = result["num_prompt_tokens"] - result["num_prefilled_tokens"]
        assert cached == 0, "a prompt this short has no cut"
    assert data["agreement"] == [4, 4]
    assert [row[0] for row in rows[len(ROWS) :]] == [*STAGES, "sum"]
    assert all(data["stages_ms"][stage]["low"] > 0 for stage in STAGES)
    for operation, module in data["peer_operations"].items():
        assert f"transformers: {operation} from {module}" in output


@pytest.mark.slow
def test_a_random_checkpoint_is_made_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_here: Callable[..., Report]
) -> None:
    narrow_sizes(monkeypatch)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    options = ["--peer", "transformers", "--side", "512", "--warm-ups", "0", "--repeats", "1"]
    data, _, _ = run_here("first_token", *options, model=("--random", "9B"))
    assert data["model"] == "random 9B"
    assert data["agreement"] == [2, 2], "of the ids that stand for tokens, which are half of this vocabulary"
    ours = [result for result in data["results"] if result["engine"] == "qwen35mm"]
    results = {(result["what"], result["picture"]): result for result in ours}
    assert set(results) == {(what, picture) for _, what, picture in ROWS}
    for what in ("full", "model"):
        cold, warm = results[what, "cold"], results[what, "warm"]
        assert cold["num_prefilled_tokens"] == cold["num_prompt_tokens"] > 256
        assert warm["num_prefilled_tokens"] < 40, "the picture is in the cache"
    assert list(tmp_path.iterdir()) == []


def test_photos_have_their_size_and_differ(tmp_path: Path) -> None:
    for seed in range(3):
        write_photo(tmp_path / f"{seed}.jpg", 96, seed)
        write_photo(tmp_path / f"{seed} again.jpg", 96, seed)
        assert (tmp_path / f"{seed}.jpg").read_bytes() == (tmp_path / f"{seed} again.jpg").read_bytes()
    files = list(tmp_path.iterdir())
    assert len({path.read_bytes() for path in files}) == 3
    with Image.open(files[0]) as image:
        assert (image.format, image.size) == ("JPEG", (96, 96))


def samples() -> dict[str, list[dict[str, Any]]]:
    ours = {"num_prompt_tokens": 8, "num_encoded_units": 1, "token_id": 1}
    return {
        "qwen35mm full cold": [ours],
        "qwen35mm full warm": [{**ours, "num_prompt_tokens": 9, "num_encoded_units": 0}],
        "transformers full cold": [{"num_prompt_tokens": 8, "token_id": 1}],
        "qwen35mm model cold": [ours],
        "transformers model cold": [{"num_prompt_tokens": 8, "token_id": 2}],
    }


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("transformers full cold", {"num_prompt_tokens": 7}, "7 prompt tokens, the others have 8"),
        ("qwen35mm full cold", {"num_encoded_units": 0}, "qwen35mm full cold: 0 pictures were encoded"),
        ("qwen35mm full warm", {"num_encoded_units": 1}, "qwen35mm full warm: 1 pictures were encoded"),
    ],
)
def test_unequal_work_is_refused(name: str, change: dict[str, int], message: str) -> None:
    check_work(samples())
    changed = samples()
    changed[name] = [{**changed[name][0], **change}]
    with pytest.raises(SystemExit, match=message):
        check_work(changed)


def test_first_tokens_are_compared() -> None:
    assert num_agreeing(samples()) == (1, 2)
