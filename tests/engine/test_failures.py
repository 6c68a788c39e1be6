"""What a person is told when the model fails."""

from __future__ import annotations

import pytest
import torch

from qwen35mm.engine.request import engine_error
from qwen35mm.errors import EngineError

CPU = torch.device("cpu")


def test_our_own_errors_stay_as_they_are() -> None:
    error = EngineError("in words")
    assert engine_error(error, CPU) is error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        torch.AcceleratorError("CUDA error: out of memory"),
    ],
)
def test_every_kind_of_a_shortage_is_told_as_one(error: Exception) -> None:
    assert str(engine_error(error, CPU)).startswith("Memory ran out while this was computed.")


def test_a_card_that_failed_needs_another_start() -> None:
    message = str(engine_error(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), CPU))
    assert "Start it again" in message
    assert "illegal" not in message


def test_others_are_named_without_their_words() -> None:
    message = str(engine_error(KeyError("a secret"), CPU))
    assert "KeyError" in message
    assert "secret" not in message
