"""Work on the rows of a decode batch, one after the other where they must not depend on their company.

On a CPU even an elementwise function gives other last bits to the elements that don't fill a vector register, and
which ones those are depends on the number of rows and on how threads share them. A row that goes through by itself,
always in the same shape, has the same bits wherever it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

Result = TypeVar("Result", torch.Tensor, tuple[torch.Tensor, ...])


def each_row(function: Callable[..., Result], *inputs: torch.Tensor, num_rows: int | None) -> Result:
    """function(*inputs); with `num_rows` (see Qwen35Model.decode) row by row.

    Args:
        function: takes tensors and gives one or a tuple of them, all with one row for each token.
        inputs: [N, ...] each.
    """
    if num_rows is None or len(inputs[0]) == 1:
        return function(*inputs)
    # Copies, because a matrix product may also round by where in memory its operands start.
    results = [function(*(x[row : row + 1].clone() for x in inputs)) for row in range(len(inputs[0]))]
    if isinstance(results[0], torch.Tensor):
        return cast("Result", torch.cat(cast("list[torch.Tensor]", results)))
    return cast("Result", tuple(torch.cat(parts) for parts in zip(*results, strict=True)))
