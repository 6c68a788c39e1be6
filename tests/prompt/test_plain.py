"""Prompts that come as token ids, or as a text without a template."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.contract import Message
from qwen35mm.errors import PromptError
from qwen35mm.prompt import PromptBuilder
from qwen35mm.prompt.build import num_in_common
from qwen35mm.tokenizer import TooManyTokensError

CONVERSATION = [
    {"role": "system", "content": "You answer in one word. " * 30},
    {"role": "user", "content": "What is left of the square? " * 20},
    {"role": "assistant", "content": "A circle."},
    {"role": "user", "content": "Where is it? " * 400},
]


@pytest.fixture
def builder(tokenizer, template, config) -> PromptBuilder:
    return PromptBuilder(tokenizer, template, config)


@pytest.mark.parametrize("form", [list, tuple, np.array, lambda ids: np.array(ids, dtype=np.uint16)])
def test_a_rendered_conversations_ids_are_the_same_prompt(build, builder, form):
    rendered = build(CONVERSATION)
    plain = builder.plain(form(rendered.token_ids.tolist()))
    assert plain.token_ids.tolist() == rendered.token_ids.tolist()
    assert plain.token_ids.dtype == rendered.token_ids.dtype
    assert plain.positions.tolist() == rendered.positions.tolist()
    assert (plain.segments, plain.tail_start, plain.rope_delta) == (
        rendered.segments,
        rendered.tail_start,
        rendered.rope_delta,
    )
    assert len(plain.segments) == 3


def test_an_array_that_is_given_stays_the_callers(builder):
    ids = np.arange(5)
    builder.plain(ids)
    ids[0] = 7


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "has no tokens"),
        (np.array([], dtype=np.int64), "has no tokens"),
        ("hello", "must be a list, or an array of whole numbers; got str"),
        ({1, 2}, "got set"),
        ([1, "2"], "Token 2 of the prompt must be a whole number; got '2'"),
        ([1.0], "got 1.0"),
        ([True], "got True"),
        ([1, -1], "Token 2 of the prompt must be an id from 0 to [0-9,]+; got -1"),
        ([10**30], "must be an id from 0"),
        (np.array([[1, 2]]), r"in one dimension; got int64 \(1, 2\)"),
        (np.array([1.0]), "got float64"),
    ],
)
def test_what_is_no_prompt_is_refused_in_words(builder, ids: Any, words: str):
    with pytest.raises(PromptError, match=words):
        builder.plain(ids)


def test_ids_at_the_edges_of_the_vocabulary(builder, tokenizer, config):
    assert builder.plain([0, tokenizer.vocab_size - 1]).token_ids.tolist() == [0, tokenizer.vocab_size - 1]
    assert config.text.vocab_size >= tokenizer.vocab_size
    with pytest.raises(PromptError, match=f"got {tokenizer.vocab_size:,}"):
        builder.plain([tokenizer.vocab_size])


def test_placeholders_without_media_are_refused(builder, config):
    for placeholder in (config.image_token_id, config.video_token_id):
        with pytest.raises(PromptError, match=r"Token 2 .* holds the place of a picture or video"):
            builder.plain([1, placeholder])


def test_control_tokens_of_a_text_are_asked_for(builder, tokenizer, oracle):
    text = "<|im_start|>user\nWhat?<|im_end|>\n"
    assert builder.text_ids(text, control_tokens=True) == oracle(text)["input_ids"]
    plain = builder.text_ids(text)
    assert tokenizer.decode(plain) == text
    assert not set(plain) & set(tokenizer.control_ids.values())


@pytest.mark.parametrize("control_tokens", [False, True])
def test_a_text_that_is_far_too_long_is_refused(builder, control_tokens):
    with pytest.raises(TooManyTokensError) as refused:
        builder.text_ids("word <|im_end|>" * 4000, control_tokens=control_tokens, most_tokens=100)
    assert refused.value.at_least > 100
    with pytest.raises(PromptError, match="half of a surrogate pair"):
        builder.text_ids("\ud83d", control_tokens=control_tokens)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_tokens_in_common(first, second):
    found = num_in_common(np.array(first), np.array(second))
    assert first[:found] == second[:found]
    assert found in (len(first), len(second)) or first[found] != second[found]


def test_a_replys_tokens_begin_behind_what_was_asked(builder, build, tokenizer):
    question, answer = CONVERSATION[1:2], "A yellow circle."
    asked = build(question)
    messages = [Message.from_dict(each) for each in question]
    prompt, start = builder.reply(messages, [], answer, enable_thinking=False)
    assert prompt.token_ids[:start].tolist() == asked.token_ids[:start].tolist()
    assert tokenizer.decode(prompt.token_ids[start:]).endswith(answer)
    assert len(asked.token_ids) - start <= 1
    with pytest.raises(PromptError, match="the text of a reply"):
        builder.reply(messages, [], "", enable_thinking=False)
