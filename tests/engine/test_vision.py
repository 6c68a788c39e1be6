"""How the vision tower's work is cut for a device, and what pixels become there."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.make_random import make_config
from qwen35mm.cache import CacheSettings
from qwen35mm.config import ModelConfig
from qwen35mm.contract import Image, Progress, Text
from qwen35mm.engine import DeferredMedia, Engine, EngineSettings
from qwen35mm.engine.vision import VisionUnit, encode, look_up, patch_layers_per_step
from qwen35mm.model import LoadedModel
from qwen35mm.model.vision import PatchMerger, VisionBlock
from qwen35mm_preprocess import Patches, PreparedMedia
from tests.engine.conftest import MakeRequest, noise
from tests.engine.exact import DENSE, Chat, chat_model, picture, user

GPU, CPU = torch.device("cuda"), torch.device("cpu")
MEGAPIXEL_PATCHES = 64 * 64


def test_a_gpu_encodes_a_picture_of_a_megapixel_in_one_step() -> None:
    depth = ModelConfig.from_dict(make_config("9B", "bfloat16")).vision.depth
    assert patch_layers_per_step(GPU) >= depth * MEGAPIXEL_PATCHES
    assert patch_layers_per_step(CPU) < depth * MEGAPIXEL_PATCHES


@pytest.mark.parametrize("patch_layers", [1, 10**6])
@torch.inference_mode()
def test_layers_in_groups_keep_the_bits(patch_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen35mm.engine.vision.CPU_PATCH_LAYERS", patch_layers)
    loaded = chat_model(DENSE)
    (medium,) = Chat(loaded).media([user(Image(picture(1)))])
    grid, tower = medium.plan.grid_thw, loaded.model.tower
    *before, (num_layers, features) = encode(loaded.model, VisionUnit(0, 0, 1, grid, b""), medium)
    assert num_layers == tower.config.depth
    assert before == ([(1, None)] if patch_layers == 1 else [])
    assert features is not None
    assert torch.equal(features, tower(torch.from_numpy(medium.pixel_values), grid))


@pytest.mark.parametrize("num_frames", [1, 2])
def test_pixels_are_looked_up_on_a_device_as_on_the_host(num_frames: int) -> None:
    rng = np.random.default_rng(num_frames)
    pixels = rng.permuted(np.arange(130 * 3 * num_frames * 256) % 256).astype(np.uint8)
    patches = Patches(
        pixels.reshape(130, 3, num_frames, 256), rng.standard_normal((3, 256), np.float32), temporal_patch_size=2
    )
    found = look_up(torch.from_numpy(patches.pixels), torch.from_numpy(patches.table), 2)
    np.testing.assert_array_equal(found.numpy(), patches.values())


def test_pixels_activations_and_features_leave_as_soon_as_they_are_used(
    loaded: LoadedModel, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By reference counts alone, and not at the reply's end."""
    pixels: list[weakref.ref[np.ndarray]] = []
    activations: list[weakref.ref[torch.Tensor]] = []
    features: list[weakref.ref[torch.Tensor]] = []

    def watch(owner: type[torch.nn.Module], found: list[weakref.ref[torch.Tensor]]) -> None:
        forward = owner.forward

        def watched(self: torch.nn.Module, *args: Any) -> torch.Tensor:
            out = forward(self, *args)
            found.append(weakref.ref(out))
            return out

        monkeypatch.setattr(owner, "forward", watched)

    watch(VisionBlock, activations)
    watch(PatchMerger, features)

    def load(medium: PreparedMedia) -> PreparedMedia:
        copied = replace(medium, patches=replace(medium.patches, pixels=medium.patches.pixels.copy()))
        pixels.append(weakref.ref(copied.patches.pixels))
        return copied

    request = make_request(Image(noise(0)), Text("and then " * 20), Image(noise(1)), Text("what " * 30))
    prepared = [medium for medium in request.media if isinstance(medium, PreparedMedia)]
    media = tuple(DeferredMedia(medium.plan, functools.partial(load, medium)) for medium in prepared)
    first, second = request.prompt.spans
    engine = Engine(loaded, EngineSettings(chunk_tokens=8), CacheSettings(reuse=False))
    engine.add(replace(request, media=media))
    gc.collect()
    gc.disable()
    try:
        seen = set()
        while engine.has_requests:
            for event in [output.event for output in engine.step()]:
                if isinstance(event, Progress) and event.phase == "prefill":
                    assert [len(pixels), len(features), len(activations)] == [2, 2, 4]
                    assert [each() for each in (*pixels, *activations)] == [None] * 6
                    held = [each() is not None for each in features]
                    assert held == [event.done < span.stop for span in (first, second)]
                    seen.add(tuple(held))
        assert seen == {(True, True), (False, True), (False, False)}
    finally:
        gc.enable()


def test_a_reply_that_has_begun_holds_no_pixels(loaded: LoadedModel, make_request: MakeRequest) -> None:
    request = make_request(Image(noise(0)), Text("What is this?"))
    request = replace(request, media=tuple(map(copy.copy, request.media)))
    medium = weakref.ref(request.media[0])
    engine = Engine(loaded)
    engine.add(request)
    del request
    gc.collect()
    gc.disable()
    try:
        while not engine._decoder.running:
            assert medium() is not None, "it may have to begin again"
            engine.step()
        assert medium() is None
    finally:
        gc.enable()
