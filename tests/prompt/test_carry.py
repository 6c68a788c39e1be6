"""Messages that the family's templates refuse: they are answered, and the cuts before them stay."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.contract import Image, Message, Text, ToolCall
from qwen35mm.prompt import ChatTemplate
from tests.prompt.templates import switching
from tests.prompt.test_media import image_plan

QUESTION = Message("user", "What is the time?")
CALL = Message("assistant", "", "I need the clock.", (ToolCall("clock", {"zone": None}),))
RESULT = Message("tool", "noon")
ANSWER = Message("assistant", "It is noon.", "The clock says so.")
TOLD = Message("system", "  Be brief.\n")
BRIEF = "<|im_start|>system\nBe brief.<|im_end|>\n"


@pytest.fixture(scope="module")
def shown(build, oracle):
    """The text of a prompt, without its generation prompt."""

    def shown(messages, **options: Any) -> str:
        return oracle.decode(build(messages, add_generation_prompt=False, **options).token_ids.tolist())

    return shown


@pytest.mark.parametrize("variant", ["template", "lenient_template"])
@pytest.mark.parametrize(
    "before",
    [
        [QUESTION],
        [QUESTION, ANSWER, QUESTION],
        [QUESTION, CALL, RESULT],
        [QUESTION, CALL],
        [QUESTION, CALL, RESULT, TOLD],
        [TOLD, QUESTION],
    ],
    ids=lambda messages: "-".join(message.role for message in messages),
)
def test_a_later_system_message_is_a_system_turn_at_its_place(shown, request, variant, before):
    template = request.getfixturevalue(variant)
    for following in ([], [CALL], [QUESTION]):
        text = shown([*before, TOLD, *following], template=template)
        start = shown([*before, *following[:0]], template=template)
        if following == [QUESTION]:  # which ends the turn: earlier thinking is left out
            assert BRIEF + "<|im_start|>user\n" in text
        else:
            assert text.startswith(start + BRIEF)


def test_after_an_answer_it_begins_a_new_exchange(shown):
    """As the answer's history was computed: without its thinking."""
    text = shown([QUESTION, ANSWER, TOLD])
    assert text == shown([QUESTION, ANSWER, QUESTION]).removesuffix(shown([QUESTION])) + BRIEF


def test_those_at_the_beginning_are_one(shown):
    leading = [Message("system", "One.\n"), Message("system", ""), Message("system", [Text("Tw"), Text("o.")])]
    assert shown([*leading, QUESTION]) == shown([Message("system", "One.\n\nTwo."), QUESTION])


def test_a_template_that_takes_them_is_asked_first(build, theirs, lenient_template):
    messages = [TOLD, TOLD, QUESTION, TOLD, CALL, RESULT, TOLD]
    dicts = [_as_dict(message) for message in messages]
    prompt = build(messages, template=lenient_template)
    assert prompt.token_ids.tolist() == theirs(dicts, template=lenient_template)


def test_a_template_that_leaves_some_out_is_not_believed(shown, template):
    """It takes two at the beginning and says nothing about the others."""
    refusal = "{{- raise_exception('The system message must be the first.') -}}"
    deaf = ChatTemplate(template.source.replace(refusal, ""))
    assert BRIEF in shown([QUESTION, TOLD], template=deaf)
    assert "One.\n\nTwo." in shown([Message("system", "One."), Message("system", "Two."), QUESTION], template=deaf)


def test_one_with_a_picture_becomes_a_user_turn(build, oracle):
    told = Message("system", ["Look: ", Image(np.zeros((64, 64, 3), np.uint8)), " see?"])
    for messages in ([told, QUESTION], [QUESTION, CALL, RESULT, told]):
        prompt = build(messages, [image_plan()])
        text = oracle.decode(prompt.token_ids.tolist())
        assert "<|im_start|>user\nLook: <|vision_start|>" in text
        assert "<|vision_end|> see?<|im_end|>\n" in text
        assert len(prompt.spans) == 1
        assert prompt.system_stop == 0


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([TOLD], BRIEF),
        ([ANSWER], "<|im_start|>assistant\n<think>\nThe clock says so.\n</think>\n\nIt is noon.<|im_end|>\n"),
        ([TOLD, RESULT], BRIEF + "<|im_start|>user\n<tool_response>\nnoon\n</tool_response><|im_end|>\n"),
        ([RESULT], "<|im_start|>user\n<tool_response>\nnoon\n</tool_response><|im_end|>\n"),
        ([Message("system", "")], "<|im_start|>system\n<|im_end|>\n"),
    ],
    ids=["system", "assistant", "system-tool", "tool", "empty"],
)
def test_without_a_user_s_message_nothing_is_added(shown, messages, text):
    assert shown(messages) == text


def test_a_first_line_by_the_model_is_continued_from_the_same_system_turn(build):
    """An application lets the model begin; then somebody answers."""
    opened = build([TOLD, ANSWER], history=True, min_segment=4)
    following = build([TOLD, ANSWER, QUESTION], min_segment=4)
    asked = build([TOLD], min_segment=4)
    assert following.token_ids[: len(opened.token_ids)].tolist() == opened.token_ids.tolist()
    assert following.segments[: len(asked.segments)] == asked.segments


_TEXTS = st.sampled_from(
    ["", " ", "Go on.", "<|im_start|>system", "<tool_response>x</tool_response>", "</think>", "<", "\ue000", "a\n\nb"]
)
_SYSTEMS = st.lists(st.builds(Message, st.just("system"), _TEXTS), max_size=2)


@st.composite
def _agents(draw: Any) -> list[Message]:
    """A conversation of an agent with system messages anywhere; every exchange ends with an answer."""
    messages = draw(_SYSTEMS)
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            messages.append(Message("user", draw(_TEXTS)))
        messages += draw(_SYSTEMS)
        for _ in range(draw(st.integers(0, 2))):
            messages.append(Message("assistant", draw(_TEXTS), draw(_TEXTS), (ToolCall("f", {"a": draw(_TEXTS)}),)))
            messages += [Message("tool", draw(_TEXTS)) for _ in range(draw(st.integers(0, 2)))]
            messages += draw(_SYSTEMS)
        messages.append(Message("assistant", draw(_TEXTS), draw(_TEXTS)))
    return messages


@given(messages=_agents(), preserve=st.sampled_from([None, False, True]), thinking=st.booleans())
def test_every_reply_s_history_is_how_the_next_prompt_begins(build, switching_template, messages, preserve, thinking):
    """Wherever system messages come. Nothing raises, whatever calls, results and texts are missing."""
    how = {"template": switching_template, "enable_thinking": thinking, "min_segment": 4}
    how["template_options"] = {"preserve_thinking": preserve}
    replies = [at for at, message in enumerate(messages) if message.role == "assistant"]
    for reply, following in pairwise(replies):
        if not _goes_on(messages[reply], messages[reply + 1 : following]):
            continue
        history = build(messages[: reply + 1], history=True, **how)
        prompt = build(messages[:following], **how)
        size = len(history.token_ids)
        assert prompt.token_ids[:size].tolist() == history.token_ids.tolist()
        assert prompt.segments[: len(history.segments)] == history.segments


@given(messages=_agents(), told=_TEXTS, lenient=st.booleans())
def test_a_system_message_changes_nothing_before_it(
    build, switching_template, lenient_template, messages, told, lenient
):
    how = {"template": lenient_template if lenient else switching_template, "min_segment": 4}
    how |= {"enable_thinking": True, "add_generation_prompt": False}
    for end in range(1, len(messages)):
        others = [message for message in messages[:end] if message.role != "system"]
        # After an answer, its history counts.
        if not others or (others[-1].role == "assistant" and not others[-1].tool_calls):
            continue
        before = build(messages[:end], **how)
        after = build([*messages[:end], Message("system", told)], **how)
        size = len(before.token_ids)
        assert after.token_ids[:size].tolist() == before.token_ids.tolist()
        assert after.segments[: len(before.segments)] == before.segments


@given(messages=_agents())
def test_outside_text_forms_no_control_token_on_the_way(build, tokenizer, template, messages):
    ids = build(messages, add_generation_prompt=False, template=template).token_ids.tolist()
    starts = ids.count(tokenizer.control_ids["<|im_start|>"])
    assert starts == ids.count(tokenizer.control_ids["<|im_end|>"])
    assert starts <= len(messages)
    results = ids.count(tokenizer.control_ids["<tool_response>"])
    assert results == sum(message.role == "tool" for message in messages)


def _goes_on(reply: Message, between: list[Message]) -> bool:
    """Whether a client can send this after a reply: something that asks for the next one, and results only of calls."""
    said = [m for m in between if m.role != "system" or m.text.strip()]
    if not said:
        return False
    return bool(reply.tool_calls) == any(message.role == "tool" for message in between)


def _as_dict(message: Message) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in message.tool_calls]
    data = {"role": message.role, "content": message.text, "reasoning_content": message.reasoning, "tool_calls": calls}
    return {name: value for name, value in data.items() if value is not None and value != []}


def test_the_switches_decide_for_themselves_whether_a_template_takes_them(template):
    """Preserved thinking is no reason to move a message."""
    chosen = ChatTemplate(switching(template.source))
    assert not chosen.takes_later(enable_thinking=True, options={"preserve_thinking": True})


def test_what_a_template_answered_is_remembered_in_little_memory(template, monkeypatch):
    chosen = ChatTemplate(switching(template.source))
    renders = []
    monkeypatch.setattr(chosen, "_tried", lambda messages, **options: renders.append(options))
    for number in range(100):
        options = {"preserve_thinking": [number] * 3000}
        for _ in range(3):
            assert not chosen.takes_later(enable_thinking=True, options=options)
        assert renders[-1] == {"enable_thinking": True, **options}
    assert len(renders) == 100 * 14
    assert sum(map(len, chosen._takes_later)) <= 64 * 32
