"""Chat completions, asked for by OpenAI's own client."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

import qwen35mm
from qwen35mm.assets import asset_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.server.app import create_app
from qwen35mm.server.parts import Sources
from tests.server.conftest import CALL, HTTP, PATIENCE_S, Scripted, sample, serving

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["number"],
    "additionalProperties": False,
}


def picture(**more: Any) -> list[Any]:
    parts = [
        {"type": "image_url", "image_url": {"url": sample("two-shapes.jpg"), **more}},
        {"type": "text", "text": "How many shapes are there?"},
    ]
    return [{"role": "user", "content": parts}]


def ask(client: openai.OpenAI, messages: list[Any] = HELLO, **options: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=messages, **{"temperature": 0, **options})


def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    whole = ask(client)
    *chunks, last = ask(client, stream=True, stream_options={"include_usage": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert text.startswith("Hello!")
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "stop"]
    assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert {chunk.id for chunk in chunks} == {last.id}
    assert last.id != whole.id
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    assert whole.timings["predicted_n"] == whole.usage.completion_tokens


def test_a_picture_and_a_clip_are_seen(client: openai.OpenAI) -> None:
    whole = ask(client, picture())
    assert whole.choices[0].message.content == "There are two shapes."
    parts = [
        {"type": "video_url", "video_url": {"url": sample("moves-right.mp4")}},
        {"type": "text", "text": "Which way does it move?"},
    ]
    clip = ask(client, [{"role": "user", "content": parts}])
    assert "right" in clip.choices[0].message.content
    fewer = ask(client, [{"role": "user", "content": parts}], extra_body={"mm_processor_kwargs": {"num_frames": 4}})
    assert fewer.usage.prompt_tokens < clip.usage.prompt_tokens
    smaller = ask(client, picture(detail="low"), extra_body={"mm_processor_kwargs": {"max_pixels": 64 * 64}})
    assert smaller.usage.prompt_tokens < whole.usage.prompt_tokens


def test_the_next_turn_comes_from_the_cache(client: openai.OpenAI, backend: LocalBackend) -> None:
    first = ask(client, picture())
    assert backend.wait_idle(PATIENCE_S)
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    second = ask(client, [*picture(), answer, {"role": "user", "content": "And the colours?"}])
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 16
    apart = ask(client, picture(), extra_body={"cache_salt": "another"})
    assert apart.usage.prompt_tokens_details.cached_tokens == 0


def test_thinking_comes_apart_under_both_names(client: openai.OpenAI) -> None:
    body = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 4}
    message = ask(client, extra_body=body).choices[0].message
    assert message.reasoning
    assert message.reasoning == message.reasoning_content
    assert message.content
    chunks = list(ask(client, extra_body=body, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == message.reasoning
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert 0 < chunks[-1].usage.completion_tokens_details.reasoning_tokens < chunks[-1].usage.completion_tokens
    assert not getattr(ask(client, reasoning_effort="none").choices[0].message, "reasoning", None)


def test_an_answer_is_held_to_a_schema_a_length_and_a_stop(client: openai.OpenAI) -> None:
    held = {"type": "json_schema", "json_schema": {"name": "count", "schema": SCHEMA}}
    assert set(json.loads(ask(client, response_format=held).choices[0].message.content)) == {"number"}
    cut = ask(client, max_completion_tokens=3)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 3)
    whole = ask(client).choices[0].message.content
    assert ask(client, stop="describe").choices[0].message.content == whole.partition("describe")[0]
    begun = [*HELLO, {"role": "assistant", "content": whole[:12]}]
    rest = ask(client, begun, extra_body={"continue_final_message": True, "add_generation_prompt": False})
    assert whole[:12] + rest.choices[0].message.content == whole
    drawn = [ask(client, temperature=1.5, seed=seed).choices[0].message.content for seed in (5, 5)]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "no tools to call"),
        ({"temperature": 200}, "temperature", "from 0 to 100; got 200"),
        ({"extra_body": {"min_p": "high"}}, "min_p", "valid number"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages.0.content.0.type", "image_url"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"extra_body": {"mm_processor_kwargs": {"fps": 0}}}, "mm_processor_kwargs.fps", "above 0"),
        ({"messages": [{"role": "user", "content": "word " * 30_000}]}, "messages", "the context holds 8,192"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_used_is_named(
    options: dict[str, Any],
    param: str,
    words: str,
    stream: bool,
    client: openai.OpenAI,
    refused: Callable[..., Any],
) -> None:
    error = refused(ask, client=client, stream=stream, **options)
    assert (error.status_code, error.body["param"], error.body["type"]) == (400, param, "invalid_request_error")
    assert words in error.body["message"]


def test_another_model_is_not_found(client: openai.OpenAI, refused: Callable[..., Any]) -> None:
    error = refused(client.chat.completions.create, model="gpt-9", messages=HELLO)
    assert (error.status_code, error.code, error.body["message"]) == (
        404,
        "model_not_found",
        "There is no model 'gpt-9' here; 'demo' is.",
    )
    assert [model.id for model in client.models.list()] == ["demo"]
    model = client.models.retrieve("demo")
    told = model.model_dump()
    assert (told["max_model_len"], told["context_length"]) == (8192, 8192)
    assert told["architecture"]["input_modalities"] == ["text", "image", "video"]
    assert 0 < model.created <= time.time()


def test_the_version_is_told(address: str) -> None:
    assert HTTP.get(f"{address}/version").json() == {"version": qwen35mm.__version__}


def test_media_come_from_where_the_server_allows(
    backend: LocalBackend, client: openai.OpenAI, refused: Callable[..., Any], tmp_path: Any
) -> None:
    root = tmp_path / "media"
    root.mkdir()
    (root / "a picture.jpg").write_bytes(asset_path("samples").joinpath("two-shapes.jpg").read_bytes())
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    (root / "link.jpg").symlink_to(tmp_path / "secret.jpg")

    def with_address(client: openai.OpenAI, address: str) -> Any:
        return ask(client, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}]}])

    for address, words in ((f"file://{root}/a%20picture.jpg", "--media-root"), ("https://a.example/", "--allow-urls")):
        assert words in refused(with_address, client=client, address=address).body["message"]
    assert "data:, https: or file:" in refused(with_address, client=client, address="picture.jpg").body["message"]
    with serving(create_app(backend, sources=Sources(root))) as other:
        client = client.with_options(base_url=f"{other}/v1")
        assert with_address(client, f"file://{root}/a%20picture.jpg").usage.prompt_tokens > 20
        for path in ("../secret.jpg", "link.jpg", "missing.jpg", "", "%00"):
            message = refused(with_address, client=client, address=f"file://{root}/{path}").body["message"]
            assert message.endswith("there is no such file under --media-root.")


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place",
            "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}},
        },
    }
]


def test_tools_are_called_streamed_or_not(backend: LocalBackend, client: openai.OpenAI) -> None:
    scripted = Scripted(backend)
    scripted.text = f"I look.\n\n{CALL.format(3)}\n{CALL.format(4)}"
    with serving(create_app(scripted)) as address:  # pyright: ignore[reportArgumentType]
        client = client.with_options(base_url=f"{address}/v1")
        (choice,) = ask(client, tools=TOOLS).choices
        assert scripted.asked[0]["tools"] == tuple(TOOLS)
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        calls = choice.message.tool_calls
        assert [call.function.name for call in calls] == ["weather"] * 2
        assert [json.loads(call.function.arguments) for call in calls] == [{"days": 3}, {"days": 4}]
        with client.chat.completions.stream(model="demo", messages=HELLO, tools=TOOLS) as stream:  # pyright: ignore
            streamed = stream.get_final_completion().choices[0]
        assert [json.loads(call.function.arguments)["days"] for call in streamed.message.tool_calls or ()] == [3, 4]
        assert (streamed.finish_reason, streamed.message.content) == ("tool_calls", "I look.")
        assert len(ask(client, tools=TOOLS, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
        none = ask(client, tools=TOOLS, tool_choice="none").choices[0]
        assert (none.message.tool_calls, none.message.content) == (None, scripted.text)
        assert scripted.asked[-1]["tools"] == ()
        result = {"role": "tool", "tool_call_id": calls[0].id, "content": "Rain"}
        ask(client, [*HELLO, choice.message.model_dump(exclude_none=True), result], tools=TOOLS)
        before, given = scripted.asked[-1]["messages"][-2:]
        assert [dict(call.arguments) for call in before.tool_calls] == [{"days": 3}, {"days": 4}]
        assert (given.role, given.text) == ("tool", "Rain")


def test_token_ids_are_told(client: openai.OpenAI, backend: LocalBackend) -> None:
    whole = ask(client, max_tokens=5, extra_body={"return_token_ids": True}).model_dump()
    prompt, reply = whole["prompt_token_ids"], whole["choices"][0]["token_ids"]
    assert (len(prompt), len(reply)) == (whole["usage"]["prompt_tokens"], 5)
    text = backend.loaded.tokenizer.decode(prompt, skip_special=False)
    assert text.startswith("<|im_start|>")
    assert "Hello" in text
    last = [
        chunk.model_dump() for chunk in ask(client, max_tokens=5, stream=True, extra_body={"return_token_ids": True})
    ][-1]
    assert (last["prompt_token_ids"], last["choices"][0]["token_ids"]) == (prompt, reply)
    assert "token_ids" not in ask(client, max_tokens=5).choices[0].model_dump()
    continued = client.completions.create(
        model="demo", prompt=prompt, max_tokens=5, temperature=0, extra_body={"return_token_ids": True}
    )
    choice = continued.choices[0].model_dump()
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, reply)
