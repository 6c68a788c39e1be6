"""The harness itself: tests that can't fail would let anything pass."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from qwen35mm_kernels import reference
from tests.kernels.compare import Backend, moved, sliced


def test_uninitialised_buffers_are_nan() -> None:
    like = torch.zeros(3)
    for buffer in (torch.empty(3), torch.empty_like(like), like.new_empty(3), torch.empty_strided((3,), (1,))):
        assert buffer.isnan().all()
    assert torch.empty(3, dtype=torch.int64).shape == (3,)


def test_a_moved_tensor_keeps_its_layout_and_what_is_around_it() -> None:
    x = sliced(4, 3, 8, dtype=torch.bfloat16).transpose(0, 1)
    there = moved(x, torch.device("meta"))
    assert (there.shape, there.stride(), there.storage_offset()) == (x.shape, x.stride(), x.storage_offset())
    assert x.to("meta").stride() != x.stride()
    assert torch.equal(moved(x, torch.device("cpu")), x)


def wrong_result(x: torch.Tensor, delta: torch.Tensor, *rest: object) -> torch.Tensor:
    return reference.add_rms_norm(x, delta, *rest) * 1.001  # type: ignore[arg-type]


def wrong_argument(x: torch.Tensor, delta: torch.Tensor, *rest: object) -> torch.Tensor:
    out = reference.add_rms_norm(x, delta, *rest)  # type: ignore[arg-type]
    delta[0, 0] = 0
    return out


def wrong_neighbour(x: torch.Tensor, *rest: object) -> torch.Tensor:
    x.as_strided((1,), (1,), x.storage_offset() - 1).fill_(5)
    return reference.add_rms_norm(x, *rest)  # type: ignore[arg-type]


def left_out(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return reference.add_rms_norm(x.clone(), *rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("operation", [wrong_result, wrong_argument, wrong_neighbour, left_out])
def test_what_differs_from_the_reference_is_found(operation: object) -> None:
    backend = Backend("broken", SimpleNamespace(add_rms_norm=operation), torch.device("cpu"))
    with pytest.raises(AssertionError):
        backend.check("add_rms_norm", sliced(4, 8), sliced(4, 8), torch.randn(8), 1e-6)
    right = Backend("right", reference, torch.device("cpu"))
    right.check("add_rms_norm", sliced(4, 8), sliced(4, 8), torch.randn(8), 1e-6)
