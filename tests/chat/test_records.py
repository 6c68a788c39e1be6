"""Plans and messages as JSON: an exact way back, and every damage refused in our own words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.chat.records import Attachment, Node, dump_object, node_values, read_node, read_plan
from qwen35mm.errors import ConversationDataError
from qwen35mm_preprocess import GridTHW, MediaPlan, MediaPlanError
from tests.chat.helpers import IMAGE_PLAN, VIDEO_PLAN

FULL = Node(
    id="0a" * 16,
    parent="0b" * 16,
    role="assistant",
    created_s=1_700_000_000.123456,
    text="Ein Bär\n\u0000 👩‍👩‍👧",
    reasoning="hm",
    thinking_s=0.1,
    status="length",
    error="Too long.",
    notes=("one", "two"),
    attachments=(
        Attachment("ab" * 32, "video", "../../कुत्ता.mp4", 0, VIDEO_PLAN),
        Attachment("cd" * 32, "text", "", 2**62),
    ),
    stats={"tokens": 5, "speed": 1 / 3, "deep": {"list": [None, True, "x"]}},
    model="Qwen3.5-0.8B",
)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("plan", [IMAGE_PLAN, VIDEO_PLAN], ids=lambda plan: plan.kind)
def test_a_plan_comes_back_exactly(plan: MediaPlan) -> None:
    back = read_plan(json.loads(json.dumps(plan.to_dict())))
    assert back == plan
    assert back is not None
    assert isinstance(back.grid_thw, GridTHW)
    assert hash(back) == hash(plan)


def test_a_message_comes_back_exactly() -> None:
    assert read_node(json.loads(json.dumps(node_values(FULL)))) == FULL


@pytest.mark.parametrize("plan", [IMAGE_PLAN, VIDEO_PLAN], ids=lambda plan: plan.kind)
@given(data=st.data())
def test_a_damaged_plan_is_a_plan_or_a_typed_error(plan: MediaPlan, data: st.DataObject) -> None:
    values = plan.to_dict()
    key = data.draw(st.sampled_from(sorted(values)))
    values[key] = data.draw(ANY_JSON)
    try:
        back = read_plan(values)
    except MediaPlanError:
        return
    assert back is not None
    assert back.to_dict() == values


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": "6"},
        {"num_tokens": True},
        {"num_tokens": 6.0},
        {"num_tokens": -1},
        {"cache_bytes": 2**70},
        {"size": [64]},
        {"size": [64, "96"]},
        {"grid_thw": [1, 4]},
        {"duration_s": float("nan")},
        {"duration_s": 10**400},
        {"frame_indices": [0, 2, 3, "6"]},
        {"notes": "text"},
        {"unit_digests": [1, 2], "digest": "x"},
        {"kind": ["image"]},
        {"extra": 1},
    ],
)
def test_a_plan_of_wrong_types_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(MediaPlanError):
        read_plan({**VIDEO_PLAN.to_dict(), **change})


@pytest.mark.parametrize("values", [[], "plan", {}, 5])
def test_what_is_no_plan_is_refused(values: object) -> None:
    with pytest.raises(MediaPlanError):
        read_plan(values)


@pytest.mark.parametrize(
    "change",
    [
        {"id": "0A" * 16},
        {"id": "0a" * 16 + "\n"},
        {"id": None},
        {"parent": 5},
        {"role": "system"},
        {"role": ["user"]},
        {"created_s": "1"},
        {"created_s": float("inf")},
        {"created_s": -1},
        {"created_s": 1e300},
        {"created_s": True},
        {"text": None},
        {"thinking_s": "2"},
        {"status": "done"},
        {"error": 5},
        {"notes": "text"},
        {"notes": [1]},
        {"stats": [1]},
        {"model": 1},
        {"attachments": {}},
        {"attachments": [1]},
        {"unknown": 1},
    ],
)
def test_a_message_of_wrong_values_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConversationDataError):
        read_node({**node_values(FULL), **change})


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "../../etc/passwd"},
        {"digest": "ab" * 31},
        {"kind": "sound"},
        {"name": None},
        {"num_bytes": -1},
        {"num_bytes": 1.5},
        {"plan": {}},
        {"plan": "x"},
    ],
)
def test_a_file_of_wrong_values_is_refused(change: dict[str, Any]) -> None:
    values = node_values(FULL)
    values["attachments"][0] |= change
    with pytest.raises(ConversationDataError):
        read_node(values)


@pytest.mark.parametrize("key", sorted(vars(FULL)))
def test_no_key_may_be_missing(key: str) -> None:
    values = node_values(FULL)
    del values[key]
    with pytest.raises(ConversationDataError, match=key):
        read_node(values)


def test_only_plain_json_is_kept() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for values in ([1], "x", {"x": float("nan")}, {"x": object()}, {"x": {1, 2}}, {"x": deep}):
        with pytest.raises(ConversationDataError, match="The settings"):
            dump_object(values, "settings")
