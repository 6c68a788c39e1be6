"""Routing and experts against the reference and transformers."""

from __future__ import annotations

from typing import TypeAlias

import pytest
import torch
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts, Qwen3_5MoeTopKRouter

from qwen35mm_kernels import reference
from tests.kernels.compare import DTYPES, LENGTHS_AND_DTYPES, Backend, assert_close, sliced

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
    """x, gate_up, down, chosen and weights; matrices of the size that keeps what comes out near 1."""
    gate_up = sliced(experts, 2 * width, hidden, dtype=dtype) / hidden**0.5
    down = sliced(experts, hidden, width, dtype=dtype) / width**0.5
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(num_tokens)])
    weights = torch.softmax(torch.randn(num_tokens, top_k), dim=-1).to(dtype)
    return sliced(num_tokens, hidden, dtype=dtype), gate_up, down, chosen, weights


def padded(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """The same but for the rows from `count` on, which are no numbers and all of the first experts."""
    x, chosen, weights = x.clone(), chosen.clone(), weights.clone()
    x[count:], weights[count:], chosen[count:] = torch.nan, torch.nan, torch.arange(chosen.shape[1])
    return x, chosen, weights


@pytest.fixture
def backend(uncompiled_backend: Backend) -> Backend:
    """Compiled libraries leave it to torch."""
    return uncompiled_backend


@pytest.mark.parametrize(
    ("num_tokens", "dtype"),
    [(16, torch.float32), *LENGTHS_AND_DTYPES[:4], (17, torch.bfloat16), *LENGTHS_AND_DTYPES[4:]],
)
def test_experts(num_tokens: int, dtype: torch.dtype, backend: Backend) -> None:
    backend.check("moe_experts", *make(num_tokens, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 65])
def test_experts_in_tiles(num_tokens: int, dtype: torch.dtype, triton_backend: Backend, block_m: int) -> None:
    triton_backend.check("moe_experts", *make(num_tokens, dtype))


@pytest.mark.emulated
def test_experts_at_real_dims(backend: Backend) -> None:
    backend.check("moe_experts", *make(2, torch.bfloat16, hidden=2048, width=512, experts=2, top_k=1))


def test_tiles_of_128_rows(triton_backend: Backend) -> None:
    from qwen35mm_kernels.gpu.moe import rows_of_a_tile

    assert rows_of_a_tile(257, 2) == 128
    triton_backend.check("moe_experts", *make(257, torch.bfloat16, experts=2, top_k=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_token_at_one_expert_and_most_experts_without_a_token(dtype: torch.dtype, backend: Backend) -> None:
    """Many tiles of one expert, and tiles without a row before and behind them."""
    x, gate_up, down, chosen, weights = make(70, dtype, experts=32, top_k=2)
    chosen[:, 0], chosen[:, 1] = 17, 31
    backend.check("moe_experts", x, gate_up, down, chosen, weights)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs(dtype: torch.dtype, triton_backend: Backend, block_m: int) -> None:
    """Experts, rows and choices that are slices of something wider: only the last dimension is dense."""
    x, gate_up, down, chosen, weights = make(20, dtype)
    wide = torch.full((EXPERTS, 2 * WIDTH + 1, HIDDEN + 7), torch.nan, dtype=dtype)
    wide[:, 1:, 3:-4] = gate_up
    tall = torch.full((EXPERTS + 1, HIDDEN, WIDTH + 5), torch.nan, dtype=dtype)
    tall[1:, :, 5:] = down
    every_other = torch.full((20, 2 * TOP_K), -7, dtype=torch.int64)
    every_other[:, ::2] = chosen
    shares = weights.t().contiguous().t()
    triton_backend.check("moe_experts", x, wide[:, 1:, 3:-4], tall[1:, :, 5:], every_other[:, ::2], shares)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_any_company(dtype: torch.dtype, triton_backend: Backend, block_m: int) -> None:
    """In tiles of one size: alone and padded (no grouping), among so many that they are grouped, and among padding.

    Interpreted in float32 only nearly: the products are NumPy's, whose rows know their place.
    """
    limit = 1e-6 if triton_backend.name == "interpreted" and dtype == torch.float32 else 0
    x, gate_up, down, chosen, weights = make(24, dtype)
    many = triton_backend.run("moe_experts", x, gate_up, down, chosen, weights)
    for rows in (slice(7, 8), slice(3, 19), slice(3, 23)):
        some = triton_backend.run("moe_experts", x[rows], gate_up, down, chosen[rows], weights[rows])
        assert_close(some, many[rows], limit)
    x, chosen, weights = padded(x, chosen, weights, 5)
    assert_close(triton_backend.run("moe_experts", x, gate_up, down, chosen, weights)[:5], many[:5], limit)


def test_no_token_gives_no_row(backend: Backend) -> None:
    x, gate_up, down, _, _ = make(1, torch.float32)
    weights, chosen = backend.run("moe_route", x.new_empty(0, EXPERTS), TOP_K)
    assert weights.shape == chosen.shape == (0, TOP_K)
    assert backend.run("moe_experts", x[:0], gate_up, down, chosen, weights).shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("num_experts", "k", "dtype"),
    [(13, 13, torch.bfloat16), (8, 1, torch.float32), (256, 8, torch.bfloat16), (512, 10, torch.float32)],
)
def test_routing(num_experts: int, k: int, dtype: torch.dtype, backend: Backend) -> None:
    """In bfloat16 with many equal logits."""
    backend.check("moe_route", sliced(9, num_experts, dtype=dtype), k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_expert_is_every_tokens_last_choice(dtype: torch.dtype, backend: Backend) -> None:
    shared = 20 * sliced(9, 1, dtype=dtype)
    weights, chosen = backend.check("moe_route", sliced(9, 13, dtype=dtype), 3, shared)
    assert_close(weights[:, 3:], torch.sigmoid(shared))
    assert chosen[:, 3].tolist() == [13] * 9


@pytest.mark.parametrize("value", [0.0, -200.0, -torch.inf])
def test_of_equal_logits_the_lower_expert_comes_first(value: float, backend: Backend) -> None:
    logits = torch.full((2, 37), value)
    logits[0, 30] = 5.0
    logits[1, [4, 35]] = 1.0
    weights, chosen = backend.run("moe_route", logits, 4)
    assert chosen.tolist() == [[30, 0, 1, 2], [4, 35, 0, 1]]
    assert_close(weights, reference.moe_route(logits, 4)[0])


def test_nan_logits_choose_experts_that_there_are(triton_backend: Backend) -> None:
    _, chosen = triton_backend.run("moe_route", torch.full((1, 5), torch.nan), 2)
    assert chosen.min() >= 0
    assert chosen.max() < 5


def test_the_layer_equals_transformers(backend: Backend) -> None:
    config = Qwen3_5MoeTextConfig(
        hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = "eager"
    router, experts = Qwen3_5MoeTopKRouter(config), Qwen3_5MoeExperts(config)
    for parameter in (*router.parameters(), *experts.parameters()):
        torch.nn.init.normal_(parameter, std=0.2)
    x = torch.randn(21, HIDDEN)
    with torch.inference_mode():
        _, their_weights, their_chosen = router(x)
        gate_up, down = (experts.get_parameter(name) for name in ("gate_up_proj", "down_proj"))
        weights, chosen = backend.run("moe_route", x @ router.get_parameter("weight").T, TOP_K)
        out = backend.run("moe_experts", x, gate_up, down, chosen, weights)
        assert torch.equal(chosen, their_chosen)
        assert_close(weights, their_weights)
        assert_close(out, experts(x, their_chosen, their_weights))
