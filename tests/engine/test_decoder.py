"""Steps that run ahead of the host, as on a GPU: what replies say is what they say with the host in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from qwen35mm.cache import CachePools, SequenceCache
from qwen35mm.contract import SamplingParams
from qwen35mm.engine import Engine, EngineSettings, Request, decoder, parts
from qwen35mm.engine.batches import StepInputs
from qwen35mm.engine.decoder import step_sizes
from qwen35mm.engine.sampler import Sampler
from qwen35mm.engine.step_graph import StepGraph
from qwen35mm.model import LoadedModel, Qwen35Model
from qwen35mm_kernels import backend
from qwen35mm_kernels.cpu.native.library import find_library
from tests.engine.exact import (
    Chat,
    cache_settings,
    endless_replies,
    results,
    small_blocks,
    user,
    words,
)

SCHEMA = '{"type":"array","items":{"enum":["red","blue"]},"minItems":1,"maxItems":9}'


def engine_of(loaded: LoadedModel, *, ahead: bool = True, num_tokens: int = 4096, **options: Any) -> Engine:
    # A card drafts nothing by default, so its steps may run ahead.
    settings = EngineSettings(**{"context_length": 512, "slots": 4, "speculate": "off", **options})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qwen35mm.engine.decoder.runs_ahead", lambda device: ahead)
        return Engine(loaded, settings, cache_settings(loaded, num_tokens=num_tokens))


def asked(chat: Chat, params: Sequence[SamplingParams]) -> list[Request]:
    return [chat.request([user(words(seed))], params=each) for seed, each in enumerate(params)]


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **options)


def test_greedy_replies_end_as_they_do_on_the_host(loaded: LoadedModel, chat: Chat) -> None:
    """By a control token, a stop string, the number of tokens, and the end of the context."""
    (first,) = results(engine_of(loaded, ahead=False), *asked(chat, [greedy(max_tokens=30)])).values()
    stop = loaded.tokenizer.decode(list(first.token_ids[5:8]))
    assert stop
    params = [greedy(stop=(stop,)), greedy(max_tokens=1), greedy(max_tokens=2), greedy(max_tokens=40), greedy()]
    requests = asked(chat, params)
    for context_length in (64, 96):
        engines = [engine_of(loaded, ahead=on, context_length=context_length) for on in (False, True)]
        expected, found = (results(engine, *requests) for engine in engines)
        assert len({result.finish_reason for result in found.values()}) == 2
        for request in requests:
            ours, theirs = found[request.id], expected[request.id]
            assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
            assert (ours.text, ours.num_generated_tokens) == (theirs.text, theirs.num_generated_tokens)


@pytest.mark.parametrize("ahead", [False, True])
def test_no_token_is_chosen_beyond_the_context(ahead: bool, loaded: LoadedModel, chat: Chat) -> None:
    with endless_replies(loaded):
        (request,) = asked(chat, [greedy()])
        num_prompt = len(request.prompt.token_ids)
        (result,) = results(engine_of(loaded, ahead=ahead, context_length=num_prompt + 5), request).values()
    # The last token needs no place.
    assert (result.num_generated_tokens, result.finish_reason) == (6, "length")


def test_the_end_of_the_context_needs_no_room_beyond_it(loaded: LoadedModel, chat: Chat) -> None:
    """Where the pool holds one context and no block more, while the last token is still under way."""
    with endless_replies(loaded):
        (request,) = asked(chat, [greedy()])
        (result,) = results(engine_of(loaded, context_length=128, num_tokens=128, slots=1), request).values()
    assert result.finish_reason == "length"
    assert len(request.prompt.token_ids) + result.num_generated_tokens == 129


def test_a_sampled_reply_is_the_same_alone_and_in_company_and_after_it_made_room(
    loaded: LoadedModel, chat: Chat
) -> None:
    base = SamplingParams(temperature=1.2, top_k=40, top_p=0.95, max_tokens=50, presence_penalty=0.3)
    with endless_replies(loaded), small_blocks(8):
        params = [replace(base, seed=seed, repetition_penalty=1 + seed / 10) for seed in range(2)]
        params.append(replace(base, seed=2, json_schema='{"type":"array","items":{"type":"string"},"minItems":30}'))
        requests = asked(chat, params)
        small = engine_of(loaded, num_tokens=96, context_length=96, batch_invariant=True)
        for request in requests:
            small.add(request)
        while not small._decoder.preempted:
            small.step()
        together = results(small)
        alone = results(engine_of(loaded, slots=1, batch_invariant=True), *requests)
    assert {id_: each.token_ids for id_, each in together.items()} == {id_: r.token_ids for id_, r in alone.items()}
    assert len({result.token_ids for result in together.values()}) == len(requests)


def test_replies_that_need_the_host_run_beside_others(loaded: LoadedModel, chat: Chat) -> None:
    pytest.importorskip("llguidance")
    params = [
        greedy(max_tokens=40),
        SamplingParams(temperature=0.9, seed=5, json_schema=SCHEMA, max_tokens=60),
        greedy(max_tokens=25),
    ]
    requests = asked(chat, params)
    requests.append(
        chat.request([user("think")], enable_thinking=True, params=greedy(thinking_budget=7, max_tokens=40))
    )
    found = results(engine_of(loaded), *requests)
    expected = results(engine_of(loaded, ahead=False), *requests)
    for request in requests:
        assert found[request.id].token_ids == expected[request.id].token_ids


def test_a_seed_gives_one_text_with_the_host_in_between_or_without(loaded: LoadedModel, chat: Chat) -> None:
    """A budget that is never spent and a grammar that allows all that was said have the host choose every token."""
    params = SamplingParams(temperature=1.1, top_k=30, top_p=0.9, presence_penalty=0.4, seed=9, max_tokens=40)
    texts = set()
    for ahead in (False, True):
        for each in (params, replace(params, thinking_budget=10_000)):
            (result,) = results(engine_of(loaded, ahead=ahead), *asked(chat, [each])).values()
            texts.add(result.token_ids)
    assert len(texts) == 1


def test_the_next_step_is_launched_before_a_token_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel, chat: Chat
) -> None:
    told: list[str] = []
    for name in ("run", "token_ids"):
        original = getattr(StepGraph, name)

        def noted(self: StepGraph, *args: Any, _name: str = name, _original: Any = original) -> Any:
            told.append(_name)
            return _original(self, *args)

        monkeypatch.setattr(StepGraph, name, noted)
    with endless_replies(loaded):
        results(engine_of(loaded), *asked(chat, [greedy(max_tokens=6)]))
    # Five steps after the first token, and none for a seventh.
    assert told == ["run", *["run", "token_ids"] * 4, "token_ids"]


def test_a_reply_that_is_stopped_while_the_device_is_ahead_leaves_nothing_behind(
    loaded: LoadedModel, chat: Chat
) -> None:
    engine = engine_of(loaded)
    with endless_replies(loaded):
        stopped, other = asked(chat, [greedy(max_tokens=90), greedy(max_tokens=30)])
        engine.add(stopped)
        engine.add(other)
        while len(engine._decoder.running) < 2:
            engine.step()
        engine.step()
        engine.cancel(stopped.id)
        engine.check_integrity()
        # Its slot is taken up at once, while its last step is still to be told of.
        (again,) = asked(chat, [greedy(max_tokens=30)])
        found = results(engine, again)
        expected = results(engine_of(loaded, ahead=False), other, again)
    assert {id_: result.token_ids for id_, result in found.items()} == {
        id_: result.token_ids for id_, result in expected.items()
    }


def test_a_table_goes_to_the_device_where_it_has_changed(
    loaded: LoadedModel, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies come, go and take blocks, and each row of a step has its own one's table."""
    rows: dict[int, list[int]] = {}
    copied: list[int] = []
    enter, run = StepInputs.set, StepGraph.run

    def entered(self: StepInputs, row: int, cache: SequenceCache, **options: Any) -> None:
        enter(self, row, cache, **options)
        rows[row] = [*cache.block_table]

    def checked(self: StepGraph, answer: int) -> None:
        run(self, answer)
        (on_device,) = self._inputs.values()
        table = on_device.block_table
        assert {row: table[row, : len(blocks)].tolist() for row, blocks in rows.items()} == rows
        # No reply gets as far as the last column: a row that is copied takes this away.
        copied.append(int((table[:, -1] == 0).sum()))
        table[:, -1] = 7
        rows.clear()

    monkeypatch.setattr(StepInputs, "set", entered)
    monkeypatch.setattr(StepGraph, "run", checked)
    with endless_replies(loaded):
        results(engine_of(loaded), *asked(chat, [greedy(max_tokens=count) for count in (30, 90, 140, 20)]))
    assert len(copied) >= 139
    # When a reply comes or goes, in both stagings' first steps, and every 64 tokens.
    assert 8 <= sum(count > 0 for count in copied) <= 20


class OnCards:
    """As much of a model as says where it lies."""

    def __init__(self, *devices: str) -> None:
        self.devices = [torch.device(device) for device in devices]


@pytest.mark.parametrize("why_not", [None, "Some card has compute capability 7.5, and the kernels need 8.0"])
def test_a_card_without_triton_decodes_on_the_host(why_not: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, Turing, AMD: torch's operations wait for the device, which a capture forbids."""
    monkeypatch.setattr(backend, "why_not_triton", lambda kind: why_not)
    models: list[Any] = [OnCards("cuda:0"), OnCards("cuda:0", "cuda:1"), OnCards("cuda:0", "cpu"), OnCards("cpu")]
    has_triton = why_not is None
    assert [parts.can_capture(model) for model in models] == [has_triton, has_triton, has_triton, False]
    assert [decoder.runs_ahead(torch.device(kind)) for kind in ("cuda", "cpu")] == [has_triton, False]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the steps that were captured; a decoder made from now on thinks that it captures."""
    sizes: list[int] = []

    class Counted(StepGraph):
        def __init__(self, model: Any, pools: Any, sampler: Any, size: int, *rest: Any, **options: Any) -> None:
            sizes.append(size)
            if size == 3:
                raise RuntimeError("out of memory")
            super().__init__(model, pools, sampler, size, *rest, **options)

    monkeypatch.setattr(decoder, "can_capture", lambda model: True)
    monkeypatch.setattr(decoder, "StepGraph", Counted)
    return sizes


def test_steps_are_captured_while_nobody_waits(loaded: LoadedModel, chat: Chat, captured: list[int]) -> None:
    (request,) = asked(chat, [greedy(max_tokens=3)])
    engine = engine_of(loaded)
    assert captured == [], "a start waits for none"
    for _ in range(2):
        engine.step()
    assert captured == [1, 4]
    # Whoever comes is served first, and what can't be captured ends nothing.
    engine.add(request)
    while engine.has_requests:
        engine.step()
    assert captured == [1, 4]
    while engine.has_work:
        engine.step()
    assert captured == [1, 4, 3, 2]


def test_a_step_that_is_asked_for_first_is_captured_once(loaded: LoadedModel, chat: Chat, captured: list[int]) -> None:
    (request,) = asked(chat, [greedy(max_tokens=3)])
    engine = engine_of(loaded, slots=2)
    assert results(engine, request)[request.id].num_generated_tokens == 3
    for _ in range(10):
        engine.step()
    assert captured == [1, 2]


def test_torchs_operations_wait_in_a_step(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta tensors whatever waits is an error, as in a capture; `tests/kernels/gpu` has the like for Triton's."""
    monkeypatch.setattr(backend, "find_library", lambda: None)
    backend._backend.cache_clear()
    try:
        config, device = loaded.config, torch.device("meta")
        model = Qwen35Model(config, dtype=torch.float32, device=device)
        sampler = Sampler(3, config.text.vocab_size, [], device)
        pools = CachePools(config, num_slots=3, num_tokens=256, dtype=torch.float32, device=device)
        graph = StepGraph(model, pools, sampler, 2, pools.kv.blocks_for(128))
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            graph.compute()
    finally:
        backend._backend.cache_clear()


def test_a_gpu_has_graphs_for_powers_of_two_and_for_all_slots() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [step_sizes(n, gpu, batch_invariant=False) for n in (1, 2, 6, 9)] == [
        [1],
        [1, 2],
        [1, 2, 4, 6],
        [1, 2, 4, 8, 9],
    ]
    assert step_sizes(3, cpu, batch_invariant=False) == [1, 2, 3]
    assert step_sizes(6, gpu, batch_invariant=True) == [6]


@pytest.mark.parametrize(("library", "sizes"), [(None, [1]), ("avx2", [1, 2, 3])])
def test_compiled_products_need_no_steps_of_one_row(
    library: str | None, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "find_library", lambda: library)
    assert step_sizes(3, torch.device("cpu"), batch_invariant=True) == sizes


@pytest.mark.skipif(find_library() is None, reason="there is no compiled part for this processor")
def test_a_recorded_step_chooses_what_a_computed_one_does(
    loaded: LoadedModel, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [SamplingParams(temperature=0.9, seed=seed, max_tokens=12 + 4 * seed) for seed in range(3)]
    requests, found = asked(chat, params), []
    with endless_replies(loaded):
        for record in (parts.record, lambda function, memory: function()):
            monkeypatch.setattr(parts, "record", record)
            engine = engine_of(loaded, ahead=False)
            found.append([result.token_ids for result in results(engine, *requests).values()])
            graphs = engine._decoder._graphs
            # Steps of three rows, of two and of one.
            assert len(graphs) == 3
            recorded = [part._replay != part.compute for graph in graphs.values() for part in graph._parts]
            assert recorded == [len(found) == 1] * 3
    assert found[0] == found[1]
