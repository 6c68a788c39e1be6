"""The engine on the Triton kernels, interpreted: what a card would run, from the prompt to the sampled token."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from qwen35mm.cache import CachePools
from qwen35mm.cache.gates import GatedScores, KVGates
from qwen35mm.checkpoints.weights_digest import weights_digest
from qwen35mm.contract import Image, SamplingParams
from qwen35mm.engine import Engine, EngineSettings, Request, sampler
from qwen35mm.engine.batches import PieceInputs
from qwen35mm.engine.prefill import Prefill
from qwen35mm.engine.settings import padded_rows
from qwen35mm.model import LoadedModel, Qwen35Model, layers, load, mlp, weight_formats
from qwen35mm.model.weight_formats import CardWeight, Weight
from tests.engine import exact
from tests.engine.exact import (
    DENSE,
    Chat,
    assert_same,
    assistant,
    cache_settings,
    chat_checkpoint,
    chat_model,
    gates_of,
    picture,
    results,
    serve,
    user,
    words,
)
from tests.interpreter import prepare_interpreter
from tests.tiny import TinySpec

pytest.importorskip("triton", reason="Triton has no package for this platform")
pytest.importorskip("llguidance")


# Its shared expert is as wide as the others.
MOE = replace(exact.MOE, name="chat-moe-joined", shared_width=32)


def run_on_triton(model: Qwen35Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation that has a Triton kernel runs it, and the engine decodes as on a GPU."""
    from qwen35mm_kernels import gpu
    from qwen35mm_kernels.gpu.launch import Config

    prepare_interpreter()
    for module in (model.rope, *model.modules()):
        if hasattr(module, "ops"):
            monkeypatch.setattr(module, "ops", gpu)
    monkeypatch.setattr(sampler, "select_backend", lambda device: gpu)
    monkeypatch.setattr("qwen35mm.engine.decoder.runs_ahead", lambda device: True)
    monkeypatch.setattr("qwen35mm.engine.pieces.pads_pieces", lambda devices: True)
    # More columns to a program than a card takes: the same sums, and programs are what the interpreter waits for.
    wide = Config({"BLOCK_N": 1024, "BLOCK_K": 64})
    monkeypatch.setattr("qwen35mm_kernels.gpu.normed._DEFAULTS", {1: wide, 4: wide})
    # So that these short prompts, too, are attended to in parts.
    monkeypatch.setattr("qwen35mm_kernels.gpu.attention_prefill._MIN_PART", 16)


def card_model(spec: TinySpec, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """With plain weights, norms in products of few rows, and a shared expert that is one of the others."""
    with monkeypatch.context() as as_on_a_card:
        as_on_a_card.setattr(weight_formats, "find_library", lambda: None)
        for module in (mlp, layers):
            as_on_a_card.setattr(module, "why_not_triton", lambda device_type: None)
        return load(chat_checkpoint(spec), dtype="float32", device="cpu")


def engine_of(loaded: LoadedModel, kv_dtype: str, *, slots: int, **options: Any) -> Engine:
    cache = cache_settings(loaded, num_tokens=768, kv_dtype=kv_dtype, **options)
    return Engine(loaded, EngineSettings(context_length=256, slots=slots), cache)


def requests(spec: TinySpec) -> list[Request]:
    chat = Chat(chat_model(spec))
    sampled = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, frequency_penalty=1.0, seed=3, max_tokens=3)
    return [
        chat.request([user(Image(picture(1)), "What is it?")], params=SamplingParams(temperature=0.0, max_tokens=2)),
        chat.request([user("hi")], params=sampled),
        chat.request([user("hi")], params=replace(sampled, json_schema='{"type": "array"}')),
    ]


@pytest.mark.parametrize(
    ("spec", "kv_dtype", "slots"),
    [
        (DENSE, "auto", 3),
        pytest.param(MOE, "auto", 3, marks=pytest.mark.emulated),
        pytest.param(DENSE, "auto", 1, marks=pytest.mark.emulated),
        pytest.param(MOE, "auto", 1, marks=pytest.mark.emulated),
        pytest.param(DENSE, "k=int8,v=int4", 3, marks=pytest.mark.emulated),
        pytest.param(DENSE, "k=fp8,v=fp8_e5m2", 1, marks=pytest.mark.emulated),
    ],
    ids=lambda value: value.name if isinstance(value, TinySpec) else str(value),
)
def test_a_seed_gives_one_text_on_both_paths_alone_and_in_company_with_a_grammar_or_without(
    spec: TinySpec, kv_dtype: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(spec)
    expected = results(engine_of(chat_model(spec), kv_dtype, slots=1), *asked)
    in_company = results(engine_of(chat_model(spec), kv_dtype, slots=4), *asked)
    loaded = card_model(spec, monkeypatch)
    run_on_triton(loaded.model, monkeypatch)
    on_triton = results(engine_of(loaded, kv_dtype, slots=slots), *asked)
    for request in asked:
        assert in_company[request.id].token_ids == expected[request.id].token_ids
        assert on_triton[request.id].token_ids == expected[request.id].token_ids
    assert expected[asked[1].id].token_ids != expected[asked[2].id].token_ids


@pytest.mark.emulated
def test_a_warm_reply_has_a_cold_ones_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pieces are other ones, and padded alike."""
    loaded = card_model(DENSE, monkeypatch)
    run_on_triton(loaded.model, monkeypatch)
    monkeypatch.setattr("qwen35mm.engine.decoder.runs_ahead", lambda device: False)
    chat, params = Chat(loaded), SamplingParams(temperature=0.0, max_tokens=1)
    first = [user(words("one", count=40)), assistant("nine")]
    warm = engine_of(loaded, "auto", slots=1)
    serve(warm, chat.request(first[:1], params=params))
    request = chat.request([*first, user("ten")], params=params)
    (found,) = serve(warm, request)
    (expected,) = serve(engine_of(loaded, "auto", slots=1), replace(request, id="cold"))
    assert found.result.cache.num_cached_tokens > 0
    assert_same(found, expected)


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("spec", "count"),
    [(DENSE, 1), (DENSE, 63), (DENSE, 64), (DENSE, 65), (MOE, 40)],
    ids=lambda value: value.name if isinstance(value, TinySpec) else str(value),
)
def test_padding_decides_nothing(spec: TinySpec, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded, a piece gives what it gives without padding; and whatever padding holds, it gives the same bits."""
    loaded = card_model(spec, monkeypatch)
    run_on_triton(loaded.model, monkeypatch)
    config, model = loaded.config, loaded.model
    found: list[list[torch.Tensor]] = []
    num_rows = padded_rows(count)
    for rows, padding in ((count, 0.0), (num_rows, 0.0), (num_rows, float("nan"))):
        pools = CachePools(config, num_slots=2, num_tokens=256, dtype=torch.float32)
        cache = pools.new_sequence()
        cache.prepare(count)
        token_ids = np.arange(count) * 7 % 100
        inputs = PieceInputs.of(cache, token_ids, np.arange(count)[None].repeat(3, 0), rows)
        embeds = model.embed_tokens(inputs.token_ids)
        embeds[count:] = padding
        hidden = model(inputs.batch(pools, embeds))[:count]
        cache.advance(count)
        found.append([hidden, *cache.export().values(), *pools.states.save(cache.slot).values()])
    for plain, padded, others in zip(*found, strict=True):
        assert torch.allclose(plain, padded, atol=1e-4, rtol=1e-4)
        assert torch.equal(padded, others)
        assert padded.isfinite().all()


def test_gates_see_what_they_see_on_the_processors_path(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, asked = chat_model(DENSE), requests(DENSE)[1]
    gates = KVGates.read(gates_of(plain), plain.config.text, weights_digest(plain.path, None))
    found = []
    for loaded in (plain, plain, card_model(DENSE, monkeypatch)):
        if loaded is not plain:
            run_on_triton(loaded.model, monkeypatch)
        scores = GatedScores(gates)
        with closing(Prefill(engine_of(loaded, "auto", slots=1).runtime, asked, watch=scores)) as prefill:
            while not prefill.done:
                prefill.step()
        found.append(scores.take())
    for layer, (own, again, on_triton) in ((layer, [each[layer] for each in found]) for layer in gates.layers):
        assert own.shape == (len(asked.prompt.token_ids), plain.config.text.num_key_value_heads), layer
        assert torch.equal(own, again)
        assert torch.allclose(own, on_triton, atol=1e-4)
        assert own.std() > 1e-3


@pytest.mark.parametrize(
    ("weights", "num_requests"),
    [("int4", 1), *(pytest.param(each, 2, marks=pytest.mark.emulated) for each in ("int4", "int8"))],
)
def test_integer_weights_say_what_a_model_of_the_numbers_they_stand_for_says(
    weights: str, num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qwen35mm_kernels.gpu import integers
    from qwen35mm_kernels.gpu.launch import Config

    # More columns to a program than a card takes: the same sums, and programs are what the interpreter waits for.
    def widened(config: Config) -> Config:
        return replace(config, blocks={**config.blocks, "BLOCK_N": 1024})

    for key, config in integers._VECTOR.items():
        monkeypatch.setitem(integers._VECTOR, key, widened(config))
    for key, (narrow, wide) in integers._TILES.items():
        monkeypatch.setitem(integers._TILES, key, (widened(narrow), widened(wide)))
    asked = requests(DENSE)[1::-1][:num_requests]
    twin = load(chat_checkpoint(DENSE), dtype="float32", device="cpu")
    with monkeypatch.context() as as_on_a_card:
        as_on_a_card.setattr(weight_formats, "find_library", lambda: None)
        as_on_a_card.setattr(weight_formats, "QuantisedWeight", CardWeight)
        loaded = load(chat_checkpoint(DENSE), dtype="float32", device="cpu", weights=weights)
    own = {name: weight for name, weight in twin.model.named_modules() if isinstance(weight, Weight)}
    for name, weight in loaded.model.named_modules():
        if isinstance(weight, Weight) and name.endswith(".weight"):
            own[name].fill(0, weight.rows(torch.arange(weight.out_features)).contiguous())
    expected = results(engine_of(twin, "auto", slots=1), *asked)
    plain = results(engine_of(chat_model(DENSE), "auto", slots=1), *asked)
    run_on_triton(loaded.model, monkeypatch)
    found = results(engine_of(loaded, "auto", slots=3), *asked)
    assert [found[each.id].token_ids for each in asked] == [expected[each.id].token_ids for each in asked]
    # Rounding to four bits shows: this is no model of the numbers before it.
    assert weights == "int8" or any(found[each.id].token_ids != plain[each.id].token_ids for each in asked)
