"""The causal convolution against the reference and transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from tests.kernels.compare import DTYPES, LENGTHS_AND_DTYPES, Backend, assert_close, sliced

# One block of a kernel and a part of the next.
CHANNELS = 160


def make(
    num_tokens: int, dtype: torch.dtype, width: int = 4, channels: int = CHANNELS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and state."""
    weight = (torch.rand(channels, width) - 0.5).to(dtype)
    return sliced(num_tokens, channels, dtype=dtype), weight, sliced(channels, width - 1, dtype=dtype)


@pytest.mark.parametrize(
    ("num_tokens", "dtype"), [*LENGTHS_AND_DTYPES, (2, torch.float32), (3, torch.bfloat16), (4, torch.float32)]
)
def test_every_length(num_tokens: int, dtype: torch.dtype, backend: Backend) -> None:
    out, final_state = backend.check("causal_conv1d", *make(num_tokens, dtype))
    assert out.is_contiguous()
    assert final_state.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_channels(dtype: torch.dtype, backend: Backend) -> None:
    """On a CPU a block of 6,144 channels has 21 tokens; 64 of them are three blocks and one of a single token."""
    backend.check("causal_conv1d", *make(64, dtype, channels=1000 if backend.is_triton else 6144))


@pytest.mark.parametrize("width", [2, 3, 5])
def test_other_kernel_widths(width: int, backend: Backend) -> None:
    backend.check("causal_conv1d", *make(7, torch.float32, width))


def test_a_float32_state_beside_bfloat16_inputs(backend: Backend) -> None:
    x, weight, _ = make(5, torch.bfloat16)
    _, final_state = backend.check("causal_conv1d", x, weight, torch.randn(CHANNELS, 3))
    assert final_state.dtype == torch.float32
    assert torch.equal(final_state, x[-3:].t().float())


def test_equals_transformers(backend: Backend) -> None:
    x, weight, state = make(70, torch.float32)
    theirs = modeling_qwen3_5.causal_conv1d_fn(x.t()[None], weight, activation="silu")[0].t()
    assert_close(backend.run("causal_conv1d", x, weight, torch.zeros(CHANNELS, 3))[0], theirs)
    their_state = state.clone()[None]
    theirs = modeling_qwen3_5.causal_conv1d_update(x[:1].t()[None], their_state, weight, activation="silu")[..., 0]
    out, final_state = backend.run("causal_conv1d", x[:1], weight, state)
    assert_close(out, theirs)
    assert torch.equal(final_state, their_state[0])


@pytest.mark.parametrize("cut", [1, 2, 64, 99])
def test_two_pieces_equal_one(cut: int, backend: Backend) -> None:
    """In Triton to the bit: every number is computed by itself, in one order."""
    x, weight, state = make(100, torch.float32)
    whole, final_state = backend.run("causal_conv1d", x, weight, state)
    first, between = backend.run("causal_conv1d", x[:cut], weight, state)
    second, last = backend.run("causal_conv1d", x[cut:], weight, between)
    assert_close(torch.cat([first, second]), whole, 1e-6 if backend.name == "cpu" else 0)
    assert torch.equal(last, final_state)
