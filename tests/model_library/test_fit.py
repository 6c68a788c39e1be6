"""Formats of weights: what each takes, which one is taken where memory is short, and what is said of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.cache import CacheSettings
from qwen35mm.checkpoints.quantised import read_checkpoint
from qwen35mm.config import ModelConfig
from qwen35mm.engine import EngineSettings
from qwen35mm.engine.memory import pixel_bytes
from qwen35mm.errors import ConfigError
from qwen35mm.model.weights import loaded_bytes, weights_bytes
from qwen35mm.model_library import BackendOptions, BackendSwitch, fit_source, with_slots_for_many
from qwen35mm.model_library.fit import fit, offered_formats
from qwen35mm.model_library.memory import MemoryNeed, NoRoomError
from qwen35mm_kernels.cpu.native.library import find_library
from qwen35mm_preprocess import MediaBudget
from tests.checkpoints import ggufs
from tests.checkpoints.packers import write_packed
from tests.model.test_quantised_models import is_matrix, write_fp8
from tests.tiny import DENSE, MOE, TinySpec, build

MIB = 1 << 20
CPU = torch.device("cpu")
OPTIONS = BackendOptions(
    device="cpu",
    settings=EngineSettings(context_length=1024, slots=2),
    cache=CacheSettings(kv_bytes=2 << 20, reuse=False),
)


def demo_mib() -> str:
    """Of the demo's file: all its numbers at 2 bytes, save those of the layer that no engine runs."""
    with safe_open(demo_model_path() / "model.safetensors", "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys() if name[:4] != "mtp."]  # noqa: SIM118
    return f"{2 * sum(map(math.prod, shapes)) / MIB:.1f}"


def fit_demo(memory_bytes: int, options: BackendOptions = OPTIONS) -> tuple[BackendOptions, MemoryNeed]:
    return fit(options, demo_model_path(), "demo", devices=[CPU], memory_bytes=memory_bytes)


def needed(weights: str) -> int:
    return fit_demo(1 << 40, replace(OPTIONS, weights=weights))[1].total_bytes


@pytest.mark.skipif(find_library() is None, reason="auto speculates with the compiled operations")
def test_the_layer_that_drafts_is_taken_where_nothing_shrinks_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "qwen35mm.model_library.fit")
    assert fit_demo(1 << 40)[0] == OPTIONS, "the demo's steps are too short"
    assert "a step is so short" in caplog.text
    monkeypatch.setattr("qwen35mm.model_library.fit._LEAST_STEP_BYTES", 1)
    options, with_layer = fit_demo(1 << 40)
    assert options.settings.speculate == "mtp"
    assert options == replace(OPTIONS, settings=options.settings)
    assert fit_demo(with_layer.total_bytes) == (options, with_layer)
    caplog.clear()
    without, need = fit_demo(with_layer.total_bytes - 1)
    assert without == OPTIONS
    assert need.total_bytes < with_layer.total_bytes
    assert "less of earlier prompts could be kept beside it" in caplog.text
    caplog.clear()
    fixed = replace(OPTIONS, cache=replace(OPTIONS.cache, state_bytes=0, vision_bytes=0))
    fixed_bytes = fit_demo(1 << 40, fixed)[1].total_bytes
    assert fit_demo(fixed_bytes - 1, fixed)[0].settings.speculate == "auto"
    for speculate in ("off", "ngram"):
        asked = replace(OPTIONS, settings=replace(OPTIONS.settings, speculate=speculate))
        assert fit_demo(1 << 40, asked)[0] == asked
    within = replace(OPTIONS, max_memory=64 << 30)
    assert fit_source(within, demo_model_path(), "demo")[0].settings.speculate == "mtp"


def test_the_first_format_that_fits_is_taken_and_said(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {weights: needed(weights) for weights in ("bf16", "int8", "int4")}
    assert sizes["bf16"] > sizes["int8"] > sizes["int4"]
    assert fit_demo(sizes["bf16"])[0].weights == "auto"
    assert not caplog.records
    for memory_bytes, weights in ((sizes["bf16"] - 1, "int8"), (sizes["int8"] - 1, "int4")):
        caplog.clear()
        options, need = fit_demo(memory_bytes)
        assert options.weights == weights
        assert need.total_bytes == sizes[weights]
        assert f"demo has {weights} weights: " in caplog.text
        assert f"instead of {demo_mib()} MiB of bf16, which don't fit into" in caplog.text
        assert "1,024 tokens" in caplog.text
    with pytest.raises(NoRoomError, match=r"int4 weights take .*Choose a smaller model"):
        fit_demo(sizes["int4"] - 1)


def test_a_format_that_was_asked_for_is_kept_to_and_a_smaller_one_named() -> None:
    small = needed("int8")
    with pytest.raises(NoRoomError, match=f"weights take {demo_mib()} MiB.* With --weights int8 it fits: "):
        fit_demo(small, replace(OPTIONS, weights="bf16"))
    with pytest.raises(NoRoomError, match=r"int8 weights take .* With --weights int4 it fits"):
        fit_demo(small - 1, replace(OPTIONS, weights="int8"))
    assert fit_demo(small, replace(OPTIONS, weights="int8"))[0].weights == "int8"
    with pytest.raises(ConfigError, match="weights must be auto, bf16, int8, int4 or fp8"):
        fit_demo(small, replace(OPTIONS, weights="q4"))


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_card_with_triton_takes_integers_that_are_asked_for(
    has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_card(weights: str, memory_bytes: int) -> tuple[BackendOptions, MemoryNeed]:
        options = replace(OPTIONS, weights=weights, device="cuda:0")
        return fit(options, demo_model_path(), "demo", devices=[torch.device("cuda", 0)], memory_bytes=memory_bytes)

    monkeypatch.setattr("qwen35mm.model.weights.multiplies_fp8", lambda device: False)
    if not has_kernels:
        monkeypatch.setattr("qwen35mm_kernels.backend.why_not_triton", lambda kind: "There is no Triton")
        monkeypatch.setattr("qwen35mm.model.weights.why_not_triton", lambda kind: "There is no Triton")
        with pytest.raises(ConfigError, match=r"int8 weights need Triton's kernels on cuda\. There is no Triton"):
            on_a_card("int8", 1 << 40)
    needs = {weights: on_a_card(weights, 1 << 40)[1] for weights in ("bf16", *("int8", "int4") * has_kernels)}
    sizes = {weights: need.plan.weights_bytes for weights, need in needs.items()}
    most = on_a_card("auto", needs["bf16"].total_bytes)[0]
    assert most.weights == "auto"
    # It takes fewer bits where somebody says so, and says which would fit.
    for weights in ("auto", "bf16"):
        with pytest.raises(NoRoomError) as refused:
            on_a_card(weights, needs["bf16"].total_bytes - 1)
        assert ("With --weights int8 it fits" in str(refused.value)) == has_kernels
    if has_kernels:
        assert sizes["bf16"] > sizes["int8"] > sizes["int4"]


def test_kept_prompts_get_what_weights_leave_before_the_weights_are_made_smaller() -> None:
    options = replace(OPTIONS, cache=CacheSettings(reuse=False))
    plenty = fit_demo(1 << 40, options)[1]
    fitted, need = fit_demo(plenty.total_bytes - (1 << 20), options)
    assert fitted.weights == "auto"
    assert plenty.plan.kv_bytes - (2 << 20) < need.plan.kv_bytes < plenty.plan.kv_bytes
    assert fitted.cache.kv_bytes is not None
    one_context = 1024 * need.plan.kv_token_bytes
    least = need.total_bytes - need.plan.kv_bytes + one_context
    assert fit_demo(least, options)[1].plan.kv_bytes == one_context
    assert fit_demo(least - 1, options)[0].weights == "int8"


def test_the_first_model_is_loaded_though_no_format_fits(caplog: pytest.LogCaptureFixture) -> None:
    options, folder = fit_source(OPTIONS, demo_model_path(), "demo", available=lambda device: 1)
    assert (options.weights, folder) == ("int4", demo_model_path())
    assert "demo doesn't fit" in caplog.text
    loaded = options.load_model(folder)
    assert (loaded.weights, loaded.model.integers) == ("int4", "int4")


@pytest.mark.parametrize(("cores", "slots"), [(1, 4), (6, 6), (64, 16)])
def test_slots_grow_with_the_cores(monkeypatch: pytest.MonkeyPatch, cores: int, slots: int) -> None:
    monkeypatch.setattr("qwen35mm.model_library.fit.usable_cores", lambda: cores)

    def grown(**changes: Any) -> int:
        options = replace(OPTIONS, settings=EngineSettings(context_length=1024), **changes)
        return with_slots_for_many(options, demo_model_path(), "demo", available=lambda device: 16 << 30).settings.slots

    assert grown() == slots
    assert grown(fixed_slots=True) == 4
    assert grown(budget=MediaBudget(max_image_tokens=256, max_video_tokens=1 << 20)) == 4


def test_slots_take_an_eighth_of_what_weights_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen35mm.model_library.fit.usable_cores", lambda: 16)
    budget = MediaBudget(max_image_tokens=64, max_video_tokens=256)
    options = replace(OPTIONS, settings=EngineSettings(context_length=1024), budget=budget)
    need = fit_demo(1 << 40, replace(options, settings=replace(options.settings, slots=16)))[1]
    media = 3 * pixel_bytes(ModelConfig.from_pretrained(demo_model_path()), budget)
    least = need.plan.weights_bytes + 8 * (need.plan.slot_bytes + 16 * media)

    def grown(memory_bytes: int, options: BackendOptions = options) -> int:
        name = "demo"
        return with_slots_for_many(options, demo_model_path(), name, available=lambda _: memory_bytes).settings.slots

    assert [grown(least), grown(least - 1), grown(1)] == [16, 8, 4]
    # What memory left one slot of, or nothing for what is kept, stays as it is.
    assert grown(1 << 40, replace(options, settings=replace(options.settings, slots=1))) == 1
    assert grown(1 << 40, replace(options, max_memory=1)) == 4
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for kind in (
        "model.weights.multiplies_fp8",
        "model.weights.multiplies_integers",
        "model_library.fit.multiplies_integers",
        "engine.memory.pads_pieces",
        "engine.memory.runs_triton",
    ):
        monkeypatch.setattr(f"qwen35mm.{kind}", lambda device: False)
    assert grown(1 << 40, replace(options, device="cuda:0")) == 16


def test_a_card_has_the_checkpoints_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    options = replace(OPTIONS, device="cuda:0")
    assert fit_source(options, demo_model_path(), "demo", available=lambda device: 1)[0] == options


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_what_is_offered_says_what_it_takes_and_gives(
    moe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoint"
    build(MOE if moe else DENSE).save_pretrained(folder)
    config = ModelConfig.from_pretrained(folder)
    stored = read_checkpoint(folder, config.quantization)
    offers = offered_formats(config, stored, torch.bfloat16, [CPU])
    assert [offer.weights for offer in offers] == ["bf16", "int8", "int4"]
    assert [offer.num_bytes for offer in offers] == sorted((offer.num_bytes for offer in offers), reverse=True)
    if find_library() is not None:
        own, eight, four = (offer.speedup for offer in offers)
        assert own is None
        assert eight is not None
        assert four is not None
        assert 1.2 < eight < 16 / 8.5
        assert eight < four < 16 / 4.5
    monkeypatch.setattr("qwen35mm.model_library.fit.find_library", lambda: None)
    assert {offer.speedup for offer in offered_formats(config, stored, torch.bfloat16, [CPU])} == {None}
    card = [torch.device("cuda", 0)]
    on_a_card = offered_formats(config, stored, torch.bfloat16, card)
    assert [(offer.weights, offer.num_bytes, offer.speedup) for offer in on_a_card] == [
        (name, weights_bytes(stored, torch.bfloat16, integers, card), None)
        for name, integers in (("bf16", None), ("int8", "int8"), ("int4", "int4"))
    ]
    monkeypatch.setattr("qwen35mm_kernels.backend.why_not_triton", lambda kind: "There is no Triton")
    assert offered_formats(config, stored, torch.bfloat16, card) == ()


@pytest.mark.parametrize(("multiplies", "spec"), [(True, None), (False, None), (True, MOE)])
def test_a_card_that_multiplies_fp8_takes_half_of_bfloat16_for_its_matrices(
    multiplies: bool, spec: TinySpec | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo's, and a mixture's with its experts."""
    monkeypatch.setattr("qwen35mm.model.weights.multiplies_fp8", lambda device: multiplies)
    source = demo_model_path()
    if spec is not None:
        source = tmp_path / "plain"
        build(spec).save_pretrained(source)
    write_fp8(source, tmp_path / "fp8", 128)

    def weights_of(weights: str) -> int:
        card = torch.device("cuda", 0)
        options = replace(OPTIONS, weights=weights, device="cuda:0")
        chosen, need = fit(options, tmp_path / "fp8", "demo", devices=[card], memory_bytes=1 << 40)
        assert chosen.weights == weights
        return need.plan.weights_bytes

    tensors = [x.numel() for name, x in load_file(source / "model.safetensors").items() if is_matrix(name)]
    saved = weights_of("bf16") - weights_of("auto")
    assert (0.99 * sum(tensors) < saved < sum(tensors)) if multiplies else saved == 0


@pytest.mark.skipif(find_library() is None, reason="there is no compiled part for this processor")
@pytest.mark.parametrize("method", ["gptq", "fp8"])
def test_a_quantised_checkpoint_is_taken_as_it_is_stored(method: str, tmp_path: Path) -> None:
    ggufs.write_checkpoint(ggufs.DENSE, tmp_path / "plain")
    folder = tmp_path / method
    write_packed(method, tmp_path / "plain", folder, lambda name: "language_model" in name and "_proj.weight" in name)

    def fitted(weights: str, memory_bytes: int = 1 << 40) -> tuple[BackendOptions, MemoryNeed]:
        options = replace(OPTIONS, weights=weights)
        return fit(options, folder, method, devices=[CPU], memory_bytes=memory_bytes)

    chosen, need = fitted("auto")
    plain = fitted("bf16")[1]
    assert chosen.weights == "auto"
    # Small floats become bfloat16.
    assert (need.plan.weights_bytes == plain.plan.weights_bytes) == (method == "fp8")
    fits = fitted("auto", plain.total_bytes - 1)[0].weights
    assert fits == ("int8" if method == "fp8" else "auto")
    with LocalBackend.load(folder, device="cpu") as backend:
        assert backend.loaded.weights == ("bf16" if method == "fp8" else "as stored")
        assert need.plan.weights_bytes <= loaded_bytes(backend.loaded.model) < 1.1 * need.plan.weights_bytes
        switch = BackendSwitch.of(backend, replace(OPTIONS, kv_directory=folder))
        assert switch.options.kv_directory is None
        assert [offer.weights for offer in switch.forecast().offers] == ["bf16", "int8", "int4"]


def test_a_context_that_memory_doesnt_hold_lies_in_a_file_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("qwen35mm.cache.planner.file_room", lambda folder: 1 << 40)
    options = replace(OPTIONS, cache=CacheSettings(), settings=EngineSettings(context_length=8_192))
    options = replace(options, kv_directory=tmp_path)
    beside = fit_demo(1 << 40, replace(options, cache=CacheSettings(kv_directory=tmp_path, reuse=False)).in_file())[1]
    short = beside.total_bytes + MIB

    def fitted(options: BackendOptions, memory_bytes: int) -> BackendOptions:
        caplog.clear()
        return fit_source(options, demo_model_path(), "demo", available=lambda device: memory_bytes)[0]

    in_memory = fitted(options, 1 << 30)
    assert (in_memory.cache.kv_directory, in_memory.settings.slots) == (None, 4)
    in_file = fitted(options, short)
    assert (in_file.cache.kv_directory, in_file.settings.slots) == (tmp_path, 1)
    assert not caplog.records
    assert fitted(options.with_context(None), short).cache.kv_directory is None
    assert "demo doesn't fit" in caplog.text
    fixed = replace(options, fixed_slots=True)
    assert fitted(fixed, short).cache.kv_directory is None
    assert "4 were asked for: --slots 1" in caplog.text
    monkeypatch.setattr("qwen35mm.cache.planner.file_room", lambda folder: MIB)
    assert fitted(options, short).cache.kv_directory is None
    assert "nor on the disk" in caplog.text
