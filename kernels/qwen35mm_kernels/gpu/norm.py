"""RMS norms, each in one pass over memory.

One program sums a row, in an order that depends only on its length, never on the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qwen35mm_kernels.gpu.early import starts_early, wait_for_inputs
from qwen35mm_kernels.gpu.launch import Config, cdiv, config_for, configured, launch, next_power_of_2


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centred: bool) -> torch.Tensor:
    """Rows may have any stride."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_rms_norm(x, None, weight, out, eps, zero_centred)
    return out


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows may have any stride."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_rms_norm(x, delta, weight, out, eps, True)
    return out


def gated_rms_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows of x and z may have any stride."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_rows, inner, stride_x = _rows(x)
    assert z.shape == x.shape
    assert weight.shape == x.shape[-1:]
    assert weight.is_contiguous()
    config = _config("gated_rms_norm", x.shape[-1], x.device)
    launch(
        _gated_rms_norm_kernel,
        (cdiv(num_rows, config.blocks["BLOCK_ROWS"]),),
        x,
        z,
        weight,
        out,
        num_rows,
        inner,
        *stride_x,
        *_rows(z)[2],
        eps,
        config=config,
        D=x.shape[-1],
        BLOCK_D=next_power_of_2(x.shape[-1]),
    )
    return out


def _launch_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, eps: float, zero_centred: bool
) -> None:
    num_rows, inner, stride_x = _rows(x)
    assert delta is None or delta.shape == x.shape
    assert weight.shape == x.shape[-1:]
    assert weight.is_contiguous()
    config = _config("rms_norm", x.shape[-1], x.device)
    launch(
        _rms_norm_kernel,
        (cdiv(num_rows, config.blocks["BLOCK_ROWS"]),),
        x,
        delta,
        weight,
        out,
        num_rows,
        inner,
        *stride_x,
        *((0, 0) if delta is None else _rows(delta)[2]),
        eps,
        config=config,
        D=x.shape[-1],
        BLOCK_D=next_power_of_2(x.shape[-1]),
        ZERO_CENTRED=zero_centred,
        ADD=delta is not None,
        EARLY=starts_early(x.device),
    )


def _rows(x: torch.Tensor) -> tuple[int, int, tuple[int, int]]:
    """(rows, rows in a group, (stride between groups, stride in a group))."""
    assert x.stride(-1) == 1 or x.shape[-1] == 1, "a row must be contiguous"
    if x.ndim == 2:
        return x.shape[0], 1, (x.stride(0), 0)
    # `view` never copies. Two strides describe any slice of a projection's output.
    groups = x.view(-1, *x.shape[-2:]) if x.ndim > 2 else x.view(1, 1, -1)
    return groups.shape[0] * groups.shape[1], groups.shape[1], (groups.stride(0), groups.stride(1))


@configured
def _config(kernel: str, row: int, device: torch.device) -> Config:
    """Short rows share a program; long rows have 16 numbers a thread. Independent of the number of rows."""
    block_d = next_power_of_2(row)
    default = Config({"BLOCK_ROWS": max(1, 2048 // block_d)}, num_warps=min(16, max(4, block_d // 512)), num_stages=1)
    return config_for(kernel, device, f"D{row}", default)


@triton.jit
def _row_offsets(inner, stride_outer, stride_inner, rows):
    return (rows // inner).to(tl.int64) * stride_outer + (rows % inner).to(tl.int64) * stride_inner


@triton.jit
def _normalise(x, eps, D: tl.constexpr):
    """Rows divided by their root mean square; columns beyond D are 0."""
    return x * tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]


# No specialisation on num_rows: all batches must run the same instructions.
@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x,  # [num_rows, D]; with ADD it becomes x + delta
    delta,  # [num_rows, D], only with ADD
    weight,  # [D]
    out,  # [num_rows, D], contiguous
    num_rows,
    inner,  # row r lies at (r // inner) * stride_outer + (r % inner) * stride_inner
    stride_x_outer,
    stride_x_inner,
    stride_delta_outer,
    stride_delta_inner,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Grid (blocks of rows)."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_D)
    mask = (rows < num_rows)[:, None] & (columns < D)[None, :]
    x += _row_offsets(inner, stride_x_outer, stride_x_inner, rows)[:, None] + columns[None, :]
    scale = tl.load(weight + columns, mask=columns < D, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
    values = tl.load(x, mask=mask, other=0.0)
    if ADD:
        delta += _row_offsets(inner, stride_delta_outer, stride_delta_inner, rows)[:, None] + columns[None, :]
        total = values.to(tl.float32) + tl.load(delta, mask=mask, other=0.0).to(tl.float32)
        # Rounded before the norm, so that the norm uses the stored values.
        values = total.to(x.dtype.element_ty)
        tl.store(x, values, mask=mask)
    if ZERO_CENTRED:
        scale += 1.0
    normed = _normalise(values.to(tl.float32), eps, D) * scale[None, :]
    tl.store(out + rows[:, None].to(tl.int64) * D + columns[None, :], normed.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_rms_norm_kernel(
    x,  # [num_rows, D]
    z,  # [num_rows, D]
    weight,  # [D]
    out,  # [num_rows, D], contiguous
    num_rows,
    inner,  # as in _rms_norm_kernel
    stride_x_outer,
    stride_x_inner,
    stride_z_outer,
    stride_z_inner,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Grid (blocks of rows)."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_D)
    mask = (rows < num_rows)[:, None] & (columns < D)[None, :]
    x += _row_offsets(inner, stride_x_outer, stride_x_inner, rows)[:, None] + columns[None, :]
    z += _row_offsets(inner, stride_z_outer, stride_z_inner, rows)[:, None] + columns[None, :]
    values = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(z, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=columns < D, other=0.0).to(tl.float32)
    gated = _normalise(values, eps, D) * scale[None, :] * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out + rows[:, None].to(tl.int64) * D + columns[None, :], gated.to(out.dtype.element_ty), mask=mask)
