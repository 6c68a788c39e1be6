"""Changing the model that answers: two copies of the bundled demo, and memory that a test gives."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import anyio
import pytest
import torch

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.remote.backend import RemoteBackend
from qwen35mm.cache import CacheSettings
from qwen35mm.checkpoints.lora_choices import LoraChoice
from qwen35mm.contract import Event, Finished, GenerationRequest, Message, SamplingParams, Text, TextDelta
from qwen35mm.engine import EngineSettings
from qwen35mm.errors import CheckpointError, ConfigError, EngineError
from qwen35mm.model_library import BackendOptions, BackendSwitch, memory
from qwen35mm_kernels.cpu.native.library import find_library
from qwen35mm_preprocess import MediaBudget
from tests.backends.events import collect, result_of
from tests.small_adapters import write_adapter

QUESTION = [Message("user", (Text("What is in the picture?"),))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
MIB = 1 << 20
PATIENCE_S = 20.0

OPTIONS = BackendOptions(
    dtype="float32",
    device="cpu",
    budget=MediaBudget(max_image_tokens=64, max_video_tokens=64),
    settings=EngineSettings(context_length=1024, slots=2),
    cache=CacheSettings(kv_bytes=16 * MIB, state_bytes=4 * MIB, vision_bytes=MIB),
)
# What a step computes with, which the old model doesn't hold while it rests; too little for another one.
WORK = 26 * MIB

Make = Callable[..., BackendSwitch]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Makes a switch that has the demo; `available` is what the machine has free."""
    made: list[BackendSwitch] = []

    def make(available: int = 1 << 40, options: BackendOptions = OPTIONS) -> BackendSwitch:
        def free(device: torch.device) -> int:
            # The old model's memory, once it is closed.
            return available + (64 * MIB if made and made[-1].shelf.used_bytes == 0 else 0)

        made.append(BackendSwitch.of(options.load(demo_model_path()), options, available=free))
        return made[-1]

    yield make
    for switch in made:
        switch.close()


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The demo's files under another name."""
    return shutil.copytree(demo_model_path(), tmp_path / "other")


async def answer(switch: BackendSwitch, params: SamplingParams = GREEDY) -> str:
    return result_of(await collect(switch.stream(GenerationRequest(QUESTION, params)))).text


async def first_words(switch: BackendSwitch) -> AsyncIterator[Event]:
    """A reply in progress, whose first words are there."""
    events = switch.stream(GenerationRequest(QUESTION, GREEDY))
    async for event in events:
        if isinstance(event, TextDelta):
            break
    return events


async def waits(switch: BackendSwitch, name: str) -> None:
    """Until a model waits for the answers of others."""
    with anyio.fail_after(PATIENCE_S):
        while not switch.coming or switch.shelf.step(name)[0] != "wait":
            await asyncio.sleep(0)


async def test_it_answers_as_what_it_holds(make: Make) -> None:
    switch = make()
    assert (switch.loaded.name, switch.is_demo, switch.context_length) == ("demo", True, 1024)
    old = switch.answering
    assert switch.media is old.media
    await switch.switch(demo_model_path(), context_length=1024)
    assert switch.answering is old, "nothing to change changes nothing"
    alone = result_of(await collect(switch.answering.stream(GenerationRequest(QUESTION, GREEDY))))
    assert await answer(switch) == alone.text != ""


@pytest.mark.parametrize("available", [1 << 40, WORK])
async def test_another_model_takes_its_place(
    make: Make, other: Path, available: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is plenty, the old one stays for whoever names it."""
    switch = make(available)
    old, expected = weakref.ref(switch.answering), await answer(switch)
    read, steps = [], []
    load = BackendOptions.load

    def watch(self: BackendOptions, *args: Any, **options: Any) -> LocalBackend:
        report = self.progress
        assert report is not None
        steps.append(switch.shelf.step("other"))
        return load(replace(self, progress=lambda *far: report(*far) or read.append(far)), *args, **options)

    monkeypatch.setattr(BackendOptions, "load", watch)
    assert [each.name for each in switch.leaving(other, 40 * MIB)] == (["demo"] if available == WORK else [])
    await switch.switch(other, context_length=512)
    assert steps == [("load", None)]
    assert read == sorted(set(read)), "more with each tensor"
    assert read[-1][0] == read[-1][1]
    assert (switch.loaded.name, switch.is_demo, switch.context_length) == ("other", False, 512)
    assert await answer(switch) == expected
    gc.collect()
    assert (old() is None) == (available == WORK)
    await switch.switch("demo")
    assert (switch.loaded.name, switch.context_length) == ("demo", 1024)
    assert await answer(switch) == expected


async def test_beside_a_server_models_share_the_memory_too(other: Path) -> None:
    switch = BackendSwitch.of(RemoteBackend("http://127.0.0.1:1"), OPTIONS, available=lambda _: 1 << 40)
    for folder in (demo_model_path(), other):
        await switch.switch(folder, context_length=512)
    assert [switch.shelf.state(each.name) for each in switch.shelf.offers] == ["loaded", "loaded"]
    switch.close()


async def test_the_old_weights_are_gone_before_the_new_ones_come(
    make: Make, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = make(WORK)
    assert isinstance(switch.answering, LocalBackend)
    weights = weakref.ref(switch.answering.loaded.model)
    load, held = BackendOptions.load, []

    def watch(self: BackendOptions, *args: object, **options: object) -> LocalBackend:
        held.append(weights())
        return load(self, *args, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(BackendOptions, "load", watch)
    await switch.switch(other)
    assert held == [None]


async def test_an_adapter_and_gates_stay_with_their_model(
    make: Make, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    cache = replace(OPTIONS.cache, kv_gates="some.safetensors")
    switch = make(options=replace(OPTIONS, lora=(LoraChoice(adapter),), cache=cache))
    named, gates, load = [], [], BackendOptions.load

    def watch(self: BackendOptions, *args: object, **options: object) -> LocalBackend:
        gates.append(self.cache.kv_gates)
        return load(self, *args, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(BackendOptions, "load", watch)
    for source in (demo_model_path(), other, demo_model_path()):
        await switch.switch(source, context_length=512)
        switch.forecast()
        named.append([each.name for each in switch.loaded.adapters])
    assert named == [["adapter"], [], ["adapter"]]
    assert gates == ["auto"], "the first one was loaded before, and stays"


async def test_another_context_keeps_the_weights(make: Make) -> None:
    switch = make(WORK)
    model, old = switch.loaded.model, switch.answering
    expected = await answer(switch)
    await switch.switch(context_length=2048)
    assert switch.context_length == 2048
    assert switch.answering is not old
    assert switch.loaded.model is model
    assert await answer(switch) == expected


@pytest.mark.skipif(find_library() is None, reason="auto speculates with the compiled operations")
async def test_a_context_without_room_for_the_layer_that_auto_took_comes_without_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen35mm.model_library.fit._LEAST_STEP_BYTES", 1)
    switch = make()
    await switch.switch(weights="int8", context_length=1024)
    assert switch.loaded.model.mtp is not None
    free_of_others = memory.memory_need

    def need(*args: Any, **how: Any) -> memory.MemoryNeed:
        if args[3].settings.speculate == "mtp":
            raise memory.NoRoomError("no room")
        return free_of_others(*args, **how)

    monkeypatch.setattr("qwen35mm.model_library.fit.memory_need", need)
    await switch.switch(context_length=2048)
    assert (switch.context_length, switch.loaded.model.mtp) == (2048, None)
    assert switch.loaded.weights == "int8"


async def test_the_disk_cache_is_written_before_another_model_comes(make: Make, other: Path, tmp_path: Path) -> None:
    options = replace(OPTIONS, cache=replace(OPTIONS.cache, directory=tmp_path / "cache"))
    switch = make(WORK, options)
    messages = [Message("user", (Text("What is in the picture? " * 40),))]
    request = GenerationRequest(messages, GREEDY, conversation="a")
    await collect(switch.stream(request))
    await switch.switch(other)
    await switch.switch(demo_model_path())
    again = result_of(await collect(switch.stream(request)))
    assert again.cache.cached_from["disk"] > 0


@pytest.mark.parametrize(("available", "settings"), [(WORK, {}), (1 << 40, {"context_length": 512})])
async def test_a_reply_in_progress_ends_before_its_model_leaves(
    make: Make, other: Path, available: int, settings: dict[str, Any]
) -> None:
    """For another one's memory, or for other settings of its own."""
    switch = make(available)
    events, old = await first_words(switch), switch.answering
    change = asyncio.ensure_future(switch.switch(None if settings else other, **settings))
    name = "demo" if settings else "other"
    await waits(switch, name)
    later = asyncio.ensure_future(answer(switch))
    assert isinstance([event async for event in events][-1], Finished)
    await change
    assert (switch.loaded.name, switch.context_length) == (name, settings.get("context_length", 8192))
    assert old.has_ended
    # It was asked of the one that was chosen then.
    assert await later


async def test_a_change_that_waits_can_be_left(make: Make, other: Path) -> None:
    switch = make(WORK)
    events = await first_words(switch)
    change = asyncio.ensure_future(switch.switch(other))
    await waits(switch, "other")
    change.cancel()
    with pytest.raises(asyncio.CancelledError):
        await change
    assert [event async for event in events]
    assert switch.loaded.name == "demo"
    assert await answer(switch)


async def test_a_server_answers_while_a_model_waits(make: Make, other: Path) -> None:
    switch = make(WORK)
    events, server = await first_words(switch), RemoteBackend("http://127.0.0.1:1")
    server.connect = AsyncMock()
    program = asyncio.ensure_future(switch.switch(other))
    await waits(switch, "other")
    with anyio.fail_after(PATIENCE_S):
        await switch.connect(server)
    assert switch.server is server
    program.cancel()
    assert [event async for event in events]


@pytest.mark.parametrize("available", [1 << 40, WORK])
async def test_a_model_that_fails_to_load_leaves_the_old_one(make: Make, other: Path, available: int) -> None:
    (other / "chat_template.jinja").unlink()
    switch = make(available)
    expected = await answer(switch)
    with pytest.raises(EngineError, match="'other' can't be loaded"):
        await switch.switch(other)
    assert (switch.loaded.name, switch.context_length) == ("demo", 1024)
    assert [each.name for each in switch.shelf.offers] == ["demo"]
    # What had to leave comes back for the next answer.
    assert switch.shelf.state("demo") == ("loaded" if available > WORK else "unloaded")
    assert await answer(switch) == expected


async def test_without_any_model_left_another_one_can_be_chosen(
    make: Make, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = make(WORK)

    def fail(*args: object, **options: object) -> LocalBackend:
        raise CheckpointError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(BackendOptions, "load", fail)
        with pytest.raises(EngineError, match="'other' can't be loaded: broken"):
            await switch.switch(other)
        with pytest.raises(EngineError, match="'demo' can't be loaded: broken"):
            await answer(switch)
    assert switch.loaded.name == "demo", "the page still has something to show"
    await switch.switch(other)
    assert await answer(switch)


async def test_what_can_be_known_before_is_said_before(make: Make, other: Path, tmp_path: Path) -> None:
    switch = make(WORK)
    old = switch.answering
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "quip"}}))
    for source, context, error, words in [
        (tmp_path / "gone", None, CheckpointError, "There is no folder 'gone'"),
        ("Qwen/Qwen3.5-2B", None, CheckpointError, "download it first"),
        (other, None, CheckpointError, r"'other' can't be used: .*quantised by 'quip'"),
        (None, 10**9, ConfigError, "demo has 8,192"),
        (None, 65_536, ConfigError, "demo has 8,192"),
    ]:
        with pytest.raises(error, match=words):
            await switch.switch(source, context_length=context)
        assert switch.shelf.state("demo") == "loaded"
    assert switch.answering is old


async def test_too_little_memory_is_said_with_the_numbers(
    make: Make, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen35mm.model_library.memory.held_bytes", lambda device, planned: 0)
    switch = make(20 * MIB)
    with pytest.raises(
        ConfigError, match=r"other doesn't fit: int4 weights take [\d.]+ MiB, the KV cache .* 20\.0 MiB of memory"
    ):
        await switch.switch(other)
    with pytest.raises(ConfigError, match=r"weights take .* Choose a smaller model"):
        await make(5 * MIB).switch(other)


@pytest.mark.parametrize(
    ("changes", "spare"),
    [({}, 1 << 40), ({"context_length": 4_096}, 0), ({"weights": "int8", "kv_dtype": "int8"}, 0)],
)
async def test_what_is_told_before_is_what_is_taken(
    make: Make, other: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], spare: int
) -> None:
    monkeypatch.setattr("qwen35mm.model_library.memory.held_bytes", lambda device, planned: 0)
    switch = make(options=BackendOptions(device="cpu", settings=EngineSettings(context_length=512)))
    told = switch.forecast(other, **changes).taken
    fixed = {"weights": told.weights, **changes}
    needed = told.needed.total_bytes
    for free, fits in ((needed - 1, False), (needed + spare, True)):
        monkeypatch.setattr(switch, "_available", lambda device, free=free: free)
        found = switch.forecast(other, **fixed).taken
        assert (found.fits, found.needed) == (fits, told.needed)
        if not fits:
            with pytest.raises(ConfigError, match="doesn't fit"):
                await switch.switch(other, **fixed)
    assert found.most is not None
    await switch.switch(other, **fixed)
    assert isinstance(switch.answering, LocalBackend)
    plan = switch.answering.engine.plan
    budgets = ("kv_bytes", "slot_bytes", "state_bytes", "vision_bytes")
    assert [getattr(plan, name) for name in budgets] == [getattr(found.most, name) for name in budgets]
    assert plan.kv_token_bytes == told.needed.kv_token_bytes
    assert await answer(switch)


async def test_what_was_picked_for_the_memory_stays(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    options = BackendOptions(device="cpu", settings=EngineSettings(context_length=1_024))
    fitted = replace(options, settings=replace(options.settings, slots=1), cache=CacheSettings(kv_dtype="int8"))
    switch = BackendSwitch.of(fitted.load(demo_model_path()), options, fitted=fitted)
    try:
        await switch.switch(context_length=512)
        assert isinstance(switch.answering, LocalBackend)
        assert switch.answering.engine.plan.num_slots == 1
        assert switch.options.cache.kv_dtype == "int8"
        before = switch.answering
        await switch.switch(context_length=512, kv_dtype="auto")
        assert switch.answering is not before
        assert (switch.options.cache.kv_dtype, switch.loaded.weights) == ("auto", "bf16")
        before = switch.answering
        await switch.switch(context_length=512, kv_keep="1.0")
        assert switch.answering is before
        await switch.switch(context_length=512, kv_keep="0.5")
        assert switch.answering is not before
        assert (switch.options.cache.kv_dtype, switch.options.cache.kv_keep) == ("auto", "0.5")
    finally:
        switch.close()


async def test_the_largest_context_is_the_planners(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen35mm.model_library.memory.held_bytes", lambda device, planned: 0)
    options = BackendOptions("float32", "cpu", settings=EngineSettings(context_length=256, slots=1))
    longest = make().loaded.config.text.max_position_embeddings
    assert await make(1 << 40, options).larger_context() == longest
    assert await make(1 << 40, options).larger_context(512) == 512
    assert await make(1 << 40, options).larger_context(256) is None
    assert await make(0, options).larger_context() is None

    limited = BackendOptions("float32", "cpu", settings=options.settings, cache=CacheSettings(kv_bytes=MIB))
    switch = make(1 << 40, limited)
    found = await switch.larger_context()
    assert found is not None
    assert 256 < found < longest
    await switch.switch(context_length=found)
    assert await answer(switch)
    with pytest.raises(ConfigError):
        await switch.switch(context_length=found + 64)


async def test_after_the_end_nothing_is_loaded(make: Make, other: Path) -> None:
    switch = make()
    switch.close()
    with pytest.raises(EngineError, match="shutting down"):
        await switch.switch(other)


def test_the_reserve_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2 << 30))
    monkeypatch.setattr(memory, "resident_bytes", lambda: 1 << 30)
    monkeypatch.setattr(memory, "host_memory_bytes", lambda: 1 << 40)
    cpu = torch.device("cpu")
    assert memory.available_bytes(cpu) == (2 << 30) - memory.RESERVE_BYTES
    monkeypatch.setattr(memory, "host_memory_bytes", lambda: 2 << 30)
    assert memory.available_bytes(cpu) == (1 << 30) - memory.RESERVE_BYTES


def test_several_devices_give_what_they_have_together() -> None:
    cards = [torch.device("cuda", index) for index in range(2)]
    free = {cards[0]: 8, cards[1]: 5}
    assert memory.measure_room([], cards, lambda device: free[device]) == 13


async def test_another_format_keeps_the_model_and_its_context(make: Make, other: Path) -> None:
    switch = make(1 << 40, replace(OPTIONS, dtype="auto"))
    assert switch.loaded.weights == "bf16"
    await switch.switch(context_length=512, weights="int4")
    assert (switch.loaded.name, switch.loaded.weights, switch.context_length) == ("demo", "int4", 512)
    assert switch.loaded.model.integers == "int4"
    assert await answer(switch)
    await switch.switch(context_length=1024)
    assert switch.loaded.weights == "int4"
    await switch.switch(other)
    assert (switch.loaded.name, switch.loaded.weights) == ("other", "int4"), "it is said for other models, too"
    with pytest.raises(ConfigError, match="weights must be"):
        await switch.switch(weights="int2")
    await switch.switch(weights="auto")
    assert switch.loaded.weights == "bf16"


async def test_a_format_that_fails_to_load_leaves_the_old_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    switch = make(2 * WORK, replace(OPTIONS, dtype="auto", weights="int8"))
    load = BackendOptions.load

    def fail(self: BackendOptions, *args: Any, **options: Any) -> LocalBackend:
        if self.weights == "int4":
            raise CheckpointError("broken")
        return load(self, *args, **options)

    monkeypatch.setattr(BackendOptions, "load", fail)
    with pytest.raises(EngineError, match="broken"):
        await switch.switch(weights="int4")
    # It was asked for once, and isn't tried again.
    assert switch.options.weights == "int8"
    assert await answer(switch)
    assert switch.loaded.weights == "int8"
    assert await answer(switch)
