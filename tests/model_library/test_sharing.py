"""The memory of several models in one program, and whose adapters are whose."""

from __future__ import annotations

import asyncio
import gc
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.shelf import LentBackend, Shelf
from qwen35mm.cache import CacheSettings
from qwen35mm.cache.planner import STARTED_BYTES
from qwen35mm.checkpoints.lora_choices import read_choices
from qwen35mm.cli import app
from qwen35mm.contract import GenerationRequest, Message, SamplingParams, Text
from qwen35mm.engine import EngineSettings
from qwen35mm.errors import CheckpointError, ConfigError, EngineError
from qwen35mm.model_library import BackendOptions
from qwen35mm.model_library.memory import NoRoomError
from qwen35mm.model_library.sharing import NamedModel, plan_models, shares
from qwen35mm.settings import ModelOptions
from tests.backends.events import collect, result_of
from tests.small_adapters import write_adapter
from tests.tiny import DENSE, TinyCheckpoints

MIB = 1 << 20
OPTIONS = BackendOptions(
    dtype="float32",
    device="cpu",
    settings=EngineSettings(context_length=1024, slots=2),
    cache=CacheSettings(vision_bytes=MIB),
)
DEMO = NamedModel(demo_model_path(), "demo")
BEE = NamedModel(demo_model_path(), "bee")


def test_gates_of_one_model_are_not_for_several() -> None:
    options = replace(OPTIONS, cache=CacheSettings(kv_gates="some.safetensors"))
    with pytest.raises(ConfigError, match=r"--kv-gates some\.safetensors: a file belongs to one model"):
        plan_models([DEMO, BEE], options)


@pytest.mark.parametrize(
    ("least", "memory", "expected"),
    [
        ([10], 30, [30]),
        ([10, 10], 30, [15, 15]),
        ([4, 10], 30, [12, 18]),
        ([4, 10], 14, [4, 10]),
        # They take turns: each may have everything.
        ([10, 10], 19, [19, 19]),
        # Two small ones stay together; the large one fits beside one of them.
        ([2, 2, 6], 8, [4, 4, 6]),
        ([40], 30, [40]),
    ],
)
def test_what_is_left_is_shared(least: list[int], memory: int, expected: list[int]) -> None:
    assert shares(least, memory) == expected


def plan(memory: int, *models: NamedModel, options: BackendOptions = OPTIONS):
    return plan_models(models, options, available=lambda device: memory)


def test_models_that_fit_stay_together_each_with_its_own_cache(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (alone,), _ = plan(1 << 40, DEMO)
    assert alone.options.cache == OPTIONS.cache, "where there is plenty, nothing is decided here"
    (one, two), memory = plan(2 * alone.least_bytes + 100 * MIB, DEMO, BEE)
    assert one.num_bytes + two.num_bytes <= memory
    assert one.least_bytes <= one.num_bytes < alone.num_bytes, "each keeps less of earlier prompts"
    assert one.options.cache.kv_bytes is not None
    assert (one.context_length, one.sees, one.options.weights) == (1024, True, "auto")
    assert "all stay loaded" in caplog.text
    caplog.clear()
    (one, two), memory = plan(int(1.5 * alone.least_bytes), DEMO, BEE)
    assert max(one.num_bytes, two.num_bytes) <= memory < one.num_bytes + two.num_bytes
    assert "so they take turns" in caplog.text


@pytest.mark.parametrize(("spare", "stay"), [(0, True), (-1, False)])
def test_the_command_says_what_a_start_does(spare: int, stay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,), _ = plan(1 << 40, DEMO)
    memory = 2 * alone.least_bytes + spare
    (one, two), _ = plan(memory + STARTED_BYTES, DEMO, BEE)
    assert (one.num_bytes + two.num_bytes <= memory) == stay
    monkeypatch.setattr("qwen35mm.model_library.plan.room_for_models", lambda options: memory)
    monkeypatch.setattr(ModelOptions, "backend_options", lambda self: OPTIONS)
    done = CliRunner().invoke(app, ["plan", *[str(demo_model_path())] * 2])
    assert ("they all stay loaded" in " ".join(done.stdout.split())) == stay, done.output


def test_memory_that_is_given_holds_all_of_them() -> None:
    with pytest.raises(NoRoomError, match=r"--max-memory 10\.0 MiB"):
        plan(1 << 40, DEMO, BEE, options=replace(OPTIONS, max_memory=10 * MIB))


def test_an_adapter_belongs_to_the_first_model_that_it_fits(tmp_path: Path) -> None:
    tiny = NamedModel(TinyCheckpoints(tmp_path).folder(DENSE), "tiny")
    folder = write_adapter(tmp_path / "poet")
    options = replace(OPTIONS, lora=read_choices(f"poet={folder}"))
    (first, second), _ = plan(1 << 40, tiny, DEMO, options=options)
    assert (first.offer().adapters, second.offer().adapters) == ((), ("poet",))
    (first, second), _ = plan(1 << 40, DEMO, BEE, options=options)
    assert (first.offer().adapters, second.offer().adapters) == (("poet",), ())
    with pytest.raises(CheckpointError, match="poet"):
        plan(1 << 40, tiny, NamedModel(tiny.source, "other"), options=options)


async def test_two_answer_at_once_with_the_bits_of_one_alone() -> None:
    (one, two), memory = plan(1 << 40, DEMO, BEE)
    shelf = Shelf([one.offer(), two.offer()], memory)
    # Sampled: the same bits give the same words.
    asked = GenerationRequest(
        [Message("user", (Text("What is a circle?"),))], SamplingParams(temperature=1.0, seed=1, max_tokens=12)
    )
    try:
        backends: list[Any] = [LentBackend(shelf, name) for name in ("demo", "bee")]
        alone = [result_of(await collect(each.stream(asked))).token_ids for each in backends]
        both = await asyncio.gather(*(collect(each.stream(asked)) for each in backends))
        assert [result_of(each).token_ids for each in both] == alone
        assert alone[0] == alone[1]
    finally:
        shelf.close()


async def test_a_damaged_model_is_found_before_another_leaves_and_repaired_ones_load(tmp_path: Path) -> None:
    folder = shutil.copytree(demo_model_path(), tmp_path / "bee")
    (one, two), _ = plan(1 << 40, DEMO, NamedModel(folder, "bee"))
    shelf = Shelf([one.offer(), two.offer()], one.num_bytes)
    shelf.shown = "demo"
    weights = (folder / "model.safetensors").read_bytes()
    try:
        async with shelf.lease("demo") as backend:
            (folder / "model.safetensors").write_bytes(weights[:100_000])
            with pytest.raises(EngineError, match="'bee' can't be loaded: "):
                await shelf.take("bee")
            assert not backend.has_ended
        assert (shelf.state("demo"), shelf.state("bee")) == ("loaded", "failed")
        (folder / "model.safetensors").write_bytes(weights)
        async with shelf.lease("bee") as other:
            assert other.loaded.name == "bee"
            # The program's own memory is no model's.
            made = other.engine.plan
            assert made.total_bytes - made.runtime_bytes <= two.num_bytes
        assert shelf.state("demo") == "unloaded"
        assert backend.has_ended
        # A page goes on counting with it, and its weights are gone all the same.
        weights_gone = weakref.ref(backend.loaded.model)
        del backend
        gc.collect()
        assert weights_gone() is None
        assert shelf.known("demo").count_tokens([Message("user", (Text("Hello"),))]) > 0
    finally:
        shelf.close()
