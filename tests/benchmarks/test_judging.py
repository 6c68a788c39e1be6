"""The benchmark of judging asks as many questions as its text has sentences, of a picture that is encoded once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.benchmarks.conftest import Report


@pytest.mark.slow
def test_what_the_cache_has_is_not_computed(run_here: Callable[..., Report]) -> None:
    options = ("--image-tokens", "256", "--repeats", "1", "--max-tokens", "4", "--sentences", "2")
    data, rows, _ = run_here("judging", *options)
    costs = {how: found[0] for how, found in data["costs"].items()}
    assert [row[0] for row in rows] == list(costs) == ["caption", "caption and judge", "judge", "judge, uncached"]
    assert [cost["num_encoded"] for cost in costs.values()] == [1, 1, 1, 2]
    assert [cost["num_questions"] for cost in costs.values()] == [0, 2, 2, 2]
    judged, uncached = costs["judge"], costs["judge, uncached"]
    assert uncached["num_computed_tokens"] == uncached["num_prompt_tokens"] == judged["num_prompt_tokens"]
    assert judged["num_computed_tokens"] < uncached["num_computed_tokens"] - 200
