"""The engine on the Triton kernels, interpreted: what a card would run, from the prompt to the sampled token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qwen35mm.engine import Engine, EngineSettings, Request
from qwen35mm.prompt import Image
from qwen35mm.sampling import SamplingParams
from qwen35mm_kernels import dispatch
from tests.engine.exact import MOE, SMALLEST, Chat, cache_settings, chat_model, picture, results, user, words
from tests.interpreter import accept_arrays_of_one_element
from tests.tiny import TinySpec

pytest.importorskip("triton", reason="Triton has no package for this platform")


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every operation that has a Triton kernel runs it, and the model takes the paths of a GPU."""
    accept_arrays_of_one_element()
    dispatch.choices("cuda")  # the kernels enter dispatch
    dispatch.choices.cache_clear()
    monkeypatch.setattr(dispatch, "_BACKENDS", {"triton": lambda device_type: None, "torch": lambda device_type: None})
    yield
    dispatch.choices.cache_clear()


def engine_of(spec: TinySpec, *, slots: int) -> Engine:
    loaded = chat_model(spec)
    return Engine(loaded, EngineSettings(context_length=512, slots=slots), cache_settings(loaded, num_tokens=1024))


def requests(spec: TinySpec) -> list[Request]:
    chat = Chat(chat_model(spec))
    sampled = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=3, max_tokens=4)
    return [
        chat.request([user(words("one", count=70))], params=SamplingParams(temperature=0.0, max_tokens=4)),
        chat.request([user(Image(picture(1)), "What is it?")], params=SamplingParams(temperature=0.0, max_tokens=3)),
        chat.request([user("hi")], params=sampled),
    ]


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("spec", [SMALLEST, MOE], ids=lambda spec: spec.name)
def test_replies_are_those_of_the_torch_versions(
    spec: TinySpec, slots: int, on_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(spec)
    with monkeypatch.context() as patch:
        patch.setattr("qwen35mm.engine.decoder.runs_ahead", lambda device: True)
        found = results(engine_of(spec, slots=slots), *asked)
    assert {choice.backend for choice in dispatch.choices("cpu").values()} == {"triton", "torch"}
    monkeypatch.undo()
    dispatch.choices.cache_clear()
    assert {choice.backend for choice in dispatch.choices("cpu").values()} == {"torch"}
    expected = results(engine_of(spec, slots=slots), *asked)
    for request in asked:
        assert found[request.id].token_ids == expected[request.id].token_ids
