"""The short depthwise causal convolution before the gated delta rule, followed by SiLU.

Source: causal_conv1d_fn and causal_conv1d_update of transformers' modeling_qwen3_5.py (there [batch, C, T]; here
[T, C]). The state is the last W - 1 inputs, oldest first.
"""

from __future__ import annotations

import torch


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """silu(conv(x)) over one sequence's piece; updates its state in place.

    Args:
        x: [T, C], float32 or bfloat16. The arithmetic is float32.
        weight: [C, W], W at least 2; the last tap meets the current token.
        states: [num_slots, C, W - 1], the inputs before x, and afterwards those before the next piece.
        slots: [1] int64, the sequence's place in `states`.
        counts: [1] int64, tokens of x.

    Returns:
        [T, C] in x's dtype; 0 for padding.
    """
    out, state = torch.zeros_like(x), states[int(slots)][None]
    for token in range(int(counts)):
        out[token] = causal_conv1d_step(x[token][None], weight, state)[0]
    return out


def causal_conv1d_step(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """One token of each of B sequences, for `gdn_decode_step`: x [B, C]; updates state [B, C, W - 1] in place."""
    window = torch.cat([state.float(), x.float()[..., None]], dim=-1)
    total = (window * weight.float()).sum(dim=-1)
    state.copy_(window[..., 1:])
    return (total / (1 + torch.exp(-total))).to(x.dtype)
