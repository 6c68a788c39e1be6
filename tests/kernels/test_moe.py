"""Routing and experts in torch against their twins and transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts, Qwen3_5MoeTopKRouter

from qwen35mm_kernels.moe import moe_experts, moe_route, naive_moe_experts, naive_moe_route
from tests.kernels.compare import DTYPES, LENGTHS, assert_close, sliced

HIDDEN, WIDTH, EXPERTS, TOP_K = 32, 24, 8, 3


def make(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, gate_up, down, chosen and weights."""
    gate_up = sliced(EXPERTS, 2 * WIDTH, HIDDEN, dtype=dtype) / HIDDEN**0.5
    down = sliced(EXPERTS, HIDDEN, WIDTH, dtype=dtype) / WIDTH**0.5
    chosen = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(num_tokens)])
    weights = torch.softmax(torch.randn(num_tokens, TOP_K), dim=-1).to(dtype)
    return sliced(num_tokens, HIDDEN, dtype=dtype), gate_up, down, chosen, weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_experts_equal_their_twin(num_tokens: int, dtype: torch.dtype) -> None:
    inputs = make(num_tokens, dtype)
    # In bfloat16 torch rounds after every step, the twin once.
    assert_close(moe_experts(*inputs), naive_moe_experts(*inputs), 1e-2 if dtype == torch.bfloat16 else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_experts", "k"), [(8, 1), (13, 13), (256, 8), (512, 10)])
def test_routing_equals_its_twin(num_experts: int, k: int, dtype: torch.dtype) -> None:
    """In bfloat16 with many equal logits."""
    logits = sliced(9, num_experts, dtype=dtype)
    (weights, chosen), (expected_weights, expected_chosen) = moe_route(logits, k), naive_moe_route(logits, k)
    assert torch.equal(chosen, expected_chosen)
    assert_close(weights, expected_weights)


def test_the_layer_equals_transformers() -> None:
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
        weights, chosen = moe_route(x @ router.get_parameter("weight").T, TOP_K)
        out = moe_experts(x, gate_up, down, chosen, weights)
        assert torch.equal(chosen, their_chosen)
        assert_close(weights, their_weights)
        assert_close(out, experts(x, their_chosen, their_weights))


def test_of_equal_logits_the_lower_expert_comes_first() -> None:
    logits = torch.zeros(1, 300)
    logits[0, 290] = 1.0
    assert moe_route(logits, 4)[1].tolist() == [[290, 0, 1, 2]]


def test_what_does_not_fit_is_refused() -> None:
    x, gate_up, down, chosen, weights = make(2, torch.float32)
    with pytest.raises(ValueError, match=r"gate_up must be .* = \[8, 48, 32\], got \[8, 24, 32\]"):
        moe_experts(x, gate_up[:, :WIDTH], down, chosen, weights)
    with pytest.raises(TypeError, match=r"chosen must be torch.int64, got torch.int32"):
        moe_experts(x, gate_up, down, chosen.int(), weights)
    with pytest.raises(TypeError, match=r"weights must be torch.float32, got torch.bfloat16"):
        moe_experts(x, gate_up, down, chosen, weights.bfloat16())
    with pytest.raises(ValueError, match="block_m must be 16, 64, 128 or None, got 32"):
        moe_experts(x, gate_up, down, chosen, weights, block_m=32)
    with pytest.raises(ValueError, match="k must be from 1 to E = 8 experts, got 9"):
        moe_route(torch.zeros(2, EXPERTS), 9)
