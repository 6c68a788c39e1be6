"""The vision tower against transformers', whole and a few layers at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qwen35mm.model.vision import interpolation_taps, patch_coordinates
from tests.model.layouts import PATCH_DIM, relative_error
from tests.tiny import DENSE

Loader = Callable[..., Any]
GRIDS = [
    [(1, 2, 2)],
    [(1, 6, 6)],
    [(1, 4, 18), (1, 26, 2), (1, 12, 10)],
    [(3, 4, 6)],
    [(2, 2, 4), (1, 8, 8), (4, 6, 2)],
]


def random_pixels(grids: list[tuple[int, int, int]]) -> torch.Tensor:
    count = sum(t * h * w for t, h, w in grids)
    return torch.rand((count, PATCH_DIM), generator=torch.Generator().manual_seed(count)) * 2 - 1


@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_embeddings_equal_transformers(grids: list[tuple[int, int, int]], ours: Loader, theirs: Loader) -> None:
    pixels = random_pixels(grids)
    with torch.no_grad():
        expected = theirs(DENSE).model.visual(pixels, grid_thw=torch.tensor(grids)).pooler_output
    actual = ours(DENSE).visual(pixels, grids)
    assert actual.shape == (len(pixels) // 4, 64)
    assert relative_error(actual, expected) <= 1e-6


def test_bfloat16_is_close(ours: Loader, theirs: Loader) -> None:
    grids = GRIDS[2]
    pixels = random_pixels(grids)
    with torch.no_grad():
        expected = theirs(DENSE).model.visual(pixels, grid_thw=torch.tensor(grids)).pooler_output
    actual = ours(DENSE, torch.bfloat16).visual(pixels, grids)
    assert actual.dtype == torch.bfloat16
    assert relative_error(actual, expected) <= 2e-2


@pytest.mark.parametrize("step", [1, 2, 5])
def test_layers_in_groups_keep_the_bits(step: int, ours: Loader) -> None:
    visual, grids = ours(DENSE).visual, GRIDS[4]
    pixels = random_pixels(grids)
    state = visual.begin(pixels, grids)
    calls = 1
    while not visual.run_layers(state, step):
        calls += 1
    assert calls == -(-len(visual.blocks) // step)
    assert torch.equal(visual.finish(state), visual(pixels, grids))


def test_frames_do_not_see_each_other(ours: Loader) -> None:
    visual = ours(DENSE).visual
    pixels = random_pixels([(2, 4, 4)])
    other = pixels.clone()
    other[16:] = -other[16:]
    first, second = visual(pixels, [(2, 4, 4)]), visual(other, [(2, 4, 4)])
    assert relative_error(first[:4], second[:4]) <= 1e-6
    assert relative_error(first[4:], second[4:]) > 0.1


@pytest.mark.parametrize(
    ("shape", "grids", "message"),
    [
        ((15, PATCH_DIM), [(1, 4, 4)], r"must be \[16, 1536\].*got \[15, 1536\]"),
        ((16, 768), [(1, 4, 4)], r"must be \[16, 1536\].*got \[16, 768\]"),
        ((12, PATCH_DIM), [(1, 4, 3)], "multiples of 2"),
        ((0, PATCH_DIM), [], r"must be \[0, 1536\]"),
    ],
)
def test_patches_that_do_not_fit_are_refused(
    shape: tuple[int, int], grids: list[tuple[int, int, int]], message: str, ours: Loader
) -> None:
    with pytest.raises(ValueError, match=message):
        ours(DENSE).visual.begin(torch.zeros(shape), grids)


def test_patch_order_is_merge_blocks_first() -> None:
    rows, columns = patch_coordinates(4, 4, 2, torch.device("cpu"))
    assert rows.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]
    assert columns.tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 0, 1, 0, 1, 2, 3, 2, 3]


@pytest.mark.parametrize(("height", "width"), [(2, 2), (6, 6), (48, 48), (2, 60), (34, 14)])
def test_positions_are_interpolated_as_torch_does(height: int, width: int) -> None:
    """The corners of the table lie on the corners of the frame."""
    side = 6
    table = torch.rand((side * side, 5), generator=torch.Generator().manual_seed(0))
    rows, columns = patch_coordinates(height, width, 2, torch.device("cpu"))
    indices, weights = interpolation_taps(rows, columns, height, width, side)
    actual = (table[indices] * weights[..., None]).sum(0)
    image = table.view(1, side, side, 5).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(image, (height, width), mode="bilinear", align_corners=True)
    assert torch.allclose(actual, resized[0, :, rows, columns].T, atol=1e-5)
