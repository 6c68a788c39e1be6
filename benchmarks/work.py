"""What a model has to do, from its config: products of a prompt's token, and bytes read for a decoded one.

Counted is the least there is to do, and only what grows with the model: products with weights, attention over the
tokens before, the recurrence token by token as its formula stands. Norms, activations and the sampler are left out, as
is whatever an engine computes beside it. So a share of a machine's rate is a share of what could be had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from qwen35mm.checkpoints.tensor_names import EMBEDDING, LM_HEAD, VISION_PREFIX, Target, checkpoint_targets
from qwen35mm.config import ModelConfig
from qwen35mm.model.weights import bytes_read_per_token

# Operations a number of a recurrent state and token: the decay, two each for S^T k, the update and S^T q.
_RECURRENCE_FLOPS = 7


def text_targets(config: ModelConfig) -> list[Target]:
    """The text model's tensors as a checkpoint has them."""
    targets = checkpoint_targets(config, separate_head=not config.tie_word_embeddings, split_experts=False)
    return [target for target in targets if not target.name.startswith(VISION_PREFIX)]


def product_shapes(config: ModelConfig) -> Counter[tuple[int, int]]:
    """(rows, columns) of the matrices that each of a prompt's tokens is multiplied with, and how often.

    Those that have the same input count as one, stacked: it is how one would compute them. The output head isn't
    there: a prompt needs it once.
    """
    stacked: dict[str, list[Target]] = {}
    for target in text_targets(config):
        if target.name not in (EMBEDDING, LM_HEAD) and len(target.shape) > 1 and "conv1d" not in target.name:
            stacked.setdefault(target.parameter, []).append(target)
    shapes: Counter[tuple[int, int]] = Counter()
    for members in stacked.values():
        *experts, _, columns = members[0].shape
        rows = sum(member.shape[-2] for member in members)
        shapes[rows, columns] += config.text.moe.num_experts_per_tok if experts and config.text.moe else 1
    return shapes


def prefill_flops(config: ModelConfig, length: int) -> float:
    """Floating point operations of a prompt of `length` tokens, with the logits of its last one."""
    text = config.text
    products = sum(2 * rows * columns * count for (rows, columns), count in product_shapes(config).items())
    conv = 2 * text.conv_dim * text.linear_conv_kernel_dim
    state = _RECURRENCE_FLOPS * text.value_dim * text.linear_key_head_dim
    # q . k and p . v of a query with itself and the tokens before it.
    attention = 4 * text.num_attention_heads * text.head_dim * (length + 1) / 2
    mixers = len(text.linear_layers) * (conv + state) + len(text.attention_layers) * attention
    return length * (products + mixers) + 2 * text.vocab_size * text.hidden_size


def vision_shapes(config: ModelConfig) -> Counter[tuple[int, int]]:
    """Like `product_shapes`, of the vision tower's blocks and its patches."""
    vision = config.vision
    hidden, inner = vision.hidden_size, vision.intermediate_size
    blocks = [(3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner)]
    return Counter({(hidden, vision.patch_dim): 1}) + Counter(dict.fromkeys(blocks, vision.depth))


def vision_flops(config: ModelConfig, height: int, width: int) -> float:
    """Floating point operations of the tower on one picture of height x width patches."""
    vision = config.vision
    num_patches, merge = height * width, vision.spatial_merge_size**2
    hidden, inner, merged = vision.hidden_size, vision.intermediate_size, vision.hidden_size * merge
    block = 2 * (4 * hidden**2 + 2 * hidden * inner) + 4 * num_patches * hidden
    merger = 2 * (merged**2 + merged * vision.out_hidden_size) / merge
    return num_patches * (2 * vision.patch_dim * hidden + vision.depth * block + merger)


def weight_bytes(
    config: ModelConfig, dtype: torch.dtype, integers: str | None = None, devices: Sequence[torch.device] = ()
) -> float:
    """Bytes of weights that decoding a token reads, in a format that `load` takes."""
    targets = {target.name: target for target in text_targets(config)}
    return bytes_read_per_token(config, targets, dtype, integers, devices)


def cache_bytes(config: ModelConfig, num_tokens: float, kv_dtype: torch.dtype, conv_dtype: torch.dtype) -> float:
    """Bytes of states, keys and values that decoding a token reads, with `num_tokens` before it."""
    return config.state_bytes(conv_dtype) + num_tokens * config.kv_bytes_per_token(kv_dtype)
