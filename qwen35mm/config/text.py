"""The decoder's part of config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from qwen35mm.config.section import Section

LayerType = Literal["linear_attention", "full_attention"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions of the text decoder.

    Attributes:
        theta: base of the frequencies.
        rotary_dim: how many of a head's dimensions are rotated (the first ones).
        mrope_section: frequency pairs of the temporal, height and width rows; they sum to rotary_dim / 2.
    """

    theta: float
    rotary_dim: int
    mrope_section: tuple[int, int, int]


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts and the shared expert of one layer."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    shared_intermediate_size: int


@dataclass(frozen=True)
class TextConfig:
    """The decoder. `intermediate_size` is None exactly where `moe` is set."""

    vocab_size: int
    hidden_size: int
    layer_types: tuple[LayerType, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: RopeConfig
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    intermediate_size: int | None = None
    moe: MoEConfig | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the full-attention layers: those with a KV cache."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the Gated DeltaNet layers: those with a conv state and a recurrent state."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "linear_attention")

    @property
    def conv_dim(self) -> int:
        """Channels of a GDN layer's convolution: q, k and v side by side."""
        return 2 * self.linear_num_key_heads * self.linear_key_head_dim + self.value_dim

    @property
    def value_dim(self) -> int:
        """Width of a GDN layer's values (and of its gate z)."""
        return self.linear_num_value_heads * self.linear_value_head_dim


def read_text(section: Section, *, is_moe: bool) -> TextConfig:
    section.require("hidden_act", "silu", default=None)
    section.require("attention_bias", False, default=False)
    section.require("attn_output_gate", True, default=True)
    section.require("norm_topk_prob", True, default=True)
    section.require("mamba_ssm_dtype", "float32", default="float32")
    section.require_empty("mlp_only_layers")
    moe = None
    if is_moe:
        moe = MoEConfig(
            num_experts=section.integer("num_experts"),
            num_experts_per_tok=section.integer("num_experts_per_tok"),
            intermediate_size=section.integer("moe_intermediate_size"),
            shared_intermediate_size=section.integer("shared_expert_intermediate_size"),
        )
        if moe.num_experts_per_tok > moe.num_experts:
            what = f"({moe.num_experts_per_tok}) is more than num_experts ({moe.num_experts})."
            raise section.error("num_experts_per_tok", what)
    section.require_multiple("num_attention_heads", "num_key_value_heads")
    section.require_multiple("linear_num_value_heads", "linear_num_key_heads")
    sizes = section.integers(
        "vocab_size",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "max_position_embeddings",
    )
    return TextConfig(
        **sizes,
        layer_types=_read_layer_types(section),
        rope=_read_rope(section, sizes["head_dim"]),
        linear_conv_kernel_dim=section.integer("linear_conv_kernel_dim", minimum=2),
        rms_norm_eps=section.number("rms_norm_eps"),
        intermediate_size=None if is_moe else section.integer("intermediate_size"),
        moe=moe,
    )


def _read_layer_types(section: Section) -> tuple[LayerType, ...]:
    num_layers = section.integer("num_hidden_layers")
    if section.data.get("layer_types") is None:
        if section.data.get("full_attention_interval") is None:
            raise section.error("layer_types", "is missing (and no full_attention_interval is there).")
        interval = section.integer("full_attention_interval")
        return tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers))
    kinds = section.value("layer_types")
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
        raise section.error("layer_types", f"must list {num_layers} layers; got {kinds!r}.")
    for kind in kinds:
        if kind not in ("linear_attention", "full_attention"):
            raise section.error("layer_types", f"holds {kind!r}, which isn't supported.")
    return cast("tuple[LayerType, ...]", tuple(kinds))


def _read_rope(section: Section, head_dim: int) -> RopeConfig:
    """Reads `rope_parameters`, or the older `rope_scaling` with theta and the rotary share beside it."""
    key = "rope_parameters" if section.data.get("rope_parameters") is not None else "rope_scaling"
    inner = section.section(key)
    rope_type = inner.data.get("rope_type", inner.data.get("type", "default"))
    # "mrope" is how Qwen2-VL's time spelled the default type with sections.
    if rope_type not in ("default", "mrope"):
        what = f"is {rope_type!r}; only 'default' is supported yet. Context extension (YaRN and others) isn't."
        raise inner.error("rope_type", what)
    inner.require("mrope_interleaved", True, default=True)

    def owner(name: str) -> Section:
        return inner if inner.data.get(name) is not None else section

    rotary_dim = int(head_dim * owner("partial_rotary_factor").number("partial_rotary_factor"))
    sections = inner.value("mrope_section")
    valid = isinstance(sections, list | tuple) and len(sections) == 3
    if not valid or not all(type(size) is int and size > 0 for size in sections):
        raise inner.error("mrope_section", f"must be three positive integers; got {sections!r}.")
    if rotary_dim % 2 or rotary_dim > head_dim or sum(sections) != rotary_dim // 2:
        what = f"{list(sections)} must sum to half the rotary dimensions (partial_rotary_factor x head_dim = "
        raise inner.error("mrope_section", f"{what}{rotary_dim}).")
    section_t, section_h, section_w = sections
    return RopeConfig(owner("rope_theta").number("rope_theta"), rotary_dim, (section_t, section_h, section_w))
