"""Good answers, what is asked for them, the model's name, turns, and leaving early."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from qwen35mm.backends.remote.backend import RemoteBackend
from qwen35mm.backends.remote.deadline import RemoteTimeouts
from qwen35mm.backends.remote.request import reply_fields, sampling_fields
from qwen35mm.contract import GenerationRequest, Message, Progress, SamplingParams, Text, TextDelta
from qwen35mm.errors import ConfigError, EngineError, PromptError, RequestError, RequestTimeoutError
from tests.backends.events import result_of
from tests.backends.remote.asking import PATIENCE_S, QUESTION, Asker, events_of, until
from tests.backends.remote.server import Handler, ModelServer, answers, chunk, event, fails, pieces, sends, stalls


async def test_an_answer_and_its_numbers(server: ModelServer, asker: Asker) -> None:
    result = await asker.ask(params=SamplingParams(seed=7))
    assert (result.text, result.reasoning, result.finish_reason) == ("A red square.", None, "stop")
    assert (result.num_prompt_tokens, result.num_generated_tokens, result.seed) == (40, 5, 7)
    assert (result.cache.num_cached_tokens, result.cache.num_prefilled_tokens) == (32, 8)
    assert (await asker.ask(params=SamplingParams(temperature=0.0, seed=7))).seed is None, "no chance, no seed"
    assert result.ttft_s is not None
    assert result.ttft_s > 0
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "What is this?"}]
    assert server.bodies[0]["stream"] is True
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
async def test_thinking_comes_apart_from_the_answer(server: ModelServer, asker: Asker, key: str) -> None:
    server.acts = [answers(["Red."], reasoning=["It is ", "red"], key=key)]
    result = await asker.ask()
    assert (result.text, result.reasoning) == ("Red.", "It is red")


async def test_a_cut_reply_says_so(server: ModelServer, asker: Asker) -> None:
    server.acts = [answers(["A red"], finish_reason="length")]
    assert (await asker.ask()).finish_reason == "length"


async def test_text_comes_when_it_is_complete(asker: Asker) -> None:
    events = await events_of(asker.backend())
    pieces = [event for event in events if isinstance(event, TextDelta)]
    assert [piece.text for piece in pieces] == ["A red square."]
    # How fast it came isn't known of what comes at once.
    assert [(piece.num_generated_tokens, piece.at_s) for piece in pieces] == [(None, None)]


async def test_conversations_keep_their_roles_and_thinking(server: ModelServer, asker: Asker) -> None:
    conversation = [
        Message("system", (Text("Be brief."),)),
        *QUESTION,
        Message("assistant", (Text("A square."),), reasoning="four sides"),
        Message("user", (Text("Its colour? \udcff"),)),
    ]
    await asker.ask(conversation)
    assert server.bodies[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is this?"},
        {"role": "assistant", "content": "A square.", "reasoning_content": "four sides"},
        {"role": "user", "content": "Its colour? ?"},
    ]


async def test_what_a_server_cannot_do_is_refused_in_words(server: ModelServer, asker: Asker) -> None:
    with pytest.raises(RequestError, match="can't be asked for the rest of a reply"):
        await events_of(asker.backend(), continue_reply=True)
    with pytest.raises(RequestError, match=r"can't be asked for thinking_budget\. Leave that setting at its default"):
        await asker.ask(params=SamplingParams(thinking_budget=5))
    with pytest.raises(PromptError, match="no messages"):
        await asker.ask([])
    assert server.bodies == []


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_address_may_end_in_the_version_or_not(server: ModelServer, asker: Asker, suffix: str) -> None:
    backend = asker.backend(server.url + suffix)
    assert result_of(await events_of(backend)).text == "A red square."
    assert backend.base_url == f"{server.url}/v1"


async def test_the_only_model_is_taken(server: ModelServer, asker: Asker) -> None:
    backend = asker.backend(model=None)
    with pytest.raises(ConfigError, match="connect first"):
        _ = backend.name
    await backend.connect()
    assert backend.name == "tiny"
    await events_of(asker.backend(model=None))
    assert server.bodies[0]["model"] == "tiny"


async def test_of_several_models_one_must_be_named(server: ModelServer, asker: Asker) -> None:
    server.models = ["tiny", "tiny-lora"]
    with pytest.raises(ConfigError, match=r"Name the model .* 'tiny', 'tiny-lora'"):
        await asker.ask(model=None)
    await asker.backend(model="tiny-lora").connect()
    server.models = []
    with pytest.raises(ConfigError, match="it has none"):
        await asker.ask(model=None)
    server.model_acts = [fails(503), fails(200, {"models": []})]
    with pytest.raises(RequestError, match="doesn't speak OpenAI's API"):
        await asker.backend(model=None).connect()


async def test_a_named_model_need_not_be_listed(server: ModelServer, asker: Asker) -> None:
    server.model_acts = [fails(404), fails(500)]
    await asker.backend().connect()
    await asker.backend().connect()
    assert asker.waits_s == []
    server.model_acts = [fails(401)]
    with pytest.raises(RequestError, match="Check the API key"):
        await asker.backend().connect()
    with pytest.raises(EngineError, match="can't be reached"):
        await asker.backend("http://127.0.0.1:1").connect()


async def test_at_most_so_many_requests_at_once_in_the_order_of_asking(server: ModelServer, asker: Asker) -> None:
    server.otherwise = sends(pieces(["Red."]), pause_s=0.005)
    backend = asker.backend(max_concurrent=3)
    questions = [[Message("user", (Text(f"Number {number}?"),))] for number in range(20)]
    results = await asyncio.gather(*(events_of(backend, question) for question in questions))
    assert [result_of(events).text for events in results] == ["Red."] * 20
    assert server.max_active == 3
    waited = [[event.total for event in events if isinstance(event, Progress)] for events in results]
    # First for a place among those whose media are read, then for a turn: who came later counts in neither.
    assert (waited[2], waited[5], waited[-1][0]) == ([], [3], 20 - 3)
    assert all(later <= first for first, *rest in waited[3:] for later in rest)
    order = [int(body["messages"][0]["content"].split()[1][:-1]) for body in server.bodies]
    # Three are under way at once, and may arrive in any order among themselves.
    assert all(abs(number - place) < 3 for place, number in enumerate(order))


async def test_leaving_early_closes_the_connection_and_frees_the_turn(server: ModelServer, asker: Asker) -> None:
    num_begun = 0

    def begun(handler: Handler) -> None:
        nonlocal num_begun
        num_begun += 1
        stalls(handler)

    server.acts = [sends(parts, then=begun) for parts in (pieces(["A "])[:2], [])]
    backend = asker.backend(max_concurrent=1)
    for number in (1, 2):
        asking = asyncio.create_task(events_of(backend))
        await until(lambda number=number: num_begun == number)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda number=number: server.num_gone == number)
    assert result_of(await events_of(backend)).text == "A red square."


async def test_a_cancellation_is_never_lost_whatever_it_meets(server: ModelServer, asker: Asker) -> None:
    # One that comes in the same step as the answer's headers is what asyncio's wait_for loses.
    server.otherwise = sends([], then=stalls)
    backend = asker.backend(max_concurrent=1)
    for num_steps in range(40):
        num_asked = len(server.bodies)
        asking = asyncio.create_task(events_of(backend))
        await until(lambda num_asked=num_asked: len(server.bodies) > num_asked, step_s=0)
        for _ in range(num_steps):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking], timeout=PATIENCE_S)
        assert asking.cancelled(), num_steps


async def test_a_request_waits_for_its_turn_no_longer_than_it_may(server: ModelServer, asker: Asker) -> None:
    server.acts = [stalls]
    backend = asker.backend(max_concurrent=1)
    first = asyncio.create_task(events_of(backend))
    await until(lambda: len(server.bodies) == 1)
    with pytest.raises(RequestTimeoutError, match=r"within 0\.05 s"):
        await events_of(backend, timeout_s=0.05)
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first


async def test_the_key_goes_to_the_server_and_nowhere_else(
    server: ModelServer, asker: Asker, caplog: pytest.LogCaptureFixture
) -> None:
    key = "sk-very-secret"
    caplog.set_level(logging.DEBUG)
    server.acts = [fails(401, {"error": {"message": f"Incorrect API key provided: {key}"}})]
    with pytest.raises(RequestError, match=r"401 \(Unauthorized\): .*\*\*\*.* Check the API key") as caught:
        await asker.ask(api_key=key)
    backend = asker.backend(api_key=key)
    await events_of(backend)
    assert [headers["Authorization"] for headers in server.headers] == [f"Bearer {key}"] * 2
    assert f"{server.url}/v1/chat/completions" in caplog.text
    assert key not in str(caught.value) + caplog.text + str(vars(backend)) + backend.base_url


async def test_a_server_that_repeats_the_key_or_talks_for_long_is_not_quoted(server: ModelServer, asker: Asker) -> None:
    key = "sk-'very\\secret"
    for reason in (key, "long " * 1000):
        server.acts = [sends([event(chunk({"content": "x"}, finish_reason=reason))])]
        with pytest.raises(EngineError, match="ended with the reason") as caught:
            await asker.ask(api_key=key, max_attempts=1)
        assert "very" not in str(caught.value)
        assert len(str(caught.value)) < 500
    server.models = [key, "long " * 1000]
    with pytest.raises(ConfigError, match=r"Name the model .*'\*\*\*', 'long") as refused:
        await asker.ask(api_key=key, model=None)
    assert len(str(refused.value)) < 500


async def test_a_user_in_the_address_is_in_no_name_and_no_log(
    server: ModelServer, asker: Asker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    backend = asker.backend(f"http://me:hush@{server.host}/v1")
    await events_of(backend)
    assert server.headers[0]["Authorization"].startswith("Basic ")
    assert backend.base_url == f"{server.url}/v1"
    assert f"{server.url}/v1/chat/completions" in caplog.text
    assert "hush" not in caplog.text + str(vars(backend))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (RemoteBackend, {"url": "localhost:8000"}, "must begin with http://"),
        (RemoteBackend, {"url": "ftp://host"}, "must begin with http://"),
        (RemoteBackend, {"url": "http://host/v1?x=1"}, "leave out"),
        (RemoteBackend, {"url": "http://host", "api_key": "two words"}, "API key"),
        (RemoteBackend, {"url": "http://host", "api_key": "line\nbreak"}, "API key"),
        (RemoteBackend, {"url": "http://me:x@host", "api_key": "k"}, "not both"),
        (RemoteBackend, {"url": "http://host", "max_concurrent": 0}, "max_concurrent"),
        (RemoteBackend, {"url": "http://host", "max_attempts": 0}, "max_attempts"),
        (RemoteBackend, {"url": "http://host", "timeout_s": 0}, "timeout_s"),
        (RemoteBackend, {"url": "http://host", "video": "gif"}, "video must be one of frames, video_url"),
        (RemoteTimeouts, {"connect_s": 0}, "connect_s"),
        (RemoteTimeouts, {"first_s": 0}, "first_s"),
        (RemoteTimeouts, {"silence_s": 0}, "silence_s"),
    ],
)
def test_settings_that_cannot_be_used(make: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_the_settings_of_a_reply_that_go_out() -> None:
    assert sampling_fields(None) == {}
    greedy = GenerationRequest(params=SamplingParams(temperature=0.0, top_k=20, seed=1), enable_thinking=False)
    assert reply_fields(greedy) == {"temperature": 0.0, "chat_template_kwargs": {"enable_thinking": False}}
    params = SamplingParams(
        temperature=0.7,
        top_k=20,
        top_p=0.8,
        min_p=0.1,
        presence_penalty=1.5,
        repetition_penalty=1.1,
        seed=5,
        max_tokens=64,
        stop=("END",),
        frequency_penalty=0.5,
        min_tokens=3,
        ignore_eos=True,
        stop_token_ids=(7,),
        logit_bias={9: -5},
    )
    assert sampling_fields(params) == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "min_p": 0.1,
        "seed": 5,
        "presence_penalty": 1.5,
        "repetition_penalty": 1.1,
        "repeat_penalty": 1.1,
        "max_tokens": 64,
        "stop": ["END"],
        "frequency_penalty": 0.5,
        "min_tokens": 3,
        "ignore_eos": True,
        "stop_token_ids": [7],
        "logit_bias": {"9": -5},
    }
    assert sampling_fields(SamplingParams(logprobs=0))["logprobs"] is True
    assert sampling_fields(SamplingParams(logprobs=3))["top_logprobs"] == 3
    # Neutral values of names that some servers refuse stay at home.
    assert set(sampling_fields(SamplingParams())) == {"temperature", "top_p"}
    no_thinking = GenerationRequest(params=SamplingParams(thinking_budget=0), enable_thinking=True)
    assert reply_fields(no_thinking)["chat_template_kwargs"] == {"enable_thinking": False}


async def test_a_json_schema_goes_out_as_response_format(server: ModelServer, asker: Asker) -> None:
    schema = {"type": "object", "properties": {"colour": {"type": "string"}}}
    await asker.ask(params=SamplingParams(json_schema=json.dumps(schema)))
    sent = server.bodies[0]["response_format"]
    assert (sent["type"], sent["json_schema"]["schema"]) == ("json_schema", schema)


async def test_nobody_at_the_address(asker: Asker) -> None:
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:1 can't be reached.* It was tried 3 times"):
        await asker.ask(url="http://127.0.0.1:1", max_attempts=3)
    assert asker.waits_s == [0.5, 1.0]
