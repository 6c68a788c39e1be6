"""Plans and settings as JSON text: an exact way back, and nothing else is taken for one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.chat.store.records import dump_object, dump_plan, load_plan
from qwen35mm.errors import ConversationDataError
from qwen35mm_preprocess import GridTHW, MediaPlan
from tests.chat.helpers import IMAGE_PLAN, VIDEO_PLAN

PLANS = pytest.mark.parametrize("plan", [IMAGE_PLAN, VIDEO_PLAN], ids=lambda plan: plan.kind)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=3,
)


@PLANS
def test_a_plan_comes_back_exactly(plan: MediaPlan) -> None:
    back = load_plan(dump_plan(plan))
    assert back == plan
    assert back is not None
    assert isinstance(back.grid_thw, GridTHW)
    assert hash(back) == hash(plan)
    assert load_plan(dump_plan(None)) is None


@PLANS
@given(data=st.data())
def test_a_damaged_plan_is_none_or_what_it_says(plan: MediaPlan, data: st.DataObject) -> None:
    values = json.loads(dump_plan(plan) or "")
    key = data.draw(st.sampled_from(sorted(values)))
    values[key] = data.draw(ANY_JSON)
    back = load_plan(json.dumps(values))
    assert back is None or json.loads(dump_plan(back) or "") == values


@PLANS
def test_a_plan_of_another_version_is_none(plan: MediaPlan) -> None:
    values = json.loads(dump_plan(plan) or "")
    assert load_plan(json.dumps(values | {"new": 1})) is None
    for key in values:
        assert load_plan(json.dumps({name: value for name, value in values.items() if name != key})) is None
    for text in ("", "{", "[]", "5", '"plan"', "{}"):
        assert load_plan(text) is None


def test_only_plain_json_is_kept() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for values in ([1], "x", {"x": float("nan")}, {"x": object()}, {"x": {1, 2}}, {"x": deep}):
        with pytest.raises(ConversationDataError, match="settings must be"):
            dump_object(values, "settings")
