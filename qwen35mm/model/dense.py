"""Products with weight matrices: x @ weight.T + bias, in the way that suits the hardware.

A CPU without bfloat16 arithmetic (no AMX, AVX-512-BF16 or Arm BF16) emulates a bfloat16 product at a third of its
float32 speed or less. There, blocks of a bfloat16 weight are converted to float32 within the cache, and a few rows
go through matrix-vector products, which read the weight once each. Measured on a Xeon with AVX-512 but no bfloat16,
7168 x 1024, one thread: 256 rows in 36 ms instead of 120, one row in 1.4 ms instead of 2.2.

A few float32 rows are faster one by one through oneDNN, block of the weight by block, than through MKL: a decode step
of one to four replies of a random 0.8B took 26% to 46% less time, on two cores.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.nn.functional as F

from qwen35mm.cpu import cpu_capabilities

logger = logging.getLogger(__name__)

# Up to here a product per row is fastest; from _MIN_BLOCK_ROWS on, converting a block to float32 pays off.
_MAX_VECTOR_ROWS = 4
_MIN_BLOCK_ROWS = 16
_BLOCK_ELEMENTS = 1 << 21
# A float32 weight of up to 2 MiB stays in the cache anyway, and a call of oneDNN costs more than its products.
_SMALL_ELEMENTS = 1 << 19


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias: [N, in] -> [N, out] in x's dtype, which is the weight's.

    The method depends only on the device, the dtype and the sizes.
    """
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    if x.dtype == torch.float32:
        small = weight.numel() <= _SMALL_ELEMENTS or len(x) > _MAX_VECTOR_ROWS
        return F.linear(x, weight, bias) if small or not _has_onednn() else _by_rows_in_blocks(x, weight, bias)
    if computes_bfloat16() or _MAX_VECTOR_ROWS < len(x) < _MIN_BLOCK_ROWS:
        return F.linear(x, weight, bias)
    return _by_rows(x, weight, bias) if len(x) <= _MAX_VECTOR_ROWS else _through_float32(x, weight, bias)


@functools.cache
def computes_bfloat16() -> bool:
    """Whether this CPU has bfloat16 matrix arithmetic (AMX or AVX-512 on x86, BF16 on Arm)."""
    capabilities = cpu_capabilities()
    found = [flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if capabilities.get(flag, False)]
    logger.info("bfloat16 products on the CPU: %s", found[0] if found else "through float32, it has none of its own")
    return bool(found)


@functools.cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available()


def _by_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    for row, target in zip(x, out, strict=True):
        torch.mv(weight, row, out=target)
    return out if bias is None else out.add_(bias)


def _by_rows_in_blocks(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """One block of the weight at a time, each row by itself through oneDNN: a block is read once for all rows."""
    num_out = weight.shape[0]
    out = x.new_empty(len(x), num_out)
    rows = [row[None].to_mkldnn() for row in x]
    num_blocks = -(-weight.numel() // _BLOCK_ELEMENTS)
    step = -(-num_out // num_blocks)
    for start in range(0, num_out, step):
        block = weight[start : start + step]
        for row, target in zip(rows, out, strict=True):
            target[start : start + step] = F.linear(row, block).to_dense()[0]
    return out if bias is None else out.add_(bias)


def _through_float32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    num_out, num_in = weight.shape
    x32, bias32 = x.float(), None if bias is None else bias.float()
    out = x.new_empty(x.shape[0], num_out)
    step = max(_BLOCK_ELEMENTS // num_in, 1)
    block = torch.empty(min(step, num_out), num_in)
    for start in range(0, num_out, step):
        stop = min(start + step, num_out)
        weight32 = block[: stop - start].copy_(weight[start:stop])
        out[:, start:stop] = F.linear(x32, weight32, None if bias32 is None else bias32[start:stop])
    return out
