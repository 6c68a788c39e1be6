"""Work on the rows of a decode batch so that a row's bits don't depend on the rows beside it.

On a CPU even an elementwise function gives other last bits to the elements that don't fill a vector register, and
which ones those are depends on the number of rows and on how threads share them. Measured: sigmoid, silu and softplus,
wherever a row isn't a multiple of the registers or the batch is large enough for several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar, cast

import torch

Result = TypeVar("Result", torch.Tensor, tuple[torch.Tensor, ...])

# A multiple of what torch's vectorised loops take at a time: two registers of 32 bfloat16 values at most.
_VECTOR_ELEMENTS = 64
# From this size on torch shares elementwise work among threads, at places that depend on the size of it all.
_SHARED_ELEMENTS = 1 << 15


def each_row(function: Callable[..., Result], *inputs: torch.Tensor, num_rows: int | None) -> Result:
    """function(*inputs); with `num_rows` (see Qwen35Model.decode) for each row by itself, which suits any function.

    Args:
        function: takes tensors and gives one or a tuple of them, all with one row for each token.
        inputs: [N, ...] each. With `num_rows` the function may get copies.
    """
    if num_rows is None or len(inputs[0]) == 1:
        return function(*inputs)
    # Copies, because a matrix product may also round by where in memory its operands start.
    return join_rows(function(*(x[row : row + 1].clone() for x in inputs)) for row in range(len(inputs[0])))


def few_rows(function: Callable[..., Result], *inputs: torch.Tensor, num_rows: int | None) -> Result:
    """As `each_row`, but rows go together where that can't change their bits, which saves many small calls.

    Args:
        function: only of elements and of sums over parts of a row, no matrix product. It gets views of the inputs.
        inputs: [N, ...] each, none wider than the first.
    """
    first = inputs[0]
    step = len(first) if num_rows is None else _rows_together(first)
    if step >= len(first):
        return function(*inputs)
    return join_rows(function(*parts) for parts in zip(*(x.split(step) for x in inputs), strict=True))


def _rows_together(x: torch.Tensor) -> int:
    """How many rows of x to take at once: registers are full at the end of each, and one thread does them all."""
    width = x[0].numel()
    if x.device.type != "cpu" or width % _VECTOR_ELEMENTS:
        return 1
    return max(1, (_SHARED_ELEMENTS - 1) // width)


def join_rows(results: Iterable[Result]) -> Result:
    """The rows of several results, or tuples of results, one after the other."""
    parts = list(results)
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], torch.Tensor):
        return cast("Result", torch.cat(cast("list[torch.Tensor]", parts)))
    return cast("Result", tuple(torch.cat(columns) for columns in zip(*parts, strict=True)))
