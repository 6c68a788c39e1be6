"""Pieces of prompts: padded to few sizes, and as graphs, for which a computation that is kept stands in here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from qwen35mm.cache import CachePools
from qwen35mm.contract import Image, Message, SamplingParams
from qwen35mm.engine import Engine, EngineSettings, Request, pieces
from qwen35mm.engine.batches import PieceInputs
from qwen35mm.engine.memory import plan_engine
from qwen35mm.engine.pieces import PieceGraph
from qwen35mm.engine.prefill import Prefill
from qwen35mm.engine.reading import Reading
from qwen35mm.engine.settings import captured_rows, padded_rows
from qwen35mm.model import LoadedModel, load
from qwen35mm_kernels.cpu.native.recording import Arena
from qwen35mm_preprocess import MediaBudget
from tests.engine.exact import (
    Chat,
    assert_same,
    assistant,
    cache_settings,
    launched_one_by_one,
    picture,
    results,
    serve,
    small_blocks,
    user,
    words,
)

CPU = torch.device("cpu")
SETTINGS = EngineSettings(context_length=512, slots=2, speculate="off", chunk_tokens=96)


def test_sizes_are_few_and_little_is_wasted_where_it_costs() -> None:
    assert [padded_rows(count) for count in (1, 64, 65, 500, 513, 768, 2047, 2048, 2049)] == [
        *(64, 64, 128, 512, 768, 768, 2048, 2048, 2304)
    ]
    assert captured_rows(2048) == [64, 128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048]
    assert captured_rows(100_000) == captured_rows(2048)
    assert captured_rows(100) == [64, 128]


def test_one_tensor_has_what_the_model_reads(loaded: LoadedModel) -> None:
    with small_blocks(16):
        pools = CachePools(loaded.config, num_slots=3, num_tokens=160, dtype=torch.float32)
    pools.new_sequence()
    cache = pools.new_sequence()
    cache.prepare(20)
    cache.advance(20)
    cache.prepare(30)
    token_ids, positions = np.arange(30) + 5, np.arange(90).reshape(3, 30)
    made = PieceInputs.of(cache, token_ids, positions, 64).to(CPU)
    batch = made.batch(pools, torch.zeros(64, 8))
    assert made.token_ids.tolist() == [*token_ids, *[0] * 34]
    assert torch.equal(batch.positions[:, :30], torch.from_numpy(positions))
    assert batch.slot_mapping.tolist() == [*(cache.row(place) for place in range(20, 50)), *[-1] * 34]
    assert batch.counts is not None
    assert (batch.counts.tolist(), batch.lengths.tolist(), batch.slots.tolist()) == ([30], [50], [cache.slot])
    assert batch.block_table[:4].tolist() == list(cache.block_table)
    graphs = PieceInputs.unused(64, 10, CPU)
    unused = graphs.batch(pools, torch.zeros(64, 8))
    assert unused.counts is not None
    assert (int(unused.counts), int(unused.lengths), set(unused.slot_mapping.tolist())) == (0, 0, {-1})
    graphs.take(made)
    taken = graphs.batch(pools, torch.zeros(64, 8))
    for name in ("positions", "slot_mapping", "counts", "lengths", "slots"):
        assert torch.equal(getattr(taken, name), getattr(batch, name))
    assert taken.block_table[:4].tolist() == list(cache.block_table)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that were captured; engines made from now on pad their pieces, and think that they capture."""
    sizes: list[int] = []

    def capture(device: torch.device, compute: Callable[[], None], memory: Any) -> Callable[[], None]:
        graph: Any = compute.__self__  # type: ignore[attr-defined]
        assert isinstance(memory, Arena)
        sizes.append(len(graph._embeds))
        return compute

    monkeypatch.setattr(pieces, "pads_pieces", lambda devices: True)
    monkeypatch.setattr(pieces, "can_capture", lambda model: True)
    monkeypatch.setattr(pieces, "capture", capture)
    return sizes


def conversation() -> list[Message]:
    first = [user(Image(picture(1)), words("one", count=90)), assistant(words("two", count=20))]
    return [*first, user(words("three", count=40))]


def asked(loaded: LoadedModel, messages: list[Message], **options: Any) -> Request:
    return Chat(loaded).request(messages, params=SamplingParams(temperature=0.0, max_tokens=3), **options)


def new_engine(loaded: LoadedModel) -> Engine:
    engine = Engine(loaded, SETTINGS, cache_settings(loaded, num_tokens=2048))
    while engine.has_work:
        engine.step()
    return engine


@torch.inference_mode()
def computed(engine: Engine, request: Request) -> dict[str, torch.Tensor]:
    """A prompt's keys, values and states, and its last hidden state."""
    prefill = Prefill(engine.runtime, request)
    while not prefill.done:
        prefill.step()
    assert prefill.last_hidden is not None
    states = engine.runtime.pools.states.save(prefill.cache.slot)
    found = {**prefill.cache.export(), **states, "hidden": prefill.last_hidden}
    prefill.close()
    return found


@pytest.mark.parametrize("mtp", [False, True], ids=["decoder", "mtp"])
def test_graphs_give_what_is_launched_one_by_one(
    mtp: bool, loaded: LoadedModel, demo: LoadedModel, captured: list[int]
) -> None:
    """Warm and cold, with a picture, across pieces and segments; also for the MTP layer."""
    if mtp:
        loaded = load(demo.path, device="cpu", mtp=True)
    engine = new_engine(loaded)
    for messages in (conversation()[:1], conversation()):
        request = asked(loaded, messages)
        (found,) = serve(engine, request)
        (expected,) = serve(launched_one_by_one(new_engine(loaded)), replace(request, id="again"))
        assert_same(found, expected)
    assert found.result.cache.num_cached_tokens > 0
    # Of the other engine, too.
    assert captured == [128, 64] * 3
    pair = [computed(each, request) for each in (new_engine(loaded), launched_one_by_one(new_engine(loaded)))]
    assert len(pair[0]["k"]) == len(loaded.config.text.attention_layers)
    for name, tensor in pair[0].items():
        assert torch.equal(tensor, pair[1][name]), name


def test_sizes_are_captured_while_nobody_waits_and_once(loaded: LoadedModel, captured: list[int]) -> None:
    engine = Engine(loaded, replace(SETTINGS, chunk_tokens=512), cache_settings(loaded, num_tokens=2048))
    engine.step()
    # The largest first: the others fit into its memory.
    assert captured == [512]
    engine.add(request := asked(loaded, [user(words("few", count=5))]))
    while engine.has_requests:
        engine.step()
    assert captured == [512], "a prompt waits for none"
    while engine.has_work:
        engine.step()
    assert sorted(captured) == [64, 128, 256, 512]
    assert results(engine, replace(request, id="again"))
    assert len(captured) == 4


def test_a_size_without_room_is_launched_one_by_one(
    loaded: LoadedModel, captured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        captured.append(0)
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(pieces, "capture", fail)
    (found,) = serve(new_engine(loaded), asked(loaded, conversation()))
    assert captured == [0, 0], "each is tried once"
    (expected,) = serve(launched_one_by_one(new_engine(loaded)), asked(loaded, conversation()))
    assert_same(found, expected)


def test_what_is_read_or_has_an_adapter_of_its_own_is_launched_one_by_one(
    loaded: LoadedModel, captured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(loaded)
    ways, before = engine.runtime.pieces, list(captured)
    monkeypatch.setattr(PieceGraph, "run", None)
    assert ways.graph(64, ((1, None),)) is None
    assert ways.graph(4096, ()) is None
    prefill = Prefill(engine.runtime, asked(loaded, [user("hi")]), reading=Reading("mean"))
    while not prefill.done:
        prefill.step()
    read = prefill.read()
    prefill.close()
    assert captured == before
    assert read is not None
    assert read.states is not None
    assert read.states.isfinite().all()
    assert ways.graph(64, ()) is not None


def test_the_plan_knows_of_padding_and_graphs(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(chunk_tokens: int, pads: bool) -> int:
        monkeypatch.setattr("qwen35mm.engine.memory.pads_pieces", lambda devices: pads)
        plan = plan_engine(
            loaded.config,
            dtype=torch.bfloat16,
            device=torch.device("cuda:0"),
            settings=replace(SETTINGS, chunk_tokens=chunk_tokens),
            cache=cache_settings(loaded, num_tokens=2048),
            budget=MediaBudget(max_image_tokens=8, max_video_tokens=8),
            available_bytes=1 << 34,
        )
        return plan.work_bytes

    plain, padded = planned(513, False), planned(513, True)
    assert padded == planned(768, True) > plain
