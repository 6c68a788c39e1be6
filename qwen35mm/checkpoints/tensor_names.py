"""The table of a checkpoint's tensors and their places: all renamings and merges.

A target is a contiguous run of elements in one of our parameters, because every merge stacks rows: q | k | v | z | b
| a, gate | up, query-and-gate | k | v, expert after expert.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod

from qwen35mm.config import ModelConfig, TextConfig, VisionConfig

TEXT_PREFIX = "model.language_model."
VISION_PREFIX = "model.visual."
EMBEDDING = f"{TEXT_PREFIX}embed_tokens.weight"
LM_HEAD = "lm_head.weight"
# Multi-token prediction: transformers doesn't run it, and we only if asked.
MTP_PREFIX = "mtp."


def family_name(name: str) -> str:
    """A tensor's name in the family's multimodal checkpoints; text-only ones leave a word out."""
    is_text = name.startswith("model.") and not name.startswith((TEXT_PREFIX, VISION_PREFIX))
    return TEXT_PREFIX + name.removeprefix("model.") if is_text else name


@dataclass(frozen=True)
class Target:
    """A checkpoint tensor's name and shape, and the elements of our parameter that it fills."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    offset: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)


def has_split_experts(names: Collection[str], prefix: str) -> bool:
    """Whether the layers under a prefix have tensors for each expert, as from some converters, rather than fused."""
    return any(name.startswith(prefix) and ".experts.0." in name for name in names)


def checkpoint_targets(config: ModelConfig, *, separate_head: bool, split_experts: bool) -> list[Target]:
    """Every tensor that a checkpoint must hold, without those of `mtp_targets`.

    Args:
        separate_head: whether the output head has its own tensor (untied).
        split_experts: whether each expert has its own tensors (`experts.0.gate_proj.weight`), as from some converters,
            rather than the family's fused `experts.gate_up_proj`.
    """
    text = config.text
    targets = [
        Target(EMBEDDING, (text.vocab_size, text.hidden_size), "embedding.weight"),
        Target(f"{TEXT_PREFIX}norm.weight", (text.hidden_size,), "norm.weight"),
    ]
    if separate_head:
        targets.append(Target(LM_HEAD, (text.vocab_size, text.hidden_size), "lm_head.weight"))
    for index, kind in enumerate(text.layer_types):
        layer = _Prefix(f"{TEXT_PREFIX}layers.{index}.", f"layers.{index}.")
        targets += _norms(layer, text)
        targets += _linear_attention(layer, text) if kind == "linear_attention" else _attention(layer, text)
        targets += _feed_forward(layer, text, split_experts)
    if config.tower is not None:
        targets += _vision(config.vision)
    return targets


def mtp_targets(text: TextConfig, *, split_experts: bool) -> list[Target]:
    """Every tensor of the layer of multi-token prediction."""
    layer, hidden = _Prefix(f"{MTP_PREFIX}layers.0.", "mtp.layer."), text.hidden_size
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return [
        Target(f"{MTP_PREFIX}fc.weight", (hidden, 2 * hidden), "mtp.fc.weight"),
        *(Target(f"{MTP_PREFIX}{norm}.weight", (hidden,), f"mtp.{norm}.weight") for norm in norms),
        *_norms(layer, text),
        *_attention(layer, text),
        *_feed_forward(layer, text, split_experts),
    ]


@dataclass(frozen=True)
class _Prefix:
    """A checkpoint's prefix and the corresponding one of ours."""

    theirs: str
    ours: str

    def one(self, name: str, shape: tuple[int, ...], parameter: str | None = None) -> Target:
        return Target(self.theirs + name, shape, self.ours + (parameter or name))

    def rows(self, parameter: str, width: int, *parts: tuple[str, int]) -> Iterator[Target]:
        """Targets for matrices of (name, rows), stacked in one of our parameters."""
        offset = 0
        for name, num_rows in parts:
            yield Target(self.theirs + name, (num_rows, width), self.ours + parameter, offset)
            offset += num_rows * width


def _norms(layer: _Prefix, text: TextConfig) -> Iterator[Target]:
    for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        yield layer.one(norm, (text.hidden_size,))


def _linear_attention(layer: _Prefix, text: TextConfig) -> Iterator[Target]:
    heads, hidden = text.linear_num_value_heads, text.hidden_size
    yield from layer.rows(
        "linear_attn.in_proj.weight",
        hidden,
        ("linear_attn.in_proj_qkv.weight", text.conv_dim),
        ("linear_attn.in_proj_z.weight", text.value_dim),
        ("linear_attn.in_proj_b.weight", heads),
        ("linear_attn.in_proj_a.weight", heads),
    )
    conv_shape = (text.conv_dim, 1, text.linear_conv_kernel_dim)
    yield layer.one("linear_attn.conv1d.weight", conv_shape, "linear_attn.conv1d")
    yield layer.one("linear_attn.A_log", (heads,))
    yield layer.one("linear_attn.dt_bias", (heads,))
    yield layer.one("linear_attn.norm.weight", (text.linear_value_head_dim,), "linear_attn.norm")
    yield layer.one("linear_attn.out_proj.weight", (hidden, text.value_dim))


def _attention(layer: _Prefix, text: TextConfig) -> Iterator[Target]:
    hidden, query_dim = text.hidden_size, text.num_attention_heads * text.head_dim
    kv_dim = text.num_key_value_heads * text.head_dim
    yield from layer.rows(
        "self_attn.qkv_proj.weight",
        hidden,
        ("self_attn.q_proj.weight", 2 * query_dim),
        ("self_attn.k_proj.weight", kv_dim),
        ("self_attn.v_proj.weight", kv_dim),
    )
    yield layer.one("self_attn.q_norm.weight", (text.head_dim,))
    yield layer.one("self_attn.k_norm.weight", (text.head_dim,))
    yield layer.one("self_attn.o_proj.weight", (hidden, query_dim))


def _mlp(layer: _Prefix, module: str, hidden: int, width: int) -> Iterator[Target]:
    gate_up = ((f"{module}.gate_proj.weight", width), (f"{module}.up_proj.weight", width))
    yield from layer.rows(f"{module}.gate_up_proj.weight", hidden, *gate_up)
    yield layer.one(f"{module}.down_proj.weight", (hidden, width))


def _feed_forward(layer: _Prefix, text: TextConfig, split_experts: bool) -> Iterator[Target]:
    hidden, moe = text.hidden_size, text.moe
    if moe is None:
        assert text.intermediate_size is not None
        yield from _mlp(layer, "mlp", hidden, text.intermediate_size)
        return
    num_experts, width = moe.num_experts, moe.intermediate_size
    yield layer.one("mlp.gate.weight", (num_experts, hidden))
    yield layer.one("mlp.shared_expert_gate.weight", (1, hidden))
    yield from _mlp(layer, "mlp.shared_expert", hidden, moe.shared_intermediate_size)
    if not split_experts:
        yield layer.one("mlp.experts.gate_up_proj", (num_experts, 2 * width, hidden))
        yield layer.one("mlp.experts.down_proj", (num_experts, hidden, width))
        return
    matrix = hidden * width
    for expert in range(num_experts):
        theirs, ours = f"{layer.theirs}mlp.experts.{expert}.", f"{layer.ours}mlp.experts."
        yield Target(f"{theirs}gate_proj.weight", (width, hidden), f"{ours}gate_up_proj", 2 * expert * matrix)
        yield Target(f"{theirs}up_proj.weight", (width, hidden), f"{ours}gate_up_proj", (2 * expert + 1) * matrix)
        yield Target(f"{theirs}down_proj.weight", (hidden, width), f"{ours}down_proj", expert * matrix)


def _vision(vision: VisionConfig) -> Iterator[Target]:
    width, inner = vision.hidden_size, vision.intermediate_size
    merged = width * vision.spatial_merge_size**2
    tower = _Prefix(VISION_PREFIX, "visual.")
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    yield tower.one("patch_embed.proj.weight", (width, *patch), "patch_embed.weight")
    yield tower.one("patch_embed.proj.bias", (width,), "patch_embed.bias")
    yield tower.one("pos_embed.weight", (vision.num_position_embeddings, width))
    linears = [("merger.linear_fc1", merged, merged), ("merger.linear_fc2", vision.out_hidden_size, merged)]
    norms = ["merger.norm"]
    for index in range(vision.depth):
        block = f"blocks.{index}."
        linears += [
            (f"{block}attn.qkv", 3 * width, width),
            (f"{block}attn.proj", width, width),
            (f"{block}mlp.linear_fc1", inner, width),
            (f"{block}mlp.linear_fc2", width, inner),
        ]
        norms += [f"{block}norm1", f"{block}norm2"]
    for name, rows, columns in linears:
        yield tower.one(f"{name}.weight", (rows, columns))
        yield tower.one(f"{name}.bias", (rows,))
    for name in norms:
        yield tower.one(f"{name}.weight", (width,))
        yield tower.one(f"{name}.bias", (width,))
