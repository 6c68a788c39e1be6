"""The short depthwise causal convolution before the gated delta rule, followed by SiLU.

Source: causal_conv1d_fn and causal_conv1d_update of transformers' modeling_qwen3_5.py (there [batch, C, T]; here
[T, C]). The state is the last W - 1 inputs, oldest first.
"""

from __future__ import annotations

import torch


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, initial_state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(conv(x)) over one sequence.

    Args:
        x: [T, C], float32 or bfloat16, T at least 1. The arithmetic is float32.
        weight: [C, W], W at least 2; the last tap meets the current token.
        initial_state: [C, W - 1], the inputs before x; not changed.

    Returns:
        out: [T, C] in x's dtype.
        final_state: [C, W - 1], a new tensor in initial_state's dtype.
    """
    state = initial_state.clone()
    out = [causal_conv1d_step(token[None], weight, state[None])[0] for token in x]
    return torch.stack(out), state


def causal_conv1d_step(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """One token of each of B sequences, for `gdn_decode_step`: x [B, C]; updates state [B, C, W - 1] in place."""
    window = torch.cat([state.float(), x.float()[..., None]], dim=-1)
    total = (window * weight.float()).sum(dim=-1)
    state.copy_(window[..., 1:])
    return (total / (1 + torch.exp(-total))).to(x.dtype)
