"""The family's models on the Hugging Face Hub, by their shapes, which we know before any download."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qwen35mm.checkpoints.tensor_names import Target, checkpoint_targets, mtp_targets
from qwen35mm.config import ModelConfig
from qwen35mm.config.model import MEDIA_TOKENS
from qwen35mm.errors import ConfigError
from qwen35mm.model.load import choose_dtype, weights_name
from qwen35mm.model.weight_formats import ROUNDED_FORMATS
from qwen35mm.model.weights import weights_bytes
from qwen35mm.model_library.fit import fit_tensors
from qwen35mm.model_library.memory import tokenizer_bytes
from qwen35mm.model_library.options import BackendOptions

# hidden, layers, query heads, KV heads, GDN value heads, FFN width (of an expert), vision depth, width, heads, FFN
SIZES: dict[str, tuple[int, ...]] = {
    "0.8B": (1024, 24, 8, 2, 16, 3584, 12, 768, 12, 3072),
    "2B": (2048, 24, 8, 2, 16, 6144, 24, 1024, 16, 4096),
    "4B": (2560, 32, 16, 4, 32, 9216, 24, 1024, 16, 4096),
    "9B": (4096, 32, 16, 4, 32, 12288, 27, 1152, 16, 4304),
    "27B": (5120, 64, 24, 4, 48, 17408, 27, 1152, 16, 4304),
    "35B-A3B": (2048, 40, 16, 2, 32, 512, 27, 1152, 16, 4304),
}
TIED = ("0.8B", "2B", "4B")
EXPERTS, EXPERTS_PER_TOKEN = 256, 8
# Mostly tokenizer.json, vocab.json and merges.txt, the same for all.
_SMALL_FILES_BYTES = 23_000_000


def family_config(size: str, dtype: str) -> dict[str, Any]:
    """The config.json of a size, without its tokenizer's ids."""
    hidden, layers, heads, kv_heads, value_heads, ffn, depth, width, vision_heads, vision_ffn = SIZES[size]
    is_moe, tied = size.endswith("A3B"), size in TIED
    text: dict[str, Any] = {
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": dtype,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "layer_types": ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_moe_text" if is_moe else "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000,
            "rope_type": "default",
        },
        "tie_word_embeddings": tied,
        "vocab_size": 248320,
    }
    if is_moe:
        text |= {
            "moe_intermediate_size": ffn,
            "num_experts": EXPERTS,
            "num_experts_per_tok": EXPERTS_PER_TOKEN,
            "shared_expert_intermediate_size": ffn,
        }
    else:
        text["intermediate_size"] = ffn
    model_type = "qwen3_5_moe" if is_moe else "qwen3_5"
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration" if is_moe else "Qwen3_5ForConditionalGeneration"],
        "dtype": dtype,
        "model_type": model_type,
        "text_config": text,
        "tie_word_embeddings": tied,
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": depth,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": width,
            "in_channels": 3,
            "intermediate_size": vision_ffn,
            "model_type": f"{model_type}_vision",
            "num_heads": vision_heads,
            "num_position_embeddings": 2304,
            "out_hidden_size": hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


def config_tensors(config: ModelConfig) -> Mapping[str, Target]:
    """The tensors of a checkpoint with this config, by name."""
    targets = checkpoint_targets(config, separate_head=not config.tie_word_embeddings, split_experts=False)
    if config.text.runs_mtp:
        targets += mtp_targets(config.text, split_experts=False)
    return {target.name: target for target in targets}


@dataclass(frozen=True)
class HubModel:
    """A model that can be downloaded.

    Attributes:
        hub_id: such as `Qwen/Qwen3.5-2B`.
    """

    hub_id: str

    @functools.cached_property
    def config(self) -> ModelConfig:
        """The Hub's config.json, without the tokenizer's ids."""
        return self.config_with(None)

    def config_with(self, rope_scaling: str | None, *, mtp: bool = False) -> ModelConfig:
        """`config` with `load`'s arguments."""
        shapes = family_config(self.hub_id.partition("Qwen3.5-")[2], "bfloat16")
        config = ModelConfig.from_dict(shapes | dict.fromkeys(MEDIA_TOKENS, 0), rope_scaling=rope_scaling)
        return config.with_mtp() if mtp else config

    @functools.cached_property
    def tensors(self) -> Mapping[str, Target]:
        """Those of `config`: without the layer of multi-token prediction."""
        return config_tensors(self.config)

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes of the weights, without the layer of multi-token prediction."""
        return weights_bytes(self.tensors, torch.bfloat16, None)

    @functools.cached_property
    def download_bytes(self) -> int:
        """Bytes of all files to download."""
        mtp = mtp_targets(self.config.text, split_experts=False)
        return self.num_bytes + 2 * sum(target.numel for target in mtp) + _SMALL_FILES_BYTES

    def format_that_fits(
        self, options: BackendOptions, *, devices: Sequence[torch.device], memory_bytes: int
    ) -> str | None:
        """The format that the planner would choose; None if the model doesn't fit. Arguments as for `fit`."""
        config = self.config.with_mtp() if options.mtp else self.config
        how = {"devices": devices, "memory_bytes": memory_bytes, "runtime_bytes": tokenizer_bytes(config)}
        size_of = functools.partial(_weights_bytes, self, options.mtp, choose_dtype(options.dtype), tuple(devices))
        try:
            fitted, _ = fit_tensors(options, config, self.tensors, self.hub_id, **how, size_of=size_of)
        except ConfigError:
            return None
        return fitted.weights if fitted.weights in ROUNDED_FORMATS else weights_name(choose_dtype(options.dtype))


@functools.cache
def _weights_bytes(
    model: HubModel, mtp: bool, dtype: torch.dtype, devices: tuple[torch.device, ...], integers: str | None
) -> int:
    """`weights_bytes` of the catalogue's models, which never change."""
    tensors = config_tensors(model.config.with_mtp()) if mtp else model.tensors
    return weights_bytes(tensors, dtype, integers, devices)


HUB_MODELS = tuple(HubModel(f"Qwen/Qwen3.5-{size}") for size in SIZES)
# The largest ones that answer fast enough: a processor reads every weight for every token.
SUGGESTED_ON_CPU, SUGGESTED_ON_GPU = HUB_MODELS[1], HUB_MODELS[3]
