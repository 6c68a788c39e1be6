"""RMS norms against their twins and transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from qwen35mm_kernels import gated_rms_norm, rms_norm
from qwen35mm_kernels.norm import naive_gated_rms_norm, naive_rms_norm
from tests.kernels.compare import DTYPES, LENGTHS, assert_close, sliced

EPS = 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("zero_centred", [True, False])
def test_rms_norm_equals_its_twin(num_tokens: int, dtype: torch.dtype, zero_centred: bool) -> None:
    x, weight = sliced(num_tokens, 5, 48, dtype=dtype), torch.randn(48).to(dtype)
    assert_close(
        rms_norm(x, weight, EPS, zero_centred=zero_centred), naive_rms_norm(x, weight, EPS, zero_centred=zero_centred)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_gated_rms_norm_equals_its_twin(num_tokens: int, dtype: torch.dtype) -> None:
    x, z, weight = sliced(num_tokens, 5, 48, dtype=dtype), sliced(num_tokens, 5, 48, dtype=dtype), torch.randn(48)
    assert_close(gated_rms_norm(x, z, weight.to(dtype), EPS), naive_gated_rms_norm(x, z, weight.to(dtype), EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_equal_those_of_transformers(dtype: torch.dtype) -> None:
    x, z, weight = torch.randn(70, 4, 128).to(dtype), torch.randn(70, 4, 128).to(dtype), torch.randn(128).to(dtype)
    theirs, theirs_gated = Qwen3_5RMSNorm(128, EPS), Qwen3_5RMSNormGated(128, EPS)
    theirs.weight.data = theirs_gated.weight.data = weight
    assert_close(rms_norm(x, weight, EPS, zero_centred=True), theirs(x).detach())
    assert_close(gated_rms_norm(x, z, weight, EPS), theirs_gated(x, z).detach())


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_equal_each_row_alone(dtype: torch.dtype) -> None:
    """Long inputs are worked on in blocks; where they are cut must not show, not even in the last bit."""
    x, z, weight = torch.randn(301, 4, 256).to(dtype), torch.randn(301, 4, 256).to(dtype), torch.randn(256)
    rows = [rms_norm(row, weight, EPS, zero_centred=True) for row in x]
    assert torch.equal(rms_norm(x, weight, EPS, zero_centred=True), torch.stack(rows))
    rows = [gated_rms_norm(row, gate, weight, EPS) for row, gate in zip(x, z, strict=True)]
    assert torch.equal(gated_rms_norm(x, z, weight, EPS), torch.stack(rows))


def test_eps_keeps_tiny_rows_small() -> None:
    x, weight = torch.full((2, 8), 1e-4), torch.ones(8)
    assert_close(rms_norm(x, weight, EPS, zero_centred=False), x / (1e-8 + EPS) ** 0.5)
    assert torch.equal(rms_norm(0 * x, weight, EPS, zero_centred=True), 0 * x)


def test_inputs_are_not_written_to() -> None:
    x, z, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    before = x.clone(), z.clone(), weight.clone()
    rms_norm(x, weight, EPS, zero_centred=True)
    gated_rms_norm(x, z, weight, EPS)
    assert all(map(torch.equal, (x, z, weight), before))


def test_what_does_not_fit_is_refused() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(ValueError, match=r"weight must be .* = \[8\], got \[7\]"):
        rms_norm(x, torch.ones(7), EPS, zero_centred=True)
    with pytest.raises(TypeError, match=r"x must be torch.float32 or torch.bfloat16, got torch.int64"):
        rms_norm(x.long(), torch.ones(8), EPS, zero_centred=True)
    with pytest.raises(ValueError, match=r"z must be the shape of x = \[3, 8\], got \[1, 8\]"):
        gated_rms_norm(x, x[:1], torch.ones(8), EPS)
