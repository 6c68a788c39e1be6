"""The two sides of a GPU call in one process: what is asked for, what is kept, and what errors become."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import qwen35mm.errors
import qwen35mm_preprocess.errors
from qwen35mm.backends.history import ended_by
from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.zero_gpu import DurationModel, ZeroGpuBackend
from qwen35mm.backends.zero_gpu.call import _failure
from qwen35mm.backends.zero_gpu.child import Failure, Item, Job, add_item
from qwen35mm.backends.zero_gpu.duration import MIN_DURATION_S
from qwen35mm.cache import CacheSettings
from qwen35mm.contract import (
    Event,
    Finished,
    GenerationRequest,
    Message,
    Progress,
    Result,
    SamplingParams,
    Text,
    TextDelta,
)
from qwen35mm.engine import Engine, EngineSettings
from qwen35mm.errors import ConfigError, EngineError, QueueFullError, RequestError, RequestTimeoutError
from qwen35mm.model import LoadedModel
from qwen35mm_preprocess import MediaError
from qwen35mm_preprocess.say import english
from tests.backends.events import PATIENCE_S, collect, result_of
from tests.backends.zero_gpu.fake import spaces

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
HELLO = [Message("user", (Text("hello"),))]


class PickledCalls:
    """Stands for `spaces.GPU` without a fork; everything is pickled on its way."""

    def __init__(self) -> None:
        self.durations: list[int] = []
        # A call begins when a GPU is lent.
        self.begun = threading.Event()
        self.lent = threading.Event()
        self.lent.set()
        self.closed = threading.Event()

    def __call__(self, *, duration: Callable[[Job], int]) -> Callable[..., Any]:
        def decorate(task: Callable[[Job], Iterator[tuple[Item, ...]]]) -> Callable[[Job], Iterator[Any]]:
            def run(job: Job) -> Iterator[Any]:
                self.durations.append(duration(job))
                self.begun.set()
                assert self.lent.wait(PATIENCE_S)
                values = task(pickle.loads(pickle.dumps(job)))
                try:
                    for value in values:
                        yield pickle.loads(pickle.dumps(value))
                finally:
                    values.close()  # pyright: ignore[reportAttributeAccessIssue]
                    self.closed.set()

            return run

        return decorate


@pytest.fixture
def calls() -> PickledCalls:
    return PickledCalls()


async def ask(backend: ZeroGpuBackend, messages: list[Message], **options: Any) -> Result:
    events = await collect(backend.stream(GenerationRequest(messages, GREEDY, **options)))
    assert await asyncio.to_thread(backend.wait_idle, PATIENCE_S)
    return result_of(events)


def names(length: int) -> str:
    return " ".join(f"name{number}" for number in range(length))


@pytest.mark.parametrize("commit", [True, False])
async def test_the_next_turn_finds_the_reply_only_if_the_call_went_on(
    demo: LoadedModel, calls: PickledCalls, tmp_path: Path, commit: bool
) -> None:
    messages = [Message("user", (Text(f"{names(40)} What can you do?"),))]
    results = []
    for _ in range(2):
        # A backend of its own each: what one call leaves to the next one is on disk.
        cache = CacheSettings(directory=tmp_path)
        backend = ZeroGpuBackend(demo, calls, cache=cache, commit_history=commit, min_segment=4)
        results.append(await ask(backend, messages, conversation="one"))
        messages += [Message("assistant", (Text(results[-1].text),)), Message("user", (Text("go on"),))]
    num_cached = [sum(result.cache.cached_from.values()) for result in results]
    assert num_cached[0] == 0
    assert (num_cached[1] > len(results[0].prompt_token_ids)) is commit


async def test_a_continued_reply_goes_on_where_it_ended(demo: LoadedModel, calls: PickledCalls, tmp_path: Path) -> None:
    question = Message("user", (Text("What is this?"),))
    backend = ZeroGpuBackend(demo, calls, cache=CacheSettings(directory=tmp_path), min_segment=4)
    whole = await ask(backend, [question])
    local = LocalBackend(demo)
    half = Message("assistant", (Text(whole.text[: len(whole.text) // 2]),))
    try:
        events = await collect(local.stream(GenerationRequest([question, half], GREEDY, continue_reply=True)))
    finally:
        local.close()
    rest = await ask(backend, [question, half], continue_reply=True)
    assert rest.token_ids == result_of(events).token_ids
    ended = ended_by(GenerationRequest([question, half], continue_reply=True), rest.text, "")
    assert ended is not None
    assert [message.text for message in ended.messages] == [question.text, half.text + rest.text]


async def test_a_child_that_is_used_again_has_its_memory(
    demo: LoadedModel, calls: PickledCalls, tmp_path: Path
) -> None:
    backend = ZeroGpuBackend(demo, calls, cache=CacheSettings(directory=tmp_path))
    message = Message("user", (Text(names(200)),))
    await ask(backend, [message])
    assert list((await ask(backend, [message])).cache.cached_from) == ["device"]


async def test_events_are_those_of_a_local_backend(demo: LoadedModel, calls: PickledCalls) -> None:
    backend = ZeroGpuBackend(demo, calls)
    events = await collect(backend.stream(GenerationRequest(HELLO, GREEDY)))
    assert events[0] == Progress("wait", 0, 0)
    assert result_of(events).text


async def test_a_call_ends_before_its_gpu_is_taken_away(
    demo: LoadedModel, calls: PickledCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen35mm.backends.zero_gpu.child.RESERVE_S", float(MIN_DURATION_S))
    with pytest.raises(RequestTimeoutError):
        await collect(ZeroGpuBackend(demo, calls).stream(GenerationRequest(HELLO, GREEDY)))


async def test_a_newer_turn_ends_what_goes_on_behind_the_last_reply(
    demo: LoadedModel, calls: PickledCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "has_work", True)  # such a call would never end by itself
    monkeypatch.setattr("qwen35mm.backends.zero_gpu.child.RESERVE_S", -1e6)
    backend = ZeroGpuBackend(demo, calls)
    await collect(backend.stream(GenerationRequest(HELLO, GREEDY, conversation="one")))
    assert not calls.closed.is_set()
    await collect(backend.stream(GenerationRequest(HELLO, GREEDY, conversation="one")))
    assert calls.closed.is_set()
    assert not backend.wait_idle(0)
    await asyncio.to_thread(backend.close)
    assert backend.wait_idle(0)


async def test_no_more_calls_than_allowed_wait(demo: LoadedModel, calls: PickledCalls) -> None:
    calls.lent.clear()
    backend = ZeroGpuBackend(demo, calls, settings=EngineSettings(max_waiting=1))
    first = asyncio.create_task(collect(backend.stream(GenerationRequest(HELLO, GREEDY))))
    assert await asyncio.to_thread(calls.begun.wait, PATIENCE_S)
    with pytest.raises(QueueFullError, match="1 request is"):
        await collect(backend.stream(GenerationRequest(HELLO, GREEDY)))
    calls.lent.set()
    assert result_of(await first).token_ids


async def test_who_leaves_while_a_gpu_is_waited_for_is_not_kept_waiting(demo: LoadedModel, calls: PickledCalls) -> None:
    calls.lent.clear()
    backend = ZeroGpuBackend(demo, calls)
    task = asyncio.create_task(collect(backend.stream(GenerationRequest(HELLO, GREEDY))))
    assert await asyncio.to_thread(calls.begun.wait, PATIENCE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not calls.closed.is_set()
    calls.lent.set()
    assert await asyncio.to_thread(calls.closed.wait, PATIENCE_S)


async def test_a_call_that_ends_without_a_word_is_an_error(demo: LoadedModel) -> None:
    def gpu(**_: Any) -> Any:
        return lambda task: lambda job: (value for value in [(Progress("prefill", 1, 2),)])

    with pytest.raises(EngineError, match="ended before"):
        await collect(ZeroGpuBackend(demo, gpu).stream(GenerationRequest(HELLO, GREEDY)))


def error_classes() -> list[type[Exception]]:
    modules = (qwen35mm.errors, qwen35mm_preprocess.errors)
    found = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return [each for each in found if issubclass(each, Exception)]


def test_every_error_survives_the_pipe() -> None:
    kind: Any
    assert {RequestError, MediaError} <= set(error_classes())
    for kind in error_classes():
        error = kind.__new__(kind, "in words")
        came = pickle.loads(pickle.dumps(Failure.of(error))).error()
        assert (type(came), str(came)) == (kind, "in words")


@pytest.mark.parametrize(
    ("title", "message", "kind", "words"),
    [
        (
            "ZeroGPU quota exceeded",
            "You have ... left). Try again in 3:10:07. ",
            RequestError,
            "free again in 3:10:07.",
        ),
        ("ZeroGPU quota exceeded", "Space app has reached its GPU limit. /srv", RequestError, "again later;"),
        ("ZeroGPU queue timeout", "No GPU was available after 60s", QueueFullError, "in a moment"),
        ("ZeroGPU client error", "No GPU was available", QueueFullError, "in a moment"),
        ("ZeroGPU illegal duration", "The requested GPU duration (90s)", RequestError, "shorter answer"),
        ("ZeroGPU worker error", "GPU task aborted", EngineError, "its time was over"),
        ("ZeroGPU worker error", "/srv/RuntimeError", EngineError, "(Error)"),
    ],
)
def test_zero_gpus_refusals_are_told_in_words(title: str, message: str, kind: type[MediaError], words: str) -> None:
    failure = _failure(spaces.Error(title, message))
    assert failure.kind is kind
    assert words in english(failure.message)
    assert "/srv" not in english(failure.message)


def test_text_is_sent_in_as_few_pieces_as_it_has_channels() -> None:
    batch: list[Item] = []
    thought = [TextDelta("a", "reasoning"), TextDelta("b", "reasoning")]
    events = [*thought, TextDelta("c", "answer", 8, 2.0), TextDelta("d", "answer", 9, 2.5)]
    for event in events:
        add_item(batch, event)
    assert batch == [TextDelta("ab", "reasoning"), TextDelta("cd", "answer", 9, 2.5)]


def finished(events: Sequence[Event]) -> Result:
    assert isinstance(events[-1], Finished)
    return events[-1].result


async def test_parameters_and_calls_go_through_the_pipe_and_logprobs_come_back(
    demo: LoadedModel, calls: PickledCalls
) -> None:
    unit = {"type": "object", "properties": {"unit": {"enum": ["celsius", "kelvin"]}}, "required": ["unit"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": unit}}]
    params = SamplingParams(temperature=0.0, max_tokens=60, frequency_penalty=0.1, logit_bias={5: -3}, logprobs=2)
    events = await collect(
        ZeroGpuBackend(demo, calls).stream(
            GenerationRequest(HELLO, params, tools=tools, tool_choice="weather", parallel_tool_calls=False)
        )
    )
    result = finished(events)
    assert [call.name for call in result.tool_calls] == ["weather"]
    assert result.logprobs is not None
    told = [each for event in events if isinstance(event, TextDelta) for each in event.logprobs]
    assert told == list(result.logprobs[:-1]), "all but the reply's end"
    assert all(len(each.top) == 2 for each in told)
    with closing(LocalBackend(demo)) as local:
        here = finished(
            await collect(local.stream(GenerationRequest(HELLO, params, tools=tools, tool_choice="weather")))
        )
    assert (here.token_ids, here.logprobs) == (result.token_ids, result.logprobs)


def test_the_duration_follows_the_work_within_bounds() -> None:
    small = DurationModel(2 * 10**9, 4 * 10**9)
    large = DurationModel(9 * 10**9, 18 * 10**9, max_duration_s=120)
    assert small.estimate_s(100, 16) == MIN_DURATION_S
    assert small.estimate_s(100, 16) < small.estimate_s(100, 800) < small.estimate_s(30_000, 800)
    assert small.estimate_s(100, None) == small.estimate_s(100, 1024)
    assert small.estimate_s(10**6, 10**6) == 60
    assert small.estimate_s(5_000, 500) < large.estimate_s(5_000, 500) <= 120
    with pytest.raises(ConfigError, match="at least 15"):
        DurationModel(1, 1, max_duration_s=5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"settings": EngineSettings(context_length=8193)}, "8,193"),
        ({"cache": CacheSettings(directory=Path(__file__))}, "not a folder"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_at_the_start(
    demo: LoadedModel, calls: PickledCalls, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        ZeroGpuBackend(demo, calls, **options)
