"""The engine on the Triton kernels, interpreted: what a card would run, from the prompt to the sampled token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qwen35mm.engine import Engine, EngineSettings, Request, sampler
from qwen35mm.model import Qwen35Model
from qwen35mm.prompt import Image
from qwen35mm.sampling import SamplingParams
from tests.engine.exact import DENSE, MOE, Chat, cache_settings, chat_model, picture, results, user, words
from tests.interpreter import prepare_interpreter
from tests.tiny import TinySpec

pytest.importorskip("triton", reason="Triton has no package for this platform")
pytest.importorskip("llguidance")


def run_on_triton(model: Qwen35Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation that has a Triton kernel runs it, and the engine decodes as on a GPU."""
    from qwen35mm_kernels import gpu

    prepare_interpreter()
    for module in (model.rope, *model.modules()):
        if hasattr(module, "ops"):
            monkeypatch.setattr(module, "ops", gpu)
    monkeypatch.setattr(sampler, "select_backend", lambda device: gpu)
    monkeypatch.setattr("qwen35mm.engine.decoder.runs_ahead", lambda device: True)


def engine_of(spec: TinySpec, kv_dtype: str, *, slots: int) -> Engine:
    loaded = chat_model(spec)
    cache = cache_settings(loaded, num_tokens=768, kv_dtype=kv_dtype)
    return Engine(loaded, EngineSettings(context_length=256, slots=slots), cache)


def requests(spec: TinySpec) -> list[Request]:
    chat = Chat(chat_model(spec))
    sampled = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, frequency_penalty=1.0, seed=3, max_tokens=4)
    return [
        chat.request([user(words("one", count=16))], params=SamplingParams(temperature=0.0, max_tokens=2)),
        chat.request([user(Image(picture(1)), "What is it?")], params=SamplingParams(temperature=0.0, max_tokens=2)),
        chat.request([user("hi")], params=sampled),
        chat.request([user("hi")], params=replace(sampled, json_schema='{"type": "array"}')),
    ]


@pytest.mark.parametrize(
    ("spec", "kv_dtype", "slots"),
    [
        (MOE, "auto", 3),
        pytest.param(DENSE, "auto", 3, marks=pytest.mark.slow),
        pytest.param(DENSE, "auto", 1, marks=pytest.mark.slow),
        pytest.param(MOE, "auto", 1, marks=pytest.mark.slow),
        pytest.param(DENSE, "k=int8,v=int4", 3, marks=pytest.mark.slow),
        pytest.param(DENSE, "k=fp8,v=fp8_e5m2", 1, marks=pytest.mark.slow),
    ],
    ids=lambda value: value.name if isinstance(value, TinySpec) else str(value),
)
def test_a_seed_gives_one_text_on_both_paths_alone_and_in_company_with_a_grammar_or_without(
    spec: TinySpec, kv_dtype: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(spec)
    expected = results(engine_of(spec, kv_dtype, slots=1), *asked)
    in_company = results(engine_of(spec, kv_dtype, slots=4), *asked)
    run_on_triton(chat_model(spec).model, monkeypatch)
    on_triton = results(engine_of(spec, kv_dtype, slots=slots), *asked)
    for request in asked:
        assert in_company[request.id].token_ids == expected[request.id].token_ids
        assert on_triton[request.id].token_ids == expected[request.id].token_ids
    assert expected[asked[2].id].token_ids != expected[asked[3].id].token_ids
