"""The engine on an NVIDIA card: the same answers as a CPU's, exact caches, graphs, and errors that it survives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from qwen35mm.assets import demo_model_path
from qwen35mm.contract import Image, Message, SamplingParams, Video
from qwen35mm.engine import Engine, EngineSettings
from qwen35mm.engine.tower import RUNS_BEFORE, Tower
from qwen35mm.engine.vision import VisionUnit, encode, pixel_values
from qwen35mm.errors import EngineError
from qwen35mm.model import LoadedModel, load
from qwen35mm_preprocess import PreparedMedia
from tests.engine.exact import (
    Chat,
    assert_same,
    assistant,
    cache_settings,
    clip,
    launched_one_by_one,
    picture,
    results,
    serve,
    user,
    words,
)

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def on_card(request: pytest.FixtureRequest) -> LoadedModel:
    return load(demo_model_path(), dtype=request.param, device="cuda")


@pytest.fixture(scope="module")
def exact() -> Iterator[LoadedModel]:
    """In float32, with products that are float32's own."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield load(demo_model_path(), dtype="float32", device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = before


def engine_of(
    loaded: LoadedModel, *, ahead: bool = True, num_tokens: int = 8192, kv_dtype: str = "auto", **options: Any
) -> Engine:
    # Few sizes of pieces to capture.
    settings = EngineSettings(**{"context_length": 2048, "slots": 4, "chunk_tokens": 256, **options})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qwen35mm.engine.decoder.runs_ahead", lambda device: ahead)
        return Engine(loaded, settings, cache_settings(loaded, num_tokens=num_tokens, kv_dtype=kv_dtype))


def conversation() -> list[Message]:
    return [
        user(Image(picture(1)), words("what is this", count=40)),
        assistant("A red circle."),
        user(Video(clip()), words("and this", count=60)),
        assistant("It moves."),
        user(words("at last", count=30)),
    ]


def test_replies_are_those_of_a_cpu(exact: LoadedModel, demo: LoadedModel) -> None:
    questions = [[user("hello")], [user(Image(picture(3)), "Describe it.")], conversation()]
    for messages in questions:
        found = [
            next(iter(results(engine_of(loaded), Chat(loaded).request(messages, params=GREEDY)).values()))
            for loaded in (exact, demo)
        ]
        assert found[0].token_ids == found[1].token_ids


@pytest.mark.parametrize("kv_dtype", ["auto", "k=int8,v=int4", "k=fp8,v=fp8_e5m2", "f16"])
def test_warm_logits_are_those_of_a_cold_engine(on_card: LoadedModel, kv_dtype: str) -> None:
    chat = Chat(on_card)
    messages = conversation()
    warm = engine_of(on_card, ahead=False, kv_dtype=kv_dtype)
    for stop in (1, 3, 5):
        request = chat.request(messages[:stop], params=GREEDY)
        (answer,) = serve(warm, request)
        (expected,) = serve(engine_of(on_card, ahead=False, kv_dtype=kv_dtype), request)
        assert_same(answer, expected)
    assert answer.result.cache.num_cached_tokens > 0


@pytest.mark.parametrize("speculate", ["off", "mtp"])
def test_a_piece_has_the_same_bits_as_a_graph_and_launched_one_by_one(on_card: LoadedModel, speculate: str) -> None:
    if speculate == "mtp":
        on_card = load(demo_model_path(), dtype=str(on_card.model.dtype).split(".")[1], device="cuda", mtp=True)
    chat, engine = Chat(on_card), engine_of(on_card, ahead=False, speculate=speculate)
    for stop in (1, 3, 5):
        request = chat.request(conversation()[:stop], params=GREEDY)
        (answer,) = serve(engine, request)
        (expected,) = serve(launched_one_by_one(engine_of(on_card, ahead=False, speculate=speculate)), request)
        assert_same(answer, expected)
    assert any(engine.runtime.pieces._graphs.values()), "some pieces were graphs"


def test_a_state_that_went_through_host_memory_comes_back_bit_for_bit(on_card: LoadedModel) -> None:
    engine = engine_of(on_card)
    (request,) = [Chat(on_card).request([user(words("state", count=80))], params=GREEDY)]
    engine.add(request)
    while not engine._decoder.running:
        engine.step()
    cache, pools = engine._decoder.running[0].cache, engine.runtime.pools
    saved = pools.states.save(cache.slot)
    other = pools.states.take()
    pools.states.load(other, saved)
    again = pools.states.save(other)
    assert all(torch.equal(saved[name], again[name]) for name in saved)
    pools.states.release(other)


def test_the_host_never_waits_between_pixels_and_features(on_card: LoadedModel) -> None:
    (medium,) = Chat(on_card).request([user(Image(picture(1)), "What is it?")], params=GREEDY).media
    assert isinstance(medium, PreparedMedia)
    tower, grid = on_card.model.tower, medium.plan.grid_thw
    expected = tower(torch.from_numpy(medium.pixel_values), grid)
    device = on_card.model.device
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        features = tower(pixel_values(medium.patches, device), grid)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert torch.equal(features, expected)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_graphs_say_what_steps_with_the_host_in_between_say(exact: LoadedModel, batch_invariant: bool) -> None:
    chat = Chat(exact)
    requests = [chat.request([user(words(seed, count=20 + 9 * seed))], params=GREEDY) for seed in range(7)]
    found = results(engine_of(exact, batch_invariant=batch_invariant), *requests)
    expected = results(engine_of(exact, ahead=False), *requests)
    assert {id_: result.token_ids for id_, result in found.items()} == {
        id_: result.token_ids for id_, result in expected.items()
    }


def test_padded_steps_free_a_reply_of_its_company(on_card: LoadedModel) -> None:
    chat = Chat(on_card)
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.95, max_tokens=60)
    requests = [chat.request([user(words(seed))], params=replace(params, seed=seed)) for seed in range(6)]
    together = results(engine_of(on_card, batch_invariant=True), *requests)
    for request in requests:
        (alone,) = results(engine_of(on_card, batch_invariant=True), request).values()
        assert alone.token_ids == together[request.id].token_ids


def test_the_engine_goes_on_after_memory_ran_out(on_card: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(on_card)
    chat = Chat(on_card)
    request = chat.request([user(words("long", count=50))], params=GREEDY)
    by_layers = type(on_card.model).by_layers

    def greedy_for_memory(*args: Any) -> Any:
        torch.empty(1 << 45, dtype=torch.int8, device="cuda")
        return by_layers(*args)

    with monkeypatch.context() as patch:
        patch.setattr(type(on_card.model), "by_layers", greedy_for_memory)
        engine.add(request)
        outputs = [output for _ in range(20) for output in engine.step()]
    (error,) = [output.event for output in outputs if isinstance(output.event, EngineError)]
    assert "GiB were asked for" in str(error)
    again = chat.request([user(words("long", count=50))], params=GREEDY)
    assert results(engine, again)[again.id].num_generated_tokens > 0


@torch.inference_mode()
def test_a_graph_of_the_tower_gives_the_bits_of_its_launches(on_card: LoadedModel) -> None:
    """Pictures of two grids in turn, and units of a video; steps of replies go in between."""
    tower, chat, seen = Tower(on_card.model), Chat(on_card), []
    engine = engine_of(on_card)
    for seed in range(RUNS_BEFORE + 3):
        for content in (Image(picture(seed)), Image(picture(seed, (160, 96))), Video(clip())):
            (medium,) = chat.media([user(content)])
            unit = VisionUnit(0, 0, medium.plan.grid_thw.t, medium.plan.grid_thw, b"")
            *_, (_, found) = tower.encode(unit, medium)
            *_, (_, expected) = encode(on_card.model, unit, medium)
            assert found is not None
            assert expected is not None
            seen.append((found, expected, found.clone()))
        results(engine, chat.request([user(words("between", seed))], params=GREEDY))
    assert len(tower._graphs) == 3
    for found, expected, before in seen:
        assert torch.equal(found, expected)
        assert torch.equal(found, before)
