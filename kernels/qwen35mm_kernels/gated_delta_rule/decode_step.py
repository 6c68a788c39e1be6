"""A Gated DeltaNet layer's decode step, from in_proj's output to out_proj's input, as one operation.

Conv step, gates, delta rule and gated norm touch little memory but the states; fused, a step reads and writes those
once and nothing else of their size. Both states are whole pools here: a batch names its rows by slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from qwen35mm_kernels.causal_conv1d import causal_conv1d_step, naive_causal_conv1d_step
from qwen35mm_kernels.checks import FLOAT_DTYPES, check_dtype, check_shape
from qwen35mm_kernels.dispatch import implementation, implements
from qwen35mm_kernels.gated_delta_rule.gates import gdn_gates
from qwen35mm_kernels.gated_delta_rule.naive import naive_gated_delta_step, naive_gdn_gates
from qwen35mm_kernels.gated_delta_rule.recurrent import recurrent_gated_delta_step
from qwen35mm_kernels.norm import gated_rms_norm, naive_gated_rms_norm


def gdn_decode_step(
    mixed: torch.Tensor,
    conv_weight: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    conv_states: torch.Tensor,
    recurrent_states: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_k_heads: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token for each of B sequences: causal conv and SiLU, gates, gated delta rule, gated norm.

    Args:
        mixed: [B, C + Hv * V + 2 * Hv], float32 or bfloat16, with C = 2 * Hk * K + Hv * V: in_proj's output, columns
            q | k | v (C of them), z, b, a. The arithmetic is float32 throughout.
        conv_weight: [C, W], W at least 2; the last tap meets the current token.
        A_log, dt_bias: [Hv] float32.
        norm_weight: [V], plain, not zero-centred.
        eps: of the gated norm.
        conv_states: [num_slots, C, W - 1], oldest input first; row slots[b] is shifted in place.
        recurrent_states: [num_slots, Hv, K, V] float32; row slots[b] is updated in place.
        slots: [B] int32 or int64, each sequence's row in both pools, no row twice. -1 marks a padding row, which
            fills up a CUDA graph's fixed batch: no state is touched for it and its output is zero.
        num_k_heads: Hk, a divisor of Hv.
        out: [B, Hv * V] in mixed's dtype, to write to; None: a new tensor.

    Returns:
        [B, Hv * V] in mixed's dtype.

    Raises:
        ValueError, TypeError: a shape or dtype that doesn't fit.
    """
    check_shape("mixed", mixed, (None, None), "[B, C + Hv * V + 2 * Hv]")
    check_shape("recurrent_states", recurrent_states, (None, None, None, None), "[num_slots, Hv, K, V]")
    num_slots, num_v_heads, key_dim, value_dim = recurrent_states.shape
    if num_k_heads < 1 or num_v_heads % num_k_heads:
        raise ValueError(f"num_k_heads must divide the value heads, got Hv = {num_v_heads} and Hk = {num_k_heads}.")
    channels = 2 * num_k_heads * key_dim + num_v_heads * value_dim
    width = channels + num_v_heads * (value_dim + 2)
    check_shape("mixed", mixed, (None, width), "[B, C + Hv * V + 2 * Hv]")
    check_shape("conv_weight", conv_weight, (channels, None), "[C, W]")
    if conv_weight.shape[1] < 2:
        raise ValueError(f"conv_weight must have at least 2 taps, got W = {conv_weight.shape[1]}; pass it as [C, W].")
    check_shape("A_log", A_log, (num_v_heads,), "[Hv]")
    check_shape("dt_bias", dt_bias, (num_v_heads,), "[Hv]")
    check_shape("norm_weight", norm_weight, (value_dim,), "[V]")
    check_shape("conv_states", conv_states, (num_slots, channels, conv_weight.shape[1] - 1), "[num_slots, C, W - 1]")
    check_shape("slots", slots, mixed.shape[:1], "[B]")
    check_dtype("slots", slots, (torch.int64, torch.int32))
    for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias), ("recurrent_states", recurrent_states)):
        check_dtype(name, tensor, (torch.float32,))
    for name, tensor in (
        ("mixed", mixed),
        ("conv_weight", conv_weight),
        ("norm_weight", norm_weight),
        ("conv_states", conv_states),
    ):
        check_dtype(name, tensor, FLOAT_DTYPES)
    if out is None:
        out = mixed.new_empty(mixed.shape[0], num_v_heads * value_dim)
    check_shape("out", out, (mixed.shape[0], num_v_heads * value_dim), "[B, Hv * V]")
    check_dtype("out", out, (mixed.dtype,))
    implementation("gdn_decode_step", mixed.device)(
        mixed,
        conv_weight,
        A_log,
        dt_bias,
        norm_weight,
        eps,
        conv_states,
        recurrent_states,
        slots,
        num_k_heads=num_k_heads,
        out=out,
    )
    return out


def naive_gdn_decode_step(
    mixed: torch.Tensor,
    conv_weight: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    conv_states: torch.Tensor,
    recurrent_states: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_k_heads: int,
) -> torch.Tensor:
    """The specification of `gdn_decode_step`: one sequence after the other, nothing rounded before the end."""
    num_v_heads, key_dim, value_dim = recurrent_states.shape[1:]
    out = mixed.new_zeros(mixed.shape[0], num_v_heads * value_dim)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        token = mixed[row : row + 1].float()
        qkv, z, b, a = _columns(token, conv_weight.shape[0], num_v_heads)
        qkv = naive_causal_conv1d_step(qkv, conv_weight, conv_states[slot : slot + 1])
        q, k, v = _heads(qkv, num_k_heads, key_dim, value_dim)
        g, beta = naive_gdn_gates(a, b, A_log, dt_bias)
        o = naive_gated_delta_step(q, k, v, g, beta, recurrent_states[slot : slot + 1])
        out[row] = naive_gated_rms_norm(o, z.view_as(o), norm_weight, eps).flatten()
    return out


@implements("gdn_decode_step", "torch")
def _gdn_decode_step(
    mixed: torch.Tensor,
    conv_weight: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    conv_states: torch.Tensor,
    recurrent_states: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_k_heads: int,
    out: torch.Tensor,
) -> None:
    num_v_heads, key_dim, value_dim = recurrent_states.shape[1:]
    out.zero_()
    for rows, taken in _runs(slots.tolist()):
        qkv, z, b, a = _columns(mixed[rows].float(), conv_weight.shape[0], num_v_heads)
        q, k, v = _heads(causal_conv1d_step(qkv, conv_weight, conv_states[taken]), num_k_heads, key_dim, value_dim)
        g, beta = gdn_gates(a, b, A_log, dt_bias)
        o = recurrent_gated_delta_step(q, k, v, g, beta, recurrent_states[taken])
        out[rows] = gated_rms_norm(o, z.reshape(o.shape), norm_weight, eps).flatten(1)


def _runs(slots: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Rows whose slots are consecutive, and those: such states are a view of the pool. Padding is left out."""
    start = 0
    for row in range(1, len(slots) + 1):
        if row == len(slots) or slots[row] != slots[row - 1] + 1 or slots[row - 1] < 0:
            if slots[start] >= 0:
                yield slice(start, row), slice(slots[start], slots[start] + row - start)
            start = row


def _columns(mixed: torch.Tensor, channels: int, num_v_heads: int) -> tuple[torch.Tensor, ...]:
    """q | k | v together, then z, b, a."""
    return mixed.split((channels, mixed.shape[1] - channels - 2 * num_v_heads, num_v_heads, num_v_heads), dim=1)


def _heads(
    qkv: torch.Tensor, num_k_heads: int, key_dim: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[B, C] -> q, k [B, Hk, K] and v [B, Hv, V], as views."""
    keys = num_k_heads * key_dim
    q, k, v = qkv.split((keys, keys, qkv.shape[1] - 2 * keys), dim=1)
    return q.unflatten(1, (-1, key_dim)), k.unflatten(1, (-1, key_dim)), v.unflatten(1, (-1, value_dim))
