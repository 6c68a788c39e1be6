"""Adapters in PEFT's folders, made by PEFT: trained ones' stand-ins, which change what a model says."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model


def make_adapter(model: Any, folder: Path, seed: int = 0, **options: Any) -> Any:
    """Saves an adapter of a transformers model with random values, and returns a copy of the model with it.

    Args:
        options: of LoraConfig.
    """
    # The model's config.json isn't on the Hub, where PEFT looks for its vocabulary's size.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**{"r": 4, "lora_alpha": 6, **options}))
        _randomize(adapted, seed)
        adapted.save_pretrained(str(folder))
    found: Any = adapted.base_model.model
    return found.eval()


@torch.no_grad()
def _randomize(adapted: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if not parameter.requires_grad:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if "lora_magnitude_vector" in name:
            parameter.mul_(1 + 0.3 * noise)
        elif "lora_" in name:
            # The change of a matrix is about a third of the matrix.
            parameter.copy_(0.5 * noise * parameter[0].numel() ** -0.5)
        else:
            parameter.add_(0.3 * noise * parameter.std().nan_to_num(1.0))
