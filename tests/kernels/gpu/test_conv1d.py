"""The causal convolution's kernels against their twins."""

from __future__ import annotations

import pytest
import torch

from qwen35mm_kernels.causal_conv1d import naive_causal_conv1d, naive_causal_conv1d_step
from qwen35mm_kernels.gpu.conv1d import causal_conv1d, causal_conv1d_step
from tests.kernels.compare import DTYPES, LENGTHS, assert_close, moved, sliced

# One block and a part of the next.
CHANNELS = 160


def make(
    num_tokens: int, dtype: torch.dtype, device: torch.device, width: int = 4, channels: int = CHANNELS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = (torch.rand(channels, width) - 0.5).to(dtype)
    x, state = sliced(num_tokens, channels, dtype=dtype), sliced(channels, width - 1, dtype=dtype)
    return moved(x, device), weight.to(device), moved(state, device)


def limit(x: torch.Tensor) -> float | None:
    """The default one. But Triton's interpreter cuts bfloat16 off where a card rounds."""
    return 1e-2 if x.dtype == torch.bfloat16 and x.device.type == "cpu" else None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [*LENGTHS, 2, 3, 4])
@pytest.mark.parametrize("with_state", [False, True])
def test_equals_its_twin(num_tokens: int, dtype: torch.dtype, with_state: bool, device: torch.device) -> None:
    x, weight, state = make(num_tokens, dtype, device)
    given = state if with_state else None
    before = state.clone()
    out, final_state = causal_conv1d(x, weight, given)
    expected, expected_state = naive_causal_conv1d(x, weight, given)
    assert_close(out, expected, limit(out))
    assert torch.equal(final_state, expected_state)
    assert torch.equal(state, before)
    assert out.is_contiguous()
    assert final_state.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_channels(dtype: torch.dtype, device: torch.device) -> None:
    x, weight, state = make(40, dtype, device, channels=1000)
    out, final_state = causal_conv1d(x, weight, state)
    expected, expected_state = naive_causal_conv1d(x, weight, state)
    assert_close(out, expected, limit(out))
    assert torch.equal(final_state, expected_state)


@pytest.mark.parametrize("width", [2, 3, 5])
def test_other_kernel_widths(width: int, device: torch.device) -> None:
    x, weight, state = make(7, torch.float32, device, width)
    for actual, expected in zip(causal_conv1d(x, weight, state), naive_causal_conv1d(x, weight, state), strict=True):
        assert_close(actual, expected)
    pool, expected_pool = state.repeat(7, 1, 1), state.repeat(7, 1, 1)
    assert_close(causal_conv1d_step(x, weight, pool), naive_causal_conv1d_step(x, weight, expected_pool))
    assert torch.equal(pool, expected_pool)


@pytest.mark.parametrize("cut", [1, 2, 32, 64, 99])
def test_two_pieces_equal_one_to_the_bit(cut: int, device: torch.device) -> None:
    x, weight, state = make(100, torch.float32, device)
    whole, final_state = causal_conv1d(x, weight, state)
    first, between = causal_conv1d(x[:cut], weight, state)
    second, last = causal_conv1d(x[cut:], weight, between)
    assert torch.equal(torch.cat([first, second]), whole)
    assert torch.equal(last, final_state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_equals_its_twin_and_keeps_to_its_rows(batch: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, _ = make(batch, dtype, device, channels=300)
    pool = torch.randn(2 * batch + 1, 300, 3).to(dtype).to(device)
    expected_pool = pool.clone()
    out = causal_conv1d_step(x, weight, pool[1::2])
    assert_close(out, naive_causal_conv1d_step(x, weight, expected_pool[1::2]), limit(out))
    assert torch.equal(pool, expected_pool)


def test_a_step_on_a_state_of_other_strides(device: torch.device) -> None:
    x, weight, _ = make(2, torch.float32, device)
    state = torch.randn(2, 3, CHANNELS).to(device).transpose(1, 2)
    expected_state = state.clone()
    assert_close(causal_conv1d_step(x, weight, state), naive_causal_conv1d_step(x, weight, expected_state))
    assert torch.equal(state, expected_state)


def test_a_float32_state_beside_bfloat16_inputs(device: torch.device) -> None:
    x, weight, _ = make(5, torch.bfloat16, device)
    state = torch.randn(CHANNELS, 3).to(device)
    out, final_state = causal_conv1d(x, weight, state)
    expected, expected_state = naive_causal_conv1d(x, weight, state)
    assert_close(out, expected, limit(out))
    assert final_state.dtype == torch.float32
    assert torch.equal(final_state, expected_state)
    stepped, expected_stepped = state.clone()[None], state.clone()[None]
    out = causal_conv1d_step(x[:1], weight, stepped)
    assert_close(out, naive_causal_conv1d_step(x[:1], weight, expected_stepped), limit(out))
    assert torch.equal(stepped, expected_stepped)
