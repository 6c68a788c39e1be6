"""The demo's architecture and its initialisation: transformers' Qwen3.5 at 6.4 million parameters, and an MTP layer.

The proportions are the family's: keys and values of one width, powers of two, a tied head, and one layer of multi-token
prediction, which transformers doesn't know and `MultiTokenPrediction` adds.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5GatedDeltaNet,
    Qwen3_5RMSNorm,
)

MAX_POSITIONS = 8192
_RESIDUAL_OUTPUTS = ("o_proj", "out_proj", "down_proj", "attn.proj", "mlp.linear_fc2")


def demo_config(ids: dict[str, int], vocab_size: int, **overrides: int) -> Qwen3_5Config:
    """The configuration; `ids` are the special tokens' (`tokenizer.token_ids`).

    `overrides` shrink it for tests: hidden_size, num_hidden_layers, intermediate_size, depth.
    """
    hidden = overrides.get("hidden_size", 192)
    text = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": overrides.get("intermediate_size", 512),
        "num_hidden_layers": overrides.get("num_hidden_layers", 8),
        "full_attention_interval": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
        "tie_word_embeddings": True,
        "mtp_num_hidden_layers": 1,  # for those that run it: transformers takes no notice
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    vision = {
        "depth": overrides.get("depth", 4),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_heads": 4,
        "num_position_embeddings": 256,
        "out_hidden_size": hidden,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "deepstack_visual_indexes": [],
    }
    settings: dict[str, Any] = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    return Qwen3_5Config(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        **settings,
    )


class MultiTokenPrediction(nn.Module):
    """The family's MTP layer: from the last hidden state at t and the embedding of token t + 1, that of token t + 2.

    Its parameters are saved as `mtp.*`, beside the model's; embedding and head are the model's own.
    """

    def __init__(self, config: Qwen3_5Config) -> None:
        super().__init__()
        text: Any = config.text_config
        attention = text.layer_types.index("full_attention")
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(text.hidden_size, eps=text.rms_norm_eps)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(text.hidden_size, eps=text.rms_norm_eps)
        self.fc = nn.Linear(2 * text.hidden_size, text.hidden_size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(text, attention)])
        self.norm = Qwen3_5RMSNorm(text.hidden_size, eps=text.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, embeds: torch.Tensor, positions: Any, mask: torch.Tensor) -> torch.Tensor:
        """`hidden`, `embeds` [B, T, H]: states at t and embeddings at t + 1; returns states for the head, [B, T, H].

        `positions` are the rotary cosine and sine, `mask` [B, 1, T, T] is true where a token is seen.
        """
        both = torch.cat([self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)], dim=-1)
        out = self.layers[0](self.fc(both), position_embeddings=positions, attention_mask=mask)
        return self.norm(out)


def new_model(config: Qwen3_5Config, seed: int) -> Qwen3_5ForConditionalGeneration:
    """A freshly initialised fp32 model.

    With transformers' own initialisation (0.02 everywhere, decays that forget at once) a model of this size does
    not learn positions in an hour. With this one it does: matrices at 1/sqrt(fan_in), residual outputs halved,
    conv taps in +-0.5, and step sizes log-uniform in 0.001 to 0.1 as in Mamba.
    """
    torch.manual_seed(seed)
    model = Qwen3_5ForConditionalGeneration(config).float()
    model.mtp = MultiTokenPrediction(config)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Conv3d):
                scale = 0.5 if name.endswith(_RESIDUAL_OUTPUTS) else 1.0
                fan_in = module.weight[0].numel()
                nn.init.normal_(module.weight, std=scale / math.sqrt(fan_in))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Conv1d):
                nn.init.uniform_(module.weight, -0.5, 0.5)
            elif isinstance(module, Qwen3_5GatedDeltaNet):
                step = torch.exp(torch.empty_like(module.dt_bias).uniform_(math.log(0.001), math.log(0.1)))
                module.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
                module.A_log.copy_(torch.empty_like(module.A_log).uniform_(1, 8).log())
        # Tied with the output: small, so that the first logits are flat.
        embedding: Any = model.get_input_embeddings()
        nn.init.normal_(embedding.weight, std=0.05)
        model.tie_weights()
        nn.init.normal_(model.model.visual.pos_embed.weight, std=0.2)
    return model
