"""The rotary kernels and the kernel from a projection to the cache, against the naive twins."""

from __future__ import annotations

import pytest
import torch

from qwen35mm_kernels.gpu.rope import apply_partial_rope, mrope_cos_sin
from qwen35mm_kernels.gpu.rope_kv import qk_norm_rope_write
from qwen35mm_kernels.paged_attention import naive_qk_norm_rope_write
from qwen35mm_kernels.rope import mrope_pair_axis, naive_apply_partial_rope, naive_mrope_cos_sin
from tests.kernels.compare import DTYPES, LENGTHS, assert_close
from tests.kernels.paged import Projection, projection


def frequencies(num_pairs: int) -> torch.Tensor:
    return 1.0 / 1e7 ** (torch.arange(num_pairs, dtype=torch.float32) / num_pairs)


@pytest.mark.parametrize("section", [(11, 11, 10), (3, 3, 2), (6, 1, 1), (1, 3, 4), (8, 0, 0), (2, 2, 1)])
def test_cos_sin_equal_their_twin(section: tuple[int, int, int], device: torch.device) -> None:
    """At a long conversation's positions, where a shortened range reduction would be far off."""
    positions, inv_freq = torch.randint(0, 262_144, (65, 3)).t(), frequencies(sum(section))
    pair_axis = mrope_pair_axis(section, sum(section))
    actual = mrope_cos_sin(positions.to(device), inv_freq.to(device), pair_axis)
    for ours, naive in zip(actual, naive_mrope_cos_sin(positions, inv_freq, section), strict=True):
        assert (ours.cpu() - naive).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize(("head_dim", "rotated"), [(64, 16), (72, 72), (24, 10), (32, 0)])
def test_rotation_equals_its_twin(
    head_dim: int, rotated: int, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, angles = torch.randn(num_tokens, 3, 3, head_dim).to(dtype), torch.randn(num_tokens, rotated // 2)
    x = x.to(device)[:, 1]
    before = x.clone()
    actual = apply_partial_rope(x, angles.cos().to(device), angles.sin().to(device))
    assert_close(actual.cpu(), naive_apply_partial_rope(x.cpu(), angles.cos(), angles.sin()))
    assert torch.equal(actual[..., rotated:], x[..., rotated:])
    assert torch.equal(x, before)


def test_a_rotation_of_nothing_is_empty(device: torch.device) -> None:
    x, angles = torch.randn(0, 3, 64, device=device), torch.randn(0, 8, device=device)
    assert apply_partial_rope(x, angles, angles).shape == x.shape


def assert_writes_as_its_twin(case: Projection) -> None:
    actual, expected = case.run(qk_norm_rope_write), case.run(naive_qk_norm_rope_write)
    for ours, twin in zip(actual, expected, strict=True):
        assert torch.equal(ours.isnan(), twin.isnan())
        assert_close(ours.nan_to_num(7.0), twin.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_write_equals_its_twin(num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Rows that no token has stay NaN."""
    case = projection(num_tokens, num_heads=2, num_kv_heads=1, head_dim=64, rotated=16, dtype=dtype)
    case.device = device
    assert_writes_as_its_twin(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotated"),
    [(8, 2, 256, 64), (4, 4, 32, 32), (6, 2, 64, 12), (2, 1, 64, 0)],
)
def test_write_at_other_sizes(
    num_heads: int, num_kv_heads: int, head_dim: int, rotated: int, dtype: torch.dtype, device: torch.device
) -> None:
    case = projection(
        9, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rotated=rotated, dtype=dtype
    )
    case.device = device
    case.q_norm, case.k_norm = case.q_norm.to(dtype), case.k_norm.to(dtype)
    assert_writes_as_its_twin(case)


def test_padding_writes_nothing_and_is_not_read(device: torch.device) -> None:
    case = projection(11, num_heads=2, num_kv_heads=1, head_dim=64, rotated=16, dtype=torch.bfloat16)
    case.device = device
    padding = [0, 4, 9, 10]
    case.rows[padding] = -1
    case.qkv[padding] = float("nan")
    q, k_cache, v_cache = case.run(qk_norm_rope_write)
    assert not q[padding].any()
    written = torch.zeros(len(k_cache), dtype=torch.bool)
    written[case.rows[case.rows >= 0]] = True
    for cache in (k_cache, v_cache):
        assert cache[~written].isnan().all()
        assert not cache[written].isnan().any()


def test_a_token_has_the_same_bits_alone_and_among_others(device: torch.device) -> None:
    case = projection(37, num_heads=2, num_kv_heads=1, head_dim=256, rotated=64, dtype=torch.float32)
    case.device = device
    q, k_cache, _ = case.run(qk_norm_rope_write)
    row = case.rows[20]
    case.qkv, case.cos, case.sin, case.rows = (x[20:21] for x in (case.qkv, case.cos, case.sin, case.rows))
    alone_q, alone_k, _ = case.run(qk_norm_rope_write)
    assert torch.equal(alone_q[0], q[20])
    assert torch.equal(alone_k[row], k_cache[row])


def test_layouts_that_it_can_not_read_are_refused(device: torch.device) -> None:
    case = projection(4, num_heads=2, num_kv_heads=1, head_dim=24, rotated=8, dtype=torch.float32)
    with pytest.raises(ValueError, match="power of 2, got 24"):
        case.run(qk_norm_rope_write)
    case = projection(4, num_heads=2, num_kv_heads=1, head_dim=32, rotated=8, dtype=torch.float32)
    case.cos = case.cos.t().contiguous().t()
    with pytest.raises(ValueError, match="cos's inner dimensions must be contiguous"):
        case.run(qk_norm_rope_write)
    x, angles = torch.randn(4, 8, 3, device=device).transpose(1, 2), torch.randn(4, 2, device=device)
    with pytest.raises(ValueError, match="contiguous in the last dimension"):
        apply_partial_rope(x, angles, angles)
