"""Adapters as models of the server: listed, chosen by name, in every protocol."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.remote.backend import RemoteBackend
from qwen35mm.contract import GenerationRequest, Message, SamplingParams, Text
from qwen35mm.server.app import create_app
from tests.backends.events import collect, result_of
from tests.server.conftest import HTTP, serving
from tests.small_adapters import write_adapter

QUESTION = "What is a circle?"
# Widely enough that the answer differs.
MODULES = {f"layers.{index}.mlp.down_proj": (192, 512) for index in range(8)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, LocalBackend]]:
    folder = tmp_path_factory.mktemp("adapters")
    lora = {
        name: write_adapter(folder / name, MODULES, seed=seed, lora_alpha=24)
        for seed, name in enumerate(("poet", "x/y"))
    }
    backend = LocalBackend.load(demo_model_path(), device="cpu", lora=lora)
    with backend, serving(create_app(backend, names=["alias"])) as address:
        yield address, backend


def expected(backend: LocalBackend, adapter: str | None) -> str:
    return backend.generate(QUESTION, temperature=0, max_tokens=8, adapter=adapter).text


def posted(address: str, path: str, model: str | None, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 8, **fields}
    answer = HTTP.post(f"{address}/v1/{path}", json=body if model is None else body | {"model": model})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_they_are_listed_as_models(server: tuple[str, LocalBackend]) -> None:
    address, _ = server
    found = HTTP.get(f"{address}/v1/models").json()["data"]
    assert [(each["id"], each.get("parent")) for each in found] == [
        ("demo", None), ("alias", None), ("poet", "demo"), ("x/y", "demo")
    ]  # fmt: skip
    assert HTTP.get(f"{address}/v1/models/x/y").json()["id"] == "x/y"
    own = HTTP.get(f"{address}/v1/models", headers={"anthropic-version": "2023-06-01"}).json()["data"]
    assert [each["id"] for each in own] == ["demo", "alias", "poet", "x/y"]


def test_a_request_picks_one_by_its_name(server: tuple[str, LocalBackend]) -> None:
    address, backend = server
    texts = {name: expected(backend, name) for name in (None, "poet", "x/y")}
    assert len(set(texts.values())) == 3
    prints = set()
    for model, adapter in {"demo": None, "alias": None, "poet": "poet", "x/y": "x/y"}.items():
        chat = posted(address, "chat/completions", model)
        assert chat["choices"][0]["message"]["content"] == texts[adapter]
        assert chat["model"] == ("demo" if adapter is None else adapter)
        prints.add(chat["system_fingerprint"])
        assert posted(address, "messages", model)["content"][0]["text"] == texts[adapter]
        response = HTTP.post(
            f"{address}/v1/responses",
            json={"model": model, "input": QUESTION, "temperature": 0, "max_output_tokens": 16},
        ).json()
        assert response["output"][0]["content"][0]["text"].startswith(texts[adapter].rstrip())
    assert len(prints) == 3
    ids = [each["embedding"][0] for model in ("demo", "poet") for each in embedded(address, model)]
    assert ids[0] != ids[1]
    for model, adapter in {"demo": None, "poet": "poet", "x/y": "x/y"}.items():
        answer = HTTP.post(
            f"{address}/v1/completions", json={"model": model, "prompt": "A red", "temperature": 0, "max_tokens": 6}
        )
        own = backend.complete("A red", temperature=0, max_tokens=6, adapter=adapter)
        assert answer.json()["choices"][0]["text"] == own.text


def embedded(address: str, model: str) -> Any:
    return HTTP.post(f"{address}/v1/embeddings", json={"model": model, "input": QUESTION}).json()["data"]


def test_an_unknown_name_is_not_found(server: tuple[str, LocalBackend]) -> None:
    address, _ = server
    body = {"model": "other", "messages": [{"role": "user", "content": QUESTION}]}
    answer = HTTP.post(f"{address}/v1/chat/completions", json=body)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "There is no model 'other' here; 'demo', 'poet', 'x/y' are."


async def test_a_client_of_ours_names_one_as_its_model(server: tuple[str, LocalBackend]) -> None:
    address, backend = server
    params = SamplingParams(temperature=0, max_tokens=8)
    asked = GenerationRequest([Message("user", (Text(QUESTION),))], params)
    remote = RemoteBackend(f"{address}/v1", model="poet")
    await remote.connect()
    assert result_of(await collect(remote.stream(asked))).text == expected(backend, "poet")
    assert result_of(await collect(remote.stream(replace(asked, adapter="x/y")))).text == expected(backend, "x/y")
    await remote.aclose()
