"""The mixture of experts against transformers' block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.model.layouts import relative_error
from tests.tiny import MOE

Loader = Callable[..., Any]


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 200])
def test_output_equals_transformers(num_tokens: int, ours: Loader, theirs: Loader) -> None:
    x = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(num_tokens))
    with torch.no_grad():
        expected = theirs(MOE).model.language_model.layers[0].mlp(x[None])[0]
    assert relative_error(ours(MOE).layers[0].mlp(x), expected) <= 1e-6


def test_a_token_does_not_depend_on_its_company(ours: Loader) -> None:
    block = ours(MOE).layers[0].mlp
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([block(row[None]) for row in x])
    assert relative_error(block(x), alone) <= 1e-6
    assert relative_error(block(x.flip(0)).flip(0), alone) <= 1e-6


def test_experts_that_no_token_chose_are_skipped(ours: Loader) -> None:
    experts = ours(MOE).layers[0].mlp.experts
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([[7, 2, 0]]).expand(5, 3)
    shares = torch.tensor([[1.0, 0.0, 0.0]]).expand(5, 3)
    hidden = experts.gate_up_proj.parts[7].product(x)
    gate, up = hidden.chunk(2, dim=-1)
    expected = experts.down_proj.parts[7].product(torch.nn.functional.silu(gate) * up)
    assert relative_error(experts(x, chosen, shares), expected) <= 1e-6
