"""The decoder's part of config.json."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Literal, cast

from qwen35mm.config.section import Section
from qwen35mm.errors import ConfigError

LayerType = Literal["linear_attention", "full_attention"]

# transformers' defaults for what `rope_scaling` lacks: that object replaces all of `rope_parameters`.
_ROPE_DEFAULTS = {"rope_theta": 10_000.0, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
_MTP = "mtp_num_hidden_layers"
_YARN_KEYS = (
    *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "truncate"),
)


@dataclass(frozen=True)
class YarnConfig:
    """YaRN's extension of the trained positions (arXiv:2309.00071, transformers' modeling_rope_utils).

    Attributes:
        factor: how many times as many positions; 1 or more.
        original_positions: positions that the model was trained with.
        attention_factor: factor of the cosines and sines.
        beta_fast, beta_slow: a frequency with more turns than beta_fast within `original_positions` stays as it is; one
            with fewer than beta_slow is divided by `factor`.
        truncate: whether the bounds between the two are rounded to whole pairs.
    """

    factor: float
    original_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @property
    def num_positions(self) -> int:
        return int(self.factor * self.original_positions)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions of the text decoder.

    Attributes:
        theta: base of the frequencies.
        rotary_dim: how many of a head's dimensions are rotated (the first ones).
        mrope_section: frequency pairs of the temporal, height and width rows; they sum to rotary_dim / 2.
        linear_factor: divisor of all frequencies.
        yarn: YaRN's settings; None without YaRN.
    """

    theta: float
    rotary_dim: int
    mrope_section: tuple[int, int, int]
    linear_factor: float = 1.0
    yarn: YarnConfig | None = None


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts and the shared expert of one layer."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    shared_intermediate_size: int


@dataclass(frozen=True)
class TextConfig:
    """The decoder. Exactly one of `intermediate_size` and `moe` is set.

    Attributes:
        max_position_embeddings: most positions of a sequence; with YaRN, factor x original positions.
        num_mtp_layers: layers of multi-token prediction that the checkpoint announces.
        runs_mtp: whether one such layer runs, as layer `num_layers` with a KV cache of its own.
    """

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
    num_mtp_layers: int = 0
    runs_mtp: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the full-attention layers: those with a KV cache."""
        decoding = tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")
        return (*decoding, self.num_layers) if self.runs_mtp else decoding

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


def read_text(section: Section, *, is_moe: bool, rope_scaling: str | None = None) -> TextConfig:
    """Reads the decoder's part; for `rope_scaling` see `ModelConfig.from_pretrained`. Raises ConfigError."""
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
    rope = _read_rope(section, sizes["head_dim"], sizes["max_position_embeddings"], rope_scaling)
    if rope.yarn is not None:
        sizes["max_position_embeddings"] = rope.yarn.num_positions
    return TextConfig(
        **sizes,
        layer_types=_read_layer_types(section),
        rope=rope,
        linear_conv_kernel_dim=section.integer("linear_conv_kernel_dim", minimum=2),
        rms_norm_eps=section.number("rms_norm_eps"),
        intermediate_size=None if is_moe else section.integer("intermediate_size"),
        moe=moe,
        num_mtp_layers=0 if section.data.get(_MTP) is None else section.integer(_MTP, minimum=0),
        runs_mtp=False,
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


def _read_rope(section: Section, head_dim: int, num_positions: int, rope_scaling: str | None) -> RopeConfig:
    """Reads `rope_parameters`, or the older `rope_scaling` with theta and the rotary share beside it."""
    # Where both are there, transformers takes the older one.
    key = "rope_scaling" if section.data.get("rope_scaling") else "rope_parameters"
    inner = section.section(key)
    replaced = Section("", (section.data.get("rope_parameters") or {}) if key == "rope_scaling" else {})
    if rope_scaling is not None:
        given = _parse_scaling(rope_scaling)
        kept = (*_ROPE_DEFAULTS, "mrope_interleaved", "original_max_position_embeddings")
        values = {name: inner.data[name] for name in kept if inner.data.get(name) is not None}
        inner = Section(f"{inner.name[:-1]} with --rope-scaling: ", values | given)
    # Configs of Qwen2-VL's time call the default type with sections "mrope".
    rope_type = inner.data.get("rope_type", inner.data.get("type", "default"))
    if rope_type not in ("default", "mrope", "linear", "yarn"):
        what = f"is {rope_type!r}; 'default', 'linear' and 'yarn' are supported. Use YaRN for longer contexts."
        raise inner.error("rope_type", what)
    inner.require("mrope_interleaved", True, default=True)

    def owner(name: str) -> Section:
        found = inner if inner.data.get(name) is not None or name == "mrope_section" else section
        if found.data.get(name) is None and (value := replaced.data.get(name)) is not None:
            if value != _ROPE_DEFAULTS[name]:
                raise inner.error(
                    name,
                    f"is missing, and rope_scaling takes the place of all of rope_parameters, whose {name} is {value}: "
                    f"transformers would compute with {_ROPE_DEFAULTS[name]}. Write all of it into one of the two.",
                )
            return replaced
        return found

    rotary_dim = int(head_dim * owner("partial_rotary_factor").number("partial_rotary_factor"))
    sections = owner("mrope_section").value("mrope_section")
    valid = isinstance(sections, list | tuple) and len(sections) == 3
    if not valid or not all(type(size) is int and size > 0 for size in sections):
        raise inner.error("mrope_section", f"must be three positive integers; got {sections!r}.")
    if rotary_dim % 2 or rotary_dim > head_dim or sum(sections) != rotary_dim // 2:
        what = f"{list(sections)} must sum to half the rotary dimensions (partial_rotary_factor x head_dim = "
        raise inner.error("mrope_section", f"{what}{rotary_dim}).")
    section_t, section_h, section_w = sections
    return RopeConfig(
        owner("rope_theta").number("rope_theta"),
        rotary_dim,
        (section_t, section_h, section_w),
        linear_factor=_factor(inner) if rope_type == "linear" else 1.0,
        yarn=_read_yarn(inner, num_positions) if rope_type == "yarn" else None,
    )


def _read_yarn(inner: Section, num_positions: int) -> YarnConfig:
    def number(key: str, default: float) -> float:
        return default if inner.data.get(key) is None else inner.number(key)

    original = num_positions
    if inner.data.get("original_max_position_embeddings") is not None:
        original = inner.integer("original_max_position_embeddings")
    if inner.data.get("factor") is None and original < num_positions:
        inner = Section(inner.name, {**inner.data, "factor": num_positions / original})
    factor = _factor(inner)
    mscale, mscale_all_dim = number("mscale", 0.0), number("mscale_all_dim", 0.0)
    attention_factor = 1.0 + 0.1 * math.log(factor)
    if mscale and mscale_all_dim:
        attention_factor = (1.0 + 0.1 * mscale * math.log(factor)) / (1.0 + 0.1 * mscale_all_dim * math.log(factor))
    yarn = YarnConfig(
        factor,
        original,
        number("attention_factor", attention_factor),
        number("beta_fast", YarnConfig.beta_fast),
        number("beta_slow", YarnConfig.beta_slow),
        inner.flag("truncate", default=True),
    )
    if yarn.beta_fast < yarn.beta_slow:
        raise inner.error("beta_fast", f"({yarn.beta_fast:g}) must be at least beta_slow ({yarn.beta_slow:g}).")
    return yarn


def _factor(inner: Section) -> float:
    factor = inner.number("factor")
    if factor < 1:
        raise inner.error("factor", f"is {factor:g}, which would shrink the context; 1 is the smallest.")
    return factor


def _parse_scaling(text: str) -> dict[str, Any]:
    """The config.json values of the option `yarn,factor=4`; raises ConfigError."""
    rope_type, *settings = (part.strip() for part in text.split(","))
    found: dict[str, Any] = {"rope_type": rope_type}
    for setting in settings:
        name, _, value = setting.partition("=")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = None
        if name not in _YARN_KEYS or found[name] is None:
            names = ", ".join(_YARN_KEYS)
            raise ConfigError(f"--rope-scaling takes a number for each of {names} (true or false); got '{setting}'.")
    if rope_type not in ("yarn", "default"):
        raise ConfigError(f"--rope-scaling is yarn,factor=4, or default for none; '{rope_type}' isn't supported.")
    return found
