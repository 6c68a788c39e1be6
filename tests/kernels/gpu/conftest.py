"""Each kernel test runs on the CPU under Triton's interpreter, and compiled on a card with `make test-gpu`."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no package for this platform")

from tests.interpreter import accept_arrays_of_one_element

accept_arrays_of_one_element()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where a test's tensors live."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted and request.param == "cuda":
        pytest.skip("kernels are interpreted here; on a card: make test-gpu")
    assert interpreted == (request.param == "cpu"), "TRITON_INTERPRET must be 1 for the CPU"
    return torch.device(request.param)
