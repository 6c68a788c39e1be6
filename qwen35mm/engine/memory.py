"""An engine's memory plan: the cache's plan plus working memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qwen35mm.cache import CacheSettings, MemoryPlan, plan_memory
from qwen35mm.cache.kv_pool import DEFAULT_BLOCK_SIZE
from qwen35mm.cache.placement import Devices, layer_devices
from qwen35mm.config import ModelConfig
from qwen35mm.engine.settings import EngineSettings, captured_rows, padded_rows, pads_pieces
from qwen35mm.engine.tower import GRAPH_PATCHES, MOST_GRAPHS
from qwen35mm.model.activations import (
    logits_bytes,
    paused_prefill_bytes,
    paused_vision_bytes,
    prefill_bytes,
    vision_bytes,
)
from qwen35mm.prompt.segments import MAX_RUN, MAX_UNCUT_SPAN
from qwen35mm_kernels.backend import runs_triton
from qwen35mm_kernels.cpu.native.attention_prefill import uses_tiles
from qwen35mm_kernels.kv_formats import KVFormats
from qwen35mm_preprocess import MediaBudget

# Without a budget, a medium's limit in transformers' processors: 16.7 million pixels.
_MOST_TOKENS = 16_384
# Temporal patches of the shortest video.
_FEWEST_FRAMES = 2
# Host bytes per prompt token for its text, ids and offsets: the tokenizer frees them, the allocator keeps them.
# Measured: see docs/models.md.
PROMPT_TOKEN_BYTES = 704
# Bytes of torch's masks for a block of 256 queries per token of context. Measured.
_MASK_TOKEN_BYTES = 256 * 7
# Of keys in float32 at a time, while they are scored.
_SCORED_COPIES = 3
# Of a card's memory that torch's allocator takes at a time, for a graph's smaller tensors.
_SEGMENT_BYTES = 20 * 2**20
# glibc keeps freed blocks of up to 32 MiB: two of them were measured.
_KEPT_BYTES = 2 * 32 * 2**20


def plan_engine(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: Devices,
    settings: EngineSettings,
    cache: CacheSettings,
    budget: MediaBudget,
    name: str = "this model",
    weights_bytes: int = 0,
    runtime_bytes: int = 0,
    available_bytes: int | None = None,
    limit_bytes: int | None = None,
) -> MemoryPlan:
    """`plan_memory` for an engine's settings. See it and `context_length_of` for the other arguments.

    Args:
        budget: the most that media may cost; bounds the vision tower's work.

    Raises:
        ConfigError: a setting can't be used, or one sequence doesn't fit.
    """
    devices = tuple(dict.fromkeys(layer_devices(config.text, device)))
    context_length = settings.context_length_of(config.text, name)
    return plan_memory(
        config,
        dtype=dtype,
        device=device,
        num_slots=settings.slots,
        num_drafts=settings.num_drafts_on(devices[0]),
        context_length=context_length,
        block_size=DEFAULT_BLOCK_SIZE,
        settings=cache,
        available_bytes=available_bytes,
        limit_bytes=limit_bytes,
        weights_bytes=weights_bytes,
        work_bytes=work_bytes(config, dtype, settings, budget, devices, context_length)
        + (eviction_bytes(config, cache.kv_formats(dtype)) if cache.keep.evicts else 0),
        runtime_bytes=runtime_bytes + context_length * PROMPT_TOKEN_BYTES,
    )


def work_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    settings: EngineSettings,
    budget: MediaBudget,
    devices: Sequence[torch.device],
    context_length: int,
) -> int:
    """Most working memory in bytes: the largest prompt chunk or vision unit, what paused prompts hold, and logits; on a
    card also the vision tower's graphs.

    Graphs of pieces keep as much as the largest of them, beside what is launched one by one.

    One prompt or history commit is computed at a time. Every other one may be paused: one in the vision tower, the rest
    between two layers of a chunk. Decoding a medium's file isn't included: that depends on the file.
    """
    rows, device = settings.slots, devices[0]
    drafts = settings.num_drafts_on(device)
    # The sampler's tables: each slot's tokens, and the banned ids.
    tables = (2 * (rows + 1) + 1) * config.text.vocab_size
    chunk_tokens, graphs = settings.chunk_tokens_on(device), 0
    if pads_pieces(devices):
        most = max(captured_rows(chunk_tokens))
        graphs = prefill_bytes(config, dtype, most) + 2 * most * config.text.hidden_size * dtype.itemsize
        chunk_tokens = padded_rows(chunk_tokens)
    chunk = prefill_bytes(config, dtype, chunk_tokens)
    if device.type == "cpu" and uses_tiles(dtype):
        chunk += _tiles_bytes(config, dtype, context_length)
    running, paused = media_bytes(config, dtype, budget), media_bytes(config, dtype, budget, is_paused=True)
    others = rows * paused_prefill_bytes(config, dtype, chunk_tokens)
    if runs_triton(device):
        graphs += tower_graphs_bytes(config, dtype)
    return max(chunk + paused, running) + graphs + others + logits_bytes(config, rows + drafts, dtype) + tables


def eviction_bytes(config: ModelConfig, formats: KVFormats) -> int:
    """Bytes that choosing and moving the longest segment's kept rows takes, one layer at a time."""
    text = config.text
    rows = 2 * sum(format.row_bytes(text.head_dim) for format in formats)
    floats = _SCORED_COPIES * text.head_dim * torch.float32.itemsize
    return (MAX_RUN + MAX_UNCUT_SPAN) * text.num_key_value_heads * (rows + floats)


def _tiles_bytes(config: ModelConfig, dtype: torch.dtype, context_length: int) -> int:
    """Bytes that a prefill's attention in torch takes for the whole context, on AMX's tiles.

    The keys and values of a layer, read in `dtype` and then packed; the masks; and what the allocator keeps of them.
    """
    read = 2 * config.text.num_key_value_heads * config.text.head_dim * dtype.itemsize
    taken = context_length * (2 * read + _MASK_TOKEN_BYTES)
    return taken + min(taken // 2, _KEPT_BYTES)


def pixel_bytes(config: ModelConfig, budget: MediaBudget) -> int:
    """Bytes of the largest medium's 8-bit pixels; 0 without a vision tower."""
    if config.tower is None:
        return 0
    tower = config.vision
    image, video = (
        (most or _MOST_TOKENS) * tower.spatial_merge_size**2 * tower.patch_dim
        for most in (budget.max_image_tokens, budget.max_video_tokens)
    )
    return max(image // tower.temporal_patch_size, video)


def tower_graphs_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that the vision tower's graphs keep: their work, and 8-bit pixels and positions; 0 without a tower."""
    if config.tower is None:
        return 0
    tower = config.vision
    kept = tower.patch_dim + tower.hidden_size * dtype.itemsize
    work = vision_bytes(tower, dtype, GRAPH_PATCHES, num_frames=1)
    return work + GRAPH_PATCHES * kept + MOST_GRAPHS * _SEGMENT_BYTES


def media_bytes(config: ModelConfig, dtype: torch.dtype, budget: MediaBudget, *, is_paused: bool = False) -> int:
    """Bytes of the largest medium's 8-bit pixels and of its largest unit's work; 0 without a vision tower.

    Args:
        is_paused: count what the unit holds between two blocks, instead of its peak.
    """
    if config.tower is None:
        return 0
    tower = config.vision
    patches_per_token = tower.spatial_merge_size**2

    def cost(max_tokens: int | None, num_frames: int, pixel_bytes: int) -> int:
        num_patches = (max_tokens or _MOST_TOKENS) * patches_per_token
        if is_paused:
            return num_patches * pixel_bytes + paused_vision_bytes(tower, dtype, num_patches)
        return num_patches * pixel_bytes + vision_bytes(tower, dtype, num_patches, num_frames)

    image_pixels = tower.patch_dim // tower.temporal_patch_size
    image = cost(budget.max_image_tokens, 1, image_pixels)
    return max(image, cost(budget.max_video_tokens, _FEWEST_FRAMES, tower.patch_dim))
