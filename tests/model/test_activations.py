"""What a model holds while it computes, by its sizes, against what torch allocates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qwen35mm.assets import demo_model_path
from qwen35mm.cache import CachePools
from qwen35mm.engine.batches import prefill_batch
from qwen35mm.model import Batch, LoadedModel
from qwen35mm.model.activations import (
    logits_bytes,
    paused_prefill_bytes,
    paused_vision_bytes,
    prefill_bytes,
    vision_bytes,
)
from qwen35mm.model.load import load
from qwen35mm_kernels.cpu.native.library import find_library
from tests.allocated import held_bytes, peak_bytes

pytestmark = pytest.mark.skipif(find_library() is None, reason="torch's own operations take more: see docs/models.md")


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load(demo_model_path(), device="cpu")


@pytest.mark.parametrize("mtp", [False, True], ids=["decoder", "mtp"])
def test_a_piece_of_a_prompt(mtp: bool, demo: LoadedModel) -> None:
    demo = load(demo_model_path(), device="cpu", mtp=True) if mtp else demo
    model, num_tokens = demo.model, 512
    pools = CachePools(demo.config, num_slots=1, num_tokens=num_tokens, dtype=model.dtype, device=model.layer_devices)
    sequence = pools.new_sequence()
    sequence.prepare(num_tokens)
    token_ids = torch.arange(num_tokens) % 900
    positions = torch.arange(num_tokens).expand(3, -1).contiguous()

    def chunk() -> tuple[Batch, torch.Tensor | None]:
        batch = prefill_batch(sequence, model.embed_tokens(token_ids), positions)
        return batch, batch.embeds.clone() if mtp else None

    @torch.inference_mode()
    def run() -> None:
        batch, embeds = chunk()
        hidden = model(batch)
        if embeds is not None:
            model.write_mtp(replace(batch, embeds=embeds), torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]]))

    found = peak_bytes(run)
    planned = prefill_bytes(demo.config, model.dtype, num_tokens)
    assert 0.9 * planned < found <= planned

    @torch.inference_mode()
    def begin() -> object:
        batch, embeds = chunk()
        layers = model.by_layers(batch)
        return layers, embeds, [next(layers) for _ in range(len(model.layers) - 1)]

    planned = paused_prefill_bytes(demo.config, model.dtype, num_tokens)
    assert 0.95 * planned < held_bytes(begin) <= planned


def test_logits(demo: LoadedModel) -> None:
    model = demo.model
    hidden = torch.zeros(4, demo.config.text.hidden_size, dtype=model.dtype)
    found = peak_bytes(lambda: model.logits(hidden).float())
    # The sampler's copy comes later.
    sampled = 4 * demo.config.text.vocab_size * 4
    assert (
        0.9 * logits_bytes(demo.config, 4, model.dtype) < found + sampled <= logits_bytes(demo.config, 4, model.dtype)
    )


@pytest.mark.parametrize("grid", [(1, 32, 40), (8, 16, 32)], ids=["image", "video"])
def test_a_unit_of_the_tower(demo: LoadedModel, grid: tuple[int, int, int]) -> None:
    """As the engine runs it, which lets go of the pixels once they are embedded."""
    tower, num_patches = demo.model.tower, grid[0] * grid[1] * grid[2]

    def encode() -> torch.Tensor:
        x, rope = tower.embed(torch.zeros(num_patches, tower.config.patch_dim), grid)
        for block in tower.blocks:
            x = block(x, rope, grid[0])
        return tower.merger(x)

    planned = vision_bytes(tower.config, demo.model.dtype, num_patches, grid[0])
    assert 0.9 * planned < peak_bytes(encode) <= planned

    @torch.inference_mode()
    def begin() -> object:
        x, rope = tower.embed(torch.zeros(num_patches, tower.config.patch_dim), grid)
        return tower.blocks[0](x, rope, grid[0]), rope

    planned = paused_vision_bytes(tower.config, demo.model.dtype, num_patches)
    assert 0.95 * planned < held_bytes(begin) <= planned


def test_a_block_of_the_tower(demo: LoadedModel) -> None:
    """Planned of patches so small that embedding them takes less. Tiles of torch's attention come on top, and without
    AMX two elevenths are never held, nor here the engine's own input and the cosines, which were there before."""
    tower, grid = demo.model.tower, (1, 96, 96)
    x, rope = tower.embed(torch.zeros(96 * 96, tower.config.patch_dim), grid)
    found = peak_bytes(lambda: tower.blocks[0](x, rope, grid[0])) + x.nbytes
    planned = vision_bytes(replace(tower.config, patch_size=2), demo.model.dtype, 96 * 96, 1)
    assert 0.6 * planned < found <= planned + torch.get_num_threads() * 2**20
