"""The plan as it is stored: a round trip through JSON, and damage found when it is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qwen35mm_preprocess import GridTHW, MediaPlan, MediaPlanError, MediaProcessor


@pytest.fixture(scope="module")
def plan(processor: MediaProcessor, clip: bytes) -> MediaPlan:
    return processor.prepare(clip).plan


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
