"""Interleaved M-RoPE and the partial rotation against the reference and transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5TextRotaryEmbedding,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_vision,
)

from tests.kernels.compare import DTYPES, LENGTHS_AND_DTYPES, Backend, assert_close, sliced


def frequencies(num_pairs: int, theta: float = 1e7) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(num_pairs, dtype=torch.float32) / num_pairs)


@pytest.mark.parametrize("section", [(11, 11, 10), (3, 3, 2), (2, 1, 1), (6, 1, 1), (1, 3, 4), (8, 0, 0), (2, 2, 1)])
def test_cos_sin(section: tuple[int, int, int], uncompiled_backend: Backend) -> None:
    """At a long conversation's positions, where a shortened range reduction would be far off."""
    positions = torch.randint(0, 262_144, (1 if section[2] == 0 else 65, 3)).t()
    uncompiled_backend.check("mrope_cos_sin", positions, frequencies(sum(section)), section, limit=1e-6)


def test_positions_and_rotation_equal_those_of_transformers(backend: Backend) -> None:
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
    cos, sin = backend.run("mrope_cos_sin", positions, frequencies(32), section)
    their_cos, their_sin = theirs(q, positions[:, None])
    assert_close(torch.cat([cos, cos], -1), their_cos[0], 1e-6)
    assert_close(torch.cat([sin, sin], -1), their_sin[0], 1e-6)
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], their_cos, their_sin)
    for x, rotated in zip((q, k), expected, strict=True):
        assert_close(backend.run("apply_partial_rope", x, cos, sin), rotated[0].transpose(0, 1))


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "head_dim", "rotated"),
    [
        (*case, *dims)
        for case, dims in zip(
            (*LENGTHS_AND_DTYPES, (65, torch.bfloat16)), 2 * ((64, 16), (72, 72), (24, 10), (32, 0)), strict=True
        )
    ],
)
def test_rotation(num_tokens: int, dtype: torch.dtype, head_dim: int, rotated: int, backend: Backend) -> None:
    x, angles = torch.randn(num_tokens, 3, 3, head_dim).to(dtype)[:, 1], torch.randn(num_tokens, rotated // 2)
    actual = backend.check("apply_partial_rope", x, angles.cos(), angles.sin())
    assert torch.equal(actual[..., rotated:], x[..., rotated:])


def test_a_rotation_of_nothing_is_empty(backend: Backend) -> None:
    x, angles = torch.randn(0, 3, 64), torch.randn(0, 8)
    assert backend.run("apply_partial_rope", x, angles, angles).shape == x.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_full_rotation_equals_that_of_transformers_vision_tower(dtype: torch.dtype, backend: Backend) -> None:
    q, k = sliced(40, 3, 32, dtype=dtype), sliced(40, 3, 32, dtype=dtype)
    angles = torch.randn(40, 16)
    cos, sin = (torch.cat([table, table], dim=-1) for table in (angles.cos(), angles.sin()))
    for x, expected in zip((q, k), apply_rotary_pos_emb_vision(q, k, cos, sin), strict=True):
        assert_close(backend.run("apply_partial_rope", x, angles.cos(), angles.sin()), expected)
