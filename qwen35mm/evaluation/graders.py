"""Graders: each takes (answer, right answer) and returns whether the answer is right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_CALL = re.compile(r"\s*<tool_call>\s*<function=(\w+)>(.*?)</function>\s*</tool_call>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=(\w+)>\n(.*?)\n</parameter>", re.DOTALL)
_QUOTED = re.compile(r'"([^"]*)"')


def exact(answer: str, right: str) -> bool:
    return answer.strip() == right.strip()


def phrases(answer: str, right: str) -> bool:
    """The same phrases in any order: 'A red circle on the left, a blue star on the right.'"""
    return _phrases(answer) == _phrases(right)


def first_word(answer: str, right: str) -> bool:
    """The same first word, 'Yes' or 'No'. Anything may follow."""
    return _first_word(answer) == _first_word(right)


def letters(answer: str, right: str) -> bool:
    """The same quoted words; case doesn't matter."""
    return [q.lower() for q in _QUOTED.findall(answer)] == [q.lower() for q in _QUOTED.findall(right)]


def box(answer: str, right: str) -> bool:
    """A box for each right one, with its label and an intersection over union above 0.7."""
    return _all_fit(answer, right, _overlaps)


def point(answer: str, right: str) -> bool:
    """A point in each right box, with its label."""
    return _all_fit(answer, right, _lies_in)


def same_json(answer: str, right: str) -> bool:
    """The same JSON value; the order of a list doesn't matter."""
    found, wanted = _json(answer), _json(right)
    if isinstance(wanted, list) and isinstance(found, list):
        return sorted(map(_sorted, found)) == sorted(map(_sorted, wanted))
    return found == wanted


def call(answer: str, right: str) -> bool:
    """The same function with the same arguments, and nothing else."""
    return not _CALL.sub("", answer) and _calls(answer) == _calls(right)


GRADERS: dict[str, Callable[[str, str], bool]] = {
    each.__name__: each for each in (exact, phrases, first_word, letters, box, point, same_json, call)
}


def letter_error(answer: str, right: str) -> float:
    """The edit distance of the quoted words, as a share of the right letters."""
    found, wanted = " ".join(_QUOTED.findall(answer)).lower(), " ".join(_QUOTED.findall(right)).lower()
    row = list(range(len(wanted) + 1))
    for i, letter in enumerate(found, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(wanted, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (letter != other))
    return row[-1] / max(1, len(wanted))


def _first_word(text: str) -> str:
    return re.split(r"\W", text.strip().lower(), maxsplit=1)[0]


def _phrases(text: str) -> list[str]:
    return sorted(re.split(r",? and |, ", text.strip().rstrip(".").lower()))


def _calls(text: str) -> list[tuple[str, dict[str, str]]]:
    return [(name, dict(_PARAMETER.findall(body))) for name, body in _CALL.findall(text)]


def _json(text: str) -> Any:
    text = re.sub(r"^```(json)?|```$", "", text.strip()).strip()
    try:
        return json.loads(text)
    except ValueError:
        return None


def _sorted(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _all_fit(answer: str, right: str, fits: Callable[[dict[str, Any], list[int]], bool]) -> bool:
    """Whether the answer has one entry for each right label, and each fits its box."""
    found, wanted = _json(answer), _json(right)
    if not isinstance(found, list) or len(found) != len(wanted):
        return False
    labelled = {str(each.get("label")): each for each in found if isinstance(each, dict)}
    return all(each["label"] in labelled and fits(labelled[each["label"]], each["bbox_2d"]) for each in wanted)


def _numbers(found: dict[str, Any], key: str, count: int) -> list[float] | None:
    """The `count` numbers under `key`, or None."""
    values = found.get(key)
    if not isinstance(values, list) or len(values) != count:
        return None
    return values if all(isinstance(value, int | float) for value in values) else None


def _lies_in(found: dict[str, Any], wanted: list[int]) -> bool:
    numbers = _numbers(found, "point_2d", 2)
    return numbers is not None and wanted[0] <= numbers[0] <= wanted[2] and wanted[1] <= numbers[1] <= wanted[3]


def _overlaps(found: dict[str, Any], wanted: list[int]) -> bool:
    numbers = _numbers(found, "bbox_2d", 4)
    if numbers is None:
        return False
    left, top, right, bottom = numbers
    width = min(right, wanted[2]) - max(left, wanted[0])
    height = min(bottom, wanted[3]) - max(top, wanted[1])
    common = max(0, width) * max(0, height)
    both = (right - left) * (bottom - top) + (wanted[2] - wanted[0]) * (wanted[3] - wanted[1]) - common
    return both > 0 and common / both > 0.7
