"""Completions and embeddings through OpenAI's own client."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest
from openai.types import Completion

from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.remote.backend import RemoteBackend
from qwen35mm.server.app import create_app
from tests.server.conftest import HTTP, PATIENCE_S, serving
from tests.server.sdk import check, events_in

# Unfinished, so that a model has something to go on with.
TEXT = "A red circle at the top left, a blue star in the center and a green cross on the right. The code of the room is"


def complete(client: openai.OpenAI, prompt: Any = TEXT, **options: Any) -> Any:
    return client.completions.create(model="demo", prompt=prompt, **{"temperature": 0, "max_tokens": 8, **options})


def ids_of(backend: LocalBackend, text: str) -> list[int]:
    return backend.loaded.tokenizer.encode_plain(text)


def test_texts_and_ids_are_gone_on_with(client: openai.OpenAI, backend: LocalBackend) -> None:
    expected = backend.complete(TEXT, temperature=0, max_tokens=8)
    assert expected.text
    for prompt in (TEXT, ids_of(backend, TEXT), [TEXT], [ids_of(backend, TEXT)]):
        found = complete(client, prompt)
        assert [choice.text for choice in found.choices] == [expected.text]
        assert found.choices[0].finish_reason == expected.finish_reason
        assert found.usage.prompt_tokens == expected.num_prompt_tokens
        assert found.usage.completion_tokens == expected.num_generated_tokens
        assert found.choices[0].logprobs is None
    assert len(complete(client, max_tokens=openai.omit, extra_body={"ignore_eos": True}).choices[0].text) > 0
    assert complete(client, echo=True).choices[0].text == TEXT + expected.text


def test_control_tokens_of_a_template_are_that(client: openai.OpenAI, backend: LocalBackend) -> None:
    """Clients that have the checkpoint's tokenizer put its template around a conversation themselves."""
    result = backend.generate("Hello", temperature=0, max_tokens=8)
    prompt = backend.loaded.tokenizer.decode(result.prompt_token_ids, skip_special=False)
    found = complete(client, prompt)
    assert found.usage.prompt_tokens == result.num_prompt_tokens
    assert found.choices[0].text == result.text


def test_thinking_is_text_like_the_rest(client: openai.OpenAI, backend: LocalBackend) -> None:
    thought = backend.generate("Hello", thinking=True, temperature=0, max_tokens=40)
    prompt = list(thought.prompt_token_ids)
    found = complete(client, prompt, max_tokens=40).choices[0].text
    assert thought.reasoning
    assert found.startswith(thought.reasoning)
    assert "</think>" in found


def test_several_prompts_have_several_choices_in_their_order(client: openai.OpenAI) -> None:
    prompts = [f"{TEXT} {number}" for number in range(5)]
    alone = [complete(client, prompt).choices[0].text for prompt in prompts]
    found = complete(client, prompts)
    assert [choice.text for choice in found.choices] == alone
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3, 4]
    two = complete(client, prompts[:2], n=2, temperature=2, seed=3, max_tokens=12, extra_body={"ignore_eos": True})
    texts = [choice.text for choice in two.choices]
    assert len(set(texts)) == 4
    again = complete(client, prompts[1], temperature=2, seed=4, max_tokens=12, extra_body={"ignore_eos": True})
    assert again.choices[0].text == texts[3], "a seed is counted up"


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_how_likely_a_text_is_as_evaluations_ask(client: openai.OpenAI, backend: LocalBackend, max_tokens: int) -> None:
    """As EleutherAI's harness does: `echo`, `logprobs`, and token ids of a context with its ending."""
    context, ending = ids_of(backend, TEXT), ids_of(backend, " It is red.")
    options = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "seed": 1234}
    found = complete(client, [[*context, *ending], context], **options).choices
    told = found[0].logprobs
    expected = backend.score(ending, context, num_top=1)
    scores = told.token_logprobs[len(context) : len(context) + len(ending)]
    assert sum(scores) == pytest.approx(expected.logprob, abs=1e-4)
    assert told.token_logprobs[0] is None
    assert told.top_logprobs[0] is None
    sizes = {len(each) for each in (told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset)}
    assert sizes == {len(context) + len(ending) + max_tokens}
    for own, top in zip(told.token_logprobs[1:], told.top_logprobs[1:], strict=True):
        assert max(top.values()) >= own
        assert own in top.values()
    text = found[0].text
    ends = [*told.text_offset[1:], None]
    assert [text[begin:end] for begin, end in zip(told.text_offset, ends, strict=True)][: len(context)] == told.tokens[
        : len(context)
    ]
    assert found[0].finish_reason in ("length", "stop")[: 1 + max_tokens]
    assert len(found[1].logprobs.tokens) == len(context) + max_tokens


def test_a_part_of_a_character_is_named_by_its_bytes(client: openai.OpenAI) -> None:
    told = complete(client, "é", echo=True, logprobs=0, max_tokens=0).choices[0].logprobs
    assert told.tokens == ["bytes:\\xc3", "bytes:\\xa9"]
    assert told.text_offset == [0, 0]


@pytest.mark.parametrize("options", [{}, {"echo": True, "logprobs": 2}, {"echo": True, "logprobs": 2, "max_tokens": 0}])
def test_a_stream_is_the_whole_in_pieces(client: openai.OpenAI, options: dict[str, Any]) -> None:
    prompts = [TEXT, "A blue star."]
    whole = complete(client, prompts, **options)
    chunks = list(complete(client, prompts, stream=True, stream_options={"include_usage": True}, **options))
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    for index, choice in enumerate(whole.choices):
        parts = [each for chunk in chunks for each in chunk.choices if each.index == index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        if choice.logprobs:
            for name in ("tokens", "token_logprobs", "text_offset"):
                told = [value for part in parts for value in getattr(part.logprobs, name)]
                expected = getattr(choice.logprobs, name)
                assert told == (pytest.approx(expected, abs=1e-4) if name == "token_logprobs" else expected)


def test_a_stop_string_ends_a_completion(client: openai.OpenAI) -> None:
    whole = complete(client, extra_body={"ignore_eos": True}).choices[0].text
    stop = whole[3:5]
    found = complete(client, stop=stop, extra_body={"ignore_eos": True}).choices[0]
    assert found.text == whole[: whole.index(stop)]
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "prompt 1 is empty"),
        ({"prompt": [TEXT, ""]}, "prompt", "prompt 2 is empty"),
        ({"prompt": []}, None, ""),
        ({"prompt": 5}, None, ""),
        ({}, "prompt", ""),
        ({"prompt": [1, "a"]}, None, ""),
        ({"prompt": [10**9]}, "prompt", "must be an id from 0"),
        ({"prompt": "<|image_pad|>"}, "prompt", "holds the place of a picture"),
        ({"prompt": "word " * 20_000}, "prompt", "tokens"),
        ({"prompt": TEXT, "max_tokens": 0}, "max_tokens", "1 or more, unless echo"),
        ({"prompt": TEXT, "max_tokens": -1}, "max_tokens", ""),
        ({"prompt": TEXT, "logprobs": 21}, "logprobs", ""),
        ({"prompt": TEXT, "logprobs": True}, "logprobs", ""),
        ({"prompt": TEXT, "n": 0}, "n", ""),
        ({"prompt": [TEXT] * 200, "n": 2}, "n", "400 texts; 256 are allowed"),
        ({"prompt": TEXT, "suffix": "end"}, "suffix", "isn't supported here"),
        ({"prompt": TEXT, "temperature": -1}, "temperature", ""),
    ],
)
def test_what_cannot_be_had_is_refused_by_its_name(
    body: dict[str, Any], param: str | None, words: str, address: str
) -> None:
    answer = HTTP.post(f"{address}/v1/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert words in error["message"]
    assert (error["param"] or "").startswith(param or "prompt")
    streamed = HTTP.post(f"{address}/v1/completions", json={**body, "stream": True})
    assert streamed.status_code == 400


def test_embeddings_are_hidden_states_of_length_one(client: openai.OpenAI, backend: LocalBackend) -> None:
    texts = [TEXT, "A blue star."]
    expected = backend.embed(texts)
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    found = client.embeddings.create(model="demo", input=texts)  # the client asks for base64
    np.testing.assert_allclose([each.embedding for each in found.data], expected, atol=1e-6)
    assert [each.index for each in found.data] == [0, 1]
    assert found.usage.prompt_tokens == sum(len(ids_of(backend, text)) for text in texts)
    for given in (TEXT, ids_of(backend, TEXT), [ids_of(backend, TEXT)]):
        one = client.embeddings.create(model="demo", input=given, encoding_format="float")
        np.testing.assert_allclose(one.data[0].embedding, expected[0], atol=1e-6)
    size = backend.loaded.config.text.hidden_size
    assert len(client.embeddings.create(model="demo", input=TEXT, dimensions=size).data[0].embedding) == size


def test_base64_is_little_endian_float32(address: str) -> None:
    def ask(encoding: str) -> Any:
        body = {"input": TEXT, "encoding_format": encoding}
        return HTTP.post(f"{address}/v1/embeddings", json=body).json()["data"][0]["embedding"]

    assert np.frombuffer(base64.b64decode(ask("base64")), "<f4").tolist() == ask("float")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": ""}, "input", "input 1 is empty"),
        ({"input": [[]]}, "input", ""),
        ({"input": "word " * 20_000}, "input", "tokens"),
        ({"input": TEXT, "dimensions": 3}, "dimensions", "can't be cut"),
        ({"input": TEXT, "encoding_format": "int8"}, "encoding_format", ""),
        ({"input": TEXT, "pooling": "mean"}, "pooling", "isn't supported here"),
    ],
)
def test_embeddings_that_cannot_be_had_are_refused(body: dict[str, Any], param: str, words: str, address: str) -> None:
    answer = HTTP.post(f"{address}/v1/embeddings", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"].split(".")[0]) == (400, param)
    assert words in error["message"]


def test_what_was_read_is_counted(client: openai.OpenAI, address: str) -> None:
    def count(name: str) -> float:
        lines = HTTP.get(f"{address}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    before, tokens = count('qwen35mm_requests_total{end="read"}'), count("qwen35mm_prompt_tokens_total")
    read = client.embeddings.create(model="demo", input=[TEXT, "a"]).usage.prompt_tokens
    assert count('qwen35mm_requests_total{end="read"}') == before + 2
    assert count("qwen35mm_prompt_tokens_total") == tokens + read


def test_a_request_that_was_let_in_is_served_to_its_end(backend: LocalBackend) -> None:
    """However many texts it has, and however short the line is."""
    with serving(create_app(backend, num_places=1, max_waiting=1)) as address:
        texts = [f"{TEXT} {number}" for number in range(12)]
        found = HTTP.post(f"{address}/v1/embeddings", json={"input": texts})
        assert len(found.json()["data"]) == 12
        body = {"prompt": texts, "max_tokens": 1}
        assert len(HTTP.post(f"{address}/v1/completions", json=body).json()["choices"]) == 12


def test_a_server_that_only_knows_conversations_says_so(backend: LocalBackend, refused: Callable[..., Any]) -> None:
    class Talking:
        """The model's backend, which has conversations alone."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("stream_"):
                raise AttributeError(name)
            return getattr(backend, name)

    assert not hasattr(RemoteBackend, "stream_prompt")
    with serving(create_app(Talking())) as address:  # pyright: ignore[reportArgumentType]
        asking = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        error = refused(asking.completions.create, model="demo", prompt="a")
    assert (error.status_code, error.code) == (501, "unsupported")


@pytest.mark.parametrize("logprobs", [None, 1])
def test_answers_are_what_openais_client_knows(logprobs: int | None, address: str) -> None:
    body = {"prompt": "A red circle", "logprobs": logprobs, "max_tokens": 4, "stream_options": {"include_usage": True}}
    whole = HTTP.post(f"{address}/v1/completions", json={**body, "stream_options": None}).json()
    check(Completion, whole, {"stop_reason", "timings"})
    *chunks, (_, last) = events_in(HTTP.post(f"{address}/v1/completions", json={**body, "stream": True}).text)
    assert last == "[DONE]"
    assert len(chunks) > 2
    for _, chunk in chunks:
        # OpenAI's own chunks have null before the end, whatever its type says.
        choices = [{**each, "finish_reason": each["finish_reason"] or "stop"} for each in chunk["choices"]]
        check(Completion, {**chunk, "choices": choices}, {"stop_reason", "timings"})
        assert chunk["system_fingerprint"] == whole["system_fingerprint"]
