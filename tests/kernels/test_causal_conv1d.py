"""The causal convolution against its twin and transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from qwen35mm_kernels import causal_conv1d, causal_conv1d_step
from qwen35mm_kernels.causal_conv1d import naive_causal_conv1d, naive_causal_conv1d_step
from tests.kernels.compare import DTYPES, LENGTHS, assert_close, sliced

CHANNELS = 40


def make(num_tokens: int, dtype: torch.dtype, width: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = (torch.rand(CHANNELS, width) - 0.5).to(dtype)
    return sliced(num_tokens, CHANNELS, dtype=dtype), weight, sliced(CHANNELS, width - 1, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [*LENGTHS, 2, 3, 4])
@pytest.mark.parametrize("with_state", [False, True])
def test_equals_its_twin(num_tokens: int, dtype: torch.dtype, with_state: bool) -> None:
    x, weight, state = make(num_tokens, dtype)
    given = state if with_state else None
    before = state.clone()
    out, final_state = causal_conv1d(x, weight, given)
    expected, expected_state = naive_causal_conv1d(x, weight, given)
    assert_close(out, expected)
    assert torch.equal(final_state, expected_state)
    assert torch.equal(state, before)
    assert final_state.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_channels_are_worked_on_in_blocks(dtype: torch.dtype) -> None:
    """At 6,144 channels a block has 21 tokens; 64 of them make three full blocks and one of a single token."""
    weight, x = (torch.rand(6144, 4) - 0.5).to(dtype), sliced(64, 6144, dtype=dtype)
    state = torch.randn(6144, 3).to(dtype)
    out, final_state = causal_conv1d(x, weight, state)
    expected, expected_state = naive_causal_conv1d(x, weight, state)
    assert_close(out, expected)
    assert torch.equal(final_state, expected_state)


@pytest.mark.parametrize("width", [2, 3, 5])
def test_other_kernel_widths(width: int) -> None:
    x, weight, state = make(7, torch.float32, width)
    for actual, expected in zip(causal_conv1d(x, weight, state), naive_causal_conv1d(x, weight, state), strict=True):
        assert_close(actual, expected)
    stepped = state.clone()[None]
    out = torch.cat([causal_conv1d_step(token[None], weight, stepped) for token in x])
    assert_close(out, causal_conv1d(x, weight, state)[0])


def test_equals_transformers() -> None:
    x, weight, state = make(70, torch.float32)
    theirs = modeling_qwen3_5.causal_conv1d_fn(x.t()[None], weight, activation="silu")[0].t()
    assert_close(causal_conv1d(x, weight)[0], theirs)
    their_state = state.clone()[None]
    theirs = modeling_qwen3_5.causal_conv1d_update(x[:1].t()[None], their_state, weight, activation="silu")[..., 0]
    ours_state = state.clone()[None]
    assert_close(causal_conv1d_step(x[:1], weight, ours_state), theirs)
    assert torch.equal(ours_state, their_state)


@pytest.mark.parametrize("cut", [1, 2, 3, 64, 99])
def test_two_pieces_equal_one(cut: int) -> None:
    x, weight, state = make(100, torch.float32)
    whole, final_state = causal_conv1d(x, weight, state)
    first, between = causal_conv1d(x[:cut], weight, state)
    second, last = causal_conv1d(x[cut:], weight, between)
    assert_close(torch.cat([first, second]), whole)
    assert torch.equal(last, final_state)


def test_states_share_no_memory_with_inputs() -> None:
    x, weight, state = make(2, torch.float32)
    final_state = causal_conv1d(x, weight, state)[1]
    kept = final_state.clone()
    x.zero_()
    state.zero_()
    assert torch.equal(final_state, kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_equals_its_twin_and_keeps_to_its_rows(batch: int, dtype: torch.dtype) -> None:
    x, weight, _ = make(batch, dtype)
    pool = torch.randn(2 * batch + 1, CHANNELS, 3).to(dtype)
    expected_pool = pool.clone()
    out = causal_conv1d_step(x, weight, pool[1::2])
    assert_close(out, naive_causal_conv1d_step(x, weight, expected_pool[1::2]))
    assert torch.equal(pool, expected_pool)


def test_a_float32_state_beside_bfloat16_inputs() -> None:
    x, weight, _ = make(5, torch.bfloat16)
    state = torch.randn(CHANNELS, 3)
    out, final_state = causal_conv1d(x, weight, state)
    expected, expected_state = naive_causal_conv1d(x, weight, state)
    assert_close(out, expected)
    assert final_state.dtype == torch.float32
    assert torch.equal(final_state, expected_state)
    stepped, expected_stepped = state.clone()[None], state.clone()[None]
    assert_close(causal_conv1d_step(x[:1], weight, stepped), naive_causal_conv1d_step(x[:1], weight, expected_stepped))
    assert torch.equal(stepped, expected_stepped)


def test_what_does_not_fit_is_refused() -> None:
    x, weight, state = make(5, torch.float32)
    with pytest.raises(ValueError, match="at least one token, got T = 0"):
        causal_conv1d(x[:0], weight, state)
    with pytest.raises(ValueError, match=r"x must be \[T, C\] = \[any, any\], got \[1, 5, 40\]"):
        causal_conv1d(x[None], weight, state)
    with pytest.raises(ValueError, match=r"weight must be \[C, W\] = \[40, any\], got \[40, 1, 4\]"):
        causal_conv1d(x, weight[:, None], state)
    with pytest.raises(ValueError, match=r"initial_state must be \[C, W - 1\] = \[40, 3\], got \[40, 4\]"):
        causal_conv1d(x, weight, torch.zeros(40, 4))
    with pytest.raises(ValueError, match="at least 2 taps, got W = 1"):
        causal_conv1d(x, weight[:, :1])
    with pytest.raises(TypeError, match=r"x must be torch.float32 or torch.bfloat16, got torch.float16"):
        causal_conv1d(x.half(), weight)
    with pytest.raises(ValueError, match=r"state must be \[B, C, W - 1\] = \[5, 40, 3\], got \[40, 3\]"):
        causal_conv1d_step(x, weight, state)
