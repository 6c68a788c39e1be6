"""RemoteBackend on our own server: what it brings is what the model says in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from PIL import Image as PILImage

from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.remote.backend import RemoteBackend
from qwen35mm.engine import Event, Finished, MediaPlanned, Result, TextDelta
from qwen35mm.errors import ContextTooLongError, RequestError
from qwen35mm.prompt import Image, Message, Text, ToolCall, Video
from qwen35mm.sampling import SamplingParams
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
    return result_of(await collect(backend.stream(messages, params, **how)))


async def test_what_it_is(remote: RemoteBackend, backend: LocalBackend) -> None:
    info = remote.info
    assert (info.name, remote.context_length) == (backend.info.name, backend.context_length)
    assert (info.images, info.videos, info.tools, info.schemas, info.continues) == (True,) * 5
    assert info.exact_counts


@pytest.mark.parametrize("thinking", [False, True])
async def test_its_words_are_the_models_and_so_is_the_count(
    remote: RemoteBackend, backend: LocalBackend, thinking: bool
) -> None:
    events: list[Event] = await collect(remote.stream(QUESTION, GREEDY, enable_thinking=thinking))
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
        *_, last = await collect(remote.stream(QUESTION, GREEDY, tools=[WEATHER], enable_thinking=False))
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
    (plan,) = planned(await collect(remote.stream(question, GREEDY))).plans
    again = [Message("user", (Video(clip, plan), Text("What happens?")))]
    events = await collect(remote.stream(again, GREEDY))
    assert planned(events).plans == (plan,)
    # And back to the model in this process, which makes a plan of its own.
    here = await collect(backend.stream(again, GREEDY))
    assert planned(here).plans[0].digest is not None


async def test_what_it_refuses_is_said(remote: RemoteBackend) -> None:
    with pytest.raises(ContextTooLongError, match="the context holds"):
        await ask(remote, [Message("user", (Text("word " * 100_000),))])
    with pytest.raises(RequestError, match="logprobs"):
        await ask(remote, QUESTION, replace(GREEDY, logprobs=1))
