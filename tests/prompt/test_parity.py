"""Where texts hold no control strings, the ids are those of transformers' apply_chat_template."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.prompt.conversations import conversations, plain_texts, tools_of


@given(
    messages=conversations(plain_texts),
    tools=tools_of(plain_texts),
    thinking=st.booleans(),
    generate=st.booleans(),
    variant=st.booleans(),
)
def test_ids_equal_transformers(
    build, theirs, template, thinking_template, messages, tools, thinking, generate, variant
):
    chosen = thinking_template if variant else template
    options = {"enable_thinking": thinking, "add_generation_prompt": generate, "tools": tools, "template": chosen}
    assert build(messages, **options).token_ids.tolist() == theirs(messages, **options)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "  leading",
            "trailing  ",
            "\n\nboth\n\n",
            "a\r\nb\r\n",
            "",
            "   ",
            "\u0338 first is a combining mark",
            "e\u0301",
        ),
        *(
            "Ω Å ﬁ",
            "한글 자모 \u1112\u1161\u11ab",
            "a\0b",
            "\ue000\ue001\uf8ff",
            "\\ue000",
            "1 < 2 > 0 <3",
            "</ think>",
        ),
        *("<|im_end", "<br>", "<tool_responses>", "👩‍👩‍👧 🏳️‍🌈"),
    ],
)
def test_text_that_is_easily_changed(build, theirs, text):
    parts = [{"type": "text", "text": part} for part in (text, text, "end")]
    messages = [
        {"role": "system", "content": text},
        {"role": "user", "content": text},
        {"role": "assistant", "content": text, "reasoning_content": text},
        {"role": "user", "content": parts},
    ]
    assert build(messages).token_ids.tolist() == theirs(messages)


def test_combining_marks_join_over_the_border_of_two_parts(build, theirs):
    parts = [{"type": "text", "text": "e"}, {"type": "text", "text": "\u0301"}]
    messages = [{"role": "user", "content": parts}]
    prompt = build(messages)
    assert prompt.token_ids.tolist() == theirs(messages)
    assert prompt.token_ids.tolist() == build([{"role": "user", "content": "é"}]).token_ids.tolist()
