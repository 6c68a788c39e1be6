"""The plan as it is stored: a round trip through JSON, and damage found when it is read."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from qwen35mm_preprocess import GridTHW, MediaPlan, MediaPlanError, MediaProcessor, timestamp_text


@pytest.fixture(scope="module")
def plan(processor: MediaProcessor, clip: bytes) -> MediaPlan:
    return processor.prepare(clip).plan


def test_round_trip_through_json(plan: MediaPlan) -> None:
    back = MediaPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert back == plan
    assert isinstance(back.grid_thw, GridTHW)
    assert hash(back) == hash(plan)


def test_round_trip_of_a_plan_not_yet_prepared(processor: MediaProcessor, clip: bytes) -> None:
    plan = processor.plan(clip)
    assert plan.digest is None
    assert MediaPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_unpinned_forgets_only_the_digests(plan: MediaPlan) -> None:
    assert plan.unpinned() == replace(plan, digest=None, unit_digests=None)
    assert plan.unpinned().frame_indices == plan.frame_indices


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "sound"},
        {"kind": "image"},
        {"grid_thw": GridTHW(2, 8, 10)},
        {"grid_thw": GridTHW(3, 0, 10)},
        {"num_tokens": 0},
        {"frame_indices": None},
        {"frame_times_s": (0.0,)},
        {"timestamps_s": (0.0,)},
        {"frame_indices": (0, 12, 6, 17, 23, 29)},
        {"digest": None},
        {"unit_digests": ("ab",)},
    ],
)
def test_damage_is_found(plan: MediaPlan, change: dict[str, Any]) -> None:
    with pytest.raises(MediaPlanError):
        replace(plan, **change)


def test_other_keys_are_named(plan: MediaPlan) -> None:
    values = plan.to_dict()
    del values["notes"]
    with pytest.raises(MediaPlanError, match="colour, notes"):
        MediaPlan.from_dict({**values, "colour": 1})


@pytest.mark.parametrize("change", [{"grid_thw": None}, {"size": 5}, {"frame_indices": 7}, {"num_tokens": "x"}])
def test_wrong_types_are_found(plan: MediaPlan, change: dict[str, Any]) -> None:
    with pytest.raises(MediaPlanError):
        MediaPlan.from_dict({**plan.to_dict(), **change})


def test_timestamp_text() -> None:
    assert timestamp_text(0) == "<0.0 seconds>"
    assert timestamp_text(12.26) == "<12.3 seconds>"
