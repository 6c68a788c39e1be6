"""The tests' own tools."""

from __future__ import annotations

import torch

from tests.kernels.compare import moved, sliced


def test_a_slice_that_is_moved_lies_as_it_lay() -> None:
    x = sliced(4, 3, dtype=torch.bfloat16).transpose(0, 1)
    there = moved(x, torch.device("meta"))
    assert (there.shape, there.stride(), there.storage_offset()) == (x.shape, x.stride(), x.storage_offset())
    assert x.to("meta").stride() != x.stride()
    assert torch.equal(moved(x, torch.device("cpu")), x)
