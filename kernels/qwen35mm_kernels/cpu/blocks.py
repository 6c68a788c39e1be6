"""Block sizes for elementwise work: on a CPU, temporaries that fit the cache cost a fraction of larger ones."""

from __future__ import annotations

import torch

# Half a MiB of float32. 2,048 tokens at once take 2 to 4 times as long, partly because large temporaries get fresh
# pages at every call.
_BLOCK_ELEMENTS = 1 << 17


def rows_per_block(x: torch.Tensor) -> int:
    """How many rows of x [T, ...] to process at once: on a CPU as many as fit the cache, else all."""
    if x.device.type != "cpu" or x.numel() <= _BLOCK_ELEMENTS:
        return max(1, x.shape[0])
    return max(1, _BLOCK_ELEMENTS // (x.numel() // x.shape[0]))
