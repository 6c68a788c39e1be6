"""Decode steps of a model on several devices: a part for each run of layers on one device, with the whole step's bits.

The devices are the processor by two names, so each part has numbers. What captures them here records them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.card_session import config_of
from benchmarks.launch_counts import BareEngine, halves
from qwen35mm.cache import CachePools
from qwen35mm.contract import SamplingParams
from qwen35mm.engine import parts
from qwen35mm.engine.parts import Part, shared_memory
from qwen35mm.engine.sampler import Sampler
from qwen35mm.engine.step_graph import StepGraph
from qwen35mm.model import load, weights
from qwen35mm.model.devices import DeviceMap
from qwen35mm_kernels.cpu.native.library import find_library
from qwen35mm_kernels.cpu.native.recording import Arena, record
from tests.engine.exact import DENSE, Chat, chat_checkpoint, chat_model, results, user, words
from tests.engine.test_decoder import engine_of
from tests.tiny import TinySpec

A, B = torch.device("cpu"), torch.device("cpu", 0)
UNTIED = replace(DENSE, name="chat-untied", tied=False)
# With the devices of the parts. The norm has the device of its weights, which go by the first name.
SPLITS = {
    "halves": (DENSE, DeviceMap(A, (A, B), B, A, A), [A, B, A]),
    "there and back": (DENSE, DeviceMap(A, (B, A), A, A, A), [A, B, A]),
    "embeddings alone": (DENSE, DeviceMap(A, (B, B), B, A, A), [A, B, A]),
    "head on the second": (UNTIED, DeviceMap(A, (A, B), B, B, A), [A, B, A, B]),
}
compiled = pytest.mark.skipif(find_library() is None, reason="there is no compiled part for this processor")
Steps = list[tuple[list[int], list[torch.Tensor]]]


class Split:
    """A model, whole or split, with its pools and its sampler."""

    def __init__(self, spec: TinySpec, places: DeviceMap | None = None) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if places is not None:
                patch.setattr(weights, "place", lambda *arguments: places)
            self.loaded = load(chat_checkpoint(spec), dtype="float32", device="cpu")
        self.model, config = self.loaded.model, self.loaded.config
        devices = self.model.layer_devices
        self.pools = CachePools(config, num_slots=4, num_tokens=1024, dtype=torch.float32, device=devices)
        self.sampler = Sampler(4, config.text.vocab_size, [], self.model.head_device)


def decoded(engine: Split, size: int = 4, num_steps: int = 8) -> tuple[Steps, StepGraph]:
    """Tokens, logits and hidden states of three replies' steps, and in the end their caches. One row is nobody's."""
    how: dict[str, Any] = {"memory": shared_memory(engine.model)}
    graph = StepGraph(engine.model, engine.pools, engine.sampler, size, engine.pools.kv.blocks_for(256), **how)
    caches = [engine.pools.new_sequence() for _ in range(3)]
    found: Steps = []
    for step in range(num_steps):
        inputs = graph.inputs(step % 2)
        for row, cache in enumerate(caches):
            cache.prepare(1)
            inputs.set(row, cache, token_id=None if step else 7 + row, step=step, table=row)
            cache.advance(1)
        graph.run(step % 2)
        found.append((graph.token_ids(step % 2)[:3], [graph.logits[:3].clone(), graph.hidden[:3].clone()]))
    for cache in caches:
        found.append(([], [*cache.export().values(), *engine.pools.states.save(cache.slot).values()]))
    return found, graph


def assert_equal(found: Steps, expected: Steps) -> None:
    assert len({token for tokens, _ in expected for token in tokens}) > 5
    for (tokens, ours), (expected_tokens, theirs) in zip(found, expected, strict=True):
        assert tokens == expected_tokens
        assert len(ours) == len(theirs) > 0
        assert all(map(torch.equal, ours, theirs))


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.device], list[torch.device]]:
    """Makes cards of devices: their parts are captured, in the order of the list that it returns."""
    order: list[torch.device] = []

    def capture(device: torch.device, compute: Callable[[], None], memory: Arena) -> Callable[[], None]:
        for _ in range(2):
            compute()
        recording = record(compute, memory)
        assert recording is not None
        order.append(device)
        return recording.run

    def cards(*devices: torch.device) -> list[torch.device]:
        monkeypatch.setattr(parts, "runs_triton", lambda device: device in devices)
        return order

    monkeypatch.setattr(parts, "capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", Arena)
    return cards


@compiled
@pytest.mark.parametrize("name", SPLITS)
def test_parts_that_are_captured_give_the_whole_steps_bits(
    name: str, captured: Callable[..., list[torch.device]]
) -> None:
    spec, places, expected_order = SPLITS[name]
    expected, _ = decoded(Split(spec))
    order = captured(A, B)
    found, graph = decoded(Split(spec, places))
    assert order == [part.device for part in graph._parts] == expected_order
    assert_equal(found, expected)


@compiled
def test_a_processors_part_is_recorded_between_a_cards(captured: Callable[..., list[torch.device]]) -> None:
    spec, places, _ = SPLITS["halves"]
    expected, _ = decoded(Split(spec))
    order = captured(A)
    found, graph = decoded(Split(spec, places))
    assert order == [A, A]
    assert [part.captures for part in graph._parts] == [True, False, True]
    assert all(part._replay != part.compute for part in graph._parts)
    assert_equal(found, expected)


def test_parts_that_are_neither_captured_nor_recorded_take_their_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size of a step lost its first token."""
    spec, places, _ = SPLITS["halves"]
    expected, _ = decoded(Split(spec))
    monkeypatch.setattr(parts, "record", lambda compute, memory: compute())
    found, graph = decoded(Split(spec, places))
    assert all(part._replay == part.compute for part in graph._parts)
    assert_equal(found, expected)


def test_a_capture_leaves_what_the_next_part_may_be_entered_with(
    captured: Callable[..., list[torch.device]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured call computes nothing: what it made holds anything until it is replayed."""
    captured(A)

    def capture(device: torch.device, compute: Callable[[], None], memory: Arena) -> Callable[[], None]:
        compute()
        with torch.inference_mode():
            part.out[0].fill_(torch.nan)
        return compute

    monkeypatch.setattr(parts, "capture", capture)
    part = Part(A, [lambda: (torch.ones(2),)], None, may_capture=True)
    part.prepare()
    assert torch.equal(part.out[0], torch.ones(2))


def test_each_device_has_the_rows_that_have_an_adapter() -> None:
    """A capture copies nothing from another device."""
    meta = torch.device("meta")
    engine = BareEngine(config_of("0.8B", tiny=True), device=DeviceMap(A, (A, A, meta, meta), meta, A, A))
    engine.model.routes.numbers.add(1)
    graph = StepGraph(engine.model, engine.pools, engine.sampler, 2, 4, adapters=(1, 2))
    for device in (A, meta):
        assert [(number, rows.device) for number, rows in graph._groups[device] if rows is not None] == [(1, device)]


def test_replies_of_a_split_model_are_those_of_the_whole() -> None:
    whole, split = chat_model(DENSE), Split(DENSE, halves(A, 2)).loaded
    assert split.model.devices == (A, B)
    chat = Chat(whole)
    params = [SamplingParams(temperature=0.9, seed=seed, max_tokens=4 + 3 * seed) for seed in range(3)]
    requests = [chat.request([user(words(seed))], params=each) for seed, each in enumerate(params)]
    answers = [results(engine_of(loaded), *requests) for loaded in (whole, split)]
    expected, found = ({id_: each.token_ids for id_, each in answer.items()} for answer in answers)
    assert found == expected
