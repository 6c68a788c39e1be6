"""Server-sent events from bytes that are cut anywhere, and the chunks in them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35mm.backends.remote.faults import Fault
from qwen35mm.backends.remote.programs import Told
from qwen35mm.backends.remote.reply import Reply
from qwen35mm.backends.remote.sse import EventReader
from qwen35mm.contract import Result


def read(*parts: bytes) -> list[str]:
    reader = EventReader()
    return [data for part in filter(None, parts) for data in reader.feed(part)] + list(reader.feed(b""))


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_line_end_comments_and_other_fields(end: bytes) -> None:
    lines = [b": ping", b"event: message", b"id: 3", b"data: one", b"", b"data:two", b"data: lines", b"", b"retry", b""]
    assert read(end.join(lines) + end) == ["one", "two\nlines"]


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), min_size=1), max_size=5),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0, 200), max_size=12),
)
def test_wherever_the_bytes_are_cut(texts: list[str], end: bytes, cuts: list[int]) -> None:
    stream = b"".join(b"data: " + text.encode() + end + end for text in texts)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    assert read(*(stream[a:b] for a, b in pairwise(places))) == texts


def test_each_byte_by_itself_with_a_byte_order_mark() -> None:
    stream = b"\xef\xbb\xbfdata: \xc3\xa9\xf0\x9f\x90\x88\r\n\r\ndata: [DONE]\r\n\r\n"
    assert read(*(stream[at : at + 1] for at in range(len(stream)))) == ["é🐈", "[DONE]"]


def test_a_line_end_that_is_cut_in_two_is_one() -> None:
    assert read(b"data: one\r", b"\ndata: line\r", b"\n\r", b"\n") == ["one\nline"]


def test_the_last_event_may_lack_its_empty_line() -> None:
    assert read(b"data: one\n\ndata: two") == ["one", "two"]


def test_a_line_without_an_end_and_wrong_bytes_are_damage() -> None:
    for match, parts in (("more than 1,048,576 characters", [b"x" * 65536] * 17), ("UTF-8", [b"data: \xc3\n\n"])):
        with pytest.raises(Fault) as caught:
            read(*parts)
        assert match in caught.value.said


def result_of(*chunks: str) -> Result:
    reply = Reply(0.0, {})
    for chunk in chunks:
        list(reply.add(chunk))
    list(reply.add('{"choices": [{"delta": {}, "finish_reason": "stop"}]}'))
    list(reply.end())
    return reply.result()


def test_half_a_character_in_an_escape_is_replaced() -> None:
    assert result_of(r'{"choices": [{"delta": {"content": "a\ud83d"}}]}').text == "a?"


def test_objects_that_bring_nothing() -> None:
    nothing = ('{"type": "ping"}', '{"choices": []}', '{"choices": [{"delta": null}]}', '{"error": null}')
    assert result_of(*nothing).text == ""


@pytest.mark.parametrize(
    ("usage", "numbers"),
    [
        ({"prompt_tokens": 3, "completion_tokens": None, "prompt_tokens_details": {"cached_tokens": "2"}}, (3, 0, 0)),
        ({"prompt_tokens": True, "prompt_tokens_details": 1}, (0, 0, 0)),
        ({"prompt_tokens": 2, "completion_tokens": 10**400, "prompt_tokens_details": {"cached_tokens": 9}}, (2, 0, 2)),
    ],
)
def test_counts_are_numbers_or_zero(usage: dict[str, Any], numbers: tuple[int, int, int]) -> None:
    result = result_of(json.dumps({"choices": [], "usage": usage}))
    assert (result.num_prompt_tokens, result.num_generated_tokens, result.cache.num_cached_tokens) == numbers


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def shaped(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names), JSON, max_size=len(names))


CALLS = st.lists(st.fixed_dictionaries({}, optional={"index": JSON, "function": shaped("name", "arguments")}) | JSON)
DELTA = st.fixed_dictionaries({}, optional={"content": JSON, "reasoning": JSON, "tool_calls": CALLS | JSON}) | JSON
CHUNK = st.fixed_dictionaries(
    {"choices": st.lists(st.fixed_dictionaries({"delta": DELTA}, optional={"finish_reason": JSON}), max_size=2) | JSON},
    optional={
        "usage": shaped("prompt_tokens", "completion_tokens", "prompt_tokens_details") | JSON,
        "timings": shaped("cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms") | JSON,
        "prompt_progress": shaped("total", "processed") | JSON,
        "error": JSON,
    },
)


@given(st.lists(CHUNK, max_size=3))
def test_whatever_a_server_sends_is_an_answer_or_damage(chunks: list[Any]) -> None:
    reply = Reply(0.0, {})
    try:
        for chunk in [*chunks, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]:
            for piece in reply.add(json.dumps(chunk)):
                str(piece).encode()
        list(reply.end())
        result = reply.result()
    except Fault:
        return
    json.dumps(result.to_dict(), allow_nan=False)
    assert 0 <= result.cache.num_cached_tokens <= result.num_prompt_tokens < 2**54


@given(JSON | shaped("owned_by", "max_model_len", "meta"), JSON | shaped("modalities", "default_generation_settings"))
def test_whatever_a_server_tells_of_itself_is_taken_or_passed_over(entry: Any, props: Any) -> None:
    settings = {"default_generation_settings": {"params": props}, "chat_template_caps": props, "modalities": props}
    for told in (props, settings):
        info = Told.read(entry).with_props(told).info("tiny", "host:1")
        assert info.name == "tiny"
