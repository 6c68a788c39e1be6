"""How the vision tower's work is cut for a device, and what pixels become there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.make_random import make_config
from qwen35mm.config import ModelConfig
from qwen35mm.engine.vision import VisionUnit, encode, look_up, patch_layers_per_step
from qwen35mm.prompt import Image
from qwen35mm_preprocess import Patches
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
    *before, (num_layers, features) = encode(tower, VisionUnit(0, 0, 1, grid, b""), medium)
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
