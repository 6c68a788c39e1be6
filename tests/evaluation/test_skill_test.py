"""Questions about the bundled model's world, and what is said of the answers."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import astuple, replace
from typing import Any

import pytest

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.contract import Finished, GenerationRequest, ToolCall
from qwen35mm.evaluation import cases, skill_test
from qwen35mm.evaluation.compare import compare
from qwen35mm.evaluation.passages import hidden_states
from qwen35mm.evaluation.skill_test import Accuracy, SkillTest, answer_cases
from qwen35mm.model import LoadedModel


def test_standard_errors() -> None:
    # Of four questions one was lost and none won: steps of 0, 0, 0 and -1.
    found = Accuracy.of([True, False, True, False], [True, True, True, False])
    assert astuple(found) == pytest.approx((4, 50, 25, -25, 100 * math.sqrt(1 / 4 - 1 / 16) / 2))
    assert astuple(Accuracy.of([True, True], [True, True])) == (2, 100, 0, 0, 0)


@pytest.mark.slow
def test_right_answers_are_foretold_after_their_questions(demo: LoadedModel) -> None:
    test = SkillTest(1)
    assert test.skills == [name for name in cases.NAMES if name != cases.TYPED_SKILL]
    plain = [case for case in test.cases if case.plain_answer]
    left_out = {case.skill for case in test.cases} - {case.skill for case in plain}
    assert left_out == {
        "reading up to 5",
        "reading up to 8",
        "point",
        "count, thinking",
        "two counts, thinking",
        "tool call",
    }
    found = test.passages(demo)
    answers = [demo.tokenizer.decode(each.targets.tolist()).strip() for each in found]
    assert answers == [case.expected for case in plain]
    # What the model answers by itself is what it holds for likeliest here: both ways see the same pictures and tools.
    said = answer_cases(demo, plain)
    assert sum(case.is_right(answer) for case, answer in zip(plain, said, strict=True)) >= 0.65 * len(plain)
    for case, answer, passage, hidden in zip(plain, said, found, hidden_states(demo, found), strict=True):
        likeliest = demo.model.logits(hidden).argmax(dim=-1)
        assert bool((likeliest == passage.targets).all()) == (answer.strip() == case.expected), case.skill


def test_answers_are_judged_by_their_skills_graders(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    test = SkillTest(1)
    answers = [case.expected for case in test.cases]
    yes_no = test.skills.index("yes no")
    answers[yes_no] = answers[yes_no].split(",")[0] + ", and something else."
    answers[yes_no + 1] = "Nonsense."
    monkeypatch.setattr(skill_test, "answer_cases", lambda *_: answers)
    right = [skill for skill, is_right in zip(test.skills, test.run(demo), strict=True) if is_right]
    assert [skill for skill in test.skills if skill not in right] == [test.skills[yes_no + 1], "point"]


def test_thinking_and_tools_are_the_cases_and_calls_are_in_the_text(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[GenerationRequest] = []
    call = "<tool_call>\n<function=get_time>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
    stream = LocalBackend.stream

    async def watched(self: LocalBackend, request: GenerationRequest) -> AsyncIterator[Any]:
        asked.append(request)
        async for event in stream(self, request):
            if isinstance(event, Finished) and request.tools:
                ids = tuple(demo.tokenizer.encode_plain(f"I look.\n</think>\n\n{call}"))
                calls = (ToolCall("get_time", {"city": "Oslo"}),)
                event = replace(event, result=replace(event.result, text="", token_ids=ids, tool_calls=calls))
            yield event

    monkeypatch.setattr(LocalBackend, "stream", watched)
    three = [cases.make_cases(name, 1, "seen")[0] for name in ("count, thinking", "tool call", "small talk")]
    answers = answer_cases(demo, three)
    assert [request.enable_thinking for request in asked] == [True, False, False]
    assert [request.tools for request in asked] == [(), tuple(three[1].tools or ()), ()]
    assert three[1].tools
    assert answers[1] == call
    assert "</think>" not in answers[0]


@pytest.mark.slow
def test_eight_and_four_bits_lose_no_skill() -> None:
    reference, eight, four = compare(demo_model_path(), ["int8", "int4"], num_questions=20)
    assert reference.accuracy is not None
    for result in (eight, four):
        assert result.accuracy is not None
        # int4 costs a point: of 200 boxes it loses 23 to 29 more than it wins.
        assert abs(result.accuracy.change) <= (reference.accuracy.error if result is eight else 3)
        for skill, found in result.skills.items():
            # Of twenty questions, four lost ones are chance: of 200, boxes lose 7 with int8 and win 7.
            assert abs(found.change) <= 3.5 * max(found.change_error, 5.0), skill
    assert eight.divergence.kl_mean < 0.0005
    # docs/performance.md has 0.00014 and 0.013.
    assert eight.divergence.kl_mean < four.divergence.kl_mean < 0.02
    assert eight.num_bytes < reference.num_bytes
