"""The short depthwise causal convolution before the gated delta rule, followed by SiLU.

Source: causal_conv1d_fn and causal_conv1d_update of transformers' modeling_qwen3_5.py (there [batch, C, T]; here
[T, C]). The state is the last W - 1 inputs, oldest first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from qwen35mm_kernels.blocks import rows_per_block
from qwen35mm_kernels.checks import FLOAT_DTYPES, check_dtype, check_shape
from qwen35mm_kernels.dispatch import implementation, implements


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, initial_state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(conv(x)) over one sequence.

    Args:
        x: [T, C], float32 or bfloat16. The arithmetic is float32.
        weight: [C, W], W at least 2; the last tap meets the current token.
        initial_state: [C, W - 1], the inputs before x; None: zeros. It is not written to.

    Returns:
        out: [T, C] in x's dtype.
        final_state: [C, W - 1], a new tensor in initial_state's dtype (x's without one).

    Raises:
        ValueError, TypeError: no token, or a shape or dtype that doesn't fit.
    """
    _check_inputs(x, weight, "[T, C]")
    if x.shape[0] == 0:
        raise ValueError("x must hold at least one token, got T = 0; skip the call when there is nothing to prefill.")
    if initial_state is not None:
        check_dtype("initial_state", initial_state, FLOAT_DTYPES)
        check_shape("initial_state", initial_state, (x.shape[1], weight.shape[1] - 1), "[C, W - 1]")
    return implementation("causal_conv1d", x.device)(x, weight, initial_state)


def causal_conv1d_step(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """silu(conv) of one token for each of B sequences.

    Args:
        x: [B, C], float32 or bfloat16. The arithmetic is float32.
        weight: [C, W].
        state: [B, C, W - 1], updated in place: the oldest input goes, x comes.

    Returns:
        [B, C] in x's dtype.

    Raises:
        ValueError, TypeError: a shape or dtype that doesn't fit.
    """
    _check_inputs(x, weight, "[B, C]")
    check_dtype("state", state, FLOAT_DTYPES)
    check_shape("state", state, (*x.shape, weight.shape[1] - 1), "[B, C, W - 1]")
    return implementation("causal_conv1d_step", x.device)(x, weight, state)


def _check_inputs(x: torch.Tensor, weight: torch.Tensor, layout: str) -> None:
    check_dtype("x", x, FLOAT_DTYPES)
    check_shape("x", x, (None, None), layout)
    check_dtype("weight", weight, FLOAT_DTYPES)
    check_shape("weight", weight, (x.shape[1], None), "[C, W]")
    if weight.shape[1] < 2:
        raise ValueError(f"weight must have at least 2 taps, got W = {weight.shape[1]}; pass conv1d.weight as [C, W].")


def naive_causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, initial_state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of `causal_conv1d`: one token after the other."""
    width = weight.shape[1]
    state = x.new_zeros(x.shape[1], width - 1) if initial_state is None else initial_state.clone()
    out = [naive_causal_conv1d_step(token[None], weight, state[None])[0] for token in x]
    return torch.stack(out), state


def naive_causal_conv1d_step(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The specification of `causal_conv1d_step`."""
    window = torch.cat([state.float(), x.float()[..., None]], dim=-1)
    total = (window * weight.float()).sum(dim=-1)
    state.copy_(window[..., 1:])
    return (total / (1 + torch.exp(-total))).to(x.dtype)


@implements("causal_conv1d", "torch")
def _causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, initial_state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, channels = x.shape
    before = weight.shape[1] - 1
    state_dtype = x.dtype if initial_state is None else initial_state.dtype
    if initial_state is None:
        initial_state = x.new_zeros(channels, before)
    # A sum of shifted products, block by block: a half to a quarter of the time of F.conv1d, which copies [T, C] twice.
    num_rows = rows_per_block(x)
    taps = weight.float().t().contiguous()
    history = torch.empty(before + min(num_rows, num_tokens), channels, dtype=torch.float32, device=x.device)
    history[:before] = initial_state.t()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for rows, target in zip(x.split(num_rows), out.split(num_rows), strict=True):
        size = len(rows)
        history[before : before + size] = rows
        total = history[:size] * taps[0]
        for index, tap in enumerate(taps[1:], start=1):
            total.addcmul_(history[index : index + size], tap)
        target.copy_(F.silu(total, inplace=True))
        history[:before] = history[size : before + size].clone()
    return out, history[:before].t().to(state_dtype, copy=True, memory_format=torch.contiguous_format)


@implements("causal_conv1d_step", "torch")
def _causal_conv1d_step(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    taps = weight.float()
    total = x * taps[:, -1]
    for index in range(state.shape[-1]):
        total.addcmul_(state[..., index], taps[:, index])
    state.copy_(torch.cat([state[..., 1:], x[..., None].to(state.dtype)], dim=-1))
    return F.silu(total, inplace=True).to(x.dtype)
