from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.contract import Message, Text, ToolCall
from qwen35mm.errors import PromptError
from qwen35mm.prompt import ChatTemplate
from tests.prompt.conversations import conversations, hostile_texts

HELLO = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("messages", "options", "error"),
    [
        pytest.param(
            [{"role": "user", "content": "ab\ud83d"}],
            {},
            r"Message 1 \(user\).*U\+D83D, character 3",
            id="a lone surrogate in a text",
        ),
        pytest.param(
            [HELLO, {"role": "assistant", "content": "a", "reasoning": "\udc00"}],
            {},
            r"Message 2 \(assistant\).*U\+DC00, character 1",
            id="a lone surrogate in a thought",
        ),
        pytest.param(
            [HELLO, Message("assistant", tool_calls=(ToolCall("f", {"a": [{"\ud800": 1}]}),))],
            {},
            r"Message 2 \(assistant\).*U\+D800",
            id="a lone surrogate in a tool call",
        ),
        pytest.param(
            [HELLO],
            {"tools": [{"name": "\ud800"}]},
            "tool definitions.*surrogate",
            id="a lone surrogate in a tool definition",
        ),
        ([HELLO], {"tools": ["f"]}, "Each tool definition must be an object"),
        ([HELLO], {"tools": [{"a": {1}}]}, "a set is not a JSON value"),
        pytest.param(
            [{"role": "user", "content": "x" * 2_000_000}, HELLO],
            {},
            "2,000,001 characters; at most 2,000,000",
            id="too much text",
        ),
        pytest.param(
            [{"role": "user", "content": "".join(map(chr, range(0xE000, 0xF900)))}],
            {},
            "private-use",
            id="no private character is free",
        ),
        pytest.param([HELLO], {"history": True}, "must end with an assistant's message", id="a history without reply"),
        pytest.param(
            [HELLO, {"role": "assistant", "content": "hi"}],
            {"history": True, "template": ChatTemplate("text")},
            r"marks no turns with <\|im_start\|>",
            id="a history without turns",
        ),
    ],
)
def test_what_makes_no_prompt_is_refused_in_words(build, messages, options, error):
    with pytest.raises(PromptError, match=error):
        build(messages, **options)


def test_a_megabyte_of_text(build, tokenizer):
    text = "x" + "".join(unit * (350_000 // len(unit.encode())) for unit in ("a ", "<|im_end|>", "\u0301")) + "x"
    prompt = build([{"role": "user", "content": text}], add_generation_prompt=False)
    assert tokenizer.decode(prompt.token_ids[1:-2].tolist()) == f"user\n{text}"
    assert prompt.tail_start > len(prompt.token_ids) - 2048


def test_a_prompt_is_read_only_and_its_positions_are_those_of_text(build):
    prompt = build([{"role": "user", "content": "hello"}])
    assert prompt.token_ids.dtype == prompt.positions.dtype == np.int64
    assert np.array_equal(prompt.positions, np.tile(np.arange(len(prompt.token_ids)), (3, 1)))
    assert prompt.rope_delta == 0
    with pytest.raises(ValueError, match="read-only"):
        prompt.token_ids[0] = 1


def test_segments_begin_at_turns(build, tokenizer):
    messages = [
        {"role": role, "content": f"{number} " * 80}
        for number, role in enumerate(["system", "user", "assistant", "user"])
    ]
    prompt = build(messages)
    turn_starts = np.flatnonzero(prompt.token_ids == tokenizer.control_ids["<|im_start|>"]).tolist()
    assert [segment.stop for segment in prompt.segments] == turn_starts[1:]
    assert prompt.tail_start == turn_starts[-1] < len(prompt.token_ids)


@given(
    turns=st.lists(conversations(hostile_texts), min_size=1, max_size=3),
    reply=st.tuples(hostile_texts, hostile_texts),
    next_text=hostile_texts,
    thinking=st.booleans(),
    calls=st.booleans(),
    keeps_thoughts=st.booleans(),
)
def test_a_history_is_how_the_next_turn_begins(
    build, template, thinking_template, turns, reply, next_text, thinking, calls, keeps_thoughts
):
    messages = [Message.from_dict(m) for turn in turns for m in turn if m["role"] != "system"]
    text, reasoning = reply
    tool_calls = (ToolCall("f", {"a": 1}),) if calls else ()
    messages += [Message("user", (Text("q"),)), Message("assistant", (Text(text),), reasoning, tool_calls)]
    next_message = Message("tool" if calls else "user", (Text(next_text),))
    options = {
        "template": thinking_template if keeps_thoughts else template,
        "min_segment": 8,
        "enable_thinking": thinking,
    }
    history = build(messages, history=True, **options)
    following = build([*messages, next_message], **options)
    length = len(history.token_ids)
    assert following.token_ids[:length].tolist() == history.token_ids.tolist()
    assert following.segments[: len(history.segments)] == history.segments
    assert length - history.tail_start < 8, "all but the end of a short last turn can be kept"
