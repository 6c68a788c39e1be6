from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from qwen35mm.model.cache_protocol import slot_runs


@dataclass
class Slot:
    slot: int


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([0], [(0, 1, 0, 1)]),
        ([5], [(0, 1, 5, 6)]),
        ([0, 1, 2], [(0, 3, 0, 3)]),
        ([2, 3, 5], [(0, 2, 2, 4), (2, 3, 5, 6)]),
        ([2, 1, 0], [(0, 1, 2, 3), (1, 2, 1, 2), (2, 3, 0, 1)]),
        ([1, 3, 4, 0], [(0, 1, 1, 2), (1, 3, 3, 5), (3, 4, 0, 1)]),
    ],
)
def test_runs_of_consecutive_slots(slots: list[int], expected: list[tuple[int, ...]]) -> None:
    runs = slot_runs(cast("Any", [Slot(slot) for slot in slots]))
    assert [(rows.start, rows.stop, pool.start, pool.stop) for rows, pool in runs] == expected
