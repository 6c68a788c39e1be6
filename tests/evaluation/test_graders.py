"""Graders take what is right, and nothing that only looks so."""

from __future__ import annotations

import json

import pytest

from qwen35mm.evaluation.graders import GRADERS, letter_error

BOX = [{"bbox_2d": [100, 200, 300, 400], "label": "red circle"}]
TWO = [*BOX, {"bbox_2d": [500, 500, 600, 600], "label": "blue star"}]
CALL = (
    "<tool_call>\n<function=add_item>\n<parameter=item>\nmilk\n</parameter>\n<parameter=count>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)


def moved(dx: int, label: str = "red circle", key: str = "bbox_2d") -> str:
    return json.dumps([{key: [100 + dx, 200, 300 + dx, 400], "label": label}])


def point(*values: object, label: str = "red circle") -> str:
    return json.dumps([{"point_2d": list(values), "label": label}])


@pytest.mark.parametrize(
    ("grader", "right", "good", "bad"),
    [
        ("exact", "It is red.", ["It is red.", " It is red.\n"], ["it is red.", "It is red", "It is red. Red.", ""]),
        (
            "phrases", "A red circle on the left and a blue star on the right.",
            ["A blue star on the right and a red circle on the left.",
             "a red circle on the left, a blue star on the right"],
            ["A red circle on the left.", "A red circle on the right and a blue star on the left.",
             "A red circle on the left, a blue star on the right and a red circle on the left.", ""],
        ),
        ("first_word", "No, the circle is blue.", ["No.", "no, it is not"], ["Yes, the circle is blue.", "", "Now."]),
        (
            "letters", 'It says "Open" and "ab1".', ['"open" "AB1"', 'It says "Open" and "ab1".'],
            ['It says "ab1" and "Open".', 'It says "Open".', "It says Open and ab1.", 'It says "0pen" and "ab1".', ""],
        ),
        (
            "box", json.dumps(BOX), [json.dumps(BOX), moved(20), f"```json\n{moved(0)}\n```"],
            [moved(60), moved(0, "blue circle"), json.dumps(TWO), "[]", "nothing", moved(0)[1:-1], moved(0, key="box"),
             point(200, 300), '[{"bbox_2d": [100, 200, 300], "label": "red circle"}]', '[{"label": ["red circle"]}]',
             '[{"bbox_2d": ["a", 1, 2, 3], "label": "red circle"}]',
             '[{"bbox_2d": [300, 400, 100, 200], "label": "red circle"}]'],
        ),
        ("box", json.dumps(TWO), [json.dumps(TWO[::-1])], [json.dumps(BOX), json.dumps([TWO[0], TWO[0]])]),
        (
            "point", json.dumps(BOX), [point(200, 300), point(100, 400), point(150.5, 200)],
            [point(99, 300), point(200, 401), point(200, 300, label="star"), point(200), point("a", "b"), moved(0),
             "[]"],
        ),
        (
            "same_json", '[{"color": "red", "shape": "star"}, {"color": "blue", "shape": "cross"}]',
            ['[{"shape": "cross", "color": "blue"}, {"color": "red", "shape": "star"}]'],
            ['[{"color": "red", "shape": "star"}]', '{"color": "red", "shape": "star"}', "red star, blue cross", "",
             '[{"color": "blue", "shape": "star"}, {"color": "red", "shape": "cross"}]'],
        ),
        (
            "same_json", '{"color": "red"}', ['```json\n{"color": "red"}\n```'],
            ['[{"color": "red"}]', '{"color": "blue"}', "null"],
        ),
        (
            "call", CALL, [CALL, f"\n{CALL}\n", CALL.replace("<tool_call>\n", "<tool_call>")],
            ["", CALL.replace("add_item", "get_item"), CALL.replace("milk", "tea"), f"Sure! {CALL}", f"{CALL} Done.",
             CALL.replace("</tool_call>", ""), CALL + CALL, CALL.replace("count", "number"), "add_item(milk, 2)"],
        ),
    ],
)  # fmt: skip
def test_graders(grader: str, right: str, good: list[str], bad: list[str]) -> None:
    grade = GRADERS[grader]
    assert [answer for answer in good if not grade(answer, right)] == []
    assert [answer for answer in bad if grade(answer, right)] == []


@pytest.mark.parametrize(
    ("answer", "error"),
    [('"ab12"', 0), ('"AB12"', 0), ('"ab1"', 0.25), ('"xb12"', 0.25), ("ab12", 1), ('"ab 12 3"', 0.75)],
)
def test_letter_error_is_an_edit_distance(answer: str, error: float) -> None:
    assert letter_error(answer, 'It says "ab12".') == error
