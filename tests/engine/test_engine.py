"""The step loop: order, cancelling in every phase, limits, failures."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from qwen35mm.cache import OutOfBlocksError, SequenceCache, VisionCache
from qwen35mm.contract import Finished, Image, Prefilled, Progress, SamplingParams, Text, TextDelta
from qwen35mm.engine import Engine, EngineSettings, Request, StepOutput, prefill
from qwen35mm.engine.batches import PieceInputs
from qwen35mm.engine.decoder import Decoder
from qwen35mm.errors import ConfigError, ContextTooLongError, EngineError, QueueFullError
from qwen35mm.model import LoadedModel
from qwen35mm.model.decoder import Qwen35Model
from qwen35mm.model.decoder_layer import DecoderLayer
from tests.engine.conftest import MakeRequest, failing_in, noise
from tests.engine.exact import never_saying, run


def finished(outputs: list[StepOutput], request: Request) -> Finished:
    events = [output.event for output in outputs if output.request_id == request.id]
    assert isinstance(events[-1], Finished)
    return events[-1]


def test_a_request_runs_to_its_end(loaded: LoadedModel, make_request: MakeRequest) -> None:
    engine = Engine(loaded)
    request = make_request(Image(noise(0)), Text("What is this?"))
    outputs = run(engine, request)
    result = finished(outputs, request).result
    events = [output.event for output in outputs]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == result.text
    assert [event.phase for event in events if isinstance(event, Progress)] == ["encode", "prefill"]
    assert result.num_generated_tokens == len(result.token_ids) <= 8
    assert result.finish_reason == ("stop" if result.token_ids[-1] in loaded.eos_ids else "length")
    assert result.num_prompt_tokens == len(request.prompt.token_ids)
    (medium,) = result.media
    assert (medium.kind, medium.frame_timestamps) == ("image", None)
    assert medium.num_tokens == medium.grid_thw[1] * medium.grid_thw[2] // 4
    assert result.ttft_s is not None
    assert result.ttft_s > 0
    (begun,) = [event for event in events if isinstance(event, Prefilled)]
    assert (begun.num_prompt_tokens, begun.ttft_s, begun.seed) == (result.num_prompt_tokens, result.ttft_s, result.seed)
    assert begun.cache == replace(result.cache, decode_s=0.0, cache_bytes=0)
    pieces = [event for event in events if isinstance(event, TextDelta)]
    assert events.index(begun) < events.index(pieces[0])
    counts = [(piece.num_generated_tokens or 0, piece.at_s or 0.0) for piece in pieces]
    assert counts == sorted(counts)
    assert 1 <= counts[0][0] <= counts[-1][0] <= result.num_generated_tokens
    assert counts[-1][1] - counts[0][1] <= result.cache.decode_s
    assert engine.step() == []


def test_requests_are_served_in_order_and_hear_their_place(loaded: LoadedModel, make_request: MakeRequest) -> None:
    engine = Engine(loaded, EngineSettings(slots=1))
    requests = [make_request(Text(text)) for text in ("hello", "who are you", "what can you do")]
    outputs = run(engine, *requests)
    ends = [output.request_id for output in outputs if isinstance(output.event, Finished)]
    assert ends == [request.id for request in requests]
    waits = [
        (output.request_id, output.event.done)
        for output in outputs
        if isinstance(output.event, Progress) and output.event.phase == "wait"
    ]
    assert waits == [(requests[1].id, 1), (requests[2].id, 2), (requests[2].id, 1)]


@pytest.mark.parametrize(("ahead", "cancelled_after"), [(False, None), (True, None), (False, 1), (True, 3)], ids=str)
def test_what_a_request_held_is_free_when_it_is_over(
    loaded: LoadedModel,
    make_request: MakeRequest,
    monkeypatch: pytest.MonkeyPatch,
    ahead: bool,
    cancelled_after: int | None,
) -> None:
    monkeypatch.setattr("qwen35mm.engine.decoder.runs_ahead", lambda device: ahead)
    assert_free_at_the_end(Engine(loaded, EngineSettings(chunk_tokens=32)), make_request, cancelled_after)


@pytest.mark.parametrize("error", [OutOfBlocksError("full"), KeyError("bug")])
def test_what_a_request_held_is_free_when_it_has_failed(
    loaded: LoadedModel, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(cache: SequenceCache, num_tokens: int) -> None:
        raise type(error)(*error.args)

    monkeypatch.setattr(SequenceCache, "prepare", refuse)
    # pytest keeps what is logged.
    monkeypatch.setattr(logging.getLogger("qwen35mm.engine.engine"), "disabled", True)
    assert_free_at_the_end(Engine(loaded), make_request)


def test_a_prefill_that_found_no_room_is_free_when_it_is_closed(
    loaded: LoadedModel, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(cache: SequenceCache, num_tokens: int) -> None:
        raise OutOfBlocksError("full")

    monkeypatch.setattr(SequenceCache, "prepare", refuse)
    work = prefill.Prefill(Engine(loaded).runtime, make_request(Text("hello")))
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            with contextlib.suppress(OutOfBlocksError):
                work.step()
        work.close()
        alive = weakref.ref(work)
        del work
        assert alive() is None
    finally:
        gc.enable()


def assert_free_at_the_end(engine: Engine, make_request: MakeRequest, cancelled_after: int | None = None) -> None:
    """Pixels and features go at once, not when Python next looks for garbage."""
    gc.collect()
    gc.disable()
    try:
        request = make_request(Image(noise(0)), Text("What is this?"))
        # Copies: the tests' own stay for other tests.
        request = replace(request, media=tuple(map(copy.copy, request.media)))
        request_id, media = request.id, weakref.ref(request.media[0])
        engine.add(request)
        del request
        num_steps = 0
        while engine.has_requests:
            engine.step()
            num_steps += 1
            if num_steps == cancelled_after:
                engine.cancel(request_id)
        assert media() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("chunk_tokens", [7, 512])
def test_pieces_do_not_change_the_reply(loaded: LoadedModel, make_request: MakeRequest, chunk_tokens: int) -> None:
    request = make_request(Image(noise(1)), Text("What is this, and where?"))
    engine = Engine(loaded, EngineSettings(chunk_tokens=chunk_tokens))
    outputs = run(engine, request)
    num_pieces = sum(isinstance(o.event, Progress) and o.event.phase == "prefill" for o in outputs)
    assert num_pieces == -(-len(request.prompt.token_ids) // chunk_tokens)
    whole = make_request(Image(noise(1)), Text("What is this, and where?"))
    reference = Engine(loaded)
    expected = finished(run(reference, whole), whole).result.token_ids
    assert finished(outputs, request).result.token_ids == expected


def watch(monkeypatch: pytest.MonkeyPatch, owner: Any, *names: str) -> list[str]:
    """The calls of these functions from now on, in order."""
    calls: list[str] = []
    for name in names:
        original = getattr(owner, name)

        def counted(*args: Any, _name: str = name, _original: Any = original, **options: Any) -> Any:
            calls.append(_name)
            return _original(*args, **options)

        monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize("others_wait", [False, True])
def test_a_first_token_is_told_before_the_second_is_computed(
    loaded: LoadedModel, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch, others_wait: bool
) -> None:
    decoded = watch(monkeypatch, Decoder, "_launch")
    engine = Engine(loaded)
    engine.add(make_request(Text("hello")))
    if others_wait:
        engine.add(make_request(Text("who are you")))
    while not engine._decoder.running:
        engine.step()
    # Where somebody waits, the next step reads a piece of their prompt first: the second token comes before that.
    assert len(decoded) == others_wait
    assert sum(isinstance(output.event, Finished) for output in run(engine)) == 1 + others_wait


def test_a_piece_goes_to_the_device_by_one_copy(
    loaded: LoadedModel, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = watch(monkeypatch, PieceInputs, "to")
    engine = Engine(loaded, EngineSettings(chunk_tokens=7))
    engine.add(make_request(Image(noise(0)), Text("What is this, and where?")))
    outputs = run(engine)
    pieces = sum(isinstance(o.event, Progress) and o.event.phase == "prefill" for o in outputs)
    assert pieces > 3
    assert copies == ["to"] * pieces


def test_embeddings_leave_the_device_once_the_first_token_is_told(
    loaded: LoadedModel, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(loaded, EngineSettings(chunk_tokens=16))
    engine.add(make_request(Image(noise(0)), Text("What is this?")))
    offloads = watch(monkeypatch, VisionCache, "offload")
    engine.step()
    before = len(offloads)
    while not engine._decoder.running:
        engine.step()
    assert len(offloads) == before
    engine.step()
    assert len(offloads) == before + 1


def step_until(engine: Engine, phase: str) -> None:
    """Until the only admitted request has told of a phase, or decodes."""
    for _ in range(1000):
        phases = [output.event.phase for output in engine.step() if isinstance(output.event, Progress)]
        if phase in phases or (phase == "decode" and engine._decoder.running):
            return
    raise AssertionError(f"the request never came to {phase}")


@pytest.mark.parametrize("phase", ["encode", "prefill", "decode"])
def test_cancelling_takes_effect_before_the_next_step(
    loaded: LoadedModel, make_request: MakeRequest, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen35mm.engine.vision.CPU_PATCH_LAYERS", 1)
    engine = Engine(loaded, EngineSettings(chunk_tokens=16))
    request = make_request(
        Image(noise(0)), Text("What is this?"), params=SamplingParams(temperature=0.0, max_tokens=50)
    )
    follower = make_request(Text("hello"))
    engine.add(request)
    engine.add(follower)
    step_until(engine, phase)
    engine.cancel(request.id)
    engine.check_integrity()
    outputs = run(engine)
    assert all(output.request_id == follower.id for output in outputs)
    assert finished(outputs, follower)


def test_cancelling_a_waiting_or_unknown_request(loaded: LoadedModel, make_request: MakeRequest) -> None:
    engine = Engine(loaded)
    first, second = make_request(Text("hello")), make_request(Text("hello"))
    engine.add(first)
    engine.add(second)
    engine.cancel(second.id)
    engine.cancel("never heard of")
    outputs = run(engine)
    assert {output.request_id for output in outputs} == {first.id}


def test_the_waiting_line_is_bounded(loaded: LoadedModel, make_request: MakeRequest) -> None:
    engine = Engine(loaded, EngineSettings(max_waiting=2))
    engine.add(make_request(Text("a")))
    engine.add(make_request(Text("b")))
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        engine.add(make_request(Text("c")))


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers(
    loaded: LoadedModel, make_request: MakeRequest
) -> None:
    request = make_request(Text("word " * 40))
    size = len(request.prompt.token_ids)
    with pytest.raises(ContextTooLongError, match=f"{size} tokens and the context holds {size}"):
        Engine(loaded, EngineSettings(context_length=size)).add(request)


def test_a_context_beyond_the_models_positions_is_refused(loaded: LoadedModel) -> None:
    limit = loaded.config.text.max_position_embeddings
    with pytest.raises(ConfigError, match=f"this model has {limit:,}"):
        Engine(loaded, EngineSettings(context_length=limit + 1))


def test_vision_tokens_are_never_sampled(
    loaded: LoadedModel, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = loaded.config
    wanted = [config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id]
    logits = Qwen35Model.logits

    def prefer_vision(self: Qwen35Model, hidden: torch.Tensor) -> torch.Tensor:
        scores = logits(self, hidden).clone()
        scores[:, wanted] = 1e4
        return scores

    monkeypatch.setattr(Qwen35Model, "logits", prefer_vision)
    for params in (SamplingParams(temperature=0.0, max_tokens=20), SamplingParams(temperature=2.0, max_tokens=20)):
        engine = Engine(loaded)
        request = make_request(Text("hello"), params=params)
        result = finished(run(engine, request), request).result
        assert not set(result.token_ids) & set(wanted)
        assert all(token_id < loaded.tokenizer.vocab_size for token_id in result.token_ids)


@pytest.mark.parametrize(
    ("phase", "error", "message"),
    [
        ("prefill", RuntimeError("secret /server/path"), "RuntimeError"),
        ("decode", ValueError("x"), "ValueError"),
        ("decode", torch.OutOfMemoryError("CUDA out of memory"), "Memory ran out"),
    ],
)
def test_a_failing_model_ends_its_request_and_nothing_else(
    loaded: LoadedModel,
    make_request: MakeRequest,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    error: Exception,
    message: str,
) -> None:
    engine = Engine(loaded)
    first, second = make_request(Text("hello")), make_request(Text("hello"))
    engine.add(first)
    engine.add(second)
    with monkeypatch.context() as patch:
        patch.setattr(DecoderLayer, "forward", failing_in(phase, error))
        outputs: list[StepOutput] = []
        while not any(isinstance(output.event, EngineError) for output in outputs):
            outputs += engine.step()
            engine.check_integrity()
    failure = outputs[-1]
    assert failure.request_id == first.id
    assert message in str(failure.event)
    assert "/server/path" not in str(failure.event)
    assert finished(run(engine), second)


def test_a_thinking_budget_is_carried_out(loaded: LoadedModel, make_request: MakeRequest) -> None:
    close_id = loaded.tokenizer.control_ids["</think>"]
    params = SamplingParams(temperature=0.0, max_tokens=20, thinking_budget=5)
    request = make_request(Text("hello"), params=params, enable_thinking=True)
    with never_saying({*loaded.eos_ids, close_id}):
        result = finished(run(Engine(loaded), request), request).result
    assert close_id in result.token_ids[5:7]
    assert result.reasoning
    assert result.text


@pytest.mark.parametrize("bad", [{"context_length": 0}, {"chunk_tokens": 0}, {"max_waiting": 0}])
def test_bad_settings_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        EngineSettings(**bad)


def test_pieces_are_larger_on_a_gpu() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert (EngineSettings().chunk_tokens_on(cpu), EngineSettings().chunk_tokens_on(gpu)) == (512, 2048)
    assert EngineSettings(chunk_tokens=64).chunk_tokens_on(gpu) == 64
