"""The memory of the model's activations, computed from its sizes: the tensors that live together at the peak.

The sums follow `decoder`, `gated_delta_net`, `attention`, `mlp` and `vision` line by line; a test compares them with
torch's real allocations. Two things are left out as too small: the compiled part's temporaries, which belong to its
threads, and the tiles of torch's attention in the tower (under 1 MB a thread).
"""

from __future__ import annotations

from qwen35mm.config import ModelConfig, VisionConfig
from qwen35mm.config.model import ElementType

_FLOAT = 4
_INT64 = 8


def prefill_bytes(config: ModelConfig, dtype: ElementType, num_tokens: int) -> int:
    """Peak bytes of one chunk of a prefill.

    Args:
        dtype: of activations.
        num_tokens: of the chunk.
    """
    text, item = config.text, dtype.itemsize
    # The residual stream, the previous layer's output, and the norm of their sum live as long as the layer.
    stream = 3 * text.hidden_size * item
    heads = text.num_attention_heads * text.head_dim
    # Projections, the convolution's output, the rule's output and its norm; decays and rates in float32.
    gates = 2 * text.linear_num_value_heads
    linear = (2 * text.conv_dim + 3 * text.value_dim + gates) * item + gates * _FLOAT
    # Queries with gates, keys and values, then rotated queries and the attention's output.
    attention = (4 * heads + 2 * text.num_key_value_heads * text.head_dim) * item
    # The mixer's output and its norm.
    rest = 2 * text.hidden_size * item
    if text.moe is None:
        assert text.intermediate_size is not None
        feed_forward = rest + 3 * text.intermediate_size * item
    else:
        moe = text.moe
        chosen = moe.num_experts_per_tok
        routing = moe.num_experts * (item + 2 * _FLOAT + _INT64) + 3 * chosen * _INT64
        # Rows sorted by expert, and the output; one expert may get all tokens.
        expert = 3 * moe.intermediate_size * item + text.hidden_size * item
        feed_forward = rest + (2 * chosen + 2) * text.hidden_size * item + routing + expert
    return num_tokens * (stream + _kept_bytes(config, dtype) + max(linear, attention, feed_forward))


def paused_prefill_bytes(config: ModelConfig, dtype: ElementType, num_tokens: int) -> int:
    """Bytes that a chunk of a prefill holds between two layers, while others run."""
    return num_tokens * (2 * config.text.hidden_size * dtype.itemsize + _kept_bytes(config, dtype))


def _kept_bytes(config: ModelConfig, dtype: ElementType) -> int:
    """Per token: cosines and sines, its id, positions, row of keys and values and share of the block table, and its
    embedding for the MTP layer."""
    embedding = config.text.hidden_size * dtype.itemsize if config.text.runs_mtp else 0
    return 2 * config.text.rope.rotary_dim // 2 * _FLOAT + 6 * _INT64 + embedding


def logits_bytes(config: ModelConfig, num_rows: int, dtype: ElementType) -> int:
    """Bytes of a decode step's logits: the head's output, its float32 copy, and the sampler's sorted copy."""
    return num_rows * config.text.vocab_size * (dtype.itemsize + 2 * _FLOAT)


def vision_bytes(tower: VisionConfig, dtype: ElementType, num_patches: int, num_frames: int) -> int:
    """Peak bytes of one unit in the vision tower: in the embedding or in a block.

    Args:
        num_patches: of all its frames (temporal patches) together.
    """
    item, width = dtype.itemsize, tower.hidden_size
    pixels = tower.patch_dim * _FLOAT
    # One frame's positions: their sum, a tap's rows, and both factors in float32; four indices and weights.
    positions = 3 * width * _FLOAT + width * item + 4 * (_INT64 + _FLOAT) + 2 * _INT64
    embedding = max(
        num_patches * (pixels + (tower.patch_dim + width) * item),
        num_patches * (pixels + width * item) + num_patches // num_frames * positions,
    )
    rope = _vision_rope_bytes(tower)
    # In a block: its input twice (the engine's and its own), the norm, and the larger half. Two of attention's eleven
    # are torch's copies of keys and values in AMX's layout.
    block = rope + max(3 * width + 2 * tower.intermediate_size, 11 * width) * item
    return max(embedding, num_patches * block)


def paused_vision_bytes(tower: VisionConfig, dtype: ElementType, num_patches: int) -> int:
    """Bytes that a unit in the vision tower holds between two blocks, while others run."""
    return num_patches * (_vision_rope_bytes(tower) + tower.hidden_size * dtype.itemsize)


def _vision_rope_bytes(tower: VisionConfig) -> int:
    """Per patch: cosines and sines."""
    return 2 * (tower.hidden_size // tower.num_heads) // 2 * _FLOAT
