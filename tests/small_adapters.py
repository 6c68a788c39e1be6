"""Adapters in PEFT's format, written without PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PREFIX = "base_model.model.model.language_model."
# Of the bundled model.
DEMO_MODULES = {"layers.3.self_attn.q_proj": (512, 192), "layers.0.mlp.down_proj": (192, 512)}


def write_adapter(
    folder: Path, modules: Mapping[str, tuple[int, int]] = DEMO_MODULES, *, rank: int = 2, seed: int = 0, **config: Any
) -> Path:
    """Writes a LoRA of the text model's modules, by their names and [out, in]; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "base_model_name_or_path": "org/base", **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (out_features, in_features) in modules.items():
        down = torch.randn(rank, in_features, generator=generator) * in_features**-0.5
        tensors[f"{PREFIX}{module}.lora_A.weight"] = down
        tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator) * rank**-0.5
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
