"""The typed questions have rules that right answers keep and wrong ones don't."""

from __future__ import annotations

import pytest

from qwen35mm.evaluation.cases import TYPED_SKILL, make_cases
from qwen35mm.evaluation.scenes import is_held_out
from qwen35mm.evaluation.skills.chat import CANT_TELL, NO_MEDIA, WHAT, WHO
from qwen35mm.evaluation.typed import SCENES, TYPED, keeps

# What the model says by its grammar where a question is asked like that.
ANSWERS = {
    ("pair", "how many triangles are in there"): "There are no triangles.",
    ("trio", "how many squares"): "There are no squares.",
    ("square", "whats on the left"): "There is nothing on the left.",
    ("square", "zero circles right?"): "Yes, there are no circles.",
    ("square", "what is it"): "A yellow square on the right.",
    ("square", "who drew this"): CANT_TELL,
    ("square", "hello"): f"Hello! {WHAT}",
    ("square", "what are u"): WHO,
    ("square", "and now in json"): '[{"color": "yellow", "shape": "square", "place": "right"}]',
    ("square", "is it a triangle or what"): "No, it is a square.",
    ("pair", "point at the circle"): '[{"point_2d": [180, 500], "label": "red circle"}]',
    ("pair", "give me the bounding box for the star"): '[{"bbox_2d": [640, 320, 1000, 680], "label": "blue star"}]',
    ("pair", "is the star big or small"): "The star is big.",
    ("pair", "both are blue, arent they"): "No, the circle is red.",
    ("trio", "where did you put the cross"): "The cross is at the bottom right.",
    ("stop", "read it"): 'It says "STOP".',
    ("words", "how many words are on it"): "There are two words.",
    ("appears", "when does it show up"): "It appears at 2.5 seconds.",
    ("nothing", "what color is it"): NO_MEDIA,
    ("photo", "how many people"): CANT_TELL,
    ("two", "which picture has the star"): "The second picture.",
}


def test_about_two_hundred_are_asked_of_every_kind_of_scene() -> None:
    assert len(TYPED) >= 200
    assert {typed.scene for typed in TYPED} == set(SCENES)
    assert len({(typed.scene, typed.turns) for typed in TYPED}) == len(TYPED)
    assert sum(len(typed.turns) > 1 for typed in TYPED) >= 20


def test_good_answers_keep_their_rules_and_others_do_not() -> None:
    for typed in TYPED:
        assert typed.is_right(typed.good), typed
        for wrong in ("", "I like bananas.", typed.turns[-1].replace("?", "") + " bananas"):
            # What a question says itself may stand in its answer.
            assert not typed.is_right(wrong) or wrong.startswith(typed.turns[-1][:8]), typed
        if typed.rule.split()[0] in ("yes", "no"):
            other = {"yes": "No, it is not.", "no": "Yes, it is."}[typed.rule.split()[0]]
            assert not typed.is_right(other), typed


@pytest.mark.parametrize(("asked", "answer"), ANSWERS.items(), ids=lambda value: str(value)[:40])
def test_the_grammars_answers_are_right(asked: tuple[str, str], answer: str) -> None:
    (typed,) = (each for each in TYPED if (each.scene, each.turns[-1]) == asked)
    assert typed.is_right(answer)
    wrong = {CANT_TELL: "A red circle.", NO_MEDIA: CANT_TELL}.get(answer, CANT_TELL)
    assert not typed.is_right(wrong)


@pytest.mark.parametrize(
    ("answer", "rule", "kept"),
    [
        ("A red circle.", "red circle", True),
        ("A reddish circle.", "red circle", False),
        ("On the left.", "left|west", True),
        ("Yes.", "no", False),
        ("There is no star.", "no", False),
        ("There are no stars.", "are_no|no", True),
        ("No, a square.", "no !yes", True),
        ("A square, yes.", "square !yes", True),
        ("Yes, a square.", "square !yes", False),
        ('[{"bbox_2d": [1, 2, 3, 4]}]', "bbox_2d", True),
        ("At 2.5 seconds.", "2.", True),
        ("At 12.5 seconds.", "2.", False),
    ],
)
def test_rules(answer: str, rule: str, kept: bool) -> None:
    assert keeps(answer, rule) == kept


def test_their_scenes_are_such_as_training_may_show() -> None:
    for name, shown in SCENES.items():
        for scene in shown:
            items = getattr(scene, "items", ())
            held_out = [item.name for item in items if is_held_out(item.color, item.shape, item.place)]
            assert len(held_out) <= 1, (name, held_out)


@pytest.mark.parametrize("count", [10, 200, 1000])
def test_cases_are_spread_over_all_kinds(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen35mm.evaluation.cases._with_files", lambda rng, messages: messages)
    cases = make_cases(TYPED_SKILL, count, "combos")
    assert len(cases) == min(count, len(TYPED))
    assert cases[0].is_right(TYPED[0].good)
    last = cases[-1].messages[-1]["content"]
    assert last in [typed.turns[-1] for typed in TYPED[-len(TYPED) // len(cases) - 1 :]]
    assert make_cases(TYPED_SKILL, count, "seen") == []
