"""Products with weight matrices: x @ weight.T + bias, in the way that suits the hardware.

A library picks its arithmetic by the number of rows, and some also by a row's place: with two threads, MKL's float32
products of 5 to 7 or 9 to 11 rows round their last rows in another way than their first ones. Where rows must not
depend on their company, the number is fixed, and where that doesn't suffice each row is a product by itself.

A CPU without bfloat16 arithmetic (no AMX, AVX-512-BF16 or Arm BF16) emulates a bfloat16 product at a third of its
float32 speed or less. There, a bfloat16 weight is taken through float32 in blocks that stay in the cache, and few
rows go through matrix-vector products, which read the weight once each. Measured on a Xeon with AVX-512 but no
bfloat16, 7168 x 1024, one thread: 256 rows in 36 ms instead of 120, one row in 1.4 ms instead of 2.2.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.nn.functional as F

from qwen35mm.cpu import cpu_capabilities

logger = logging.getLogger(__name__)

# Up to here a product per row is the quickest; from there on the block's conversion pays.
_MAX_VECTOR_ROWS = 4
_MIN_BLOCK_ROWS = 16
_BLOCK_ELEMENTS = 1 << 21
# A float32 weight of up to 2 MiB stays in the cache by itself, and a call of oneDNN costs more than its products.
_SMALL_ELEMENTS = 1 << 19


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, num_rows: int | None = None
) -> torch.Tensor:
    """x @ weight.T + bias: [N, in] -> [N, out] in x's dtype, which is the weight's.

    How it is computed depends on the device, the dtype and N alone.

    Args:
        num_rows: at least N. With it, a row of the result depends on its own row of x alone, bit for bit: not on N,
            its place or the other rows. For two values of num_rows it may differ.

    Raises:
        ValueError: N is more than num_rows.
    """
    if num_rows is not None:
        return _free_of_company(x, weight, bias, num_rows)
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or computes_bfloat16():
        return F.linear(x, weight, bias)
    if len(x) <= _MAX_VECTOR_ROWS:
        return _by_rows(x, weight, bias)
    if len(x) < _MIN_BLOCK_ROWS:
        return F.linear(x, weight, bias)
    return _through_float32(x, weight, bias)


@functools.cache
def computes_bfloat16() -> bool:
    """Whether this CPU has bfloat16 matrix arithmetic (AMX or AVX-512 on x86, BF16 on Arm)."""
    capabilities = cpu_capabilities()
    found = [flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if capabilities.get(flag, False)]
    logger.info("bfloat16 products on the CPU: %s", found[0] if found else "through float32, it has none of its own")
    return bool(found)


def _free_of_company(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_rows: int) -> torch.Tensor:
    if len(x) > num_rows:
        raise ValueError(f"{len(x)} rows don't fit into num_rows = {num_rows}; ask for as many rows as there can be.")
    if x.device.type != "cpu" or (x.dtype == torch.bfloat16 and computes_bfloat16()):
        # Bound by reading the weight: a few rows cost hardly more than one. oneDNN's rows don't know their place.
        return F.linear(_padded(x, num_rows), weight, bias)[: len(x)]
    if x.dtype == torch.float32 and weight.numel() > _SMALL_ELEMENTS and torch.backends.mkldnn.is_available():
        return _by_rows_in_blocks(x, weight, bias)
    return _by_rows(_aligned(x), weight, bias)


def _padded(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[N, in] -> [num_rows, in], zeros after x; always a new tensor, so that its alignment is always the same."""
    padded = x.new_zeros(num_rows, x.shape[1])
    padded[: len(x)] = x
    return padded


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """A copy whose rows all start at multiples of 64 bytes: MKL rounds a vector by its alignment, too."""
    return x.new_empty(len(x), x.shape[1] + -x.shape[1] % 32)[:, : x.shape[1]].copy_(x)


def _by_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    for row, target in zip(x, out, strict=True):
        torch.mv(weight, row, out=target)
    return out if bias is None else out.add_(bias)


def _by_rows_in_blocks(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Each row by itself through oneDNN, one block of the weight after the other: read once, used by every row.

    One float32 row is quicker this way than through MKL; a fixed number of rows isn't, as it is bound by arithmetic.
    """
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
