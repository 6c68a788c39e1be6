"""Many requests at once: slots, fairness, deadlines, failures, and room for everybody."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from qwen35mm.cache.kv_pool import KVBlockPool
from qwen35mm.contract import Finished, Image, Part, Progress, SamplingParams, Text, TextDelta
from qwen35mm.engine import DeferredMedia, Engine, EngineSettings, Request, StepOutput
from qwen35mm.engine.step_graph import StepGraph
from qwen35mm.errors import EngineError, RequestTimeoutError
from qwen35mm.model import Batch, LoadedModel
from qwen35mm.model.decoder import Qwen35Model
from qwen35mm_preprocess import PreparedMedia
from tests.engine.conftest import MakeRequest, noise
from tests.engine.exact import Later, cache_settings, endless_replies, results_of, run, small_blocks

LONG = SamplingParams(temperature=0.0, max_tokens=20)
QUESTIONS: tuple[tuple[Part, ...], ...] = (
    (Text("hello"),),
    (Image(noise(1)), Text("What is this?")),
    (Text("word " * 60),),
    (Image(noise(2)), Text("Which shape, and where?")),
    (Text("who are you"),),
    (Image(noise(1)), Text("How many are there?")),
)


BOTH = pytest.mark.parametrize("_runs_ahead", [False, True], ids=["in turn", "ahead"], indirect=True)


@pytest.fixture(autouse=True)
def _runs_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as on a GPU, launched before the tokens of the ones before are known; some tests take a CPU's, too."""
    monkeypatch.setattr("qwen35mm.engine.decoder.runs_ahead", lambda device: getattr(request, "param", True))


@pytest.fixture(autouse=True)
def _endless(loaded: LoadedModel) -> Iterator[None]:
    """Replies end at max_tokens only, so that they run beside each other for long."""
    with endless_replies(loaded):
        yield


def alone(loaded: LoadedModel, request: Request) -> tuple[int, ...]:
    engine = Engine(loaded, EngineSettings(context_length=512), cache_settings(loaded, reuse=False))
    (result,) = results_of(run(engine, request)).values()
    return result.token_ids


def test_slots_bound_how_many_run(loaded: LoadedModel, make_request: MakeRequest) -> None:
    engine = Engine(loaded, EngineSettings(slots=2))
    for parts in QUESTIONS[:5]:
        engine.add(make_request(*parts, params=LONG))
    most = 0
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        running = len(engine._decoder.running) + len(engine._prefilling)
        most = max(most, running)
        assert running <= 2
    assert most == 2


def test_a_long_prefill_stops_running_replies_for_one_piece_at_most(
    loaded: LoadedModel, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(loaded, EngineSettings(chunk_tokens=64))
    first = make_request(Text("hello"), params=SamplingParams(temperature=0.0, max_tokens=40))
    engine.add(first)
    while not engine._decoder.running:
        engine.step()
    calls: list[str] = []
    for owner, name in ((Qwen35Model, "by_layers"), (StepGraph, "run")):
        original = getattr(owner, name)

        def counted(self: Any, work: Batch | int, _original: Any = original) -> Any:
            if isinstance(work, int):
                calls.append("decode")
            elif work.is_prefill:
                calls.append("prefill")
            return _original(self, work)

        monkeypatch.setattr(owner, name, counted)
    long = make_request(Text("word " * 400), params=LONG)
    engine.add(long)
    run(engine)
    tail = len(long.prompt.token_ids) - long.prompt.tail_start
    assert calls.count("prefill") == -(-long.prompt.tail_start // 64) + -(-tail // 64)
    assert max(len(list(group)) for name, group in itertools.groupby(calls) if name == "prefill") == 1


def test_vision_layers_stop_running_replies_for_one_step_at_most(
    loaded: LoadedModel, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen35mm.engine.vision.CPU_PATCH_LAYERS", 1)
    engine = Engine(loaded)
    first = make_request(Text("hello"), params=LONG)
    engine.add(first)
    # On the device a step's tokens are told by the next one.
    engine.step()
    engine.step()
    engine.add(make_request(Image(noise(0)), Text("What?"), params=LONG))
    encoding = 0
    while engine.has_requests:
        outputs = engine.step()
        if any(isinstance(o.event, Progress) and o.event.phase == "encode" for o in outputs):
            encoding += 1
            assert any(o.request_id == first.id and isinstance(o.event, TextDelta | Finished) for o in outputs)
    assert encoding == loaded.config.vision.depth


@BOTH
@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode"])
def test_a_request_ends_at_its_deadline(loaded: LoadedModel, make_request: MakeRequest, phase: str) -> None:
    now = [0.0]
    engine = Engine(loaded, EngineSettings(slots=1, chunk_tokens=16), clock=lambda: now[0])
    other = make_request(Text("hello"), params=LONG)
    if phase == "waiting":
        engine.add(other)
        engine.step()
    request = make_request(Text("word " * 100), params=LONG, deadline_s=10.0)
    engine.add(request)
    for _ in range({"waiting": 1, "prefill": 3, "decode": 15}[phase]):
        engine.step()
    assert engine._end_late() == []
    now[0] = 10.0
    outputs = engine.step()
    engine.check_integrity()
    (late,) = [output for output in outputs if output.request_id == request.id]
    assert isinstance(late.event, RequestTimeoutError)
    assert all(output.request_id == other.id for output in run(engine))
    assert engine.runtime.pools.states.num_free == engine.runtime.pools.states.num_slots


@BOTH
def test_a_failing_step_ends_the_running_requests_and_nothing_else(
    loaded: LoadedModel, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(loaded, EngineSettings(slots=2))
    requests = [make_request(Text(text), params=LONG) for text in ("hello", "who are you", "what can you do")]
    for request in requests:
        engine.add(request)
    while len(engine._decoder.running) < 2:
        engine.step()

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(StepGraph, "run", fail)
        outputs = engine.step()
    engine.check_integrity()
    failed = [output.request_id for output in outputs if isinstance(output.event, EngineError)]
    assert failed == [requests[0].id, requests[1].id]
    assert results_of(run(engine))[requests[2].id].token_ids == alone(loaded, requests[2])


@BOTH
def test_a_failing_sampler_ends_only_its_own_request(
    loaded: LoadedModel, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(loaded, EngineSettings(slots=2))
    good, bad = make_request(Text("hello"), params=LONG), make_request(Text("who are you"), params=LONG)
    engine.add(good)
    engine.add(bad)
    while len(engine._decoder.running) < 2:
        engine.step()

    def fail(*_: object) -> int:
        raise ValueError("no token")

    monkeypatch.setattr(engine._running[bad.id], "take", fail)
    outputs = run(engine)
    assert [o.request_id for o in outputs if isinstance(o.event, EngineError)] == [bad.id]
    assert results_of(outputs)[good.id].token_ids == alone(loaded, good)


@pytest.fixture
def crowded(loaded: LoadedModel, make_request: MakeRequest) -> Iterator[tuple[Engine, list[Request]]]:
    """Three replies that grow to more than half of the room each, and wait for their turn in host memory meanwhile."""
    params = SamplingParams(temperature=0.0, max_tokens=60)
    requests = [make_request(Text(text), params=params) for text in ("hello", "who are you", "a")]
    with small_blocks(8):
        engine = Engine(loaded, EngineSettings(context_length=96), cache_settings(loaded, num_tokens=96))
        for request in requests:
            engine.add(request)
        while not engine._decoder.preempted:
            engine.step()
            engine.check_integrity()
        yield engine, requests


@BOTH
def test_a_preempted_reply_can_be_cancelled(crowded: tuple[Engine, list[Request]]) -> None:
    engine, requests = crowded
    victim = engine._decoder.preempted[0].request
    engine.cancel(victim.id)
    engine.check_integrity()
    found = results_of(run(engine))
    assert set(found) == {request.id for request in requests} - {victim.id}


@pytest.mark.parametrize("broken", ["export", "restore"])
def test_a_reply_that_no_memory_is_left_to_move_ends_alone(
    broken: str, crowded: tuple[Engine, list[Request]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, requests = crowded

    def fail(*_: object) -> None:
        patch.undo()
        raise torch.OutOfMemoryError("out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVBlockPool, broken, fail)
        outputs = run(engine)
    engine.check_integrity()
    (failed,) = [output.request_id for output in outputs if isinstance(output.event, EngineError)]
    assert set(results_of(outputs)) == {request.id for request in requests} - {failed}


def test_a_prompt_that_waits_for_a_file_holds_back_nobody(loaded: LoadedModel, make_request: MakeRequest) -> None:
    """The next ones are begun meanwhile, as far as there are slots, and it goes on when its file is there."""
    files = Later()
    engine = Engine(
        loaded, EngineSettings(slots=2, context_length=512), cache_settings(loaded, reuse=False), reader=files
    )
    waiting = make_request(Image(noise(0)), Text("What is this?"))
    (medium,) = waiting.media
    assert isinstance(medium, PreparedMedia)
    deferred = replace(waiting, media=(DeferredMedia(medium.plan, lambda: medium),))
    others = [make_request(*parts, params=LONG) for parts in QUESTIONS[:3]]
    for request in (deferred, *others):
        engine.add(request)
    outputs: list[StepOutput] = []
    while not engine.blocked:
        outputs += engine.step()
        engine.check_integrity()
        assert len(engine._running) <= 2
    found = results_of(outputs)
    assert {request.id: found[request.id].token_ids for request in others} == {
        request.id: alone(loaded, request) for request in others
    }
    assert engine.has_requests
    files.work(1)
    assert not engine.blocked
    while engine.has_requests:
        outputs += engine.step()
    assert results_of(outputs)[waiting.id].token_ids == alone(loaded, waiting)


def test_a_prompt_is_not_begun_where_one_that_waits_will_need_the_room(
    loaded: LoadedModel, make_request: MakeRequest
) -> None:
    files = Later()
    engine = Engine(
        loaded,
        EngineSettings(slots=3, context_length=256),
        cache_settings(loaded, num_tokens=256, reuse=False),
        reader=files,
    )
    waiting = make_request(Image(noise(0)), Text("What is this? " * 10))
    (medium,) = waiting.media
    assert isinstance(medium, PreparedMedia)
    engine.add(replace(waiting, media=(DeferredMedia(medium.plan, lambda: medium),)))
    large = make_request(Text("word " * 55))
    engine.add(large)
    for _ in range(5):
        engine.step()
    assert engine.blocked
    assert engine.num_waiting == 1
    files.work(1)
    outputs: list[StepOutput] = []
    while engine.has_requests:
        outputs += engine.step()
    assert list(results_of(outputs)) == [waiting.id, large.id]
