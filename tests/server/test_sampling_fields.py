"""How tokens are chosen and what is told of them, asked for by OpenAI's own client."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import fields
from typing import Any

import openai
import pytest

from qwen35mm.backends.local import LocalBackend
from qwen35mm.contract import Event
from qwen35mm.contract.sampling import NUMBERS, SamplingParams
from qwen35mm.engine import Request
from qwen35mm.model import LoadedModel
from qwen35mm.server.app import create_app
from qwen35mm.server.fields import RequestFields
from tests.server import instant
from tests.server.instant import Instant

# The protocols have fields of their own for these: max_completion_tokens, response_format, top_logprobs.
ASKED_OTHERWISE = {"max_tokens", "json_schema", "grammar", "logprobs"}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def ask(client: openai.OpenAI, messages: list[Any] = HELLO, **options: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=messages, **{"temperature": 0, **options})


def test_logprobs_are_of_each_token_of_the_answer(client: openai.OpenAI, demo: LoadedModel) -> None:
    choice = ask(client, logprobs=True, top_logprobs=3, max_completion_tokens=60).choices[0]
    told = choice.logprobs.content
    assert b"".join(bytes(each.bytes) for each in told).decode() == choice.message.content
    assert "".join(each.token for each in told) == choice.message.content
    for each in told:
        assert [len(each.top_logprobs), each.top_logprobs[0].token] == [3, each.token], "greedy takes the likeliest"
        assert each.top_logprobs[0].logprob == each.logprob <= 0
        assert sum(math.exp(top.logprob) for top in each.top_logprobs) <= 1 + 1e-6
    chunks = [
        chunk.choices[0]
        for chunk in ask(client, logprobs=True, top_logprobs=3, max_completion_tokens=60, stream=True)
        if chunk.choices
    ]
    streamed = [each for chunk in chunks if chunk.logprobs for each in chunk.logprobs.content]
    assert streamed == told
    spoken = [chunk for chunk in chunks if chunk.delta.content]
    assert sum(chunk.logprobs is not None for chunk in spoken) >= len(spoken) - 1
    assert ask(client).choices[0].logprobs is None
    assert [each.top_logprobs for each in ask(client, logprobs=True).choices[0].logprobs.content[:2]] == [[], []]


def test_thinking_has_no_logprobs(client: openai.OpenAI) -> None:
    body = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 4}
    choice = ask(client, logprobs=True, extra_body=body).choices[0]
    said = "".join(each.token for each in choice.logprobs.content)
    assert choice.message.reasoning
    assert said.lstrip("\n") == choice.message.content


def test_biases_penalties_and_ends(client: openai.OpenAI, backend: LocalBackend) -> None:
    tokenizer = backend.loaded.tokenizer
    whole = ask(client).choices[0]
    assert whole.stop_reason is None
    first, *_, last = tokenizer.encode_plain(whole.message.content)
    biased = ask(client, logit_bias={str(first): -100}).choices[0].message.content
    assert biased != whole.message.content
    assert first not in tokenizer.encode_plain(biased)[:1]
    stopped = ask(client, extra_body={"stop_token_ids": [last]}).choices[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", last)
    assert whole.message.content.startswith(stopped.message.content)
    *_, end = ask(client, stop=["nothing", "describe"], stream=True)
    assert (end.choices[0].finish_reason, end.choices[0].stop_reason) == ("stop", "describe")
    length = ask(client).usage.completion_tokens
    longer = ask(client, extra_body={"min_tokens": length + 5}, max_completion_tokens=length + 20)
    assert longer.usage.completion_tokens > length + 5
    goes_on = ask(client, extra_body={"ignore_eos": True}, max_completion_tokens=length + 7)
    assert (goes_on.usage.completion_tokens, goes_on.choices[0].finish_reason) == (length + 7, "length")
    repeated = [{"role": "user", "content": "Describe a red circle."}]
    biases = {str(tokenizer.encode_plain("a")[0]): 100}
    assert set(ask(client, repeated, logit_bias=biases, max_completion_tokens=9).choices[0].message.content) == {"a"}
    # A hundred, less ten for each time.
    varied = ask(client, repeated, logit_bias=biases, frequency_penalty=10, max_completion_tokens=16)
    assert len(set(varied.choices[0].message.content)) > 1


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"frequency_penalty": 20}, "frequency_penalty", "from -10 to 10"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids for names; got 'x'"),
        ({"logit_bias": {"1": 500}}, "logit_bias", "from -100 to 100"),
        ({"logit_bias": {"999999": 5}}, "logit_bias", "no token 999,999"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"stop": "x", "extra_body": {"stop_token_ids": [-1]}}, "stop_token_ids", "at least 0"),
        ({"extra_body": {"min_tokens": 9}, "max_tokens": 8}, "min_tokens", "max_tokens (8) at most"),
        ({"extra_body": {"ignore_eos": "yes"}}, "ignore_eos", "boolean"),
    ],
)
def test_what_cannot_be_used_is_named(
    options: dict[str, Any], param: str, words: str, client: openai.OpenAI, refused: Callable[..., Any]
) -> None:
    error = refused(ask, client=client, **options)
    assert (error.status_code, error.body["param"]) == (400, param)
    assert words in error.body["message"]


def params_of(demo: LoadedModel, body: dict[str, Any]) -> SamplingParams:
    return RequestFields.model_validate(body).params(demo, max_tokens=None, effort=None, json_schema=None)


@pytest.mark.parametrize("name", [each.name for each in fields(SamplingParams) if each.name not in ASKED_OTHERWISE])
def test_every_parameter_can_be_asked_for_by_its_name(name: str, demo: LoadedModel) -> None:
    others = {"stop": ["a"], "ignore_eos": True, "stop_token_ids": [1], "logit_bias": {"1": 1.0}}
    value = others[name] if name in others else 2 if NUMBERS[name].is_whole else 0.5
    plain, asked = vars(params_of(demo, {})), vars(params_of(demo, {name: value}))
    assert [each for each in plain if plain[each] != asked[each]] == [name]


def test_what_others_send_for_the_neutral_value_is_understood(demo: LoadedModel) -> None:
    for name, number in NUMBERS.items():
        if number.off_from is not None:
            for value in {number.off_from, number.off_from if number.is_whole else number.off_from / 2}:
                assert getattr(params_of(demo, {name: value}), name) == getattr(SamplingParams(), name)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
async def test_a_top_p_of_0_takes_the_likeliest_token(path: str, demo: LoadedModel) -> None:
    class Drawing(Instant):
        asked: SamplingParams

        async def _answer(self, work: Request, request: Any, *, commits: bool = False) -> AsyncGenerator[Event, None]:
            Drawing.asked = work.params
            async for event in super()._answer(work, request, commits=commits):
                yield event

    said: dict[str, Any] = {"input": "Hello", "prompt": "Hello", "messages": HELLO}
    name = {"/v1/responses": "input", "/v1/completions": "prompt"}.get(path, "messages")
    for zero in (0, 0.0):
        body = {name: said[name], "max_tokens": 5, "top_p": zero, "temperature": 1.0}
        assert (await instant.ask(create_app(Drawing(demo)), path, json.dumps(body).encode())).status == 200
        assert 0 < Drawing.asked.top_p < 1e-5
