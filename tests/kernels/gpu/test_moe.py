"""The Triton kernels of the mixture of experts against their twins."""

from __future__ import annotations

from typing import TypeAlias

import pytest
import torch

from qwen35mm_kernels.gpu.moe import moe_experts, moe_route, rows_of_a_tile
from qwen35mm_kernels.moe import naive_moe_experts, naive_moe_route
from tests.kernels.compare import DTYPES, assert_close, moved, sliced

HIDDEN, WIDTH, EXPERTS, TOP_K = 64, 48, 8, 3
Inputs: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make(
    num_tokens: int,
    dtype: torch.dtype,
    *,
    hidden: int = HIDDEN,
    width: int = WIDTH,
    experts: int = EXPERTS,
    top_k: int = TOP_K,
) -> Inputs:
    """x, gate_up and down as slices; weights of the size that keeps what comes out near 1."""
    gate_up = sliced(experts, 2 * width, hidden, dtype=dtype) / hidden**0.5
    down = sliced(experts, hidden, width, dtype=dtype) / width**0.5
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(num_tokens)])
    weights = torch.softmax(torch.randn(num_tokens, top_k), dim=-1).to(dtype)
    return sliced(num_tokens, hidden, dtype=dtype), gate_up, down, chosen, weights


def on(device: torch.device, inputs: Inputs) -> Inputs:
    x, gate_up, down, chosen, weights = (moved(tensor, device) for tensor in inputs)
    return x, gate_up, down, chosen, weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 65])
@pytest.mark.parametrize("block_m", [16, 64])
def test_experts_equal_their_twin(num_tokens: int, dtype: torch.dtype, block_m: int, device: torch.device) -> None:
    """Fewer tokens than a tile's rows go without grouping, more are grouped."""
    inputs = make(num_tokens, dtype)
    assert_close(moe_experts(*on(device, inputs), block_m=block_m).cpu(), naive_moe_experts(*inputs))


def test_experts_at_real_dims(device: torch.device) -> None:
    inputs = make(2, torch.bfloat16, hidden=2048, width=512, experts=2, top_k=1)
    assert_close(moe_experts(*on(device, inputs)).cpu(), naive_moe_experts(*inputs))


def test_tiles_of_128_rows(device: torch.device) -> None:
    inputs = make(257, torch.bfloat16, experts=2, top_k=1)
    assert rows_of_a_tile(257, 2) == 128
    assert_close(moe_experts(*on(device, inputs)).cpu(), naive_moe_experts(*inputs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_token_at_one_expert_and_most_experts_without_a_token(dtype: torch.dtype, device: torch.device) -> None:
    """Many tiles of one expert, and tiles without a row before and behind them."""
    x, gate_up, down, chosen, weights = make(70, dtype, experts=32, top_k=2)
    chosen[:, 0], chosen[:, 1] = 17, 31
    inputs = x, gate_up, down, chosen, weights
    assert_close(moe_experts(*on(device, inputs), block_m=16).cpu(), naive_moe_experts(*inputs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs(dtype: torch.dtype, device: torch.device) -> None:
    """Experts, rows and choices that are slices of something wider: only the last dimension is dense."""
    x, gate_up, down, chosen, weights = make(20, dtype)
    expected = naive_moe_experts(x, gate_up, down, chosen, weights)
    wide = torch.full((EXPERTS, 2 * WIDTH + 1, HIDDEN + 7), torch.nan, dtype=dtype, device=device)
    wide[:, 1:, 3:-4] = gate_up.to(device)
    tall = torch.full((EXPERTS + 1, HIDDEN, WIDTH + 5), torch.nan, dtype=dtype, device=device)
    tall[1:, :, 5:] = down.to(device)
    long = torch.full((20, HIDDEN + 3), torch.nan, dtype=dtype, device=device)
    long[:, 1:-2] = x.to(device)
    every_other = torch.full((20, 2 * TOP_K), -7, dtype=torch.int64, device=device)
    every_other[:, ::2] = chosen.to(device)
    shares = weights.t().contiguous().to(device).t()
    for block_m in (16, 64):
        out = moe_experts(
            long[:, 1:-2], wide[:, 1:, 3:-4], tall[1:, :, 5:], every_other[:, ::2], shares, block_m=block_m
        )
        assert_close(out.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_any_company(dtype: torch.dtype, device: torch.device) -> None:
    """With one block_m: alone and padded (no grouping), and among so many that they are grouped."""
    x, gate_up, down, chosen, weights = on(device, make(24, dtype))
    many = moe_experts(x, gate_up, down, chosen, weights, block_m=16)
    for rows in (slice(7, 8), slice(3, 19), slice(3, 23)):
        some = moe_experts(x[rows], gate_up, down, chosen[rows], weights[rows], block_m=16)
        assert torch.equal(some, many[rows])


def test_no_token_gives_no_row(device: torch.device) -> None:
    x, gate_up, down, _, _ = on(device, make(1, torch.float32))
    chosen, weights = chosen_of_nobody = moe_route(x.new_empty(0, EXPERTS), TOP_K)[::-1]
    assert [list(tensor.shape) for tensor in chosen_of_nobody] == [[0, TOP_K]] * 2
    assert moe_experts(x[:0], gate_up, down, chosen, weights).shape == (0, HIDDEN)


def test_a_last_dimension_that_is_not_dense_is_refused(device: torch.device) -> None:
    x, gate_up, down, chosen, weights = on(device, make(2, torch.float32))
    with pytest.raises(ValueError, match="down must be dense in its last dimension"):
        moe_experts(x, gate_up, down.transpose(1, 2).contiguous().transpose(1, 2), chosen, weights)
    with pytest.raises(ValueError, match="at most 1024 experts"):
        moe_route(torch.zeros(1, 1025, device=device), 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_experts", "k"), [(8, 1), (13, 13), (256, 8), (512, 10)])
def test_routing_equals_its_twin(num_experts: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = sliced(9, num_experts, dtype=dtype)
    weights, chosen = moe_route(moved(logits, device), k)
    expected_weights, expected_chosen = naive_moe_route(logits, k)
    assert torch.equal(chosen.cpu(), expected_chosen)
    assert_close(weights.cpu(), expected_weights)


@pytest.mark.parametrize("value", [0.0, -200.0, -torch.inf])
def test_of_equal_logits_the_lower_expert_comes_first(value: float, device: torch.device) -> None:
    logits = torch.full((2, 37), value)
    logits[0, 30] = 5.0
    logits[1, [4, 35]] = 1.0
    weights, chosen = moe_route(logits.to(device), 4)
    assert chosen.tolist() == [[30, 0, 1, 2], [4, 35, 0, 1]]
    assert_close(weights.cpu(), naive_moe_route(logits, 4)[0])


def test_nan_logits_choose_experts_that_there_are(device: torch.device) -> None:
    _, chosen = moe_route(torch.full((1, 5), torch.nan, device=device), 2)
    assert chosen.min() >= 0
    assert chosen.max() < 5
