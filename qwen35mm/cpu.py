"""What this machine's processor can do."""

from __future__ import annotations

from typing import Any

import torch


def cpu_capabilities() -> dict[str, Any]:
    """Instruction sets by name, and sizes; PyTorch before 2.11 tells only of x86's bfloat16 arithmetic."""
    if hasattr(torch.cpu, "get_capabilities"):
        return dict(torch.cpu.get_capabilities())
    # Every processor with AMX's tiles multiplies bfloat16 in them.
    return {"amx_bf16": torch.cpu._is_amx_tile_supported(), "avx512_bf16": torch.cpu._is_avx512_bf16_supported()}
