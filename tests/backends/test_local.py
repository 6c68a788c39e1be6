"""The whole local path: messages with media in, events out, with transformers as the oracle."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import shutil
import signal
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.history import ended_by
from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.remote.media import encode_medium
from qwen35mm.cache import CacheSettings
from qwen35mm.contract import (
    EncodedMedium,
    Event,
    Finished,
    GenerationRequest,
    Image,
    MediaPlanned,
    Message,
    Progress,
    SamplingParams,
    Text,
    ToolCall,
    Video,
    pin_plans,
)
from qwen35mm.errors import CheckpointError, ContextTooLongError, EngineError, PromptError
from qwen35mm.model import LoadedModel
from qwen35mm_preprocess import MediaBudget, MediaError, MediaPlanError, PreparedMedia, VideoClip
from tests import forked
from tests.backends.events import collect, result_of
from tests.backends.remote.asking import until
from tests.engine.exact import clip as short_clip
from tests.engine.exact import picture
from tests.oracle import greedy_reply, load_demo_oracle
from tests.test_tokenizer import Counting

# Pools of the whole program.
LASTING = ("qwen35mm-media", "qwen35mm-prompts", "qwen35mm-scripts")

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def clip() -> Path:
    return short_clip(12)


@pytest.fixture
def backend(demo: LoadedModel) -> Iterator[LocalBackend]:
    backend = LocalBackend(demo)
    yield backend
    backend.close()


def plans_of(events: list[Event]) -> MediaPlanned:
    (planned,) = [event for event in events if isinstance(event, MediaPlanned)]
    return planned


async def test_a_medium_that_was_encoded_for_a_server_is_refused(backend: LocalBackend) -> None:
    medium = encode_medium(Image(picture(0)), backend.media, "frames")
    with pytest.raises(MediaError, match="encoded for a server can't be read here"):
        await collect(backend.stream(GenerationRequest([Message("user", (Image(medium),))], GREEDY)))


@pytest.mark.parametrize(
    ("option", "values"),
    [("weights", ["bf16", "int8", "int4"]), ("rope_scaling", [None, "yarn,factor=2", "yarn,factor=4"])],
)
def test_what_computes_otherwise_has_a_cache_of_its_own(option: str, values: list[str | None], tmp_path: Path) -> None:
    roots = []
    for value in [*values, values[1]]:
        options: dict[str, Any] = {option: value, "cache": CacheSettings(directory=tmp_path)}
        backend = LocalBackend.load(demo_model_path(), device="cpu", **options)
        roots.append(backend.engine._engine.runtime.root)
        backend.close()
    assert roots[1] == roots[3]
    assert len(set(roots)) == 3


async def test_events_come_in_order(backend: LocalBackend, clip: Path) -> None:
    message = Message("user", (Image(picture(0)), Video(clip), Text("What is this?")))
    events = await collect(backend.stream(GenerationRequest([message], GREEDY)))
    kinds = [event.phase if isinstance(event, Progress) else type(event).__name__ for event in events]
    order = ["read", "MediaPlanned", "encode", "prefill", "Prefilled", "TextDelta", "Finished"]
    assert list(dict.fromkeys(kinds)) == order
    result = result_of(events)
    assert [medium.kind for medium in result.media] == ["image", "video"]
    timestamps = result.media[1].frame_timestamps
    assert timestamps is not None
    assert len(timestamps) == result.media[1].grid_thw[0]
    assert [plan and plan.digest for plan in plans_of(events).plans] == [medium.digest for medium in result.media]


async def test_replies_equal_transformers(backend: LocalBackend, clip: Path) -> None:
    """Three turns with two pictures and a video: the same prompt and pixels give transformers the same tokens."""
    params = replace(GREEDY, max_tokens=10)
    oracle = load_demo_oracle()
    messages: list[Message] = []
    for parts in (
        (Image(picture(1)), Text("What is in this picture?")),
        (Text("And here?"), Image(picture(2, (70, 200)))),
        (Video(clip), Text("What happens?")),
    ):
        messages.append(Message("user", parts))
        result = result_of(await collect(backend.stream(GenerationRequest(messages, params))))
        expected = greedy_reply(oracle, result.prompt_token_ids, oracle_inputs(backend, messages), max_new_tokens=10)
        assert list(result.token_ids) == expected
        messages.append(Message("assistant", (Text(result.text),)))


def oracle_inputs(backend: LocalBackend, messages: list[Message]) -> dict[str, torch.Tensor]:
    sources = [part.source for message in messages for part in message.media]
    media = [
        backend.media.prepare(source) for source in sources if not isinstance(source, PreparedMedia | EncodedMedium)
    ]
    inputs: dict[str, torch.Tensor] = {}
    for kind, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        chosen = [medium for medium in media if medium.plan.kind == kind]
        if chosen:
            inputs[pixels] = torch.cat([torch.from_numpy(medium.pixel_values) for medium in chosen])
            inputs[grid] = torch.tensor([list(medium.plan.grid_thw) for medium in chosen])
    return inputs


async def test_top_n_sigma_of_almost_nothing_leaves_the_likeliest(backend: LocalBackend) -> None:
    hot = SamplingParams(temperature=50.0, seed=1, max_tokens=12)
    greedy, kept, free = [
        result_of(await collect(backend.stream(GenerationRequest([Message("user", "Hello")], params)))).token_ids
        for params in (replace(hot, temperature=0.0), replace(hot, top_n_sigma=1e-6), hot)
    ]
    assert greedy == kept != free


async def test_a_pinned_plan_outlives_other_settings(demo: LoadedModel, backend: LocalBackend, clip: Path) -> None:
    question = (Text("What happens?"),)
    first = await collect(backend.stream(GenerationRequest([Message("user", (Video(clip), *question))], GREEDY)))
    (plan,) = plans_of(first).plans
    frugal = LocalBackend(demo, budget=MediaBudget(max_frames=4))
    try:
        pinned = await collect(
            frugal.stream(GenerationRequest([Message("user", (Video(clip, plan), *question))], GREEDY))
        )
        fresh = await collect(frugal.stream(GenerationRequest([Message("user", (Video(clip), *question))], GREEDY)))
    finally:
        frugal.close()
    assert plans_of(pinned).plans == (plan,)
    assert result_of(pinned).prompt_token_ids == result_of(first).prompt_token_ids
    assert len(result_of(fresh).prompt_token_ids) < len(result_of(first).prompt_token_ids)


async def test_a_text_stands_in_place_of_a_damaged_medium(backend: LocalBackend) -> None:
    """The history that a turn commits is the next turn's prefix, and the other medium keeps its plan."""
    file = io.BytesIO()
    picture(0).save(file, "PNG")
    cut = file.getvalue()[: len(file.getvalue()) // 2]
    parts = (
        Image(cut, stand_in="[image left out]"),
        Image(picture(1)),
        Text("These are pictures. " * 100 + "What is in them?"),
    )
    messages = [Message("user", parts)]
    events = await collect(backend.stream(GenerationRequest(messages, GREEDY)))
    first = result_of(events)
    lost, plan = plans_of(events).plans
    assert lost is None
    assert plan is not None
    assert [medium.digest for medium in first.media] == [plan.digest]
    told = [Message("user", (Text("[image left out]"), *parts[1:]))]
    assert first.prompt_token_ids == tuple(backend.prompt_ids(told).tolist())
    assert backend.wait_idle(forked.PATIENCE_S)
    answer = Message("assistant", first.text, first.reasoning, first.tool_calls)
    messages = [*pin_plans(messages, plans_of(events).plans), answer, Message("user", "And the colours?")]
    assert [part.plan for part in messages[0].media] == [None, plan]
    events = await collect(backend.stream(GenerationRequest(messages, GREEDY)))
    assert plans_of(events).plans == (None, plan)
    assert result_of(events).cache.num_cached_tokens > len(first.prompt_token_ids) - 16
    with pytest.raises(MediaError, match="damaged or cut off"):
        await collect(backend.stream(GenerationRequest([Message("user", (Image(cut),))], GREEDY)))
    # An error of the caller's own stays one.
    wrong = Image(cut, replace(plan, processing="another"), stand_in="[image left out]")
    with pytest.raises(MediaPlanError):
        await collect(backend.stream(GenerationRequest([Message("user", (wrong,))], GREEDY)))


async def test_a_part_of_a_video_is_another_medium_to_the_cache(demo: LoadedModel, backend: LocalBackend) -> None:
    """Whatever of the video was asked about before, an answer is that of an engine that knows nothing."""
    clip, what, params = short_clip(24), Text("What happens?"), replace(GREEDY, max_tokens=6)
    chosen = [None, VideoClip(0.0, 1.0, 4), VideoClip(1.0, 2.0, 4), VideoClip(0.0, 1.0, 4, drop_similar=True)]
    for part in [*chosen, chosen[1]]:
        messages = [Message("user", (Video(clip, clip=part), what))]
        warm = result_of(await collect(backend.stream(GenerationRequest(messages, params))))
        fresh = LocalBackend(demo)
        try:
            cold = result_of(await collect(fresh.stream(GenerationRequest(messages, params))))
        finally:
            fresh.close()
        assert (warm.token_ids, warm.prompt_token_ids) == (cold.token_ids, cold.prompt_token_ids)
    # The same part again isn't encoded again.
    assert (warm.cache.num_encoded_units, cold.cache.num_cached_units) == (0, 0)


async def test_every_kind_of_source_gives_the_same_prompt(backend: LocalBackend, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    picture(5).save(buffer, "PNG")
    path = tmp_path / "picture"
    path.write_bytes(buffer.getvalue())
    sources = [picture(5), buffer.getvalue(), path, str(path)]
    digests = set()
    for source in sources:
        events = await collect(
            backend.stream(GenerationRequest([Message("user", (Image(source), Text("hi")))], GREEDY))
        )
        digests.add(result_of(events).media[0].digest)
    assert len(digests) == 1


async def test_leaving_while_a_medium_is_read_stops_the_reading(
    backend: LocalBackend, clip: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Event()
    prepare = type(backend.media).prepare

    def watched(*args: object, **kwargs: object) -> object:
        try:
            return prepare(*args, **kwargs)  # pyright: ignore[reportArgumentType]
        finally:
            ended.set()

    monkeypatch.setattr(type(backend.media), "prepare", watched)
    messages = [Message("user", (*[Video(clip)] * 20, Text("What happens?")))]
    events = backend.stream(GenerationRequest(messages, GREEDY))
    assert isinstance(await anext(events), Progress)
    await events.aclose()  # pyright: ignore[reportAttributeAccessIssue]
    assert await asyncio.to_thread(ended.wait, 30)
    assert backend.engine.idle
    # The loop hears of the thread's end, and lets go of what came of it.
    await asyncio.to_thread(lambda: None)
    gc.collect()
    assert not caplog.records, "nobody is told of an error that is none"


async def test_whoever_waits_no_longer_for_a_picture_leaves_nothing_in_the_log(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, given_up, failed = threading.Event(), threading.Event(), threading.Event()

    def fails_late(*_: object, **__: object) -> object:
        begun.set()
        try:
            assert given_up.wait(30)
            raise MediaError("it can't be read")
        finally:
            failed.set()

    monkeypatch.setattr(type(backend.media), "prepare", fails_late)
    asking = asyncio.ensure_future(
        collect(backend.stream(GenerationRequest([Message("user", (Image(picture(0)), Text("hi")))], GREEDY)))
    )
    assert await asyncio.to_thread(begun.wait, 30)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(asking, 0)
    given_up.set()
    assert await asyncio.to_thread(failed.wait, 30)
    # The loop hears of the thread's end, and lets go of what came of it.
    await asyncio.to_thread(lambda: None)
    gc.collect()
    assert not caplog.records, "Task exception was never retrieved"


async def test_no_more_media_are_read_than_the_context_holds(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pixels would all be in memory before the engine counts the prompt."""
    plan = backend.media.plan(source := picture(0), "image")
    monkeypatch.setattr(backend, "media_of", None)
    message = Message("user", (Image(source, plan),) * (backend.context_length // plan.num_tokens + 1))
    with pytest.raises(ContextTooLongError):
        await collect(backend.stream(GenerationRequest([message], GREEDY)))
    # What a record says of a medium is not taken for true.
    huge = replace(plan, grid_thw=plan.grid_thw._replace(h=10**6, w=10**6))
    with pytest.raises(MediaPlanError):
        backend.count_tokens([Message("user", (Image(source, huge),))])
    pinned = replace(huge, digest="ab" * 32, unit_digests=("cd" * 32,), num_tokens=6)
    with pytest.raises(MediaPlanError):
        await collect(backend.stream(GenerationRequest([Message("user", (Image(source, pinned),))], GREEDY)))


@pytest.mark.parametrize("num_messages", [1, 200])
async def test_a_megabyte_of_text_is_refused_before_it_is_tokenized(
    num_messages: int, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(backend.loaded.tokenizer._plain)
    monkeypatch.setattr(backend.loaded.tokenizer, "_plain", counting)
    monkeypatch.setattr(backend.loaded.tokenizer, "_longest", 1000)
    part = Text("word " * (200_000 // num_messages))
    messages = [Message("assistant" if at % 2 else "user", (part,)) for at in range(num_messages)]
    for count in (
        lambda: backend.count_tokens(messages, enable_thinking=False),
        lambda: asyncio.run(collect(backend.stream(GenerationRequest(messages, GREEDY)))),
        lambda: backend.commit_history(GenerationRequest([*messages, Message("assistant", "Yes.")])),
    ):
        counting.num_chars = 0
        with pytest.raises(ContextTooLongError, match=r"has [\d,]+ tokens or more") as refused:
            await asyncio.to_thread(count)
        assert refused.value.num_tokens is not None
        assert 2 * backend.context_length < refused.value.num_tokens <= 1_000_000
        assert counting.num_chars <= 32 * backend.context_length


async def test_what_is_a_little_too_long_is_told_to_the_token(backend: LocalBackend) -> None:
    thousand = backend.count_tokens([Message("user", (Text("word " * 1000),))])
    messages = [Message("user", (Text("word " * (1500 * backend.context_length // thousand)),))]
    num_tokens = backend.count_tokens(messages)
    assert backend.context_length < num_tokens < 2 * backend.context_length
    with pytest.raises(ContextTooLongError, match=f"has {num_tokens:,} tokens and the context"):
        await collect(backend.stream(GenerationRequest(messages, GREEDY)))


async def test_a_broken_medium_leaves_the_backend_working(backend: LocalBackend) -> None:
    with pytest.raises(MediaError):
        await collect(
            backend.stream(GenerationRequest([Message("user", (Image(b"not a picture"), Text("hi")))], GREEDY))
        )
    with pytest.raises(PromptError):
        await collect(backend.stream(GenerationRequest([], GREEDY)))
    assert result_of(
        await collect(backend.stream(GenerationRequest([Message("user", (Text("hello"),))], GREEDY)))
    ).token_ids


HELLO = Message("user", (Text("hello"),))


def test_a_history_holds_calls_as_the_next_turn_has_them() -> None:
    reply = "I look.\n\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    for tools, calls, text in (
        ((), (), reply),
        ([{"function": {"name": "f"}}], (ToolCall("f", {"a": "1"}),), "I look."),
    ):
        ended = ended_by(GenerationRequest([HELLO], tools=tools), reply, "")
        assert ended is not None
        assert (ended.messages[-1].tool_calls, ended.messages[-1].text) == (calls, text)


async def test_a_result_has_its_calls_apart(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    written = "I look.\n\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    told = result_of(await collect(backend.stream(GenerationRequest([HELLO], GREEDY))))

    async def answer(*_: object, **__: object) -> AsyncIterator[Event]:
        yield Finished(replace(told, text=written))

    monkeypatch.setattr(backend, "_answer", answer)
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
    for given, text, calls in ((tools, "I look.", (ToolCall("f", {"a": 1}),)), ((), written, ())):
        (event,) = await collect(backend.stream(GenerationRequest([HELLO], GREEDY, tools=given)))
        assert isinstance(event, Finished)
        assert (event.result.text, event.result.tool_calls) == (text, calls)
    assert str(replace(told, text="I look.", tool_calls=(ToolCall("f", {"a": 1}),))) == "I look.\nf(a=1)"


def test_an_end_that_is_no_token_is_refused_in_words(tmp_path: Path) -> None:
    folder = shutil.copytree(demo_model_path(), tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, "x"]}')
    with pytest.raises(CheckpointError, match=r"eos_token_id must be one or more token ids; got \[3, 'x'\]"):
        LocalBackend.load(folder)


async def test_thinking_follows_the_call_and_a_budget_of_none_turns_it_off(backend: LocalBackend) -> None:
    think = backend.loaded.tokenizer.control_ids["<think>"]
    close = backend.loaded.tokenizer.control_ids["</think>"]
    messages = [Message("user", (Text("hello"),))]

    async def thinking_ids(params: SamplingParams, enable_thinking: bool | None) -> list[int]:
        events = await collect(backend.stream(GenerationRequest(messages, params, enable_thinking=enable_thinking)))
        return [i for i in result_of(events).prompt_token_ids if i in (think, close)]

    assert await thinking_ids(GREEDY, True) == [think]
    assert await thinking_ids(GREEDY, False) == [think, close]
    assert await thinking_ids(GREEDY, None) == [think, close], "the demo's template doesn't think by default"
    assert await thinking_ids(GREEDY.with_overrides(thinking_budget=0), True) == [think, close]


async def test_a_thought_that_was_cut_goes_on_where_it_ended(backend: LocalBackend) -> None:
    question = Message("user", (Text("hello"),))
    whole, half = [
        result_of(
            await collect(
                backend.stream(
                    GenerationRequest([question], GREEDY.with_overrides(max_tokens=most), enable_thinking=True)
                )
            )
        )
        for most in (64, 4)
    ]
    assert (half.finish_reason, half.text) == ("length", "")
    assert half.reasoning
    messages = [question, Message("assistant", reasoning=half.reasoning)]
    params = GREEDY.with_overrides(max_tokens=64)
    rest = result_of(
        await collect(backend.stream(GenerationRequest(messages, params, enable_thinking=True, continue_reply=True)))
    )
    assert rest.reasoning
    assert (half.reasoning + rest.reasoning, rest.text) == (whole.reasoning, whole.text)
    with pytest.raises(PromptError, match="turn thinking on"):
        await collect(backend.stream(GenerationRequest(messages, GREEDY, enable_thinking=False, continue_reply=True)))


def test_only_the_bundled_folder_is_the_demo(backend: LocalBackend) -> None:
    assert backend.is_demo


def test_a_program_may_end_without_closing_it(tmp_path: Path) -> None:
    """Whatever is done then: a history that is computed, a file that is written."""
    reports = []
    for expected in (1, 0):
        process = forked.run("tests.backends.test_local", tmp_path, expected)
        assert (process.returncode, process.stderr) == (expected, "")
        reports.append(process.stdout.strip())
    assert reports == ["", "disk"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_raises_and_never_hangs(backend: LocalBackend) -> None:
    """As a worker of `multiprocessing` or `datasets.map(num_proc=...)`, forked while another thread has the lock."""
    messages = [Message("user", (Text("hello"),))]
    request = GenerationRequest(messages, GREEDY)
    ended = GenerationRequest([*messages, Message("assistant", (Text("hi"),))])
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with backend.engine._wake:
            held.set()
            over.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(240)  # ends a child that hangs
            for call in (
                lambda: asyncio.run(collect(backend.stream(request))),
                lambda: backend.wait_idle(1),
                lambda: backend.commit_history(ended),
            ):
                with pytest.raises(EngineError, match="a forked child has none of its threads"):
                    call()
            backend.close()
            os._exit(7)
        finally:
            os._exit(1)
    over.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert result_of(asyncio.run(collect(backend.stream(request)))).token_ids


async def test_the_last_reference_ends_its_threads(demo: LoadedModel) -> None:
    before = set(threading.enumerate())
    backend = LocalBackend(demo)
    await collect(backend.stream(GenerationRequest([Message("user", (Text("hello"),))], GREEDY)))
    threads = [each for each in threading.enumerate() if each not in before and each.name.startswith("qwen35mm-")]
    assert {"qwen35mm-engine", "qwen35mm-reader", "qwen35mm-writer"} <= {each.name for each in threads}
    alive = weakref.ref(backend)
    del backend
    # The thread that keeps the history holds it until it is done, and a pool's worker a moment after its answer.
    await until(lambda: gc.collect() >= 0 and alive() is None)
    for thread in threads:
        if not thread.name.startswith(LASTING):
            await asyncio.to_thread(thread.join, 60)
            assert not thread.is_alive(), thread.name


async def leave(folder: Path) -> str:
    """One answer, and where its prompt's beginning came from; nothing is closed."""
    backend = LocalBackend.load(demo_model_path(), cache=CacheSettings(directory=folder))
    question = Message("user", (Text("hello " * 600),))
    events = await collect(backend.stream(GenerationRequest([question], GREEDY, conversation="chat")))
    answer = backend.chat().stream("Hello.")
    next(answer)
    # As a script's own names would, until the very end.
    globals().update(backend=backend, answer=answer)
    return " ".join(result_of(events).cache.cached_from)


if __name__ == "__main__":
    print(asyncio.run(leave(Path(sys.argv[1]))))
    sys.exit(int(sys.argv[2]))
