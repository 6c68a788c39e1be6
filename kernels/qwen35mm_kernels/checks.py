"""Checks of what callers pass in: a message says what was expected, what came, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FLOAT_DTYPES = (torch.float32, torch.bfloat16)


def check_shape(name: str, tensor: torch.Tensor, expected: Sequence[int | None], layout: str) -> None:
    """Raises ValueError unless `tensor` has the `expected` sizes (None: any size), which `layout` names."""
    shape = tensor.shape
    if len(shape) == len(expected) and all(
        want is None or want == got for want, got in zip(expected, shape, strict=True)
    ):
        return
    wanted = ", ".join("any" if size is None else str(size) for size in expected)
    raise ValueError(f"{name} must be {layout} = [{wanted}], got {list(shape)}; pass it in that layout, unpadded.")


def check_dtype(name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Raises TypeError unless the tensor's dtype is one of `allowed`."""
    if tensor.dtype not in allowed:
        wanted = " or ".join(str(dtype) for dtype in allowed)
        raise TypeError(f"{name} must be {wanted}, got {tensor.dtype}; convert it with .to({allowed[0]}).")
