"""Interleaved M-RoPE and the partial rotation against their twins and transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5TextRotaryEmbedding,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_vision,
)

from qwen35mm_kernels import apply_partial_rope, mrope_cos_sin
from qwen35mm_kernels.rope import mrope_pair_axis, naive_apply_partial_rope, naive_mrope_cos_sin
from tests.kernels.compare import DTYPES, LENGTHS, assert_close, sliced


def frequencies(num_pairs: int, theta: float = 1e7) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(num_pairs, dtype=torch.float32) / num_pairs)


def test_the_real_section_is_interleaved() -> None:
    axis = mrope_pair_axis((11, 11, 10), 32)
    assert [pair for pair in range(32) if axis[pair] == 1] == list(range(1, 32, 3))
    assert [pair for pair in range(32) if axis[pair] == 2] == list(range(2, 30, 3))


@pytest.mark.parametrize("section", [(11, 11, 10), (3, 3, 2), (2, 1, 1), (6, 1, 1), (1, 3, 4), (8, 0, 0)])
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_cos_sin_equal_their_twin(section: tuple[int, int, int], num_tokens: int) -> None:
    positions = torch.randint(0, 5000, (3, num_tokens))
    inv_freq = frequencies(sum(section))
    for ours, naive in zip(
        mrope_cos_sin(positions, inv_freq, section), naive_mrope_cos_sin(positions, inv_freq, section), strict=True
    ):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, naive)


def test_positions_and_rotation_equal_those_of_transformers() -> None:
    """At the real sizes: head_dim 256, 64 dimensions rotated, theta 1e7."""
    section = [11, 11, 10]
    config = Qwen3_5TextConfig(
        head_dim=256,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": section,
            "mrope_interleaved": True,
        },
    )
    positions = torch.randint(0, 200_000, (3, 65))
    theirs = Qwen3_5TextRotaryEmbedding(config)
    q, k = torch.randn(65, 8, 256), torch.randn(65, 2, 256)
    cos, sin = mrope_cos_sin(positions, frequencies(32), section)
    their_cos, their_sin = theirs(q, positions[:, None])
    assert torch.equal(torch.cat([cos, cos], -1), their_cos[0])
    assert torch.equal(torch.cat([sin, sin], -1), their_sin[0])
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], their_cos, their_sin)
    for x, rotated in zip((q, k), expected, strict=True):
        assert_close(apply_partial_rope(x, cos, sin), rotated[0].transpose(0, 1))


def test_height_and_width_are_told_apart() -> None:
    positions = torch.tensor([[5], [7], [9]])
    straight = mrope_cos_sin(positions, frequencies(32), [11, 11, 10])[1]
    swapped = mrope_cos_sin(positions[[0, 2, 1]], frequencies(32), [11, 11, 10])[1]
    changed = (straight != swapped)[0]
    assert changed[1:3].all()
    assert not changed[::3].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("rotated", [2, 16, 24])
def test_rotation_equals_its_twin(rotated: int, num_tokens: int, dtype: torch.dtype) -> None:
    x, angles = sliced(num_tokens, 3, 24, dtype=dtype), sliced(num_tokens, rotated // 2)
    before = x.clone()
    actual = apply_partial_rope(x, angles.cos(), angles.sin())
    assert_close(actual, naive_apply_partial_rope(x, angles.cos(), angles.sin()))
    assert torch.equal(actual[..., rotated:], x[..., rotated:])
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_full_rotation_equals_that_of_transformers_vision_tower(dtype: torch.dtype) -> None:
    q, k = torch.randn(40, 3, 32).to(dtype), torch.randn(40, 3, 32).to(dtype)
    angles = torch.randn(40, 16)
    cos, sin = (torch.cat([table, table], dim=-1) for table in (angles.cos(), angles.sin()))
    for x, expected in zip((q, k), apply_rotary_pos_emb_vision(q, k, cos, sin), strict=True):
        assert_close(apply_partial_rope(x, angles.cos(), angles.sin()), expected)


def test_what_does_not_fit_is_refused() -> None:
    positions, x, angles = torch.zeros(3, 4, dtype=torch.int64), torch.randn(4, 2, 8), torch.randn(4, 2)
    for section in ([1, 1], [1, 1, 1], [-1, 3, 2]):
        with pytest.raises(ValueError, match=r"sum to R / 2 = 4 .*config\.json"):
            mrope_cos_sin(positions, frequencies(4), section)
    with pytest.raises(ValueError, match=r"positions must be \[3, T\] = \[3, any\], got \[2, 4\]"):
        mrope_cos_sin(positions[:2], frequencies(4), [2, 1, 1])
    with pytest.raises(ValueError, match=r"cos must be .* = \[4, any\], got \[3, 2\]"):
        apply_partial_rope(x, angles[:3], angles[:3])
    with pytest.raises(ValueError, match="turn 10 dimensions, but heads have 8"):
        apply_partial_rope(x, torch.randn(4, 5), torch.randn(4, 5))
    with pytest.raises(TypeError, match=r"cos must be torch.float32, got torch.bfloat16"):
        apply_partial_rope(x, angles.bfloat16(), angles)
