"""RemoteBackend on our own server: what it brings is what the model says in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from PIL import Image as PILImage

from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.remote.backend import RemoteBackend
from qwen35mm.contract import (
    Event,
    Finished,
    GenerationRequest,
    Image,
    MediaPlanned,
    Message,
    Result,
    SamplingParams,
    Text,
    TextDelta,
    ToolCall,
    Video,
)
from qwen35mm.errors import ContextTooLongError, PromptError, RequestError
from qwen35mm.server.app import create_app
from tests.backends.events import collect, result_of
from tests.preprocess.media_files import encode_video, scene
from tests.server.conftest import CALL, Scripted, serving

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
QUESTION = [Message("system", (Text("Be brief."),)), Message("user", (Text("Which shapes are there?"),))]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}}},
}


@pytest_asyncio.fixture
async def remote(address: str) -> AsyncIterator[RemoteBackend]:
    remote = RemoteBackend(address)
    await remote.connect()
    yield remote
    await remote.aclose()


def planned(events: Sequence[Event]) -> MediaPlanned:
    (found,) = [event for event in events if isinstance(event, MediaPlanned)]
    return found


async def ask(backend: Any, messages: Sequence[Message], params: SamplingParams = GREEDY, **how: Any) -> Result:
    return result_of(await collect(backend.stream(GenerationRequest(messages, params, **how))))


async def test_what_it_is(remote: RemoteBackend, backend: LocalBackend) -> None:
    info = remote.info
    assert (info.name, remote.context_length) == (backend.info.name, backend.context_length)
    assert (info.images, info.videos, info.tools, info.schemas, info.continues) == (True,) * 5
    assert info.exact_counts


@pytest.mark.parametrize("thinking", [False, True])
async def test_its_words_are_the_models_and_so_is_the_count(
    remote: RemoteBackend, backend: LocalBackend, thinking: bool
) -> None:
    events: list[Event] = await collect(remote.stream(GenerationRequest(QUESTION, GREEDY, enable_thinking=thinking)))
    result = result_of(events)
    here = await ask(backend, QUESTION, enable_thinking=thinking)
    assert (result.text, result.reasoning, result.finish_reason) == (here.text, here.reasoning, here.finish_reason)
    assert (result.num_prompt_tokens, result.num_generated_tokens) == (
        here.num_prompt_tokens,
        here.num_generated_tokens,
    )
    assert sum(isinstance(event, TextDelta) for event in events) > 1, "it streams"
    assert result.cache.decode_s > 0
    count = await asyncio.to_thread(remote.count_tokens, QUESTION, enable_thinking=thinking)
    assert count == here.num_prompt_tokens


async def test_a_schema_and_the_rest_of_a_reply(remote: RemoteBackend, backend: LocalBackend) -> None:
    pytest.importorskip("llguidance")
    held = replace(GREEDY, json_schema='{"enum": ["red", "blue"]}')
    assert (await ask(remote, QUESTION, held)).text in ('"red"', '"blue"')
    begun = [*QUESTION, Message("assistant", (Text("There is a"),))]
    rest = await ask(remote, begun, continue_reply=True, enable_thinking=False)
    assert rest.text == (await ask(backend, begun, continue_reply=True, enable_thinking=False)).text


async def test_calls_and_their_results(backend: LocalBackend) -> None:
    scripted: Any = Scripted(backend)
    scripted.text = f"Let me see.\n\n{CALL.format(3)}"
    with serving(create_app(scripted)) as address:
        remote = RemoteBackend(address)
        *_, last = await collect(
            remote.stream(GenerationRequest(QUESTION, GREEDY, tools=[WEATHER], enable_thinking=False))
        )
        assert isinstance(last, Finished)
        (call,) = last.result.tool_calls
        assert (call.name, call.arguments, last.result.text) == ("weather", {"days": 3}, "Let me see.")
        scripted.text = "Rain."
        answered = [*QUESTION, Message("assistant", (), tool_calls=(call,)), Message("tool", (Text("rain"),))]
        assert (await ask(remote, answered, tools=[WEATHER])).text == "Rain."
        await remote.aclose()
    heard = scripted.asked[-1]["messages"]
    assert heard[-2].tool_calls == (ToolCall("weather", {"days": 3}, call.id),)
    assert heard[-1].text == "rain"


async def test_media_are_seen_as_here(remote: RemoteBackend, backend: LocalBackend, address: str) -> None:
    picture = Message("user", (Image(PILImage.fromarray(scene(3, (64, 96)))), Text("Which shape?")))
    assert (await ask(remote, [picture])).text == (await ask(backend, [picture])).text
    clip = encode_video([scene(index, (64, 96)) for index in range(8)], fps=4)
    question = [Message("user", (Video(clip), Text("What happens?")))]
    whole = RemoteBackend(address, video="video_url")
    assert (await ask(whole, question)).text == (await ask(backend, question)).text
    await whole.aclose()
    (plan,) = planned(await collect(remote.stream(GenerationRequest(question, GREEDY)))).plans
    again = [Message("user", (Video(clip, plan), Text("What happens?")))]
    events = await collect(remote.stream(GenerationRequest(again, GREEDY)))
    assert planned(events).plans == (plan,)
    # And back to the model in this process, which makes a plan of its own.
    here = await collect(backend.stream(GenerationRequest(again, GREEDY)))
    (plan,) = planned(here).plans
    assert plan is not None
    assert plan.digest is not None


async def test_what_it_refuses_is_said(remote: RemoteBackend) -> None:
    with pytest.raises(ContextTooLongError, match="the context holds"):
        await ask(remote, [Message("user", (Text("word " * 100_000),))])


async def test_how_likely_tokens_are(remote: RemoteBackend, backend: LocalBackend) -> None:
    params = replace(GREEDY, logprobs=2)
    events = await collect(remote.stream(GenerationRequest(QUESTION, params)))
    found, expected = result_of(events).logprobs, (await ask(backend, QUESTION, params)).logprobs
    assert found
    assert expected
    # The token that ends a reply has no text, and isn't told.
    assert [told.text for told in found] == [told.text for told in expected[: len(found)]]
    assert len(found) >= len(expected) - 1
    for here, there in zip(expected, found, strict=False):
        assert there.logprob == pytest.approx(here.logprob, abs=1e-4)
        assert [each.bytes for each in there.top] == [each.bytes for each in here.top]
    streamed = [told for event in events if isinstance(event, TextDelta) for told in event.logprobs]
    assert streamed == list(found)[: len(streamed)]
    assert len(streamed) > 1


def test_texts_are_gone_on_with_and_scored_as_here(address: str, backend: LocalBackend) -> None:
    begun, end = "A red circle is to the", " left of a blue square."
    ids = backend.loaded.tokenizer.encode_plain(begun)
    how: Any = {"temperature": 0, "max_tokens": 8}
    with RemoteBackend(address) as remote:
        for prompt in (begun, ids):
            assert remote.complete(prompt, **how).text == backend.complete(prompt, **how).text
        several = remote.complete([begun, "A blue"], logprobs=1, **how)
        here = backend.complete([begun, "A blue"], logprobs=1, **how)
        assert [each.text for each in several] == [each.text for each in here]
        assert several[0].logprobs[0].logprob == pytest.approx(here[0].logprobs[0].logprob, abs=1e-4)
        end_ids = backend.loaded.tokenizer.encode_plain(end)
        for text, given in ((begun, None), (end, begun), (end_ids, ids), ("cle is red.", "A red cir")):
            found, expected = remote.score(text, given, num_top=2), backend.score(text, given, num_top=2)
            assert [told.text for told in found.tokens] == [told.text for told in expected.tokens]
            assert found.logprob == pytest.approx(expected.logprob, abs=1e-3)
            assert found.num_prompt_tokens == expected.num_prompt_tokens
            assert found.tokens[0].top[0].text == expected.tokens[0].top[0].text
        vectors = remote.embed([begun, end])
        expected = backend.embed([begun, end])
        assert vectors.shape == expected.shape
        lengths = (expected**2).sum(axis=1, keepdims=True) ** 0.5
        # Its vectors have length 1.
        assert vectors == pytest.approx(expected / lengths, abs=1e-5)


_NOT_HERE: list[tuple[Callable[[Any], object], str]] = [
    (lambda model: model.complete("<|im_start|>user"), "control_tokens=True"),
    (lambda model: model.complete("A", schema='{"type": "object"}'), "use generate"),
    (lambda model: model.score("A", "<|im_end|>"), "control_tokens=True"),
    (lambda model: model.score("A", [1, 2]), "token ids after token ids"),
    (lambda model: model.score("A", QUESTION), "by a model in this process"),
    (lambda model: model.score("A", "B", tools=[WEATHER]), "is for conversations"),
    (lambda model: model.score("A"), "nothing to score"),
    (lambda model: model.embed(QUESTION), "by a model in this process"),
    (lambda model: model.embed("A", pooling="mean"), "leave pooling out"),
    (lambda model: model.embed("word " * 100_000), "tokens"),
]


def test_what_of_texts_a_server_cannot_do_is_said(address: str) -> None:
    with RemoteBackend(address) as remote:
        for ask, message in _NOT_HERE:
            with pytest.raises((PromptError, RequestError), match=message):
                ask(remote)
