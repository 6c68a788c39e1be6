"""The causal convolution against the reference and transformers."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from tests.kernels.compare import DTYPES, LENGTHS_AND_DTYPES, Backend, assert_close, sliced

# One block of a kernel and a part of the next.
CHANNELS = 160


class Inputs(NamedTuple):
    """The arguments of `causal_conv1d`."""

    x: torch.Tensor
    weight: torch.Tensor
    states: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor

    def rows(self, start: int, stop: int | None) -> Inputs:
        """Some of the tokens, with the states that they share."""
        x = self.x[start:stop]
        return self._replace(x=x, counts=torch.tensor([len(x)]))

    @property
    def state(self) -> torch.Tensor:
        return self.states[self.slots[0]]


def make(num_tokens: int, dtype: torch.dtype, width: int = 4, channels: int = CHANNELS) -> Inputs:
    """In the second of three slots."""
    weight = (torch.rand(channels, width) - 0.5).to(dtype)
    numbers = torch.tensor([1]), torch.tensor([num_tokens])
    return Inputs(
        sliced(num_tokens, channels, dtype=dtype), weight, sliced(3, channels, width - 1, dtype=dtype), *numbers
    )


@pytest.mark.parametrize(
    ("num_tokens", "dtype"), [*LENGTHS_AND_DTYPES, (2, torch.float32), (3, torch.bfloat16), (4, torch.float32)]
)
def test_every_length(num_tokens: int, dtype: torch.dtype, backend: Backend) -> None:
    assert backend.check("causal_conv1d", *make(num_tokens, dtype)).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_channels(dtype: torch.dtype, backend: Backend) -> None:
    """On a CPU a block of 6,144 channels has 21 tokens; 64 of them are three blocks and one of a single token."""
    backend.check("causal_conv1d", *make(64, dtype, channels=1000 if backend.is_triton else 6144))


@pytest.mark.parametrize("width", [2, 3, 5])
def test_other_kernel_widths(width: int, backend: Backend) -> None:
    backend.check("causal_conv1d", *make(7, torch.float32, width))


def test_a_float32_state_beside_bfloat16_inputs(backend: Backend) -> None:
    inputs = make(5, torch.bfloat16)._replace(states=torch.randn(3, CHANNELS, 3))
    backend.check("causal_conv1d", *inputs)
    assert torch.equal(inputs.state, inputs.x[-3:].t().float())


def test_equals_transformers(backend: Backend) -> None:
    inputs = make(70, torch.float32)
    x, weight = inputs[:2]
    theirs = modeling_qwen3_5.causal_conv1d_fn(x.t()[None], weight, activation="silu")[0].t()
    assert_close(backend.run("causal_conv1d", *inputs._replace(states=torch.zeros(2, CHANNELS, 3))), theirs)
    their_state = inputs.state.clone()[None]
    theirs = modeling_qwen3_5.causal_conv1d_update(x[:1].t()[None], their_state, weight, activation="silu")[..., 0]
    assert_close(backend.run("causal_conv1d", *inputs.rows(0, 1)), theirs)
    assert torch.equal(inputs.state, their_state[0])


@pytest.mark.parametrize("cut", [1, 2, 64, 99])
def test_two_pieces_equal_one(cut: int, backend: Backend) -> None:
    """In Triton to the bit: every number is computed by itself, in one order."""
    inputs = make(100, torch.float32)
    again = inputs._replace(states=inputs.states.clone())
    whole = backend.run("causal_conv1d", *again)
    parts = [backend.run("causal_conv1d", *inputs.rows(*bounds)) for bounds in ((0, cut), (cut, None))]
    assert_close(torch.cat(parts), whole, 1e-6 if backend.name == "cpu" else 0)
    assert torch.equal(inputs.state, again.state)


@pytest.mark.parametrize("count", [1, 2, 3, 40, 64])
def test_padding_reaches_nothing(count: int, backend: Backend) -> None:
    """It is NaN here; 32 rows are a block, and 3 of them read the state."""
    inputs = make(70, torch.float32)
    inputs.x[count:] = float("nan")
    plain = inputs.rows(0, count)._replace(states=inputs.states.clone())
    out = backend.check("causal_conv1d", *inputs._replace(counts=torch.tensor([count])))
    assert not out[count:].any()
    assert torch.equal(backend.run("causal_conv1d", *plain), out[:count])
    assert torch.equal(plain.states, inputs.states)


def test_a_piece_of_no_token_changes_nothing(triton_backend: Backend) -> None:
    """As a graph runs before it is captured."""
    inputs = make(70, torch.bfloat16)
    inputs.x.fill_(float("nan"))
    before = inputs.states.clone()
    assert not triton_backend.run("causal_conv1d", *inputs._replace(counts=torch.tensor([0]))).any()
    assert torch.equal(inputs.states, before)
