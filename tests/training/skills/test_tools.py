"""Calls are what the server reads out of replies, fit their schemas, and say what was asked."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from qwen35mm.evaluation.scenes import Split
from qwen35mm.evaluation.skills import tools
from qwen35mm.evaluation.skills.graders import GRADERS
from qwen35mm.prompt.calls import read_calls
from training.data import answer_text

pytestmark = pytest.mark.usefixtures("plainly")
HELD_OUT = {"get_humidity", "find_person"}


def schema_of(sample: Any, name: str) -> dict[str, Any]:
    (found,) = (tool["function"] for tool in sample.tools if tool["function"]["name"] == name)
    return found["parameters"]


@pytest.mark.parametrize("split", ["train", "seen", "combos"])
def test_calls_are_valid_and_say_what_was_asked(split: Split) -> None:
    rng = random.Random(split)
    names = set()
    for _ in range(150):
        sample = tools.call_sample(rng, split)
        question, reply = sample.messages
        text, calls = read_calls(answer_text(reply), sample.tools or [])
        (call,) = calls
        assert text == ""
        jsonschema.validate(dict(call.arguments), schema_of(sample, call.name))
        assert all(str(value).lower() in question["content"].lower() for value in call.arguments.values())
        assert len(set(map(str, call.arguments.values()))) == len(call.arguments)
        assert GRADERS["call"](answer_text(reply), answer_text(reply))
        names.add(call.name)
        # Of the tools that are offered, which one is meant has to show in the question.
        assert len({json.dumps(tool) for tool in sample.tools or []}) == len(sample.tools or [])
    assert (names == HELD_OUT) if split == "combos" else not names & HELD_OUT
    # Training makes up most of its tools; the others are twelve.
    assert len(names) > 80 if split == "train" else split == "combos" or len(names) == 12


def test_a_made_up_tool_is_asked_for_by_its_noun_and_named_by_its_schema() -> None:
    """Or by the word that asks how much of it there is: "how loud" of loudness, "how blick" of blickity."""
    rng = random.Random(0)
    without_noun, asked_otherwise = 0, set()
    for _ in range(300):
        tool = tools._made_up(rng)
        assert "{noun}" not in json.dumps(tool.schema()) + tool.says
        asked = tools._ASKED_AS.get(tool.returns) or next(
            (tool.returns.removesuffix(ending) for ending in tools._ENDINGS if tool.returns.endswith(ending)), None
        )
        for question in tool.questions:
            assert tool.returns in question or (asked and asked in question), question
            assert "{asked}" not in question
            if tool.returns not in question:
                asked_otherwise.add(tool.returns)
        assert tool.returns in tool.description
        without_noun += tool.returns not in tool.name
    assert asked_otherwise & set(tools._ASKED_AS)
    assert asked_otherwise - set(tools._ASKED_AS), "made-up words too"
    # That a call's name is the schema's can't be guessed from the question.
    assert without_noun > 40


def test_training_is_never_offered_a_held_out_tool() -> None:
    rng = random.Random(0)
    for sample in (skill.sample(rng, "train") for skill in tools.SKILLS for _ in range(600)):
        assert not {tool["function"]["name"] for tool in sample.tools or []} & HELD_OUT


def test_results_are_told_with_what_was_asked() -> None:
    rng = random.Random(0)
    for _ in range(100):
        sample = tools.result_sample(rng, "train")
        _, reply, result, last = sample.messages
        (value,) = json.loads(result["content"]).values()
        function = reply["tool_calls"][0]["function"]
        assert str(value) in last["content"].rstrip(".").split()
        told = [str(v) for v in function["arguments"].values() if str(v) in last["content"]]
        assert told or function["name"] == "add_item"


def test_small_talk_is_answered_without_a_call() -> None:
    sample = tools.restraint_sample(random.Random(0), "train")
    assert sample.tools
    assert not sample.messages[-1].get("tool_calls")
