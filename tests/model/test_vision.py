"""The vision tower against transformers', whole and a few layers at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.model.layouts import PATCH_DIM, relative_error
from tests.tiny import DENSE

Loader = Callable[..., Any]
GRIDS = [(1, 2, 2), (1, 6, 6), (1, 4, 18), (1, 26, 2), (3, 4, 6), (4, 6, 2)]


def random_pixels(t: int, h: int, w: int) -> torch.Tensor:
    return torch.rand((t * h * w, PATCH_DIM), generator=torch.Generator().manual_seed(t * h * w)) * 2 - 1


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_embeddings_equal_transformers(
    grid: tuple[int, int, int], dtype: torch.dtype, tolerance: float, ours: Loader, theirs: Loader
) -> None:
    pixels = random_pixels(*grid)
    with torch.no_grad():
        expected = theirs(DENSE).model.visual(pixels, grid_thw=torch.tensor([grid])).pooler_output
    actual = ours(DENSE, dtype).visual(pixels, grid)
    assert (actual.shape, actual.dtype) == ((len(pixels) // 4, 64), dtype)
    assert relative_error(actual, expected) <= tolerance


def test_frames_do_not_see_each_other(ours: Loader) -> None:
    visual = ours(DENSE).visual
    pixels = random_pixels(2, 4, 4)
    other = pixels.clone()
    other[16:] = -other[16:]
    first, second = visual(pixels, (2, 4, 4)), visual(other, (2, 4, 4))
    assert relative_error(first[:4], second[:4]) <= 1e-6
    assert relative_error(first[4:], second[4:]) > 0.1


@pytest.mark.parametrize(
    ("shape", "grid", "message"),
    [
        ((15, PATCH_DIM), (1, 4, 4), r"must be \[16, 1536\].*got \[15, 1536\]"),
        ((16, 768), (1, 4, 4), r"must be \[16, 1536\].*got \[16, 768\]"),
        ((12, PATCH_DIM), (1, 4, 3), "multiples of 2"),
    ],
)
def test_patches_that_do_not_fit_are_refused(
    shape: tuple[int, int], grid: tuple[int, int, int], message: str, ours: Loader
) -> None:
    with pytest.raises(ValueError, match=message):
        ours(DENSE).visual.embed(torch.zeros(shape), grid)
