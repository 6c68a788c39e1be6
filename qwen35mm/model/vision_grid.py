"""Where a frame's patches lie, and how the learned position grid is resampled to them."""

from __future__ import annotations

import torch


def patch_coordinates(
    height: int, width: int, merge_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of a frame's patches in their order: merge blocks in raster order, raster inside a block.

    Args:
        height, width: the frame in patches, multiples of merge_size.

    Returns:
        rows and columns, each [height * width] int64.
    """
    blocks = (height // merge_size, merge_size, width // merge_size, merge_size)
    rows = torch.arange(height, device=device)[:, None].expand(height, width)
    columns = torch.arange(width, device=device)[None, :].expand(height, width)
    return rows.reshape(blocks).transpose(1, 2).flatten(), columns.reshape(blocks).transpose(1, 2).flatten()


def interpolation_taps(
    rows: torch.Tensor, columns: torch.Tensor, height: int, width: int, side: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bilinear resampling (corners aligned) of a side x side table to patches of a height x width frame.

    Equal to transformers' vision_utils.get_vision_interpolation_indices_and_weights.

    Returns:
        indices [4, P] int64 into the flattened table and weights [4, P] float32.
    """
    row_low, row_high, row_share = _axis_taps(rows, height, side)
    column_low, column_high, column_share = _axis_taps(columns, width, side)
    indices = [row * side + column for row in (row_low, row_high) for column in (column_low, column_high)]
    shares = [row * column for row in (1 - row_share, row_share) for column in (1 - column_share, column_share)]
    return torch.stack(indices), torch.stack(shares)


def _axis_taps(index: torch.Tensor, size: int, side: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The two neighbours of each place on one axis, and how much of the second one to take."""
    source = index.float() * (side - 1) / max(size - 1, 1)
    low = source.floor()
    return low.long(), (low.long() + 1).clamp(max=side - 1), source - low
