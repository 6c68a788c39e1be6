"""How kernel tests compare, and how they make tensors that are slices of something wider, here and on a card."""

from __future__ import annotations

import torch

# Odd lengths around a chunk and more than one block of everything.
LENGTHS = (1, 63, 64, 65, 257)
DTYPES = (torch.float32, torch.bfloat16)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`; NaN where `actual` has one."""
    assert actual.shape == expected.shape
    difference = torch.linalg.vector_norm(actual.double() - expected.double())
    return (difference / torch.linalg.vector_norm(expected.double())).item()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, limit: float | None = None) -> None:
    """Same dtype, and a relative error of at most `limit` (by default 1e-5, or 5e-3 in bfloat16)."""
    assert actual.dtype == expected.dtype
    if limit is None:
        limit = 5e-3 if actual.dtype == torch.bfloat16 else 1e-5
    assert relative_error(actual, expected) <= limit


def sliced(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers, as a slice of a tensor with wider rows and more of them."""
    first, *middle, last = shape
    wide = torch.randn(first + 2, *middle, last + 5).to(dtype)
    return wide[1:-1, ..., 3:-2]


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device, lying there as it lies here: with its strides, its offset and what is around it.

    `Tensor.to` makes a slice dense, and a kernel would never see on a card what it is tested with on a CPU.
    """
    everything = tensor.new_empty(0).set_(tensor.untyped_storage())
    return everything.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
