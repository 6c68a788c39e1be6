"""Media plans as plain JSON values and back, exactly; what was not written by it is refused, whatever its types."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from qwen35mm_preprocess import MediaPlan, MediaPlanError

_LARGEST = 2**63


def plan_to_json(plan: MediaPlan) -> dict[str, Any]:
    """JSON values that `plan_from_json` reads back as an equal plan."""
    return plan.to_dict()


def plan_from_json(values: object) -> MediaPlan:
    """Reads what `plan_to_json` wrote.

    Raises:
        MediaPlanError: a key is missing or unknown, or a value is of another type or impossible.
    """
    if not isinstance(values, Mapping):
        raise MediaPlanError("The media plan is damaged: it is no JSON object. Make a new plan.")
    for name, is_valid in _VALID.items():
        if name in values and not is_valid(values[name]):
            raise MediaPlanError(f"The media plan is damaged: its {name} can't be used. Make a new plan.")
    return MediaPlan.from_dict(values)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def _is_number(value: object) -> bool:
    return _is_count(value) or (isinstance(value, float) and math.isfinite(value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _list_of(is_valid: Callable[[object], bool], length: int | None = None) -> Callable[[object], bool]:
    def check(value: object) -> bool:
        return isinstance(value, list) and length in (None, len(value)) and all(map(is_valid, value))

    return check


def _optional(is_valid: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or is_valid(value)


_VALID: dict[str, Callable[[object], bool]] = {
    "kind": _is_text,
    "source_size": _list_of(_is_count, 2),
    "size": _list_of(_is_count, 2),
    "grid_thw": _list_of(_is_count, 3),
    "num_tokens": _is_count,
    "num_prompt_tokens": _is_count,
    "cache_bytes": _is_count,
    "processing": _is_text,
    "source_frames": _optional(_is_count),
    "duration_s": _optional(_is_number),
    "frame_indices": _optional(_list_of(_is_count)),
    "frame_times_s": _optional(_list_of(_is_number)),
    "timestamps_s": _optional(_list_of(_is_number)),
    "similar_difference": _optional(_is_number),
    "notes": _list_of(_is_text),
    "digest": _optional(_is_text),
    "unit_digests": _optional(_list_of(_is_text)),
}
