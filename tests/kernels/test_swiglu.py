"""SwiGLU against the reference and transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5MLP

from tests.kernels.compare import DTYPES, LENGTHS_AND_DTYPES, Backend, assert_close, sliced


@pytest.mark.parametrize(("num_tokens", "dtype"), [*LENGTHS_AND_DTYPES, (0, torch.bfloat16)])
def test_every_length(num_tokens: int, dtype: torch.dtype, backend: Backend) -> None:
    backend.check("swiglu", sliced(num_tokens, 2 * 75, dtype=dtype) * 3)


def test_gates_of_any_size(backend: Backend) -> None:
    gate_up = torch.ones(2, 96)
    gate_up[:, :48] = torch.linspace(-1000, 1000, 96).view(2, 48)
    backend.check("swiglu", gate_up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype, kernel_backend: Backend) -> None:
    gate_up = torch.randn(70, 2 * 1000).to(dtype)
    whole = kernel_backend.run("swiglu", gate_up)
    for row in (0, 13, 69):
        assert torch.equal(kernel_backend.run("swiglu", gate_up[row : row + 1])[0], whole[row])


def test_equals_transformers(backend: Backend) -> None:
    mlp = Qwen3_5MLP(Qwen3_5TextConfig(hidden_size=32), intermediate_size=64)  # pyright: ignore[reportArgumentType]
    for projection in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        projection.weight.data = torch.randn_like(projection.weight)
    x = torch.randn(5, 32)
    gate_up = torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], dim=-1).detach()
    ours = mlp.down_proj(backend.run("swiglu", gate_up))
    assert_close(ours.detach(), mlp(x).detach())
