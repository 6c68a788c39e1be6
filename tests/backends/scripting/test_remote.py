"""The same scripts on a model behind a server: ours, on the bundled model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.remote.backend import RemoteBackend
from qwen35mm.contract import Message
from qwen35mm.engine import EngineSettings
from qwen35mm.errors import BatchError, Qwen35mmError
from qwen35mm.model import LoadedModel
from qwen35mm.server.app import create_app
from tests.backends.events import PATIENCE_S
from tests.engine.exact import picture
from tests.server.conftest import serving

SHORT = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def model(demo: LoadedModel) -> Iterator[LocalBackend]:
    with LocalBackend(demo, settings=EngineSettings(slots=2), min_segment=16) as backend:
        yield backend


@pytest.fixture(scope="module")
def address(model: LocalBackend) -> Iterator[str]:
    with serving(create_app(model, num_places=2)) as address:
        yield address


async def test_a_chat_is_the_same_whatever_answers(model: LocalBackend, address: str) -> None:
    async with RemoteBackend(address, max_concurrent=2) as server:
        near, far = model.chat("You are brief.", params=SHORT), server.chat("You are brief.", params=SHORT)
        for question, images in (("What is this?", [picture(3)]), ("And its colour?", [])):
            assert far.ask(question, images=images).text == near.ask(question, images=images).text != ""
        assert far.messages[1].media[0].plan is not None
        # Blocking, awaited, streamed either way, and from another loop: one server, one connection pool.
        far.drop_answer()
        assert (await far.aask()).text == near.messages[-1].text
        far.drop_answer()
        assert "".join([text async for text in far.stream()]) == near.messages[-1].text
        far.drop_answer()
        assert "".join(far.stream()) == near.messages[-1].text
        far.drop_answer()
        assert (await asyncio.to_thread(asyncio.run, far.aask())).text == near.messages[-1].text
        results = server.generate(["Hello.", "What is a circle?"] * 2, SHORT)
        assert [result.text for result in results[:2]] == [result.text for result in results[2:]]
        assert results[0].text == model.generate("Hello.", SHORT).text


PLACE = {"type": "string", "enum": ["Bonn", "Rome"]}
SCHEMA = {"type": "object", "properties": {"place": PLACE}, "required": ["place"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": SCHEMA}}


def test_a_call_is_made_kept_and_answered(model: LocalBackend, address: str) -> None:
    with RemoteBackend(address) as server:
        for backend in (model, server):
            chat = backend.chat(tools=[WEATHER], params=SHORT | {"max_tokens": 80})
            reply = chat.ask("How is the weather in Bonn?", tool_choice="required", parallel_tool_calls=False)
            (call,) = reply.tool_calls
            assert (call.name, reply.text, chat.messages[-1].tool_calls) == ("weather", "", (call,))
            assert call.arguments["place"] in PLACE["enum"]
            assert model.wait_idle(PATIENCE_S)
            chat.answer_calls(["Rain"])
            answer = chat.ask()
            assert (answer.tool_calls, answer.text != "") == ((), True)
            # The call is in the history as the next turn writes it: only its result is new.
            assert answer.cache.num_cached_tokens > reply.num_prompt_tokens
            assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "assistant"]


def test_what_a_server_refuses_is_said(address: str) -> None:
    with RemoteBackend(address) as server:
        with pytest.raises(BatchError) as caught:
            server.generate(["Hello.", [Message("user", "word " * 40_000)]], SHORT)
        kinds = [isinstance(result, Qwen35mmError) for result in caught.value.results]
        assert kinds == [False, True]
        assert server.generate("Hello.", SHORT).text == caught.value.results[0].text
    with pytest.raises(Qwen35mmError):
        server.chat().ask("Hello.")
