"""What is learned of a server before it is asked: its program, its context, what its model can do, counts of tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from qwen35mm.backends.remote.programs import ADVISED, ASSUMED_CONTEXT, Told
from qwen35mm.contract import Backend, Image, Message, SamplingParams, Text
from qwen35mm.errors import ConfigError
from tests.backends.events import result_of
from tests.backends.remote.asking import QUESTION, Asker, events_of, until
from tests.backends.remote.server import ModelServer, closes, fails, stalls
from tests.preprocess.media_files import PHOTOGRAPHS

PROPS = {
    "default_generation_settings": {
        "n_ctx": 8192,
        "params": {"temperature": 0.6, "top_k": 40, "repeat_penalty": 1.1, "top_n_sigma": -1.0},
    },
    "modalities": {"vision": True, "audio": False, "video": False},
    "chat_template": "{% if enable_thinking %}",
    "chat_template_caps": {"supports_tools": False},
}


async def test_a_llama_server_tells_its_context_its_defaults_and_what_its_model_can(
    server: ModelServer, asker: Asker
) -> None:
    server.told = {"owned_by": "llamacpp", "meta": {"n_ctx_train": 262144}}
    server.pages["/props"] = PROPS
    backend = asker.backend(model=None)
    await backend.connect()
    info = backend.info
    assert (info.name, info.host, backend.context_length) == ("tiny", server.host, 8192)
    assert info.generation == SamplingParams(temperature=0.6, top_k=40, repetition_penalty=1.1)
    assert (info.images, info.videos, info.tools, info.thinking) == (True, False, False, True)
    assert (info.schemas, info.continues, info.exact_counts) == (True, True, True)
    assert "thinking_budget" not in info.unsupported
    server.pages["/props"] = {**PROPS, "chat_template": "plain", "modalities": {"vision": False}}
    await backend.connect()
    assert (backend.info.images, backend.info.thinking) == (False, False)


async def test_what_llama_server_tells_may_be_missing_or_nonsense(server: ModelServer, asker: Asker) -> None:
    server.told = {"owned_by": "llamacpp", "meta": {"n_ctx_train": 4096}}
    backend = asker.backend(model=None)
    for props in (None, [], {"default_generation_settings": {"n_ctx": -1, "params": {"temperature": -5}}}):
        server.pages["/props"] = props
        await backend.connect()
        assert (backend.context_length, backend.info.generation) == (4096, ADVISED)
    del server.pages["/props"]
    await backend.connect()
    assert backend.context_length == 4096


@pytest.mark.parametrize(
    ("told", "length", "videos", "schemas"),
    [
        ({"owned_by": "vllm", "max_model_len": 32768}, 32768, None, True),
        ({"owned_by": "qwen35mm", "max_model_len": 2048, "meta": {"n_ctx": 2048}}, 2048, True, True),
        ({"owned_by": "somebody"}, ASSUMED_CONTEXT, None, None),
        ({"owned_by": ["vllm"], "max_model_len": True, "meta": 3}, ASSUMED_CONTEXT, None, None),
        ({"max_model_len": 10**400}, ASSUMED_CONTEXT, None, None),
    ],
)
async def test_other_programs(
    server: ModelServer, asker: Asker, told: dict[str, Any], length: int, videos: bool | None, schemas: bool | None
) -> None:
    server.told = told
    backend = asker.backend()
    with pytest.raises(ConfigError, match="connect first"):
        _ = backend.context_length
    await backend.connect()
    assert (backend.context_length, backend.info.videos, backend.info.schemas) == (length, videos, schemas)
    assert backend.info.default_enable_thinking is False


async def test_transformers_serve_is_told_by_its_routes(server: ModelServer, asker: Asker) -> None:
    server.told = {"owned_by": "Qwen"}
    server.pages["/openapi.json"] = {"paths": {"/load_model": {}, "/v1/chat/completions": {}}}
    backend = asker.backend()
    await backend.connect()
    info = backend.info
    assert (info.schemas, info.videos, info.exact_counts) == (False, True, False)
    assert {"top_k", "min_p", "repetition_penalty", "presence_penalty", "json_schema"} <= info.unsupported
    assert (info.generation.top_k, info.generation.temperature) == (0, 0.7), "the defaults ask for nothing it hasn't"


async def test_a_server_that_hangs_up_after_an_error_is_looked_at_again(server: ModelServer, asker: Asker) -> None:
    server.model_acts = [fails(500), closes]
    server.pages["/openapi.json"] = {"paths": {"/load_model": {}, "/v1/chat/completions": {}}}
    backend = asker.backend()
    await backend.connect()
    assert backend.info.schemas is False


def test_an_entry_that_is_none() -> None:
    for entry in (None, 3, "vllm", []):
        assert Told.read(entry) == Told()


async def connected(server: ModelServer, asker: Asker, owner: str) -> Any:
    server.told = {"owned_by": owner}
    backend = asker.backend()
    await backend.connect()
    return backend


CONVERSATION = [Message("system", (Text("Be brief."),)), *QUESTION]


async def test_vllm_counts_a_conversation(server: ModelServer, asker: Asker) -> None:
    backend = await connected(server, asker, "vllm")
    server.pages["/tokenize"] = {"count": 23, "max_model_len": 100, "tokens": []}
    for _ in range(3):
        assert await asyncio.to_thread(backend.count_tokens, CONVERSATION, enable_thinking=True) == 23
    ((path, body),) = server.asked
    assert path == "/tokenize"
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is this?"},
    ]
    assert body["chat_template_kwargs"] == {"enable_thinking": True}


async def test_llama_server_counts_what_its_template_makes(server: ModelServer, asker: Asker) -> None:
    backend = await connected(server, asker, "llamacpp")
    server.pages |= {"/apply-template": {"prompt": "<|im_start|>"}, "/tokenize": {"tokens": [1, 2, 3]}}
    assert await asyncio.to_thread(backend.count_tokens, QUESTION) == 3
    assert [path for path, _ in server.asked] == ["/apply-template", "/tokenize"]
    assert server.asked[1][1]["content"] == "<|im_start|>"


async def test_our_own_server_counts_in_anthropics_form(server: ModelServer, asker: Asker) -> None:
    backend = await connected(server, asker, "qwen35mm")
    server.pages["/v1/messages/count_tokens"] = lambda body: {"input_tokens": len(body["messages"])}
    assert await asyncio.to_thread(backend.count_tokens, CONVERSATION, enable_thinking=False) == 1
    assert server.asked[0][1]["system"] == "Be brief."
    assert server.asked[0][1]["thinking"] == {"type": "disabled"}


async def test_media_count_as_they_are_planned(server: ModelServer, asker: Asker) -> None:
    backend = await connected(server, asker, "vllm")
    server.pages["/tokenize"] = {"count": 10}
    image = Image(PHOTOGRAPHS / "rocket.jpg")
    plan = backend.media.plan(image.source, "image")
    count = await asyncio.to_thread(backend.count_tokens, [Message("user", (image, Text("What?")))])
    assert count == 10 + plan.num_prompt_tokens


async def test_a_server_that_does_not_count_is_estimated_and_left_alone(server: ModelServer, asker: Asker) -> None:
    backend = await connected(server, asker, "vllm")
    text = [Message("user", (Text("word " * 400),))]
    for page in ({"count": "many"}, {"count": 10**400}, []):
        server.pages["/tokenize"] = page
        assert 300 < await asyncio.to_thread(backend.count_tokens, text) < 700
    assert len(server.asked) == 1, "it isn't asked again at once"
    other = await connected(server, asker, "somebody")
    assert not other.info.exact_counts
    assert 300 < other.count_tokens(text) < 700


async def test_it_is_idle_while_nothing_is_awaited(server: ModelServer, asker: Asker) -> None:
    backend: Backend = asker.backend()
    assert (backend.idles, backend.is_demo, backend.memory()) == (False, False, {})
    server.acts = [stalls]
    asking = asyncio.create_task(events_of(backend))  # pyright: ignore[reportArgumentType]
    await until(lambda: len(server.bodies) == 1)
    assert not await asyncio.to_thread(backend.wait_idle, 0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await asyncio.to_thread(backend.wait_idle, 10)


def test_a_page_connects_before_its_loop_runs(server: ModelServer) -> None:
    from qwen35mm.backends.remote.backend import RemoteBackend

    backend = RemoteBackend(server.url)
    asyncio.run(backend.connect())
    assert result_of(asyncio.run(events_of(backend))).text == "A red square."
    backend.close()
