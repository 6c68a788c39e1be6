"""A template writes no ids: results must stand in the order of their calls."""

from __future__ import annotations

import pytest
from PIL import Image as PILImage

from qwen35mm.contract import Image, Message, Text
from qwen35mm.server.results import NO_RESULT, in_order_of_calls

ASK = Message("user", "Go.")


def called(*ids: str | None) -> Message:
    return Message("assistant", tool_calls=[{"name": "f", "arguments": {}, "id": each} for each in ids])


def result(of: str | None, text: str = "") -> Message:
    return Message("tool", text or f"of {of}", tool_call_id=of)


@pytest.mark.parametrize(
    ("calls", "results", "expected"),
    [
        (["a", "b"], ["a", "b"], ["of a", "of b"]),
        (["a", "b"], ["b", "a"], ["of a", "of b"]),
        (["a", "b", "c"], ["c", "a"], ["of a", NO_RESULT, "of c"]),
        (["a", "b"], ["b"], [NO_RESULT, "of b"]),
        (["a", "b"], ["a"], ["of a"]),
        # Whose they are isn't known.
        (["a", "b"], ["b", "x"], ["of b", "of x"]),
        (["a", "b"], [None, "a"], ["of None", "of a"]),
        ([None, "b"], ["b"], ["of b"]),
        (["a", "a"], ["a"], ["of a"]),
        (["a", "b"], ["b", "b"], ["of b", "of b"]),
    ],
)
def test_results_stand_in_the_order_of_calls(
    calls: list[str | None], results: list[str | None], expected: list[str]
) -> None:
    given = [ASK, called(*calls), *map(result, results), ASK]
    found = in_order_of_calls(given)
    assert [each.text for each in found[2:-1]] == expected
    assert (found[:2], found[-1]) == (given[:2], ASK)


def test_each_answer_has_its_own_results() -> None:
    given = [ASK, called("a", "b"), result("b"), result("a"), called("c", "d"), result("d"), result("c"), ASK]
    assert [each.text for each in in_order_of_calls(given) if each.role == "tool"] == ["of a", "of b", "of c", "of d"]


def test_media_stay_where_their_plans_are() -> None:
    picture = Message("tool", (Image(PILImage.new("RGB", (4, 4))), Text("of b")), tool_call_id="b")
    given = [ASK, called("a", "b"), picture, result("a")]
    assert in_order_of_calls(given, moves_media=False) == given
    assert in_order_of_calls(given) == [ASK, called("a", "b"), result("a"), picture]
