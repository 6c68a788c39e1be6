"""The torch version of the gates."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from qwen35mm_kernels.dispatch import implements


@implements("gdn_gates", "torch")
def gdn_gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return F.softplus(a.float() + dt_bias.float()) * -A_log.float().exp(), b.float().sigmoid()
