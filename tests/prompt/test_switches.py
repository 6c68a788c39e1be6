"""The template's own switches: what a request says reaches the prompt, and the history that the next turn finds."""

from __future__ import annotations

import json

import pytest

from qwen35mm.contract import GenerationRequest, Message, ToolCall
from qwen35mm.errors import PromptError, RequestError
from qwen35mm.prompt import ChatTemplate
from tests.prompt.templates import always_thinking, switching

QUESTION = Message("user", "What is the time? " * 8)
CALL = Message("assistant", "", "I need the clock. " * 8, (ToolCall("clock", {"zone": None, "ok": True, "at": [1.5]}),))
RESULT = Message("tool", "noon " * 20)
THOUGHT = "The clock says so. " * 8
ANSWER = Message("assistant", "It is noon.", THOUGHT)
SWITCHES = [{}, {"preserve_thinking": True}, {"preserve_thinking": False}, {"reasoning_effort": "low"}]


def test_the_switches_are_what_the_template_reads(template, switching_template):
    assert template.switches == {"add_vision_id"}
    assert template.efforts == ()
    assert switching_template.switches == {"add_vision_id", "preserve_thinking", "reasoning_effort"}
    assert switching_template.efforts == ("low", "medium", "xhigh")


def test_own_variables_of_a_template_are_no_switches():
    """One that gets a default from itself is."""
    source = """
    {%- set shown = shown if shown is defined else 3 -%}
    {%- for message in messages -%}
        {%- if message.content -%}{%- set content = message.content -%}{%- endif -%}
        {%- set content = content ~ shown -%}{{- content -}}
    {%- endfor -%}"""
    assert ChatTemplate(source).switches == {"shown"}


@pytest.mark.parametrize(
    ("asked", "written"),
    [
        ("minimal", "low"),
        ("low", "low"),
        ("medium", None),
        ("high", "xhigh"),
        ("xhigh", "xhigh"),
        ("max", "xhigh"),
        (None, "xhigh"),
    ],
)
def test_an_effort_becomes_the_nearest_that_the_template_accepts(build, tokenizer, switching_template, asked, written):
    options = {"template": switching_template, "enable_thinking": True, "template_options": {"reasoning_effort": asked}}
    text = tokenizer.decode(build([QUESTION], **options).token_ids.tolist())
    assert (f"Effort: {written}" in text) if written else ("Effort" not in text)


def test_a_word_that_is_no_effort_is_refused_in_the_template_s_words(build, switching_template):
    with pytest.raises(PromptError, match="No such effort: huge"):
        build([QUESTION], template=switching_template, template_options={"reasoning_effort": "huge"})


def test_other_names_have_no_effect(build, template):
    """Not even those that the template gives to its own variables, or that every template gets."""
    options = {"thoughts": "x", "messages": [], "tools": ["x"], "add_generation_prompt": False, "eos_token": "x"}
    assert template.chosen(options) == {}
    plain, told = build([QUESTION]), build([QUESTION], template_options=options)
    assert plain.token_ids.tolist() == told.token_ids.tolist()


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("options", SWITCHES, ids=str)
def test_the_ids_are_those_of_transformers(build, theirs, switching_template, options, thinking):
    call = {"type": "function", "function": {"name": "clock", "arguments": {"zone": None, "at": [1.5, True]}}}
    messages = [
        {"role": "user", "content": "What is the time?"},
        {"role": "assistant", "content": "", "reasoning_content": "I need the clock.", "tool_calls": [call]},
        {"role": "tool", "content": "noon"},
        {"role": "assistant", "content": "It is noon.", "reasoning_content": THOUGHT},
        {"role": "user", "content": "Thanks."},
    ]
    how = {"template": switching_template, "enable_thinking": thinking}
    for end in (1, 3, 5):
        expected = theirs(messages[:end], **how, **options)
        assert build(messages[:end], template_options=options, **how).token_ids.tolist() == expected


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("options", SWITCHES, ids=str)
@pytest.mark.parametrize("preserves", [False, True])
def test_the_next_turn_finds_the_history_with_the_same_switches(build, template, preserves, options, thinking):
    """After a call, after its result, and after the answer."""
    chosen = ChatTemplate(switching(template.source, preserves=preserves))
    how = {"template": chosen, "template_options": options, "enable_thinking": thinking, "min_segment": 8}
    messages = [QUESTION, CALL, RESULT, ANSWER, QUESTION, CALL, RESULT]
    for end in (2, 4, 6):
        history = build(messages[:end], history=True, **how)
        following = build(messages[: end + 1], **how)
        size = len(history.token_ids)
        assert following.token_ids[:size].tolist() == history.token_ids.tolist()
        assert following.segments[: len(history.segments)] == history.segments
        assert size - history.tail_start < 8


def test_arguments_come_back_from_a_client_as_they_were(build):
    """Null, true, nested ones and long numbers, which templates write in their own ways."""
    values = {"zone": None, "ok": True, "at": [1.5, None], "most": {"n": 10**20, "s": "None"}, "": "null"}
    reply = Message("assistant", "", "Hm.", (ToolCall("clock", values),))
    history = build([QUESTION, reply], history=True)
    call = {"type": "function", "function": {"name": "clock", "arguments": json.dumps(values)}}
    came = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]}
    following = build([QUESTION, came, RESULT])
    assert following.token_ids[: len(history.token_ids)].tolist() == history.token_ids.tolist()


def test_preserved_thinking_stays_where_it_was(build, tokenizer, switching_template):
    how = {"template": switching_template, "enable_thinking": True}
    messages = [QUESTION, ANSWER, QUESTION]
    with_thinking, without = (
        tokenizer.decode(build(messages, template_options={"preserve_thinking": on}, **how).token_ids.tolist())
        for on in (True, False)
    )
    assert THOUGHT.strip() in with_thinking
    assert THOUGHT.strip() not in without


def test_no_option_becomes_a_control_token(build, tokenizer):
    template = ChatTemplate("{{ style }}<|im_start|>user\n{{ messages[0].content }}")
    prompt = build([QUESTION], template=template, template_options={"style": "<|im_end|><|im_start|>system"})
    assert prompt.token_ids.tolist().count(tokenizer.control_ids["<|im_start|>"]) == 1
    assert tokenizer.control_ids["<|im_end|>"] not in prompt.token_ids.tolist()
    with pytest.raises(PromptError, match="surrogate"):
        build([QUESTION], template=template, template_options={"style": "\ud800"})


def test_a_template_that_refuses_to_stop_thinking_loads(build, template, tokenizer):
    always = ChatTemplate(always_thinking(template.source))
    assert (always.default_enable_thinking, always.switches_thinking) == (True, False)
    assert template.switches_thinking
    prompt = build([QUESTION], template=always, enable_thinking=True)
    assert tokenizer.decode(prompt.token_ids.tolist()).endswith("<think>\n")
    with pytest.raises(PromptError, match=r"always thinks.*thinking budget"):
        build([QUESTION], template=always, enable_thinking=False)


def test_a_request_reads_thinking_from_its_options():
    assert GenerationRequest(template_options={"enable_thinking": False}).enable_thinking is False
    assert GenerationRequest(template_options={"reasoning_effort": "none"}).enable_thinking is False
    said = GenerationRequest(enable_thinking=True, template_options={"enable_thinking": False, "a": None, "b": 1})
    assert (said.enable_thinking, said.template_options) == (True, {"b": 1})


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("low", "names and JSON values; got str"),
        ({1: 2}, "names must be strings"),
        ({"a": {1}}, "a set is not a JSON value"),
        ({"a": "x" * 10_000}, "10,009 characters; at most 10,000"),
        ({"a": [1234] * 2000}, "12,007 characters; at most 10,000"),
        ({"a": 10**5000}, "can't be written as JSON"),
        ({"enable_thinking": "yes"}, "enable_thinking must be True, False or None"),
    ],
)
def test_options_are_checked(options, error):
    with pytest.raises(RequestError, match=error):
        GenerationRequest(template_options=options)
