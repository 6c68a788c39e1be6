"""Tiny random checkpoints, written by transformers' own classes, that are able to fail.

transformers' initialisation forgets the past at once (its decays are tiny), so a model that lost its state would
still produce the same tokens. Here every parameter gets a realistic random value: decays mostly between 0.9 and
0.999, conv taps in +-0.5, norm weights neither 0 nor 1, matrices of 1 / sqrt(fan_in).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

VOCAB_SIZE = 1024
# Ordinary text lies below; the special tokens above.
NUM_TEXT_IDS = 1000
EOS_ID, VISION_START_ID, VISION_END_ID, IMAGE_ID, VIDEO_ID = 1001, 1002, 1003, 1004, 1005


_RESIDUAL_OUTPUTS = tuple(
    f"{name}{end}"
    for name in ("out_proj", "o_proj", "down_proj", "attn.proj", "mlp.linear_fc2")
    for end in ("", ".weight")
)


@dataclass(frozen=True)
class TinySpec:
    """One tiny model. `real_heads` takes the family's true head sizes; `interval` is the full-attention one."""

    name: str
    num_layers: int = 4
    interval: int = 4
    tied: bool = True
    key_heads: int = 2
    value_heads: int = 2
    moe: bool = False
    shared_width: int = 48
    real_heads: bool = False
    seed: int = 0


DENSE = TinySpec("dense")
SHALLOW = TinySpec("shallow", num_layers=2, interval=2, tied=False, value_heads=4, seed=1)
DEEP = TinySpec("deep", num_layers=8, value_heads=4, seed=2)
MOE = TinySpec("moe", tied=False, value_heads=4, moe=True, seed=3)
MOE_TIED = TinySpec("moe-tied", num_layers=2, interval=2, moe=True, seed=4)
REAL_HEADS = TinySpec("real-heads", interval=2, key_heads=16, value_heads=32, tied=False, real_heads=True, seed=5)
ALL_SPECS = (DENSE, SHALLOW, DEEP, MOE, MOE_TIED, REAL_HEADS)


class TinyCheckpoints:
    """Folders of tiny checkpoints under `root`, each written when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, spec: TinySpec) -> Path:
        """The folder of a checkpoint with float32 weights."""
        folder = self._root / spec.name
        if not folder.exists():
            build(spec).save_pretrained(folder)
        return folder


def build(spec: TinySpec) -> Any:
    """transformers' model of a spec, in float32, with realistic random parameters."""
    values = config_dict(spec)
    if spec.moe:
        model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**values))
    else:
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**values))
    randomize(model, spec.seed, tied=spec.tied)
    return model.eval()


def config_dict(spec: TinySpec) -> dict[str, Any]:
    """The config.json of a spec."""
    hidden = 64
    text: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "num_hidden_layers": spec.num_layers,
        "layer_types": [
            "linear_attention" if (index + 1) % spec.interval else "full_attention" for index in range(spec.num_layers)
        ],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 256 if spec.real_heads else 64,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": spec.tied,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128 if spec.real_heads else 16,
        "linear_value_head_dim": 128 if spec.real_heads else 32,
        "linear_num_key_heads": spec.key_heads,
        "linear_num_value_heads": spec.value_heads,
        "eos_token_id": EOS_ID,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0 if spec.real_heads else 10_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10] if spec.real_heads else [3, 3, 2],
            "mrope_interleaved": True,
        },
    }
    if spec.moe:
        text |= {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": spec.shared_width,
        }
    else:
        text["intermediate_size"] = 128
    return {
        "text_config": text,
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": 96,
            "num_heads": 4,
            "in_channels": 3,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "num_position_embeddings": 36,
            "out_hidden_size": hidden,
        },
        "image_token_id": IMAGE_ID,
        "video_token_id": VIDEO_ID,
        "vision_start_token_id": VISION_START_ID,
        "vision_end_token_id": VISION_END_ID,
        "eos_token_id": EOS_ID,
        "tie_word_embeddings": spec.tied,
    }


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int, *, tied: bool) -> None:
    """Gives every parameter a realistic random value, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(like: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return torch.rand(like.shape, generator=generator) * (high - low) + low

    def normal(like: torch.Tensor, std: float) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator) * std

    for name, parameter in model.named_parameters():
        kind = name.rsplit(".", 1)[-1]
        if kind == "A_log":
            value = uniform(parameter, -0.3, 0.3)
        elif kind == "dt_bias":
            # softplus(dt_bias) is log-uniform between 0.003 and 0.06: a decay of about 0.94 to 0.997 a token.
            step = torch.exp(uniform(parameter, -5.8, -2.8))
            value = torch.log(torch.expm1(step))
        elif "conv1d" in name:
            value = uniform(parameter, -0.5, 0.5)
        elif "linear_attn.norm" in name or (".visual." in name and "norm" in name and kind == "weight"):
            value = uniform(parameter, 0.6, 1.4)
        elif "norm" in name and kind == "weight":
            value = uniform(parameter, -0.4, 0.4)
        elif kind == "bias":
            value = normal(parameter, 0.1)
        elif "pos_embed" in name:
            value = normal(parameter, 0.5)
        else:
            fan_in = parameter[0].numel() if parameter.ndim != 3 else parameter.shape[-1]
            value = normal(parameter, fan_in**-0.5 * _gain(name, tied))
        parameter.copy_(value)


def _gain(name: str, tied: bool) -> float:
    """What a trained model does with some matrices' scale; it keeps bfloat16's rounding from growing with depth."""
    if name.endswith("mlp.gate.weight"):
        return 4.0  # a router that has made up its mind
    if name.endswith(_RESIDUAL_OUTPUTS):
        return 0.5
    if "embed_tokens" in name or "merger.linear_fc2" in name:
        # With tied embeddings a larger table would only repeat the last token.
        return 1.0 if tied else 2.0
    return 1.0
