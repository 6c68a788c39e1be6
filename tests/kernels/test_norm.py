"""RMS norms against the reference and transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from tests.kernels.compare import DTYPES, LENGTHS_AND_DTYPES, Backend, assert_close, sliced

EPS = 1e-6


@pytest.mark.parametrize(("num_tokens", "dtype"), LENGTHS_AND_DTYPES)
def test_rms_norm(num_tokens: int, dtype: torch.dtype, backend: Backend) -> None:
    zero_centred = num_tokens != 64
    x, weight = sliced(num_tokens, 5, 48, dtype=dtype), torch.randn(48).to(dtype)
    backend.check("rms_norm", x, weight, EPS, zero_centred=zero_centred)


@pytest.mark.parametrize("shape", [(7,), (3, 1024), (2, 5120), (1, 8192), (2, 3, 2, 128), (9, 256)])
def test_rows_of_any_shape(shape: tuple[int, ...], backend: Backend) -> None:
    backend.check("rms_norm", torch.randn(shape), torch.randn(shape[-1]), EPS, zero_centred=True)


def test_no_row_gives_no_row(backend: Backend) -> None:
    assert backend.run("rms_norm", torch.randn(0, 64), torch.randn(64), EPS, zero_centred=True).shape == (0, 64)


def test_rows_between_others(backend: Backend) -> None:
    """As the queries lie beside their gates in a projection."""
    backend.check("rms_norm", torch.randn(6, 4, 2, 64)[:, :, 0], torch.randn(64), EPS, zero_centred=True)


@pytest.mark.parametrize(("num_tokens", "dtype"), LENGTHS_AND_DTYPES)
def test_gated_rms_norm(num_tokens: int, dtype: torch.dtype, backend: Backend) -> None:
    x, z, weight = (sliced(rows, 3, 128, dtype=dtype) for rows in (num_tokens, num_tokens, 1))
    backend.check("gated_rms_norm", x, z, weight[0, 0], EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1024), (5, 2048), (3, 2, 100)])
def test_add_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, backend: Backend) -> None:
    x = torch.randn(shape[0] + 2, *shape[1:]).to(dtype)[1:-1]
    delta, weight = sliced(*shape, dtype=dtype), torch.randn(shape[-1]).to(dtype)
    out = backend.check("add_rms_norm", x, delta, weight, EPS)
    # What is normed is the sum that stays.
    assert_close(out, backend.run("rms_norm", x, weight, EPS, zero_centred=True), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_equal_those_of_transformers(dtype: torch.dtype, backend: Backend) -> None:
    x, z, weight = torch.randn(70, 4, 128).to(dtype), torch.randn(70, 4, 128).to(dtype), torch.randn(128).to(dtype)
    theirs, theirs_gated = Qwen3_5RMSNorm(128, EPS), Qwen3_5RMSNormGated(128, EPS)
    theirs.weight.data = theirs_gated.weight.data = weight
    limit = 1e-2 if backend.name == "interpreted" and dtype == torch.bfloat16 else None
    assert_close(backend.run("rms_norm", x, weight, EPS, zero_centred=True), theirs(x).detach(), limit)
    assert_close(backend.run("gated_rms_norm", x, z, weight, EPS), theirs_gated(x, z).detach(), limit)


@pytest.mark.parametrize(("rows", "size"), [(19, 48), (19, 2048), (301, 1024)])
def test_a_row_has_the_same_bits_alone_and_among_others(rows: int, size: int, backend: Backend) -> None:
    """Also where long inputs are worked on in blocks."""
    x, z, weight = torch.randn(rows, size), torch.randn(rows, size), torch.randn(size)
    normed = backend.run("rms_norm", x, weight, EPS, zero_centred=True)
    gated = backend.run("gated_rms_norm", x, z, weight, EPS)
    for row in (0, 7, 18, rows - 1):
        one = slice(row, row + 1)
        assert torch.equal(backend.run("rms_norm", x[one], weight, EPS, zero_centred=True), normed[one])
        assert torch.equal(backend.run("gated_rms_norm", x[one], z[one], weight, EPS), gated[one])


def test_eps_keeps_tiny_rows_small(backend: Backend) -> None:
    x, weight = torch.full((2, 8), 1e-4), torch.ones(8)
    assert_close(backend.run("rms_norm", x, weight, EPS, zero_centred=False), x / (1e-8 + EPS) ** 0.5)
    assert torch.equal(backend.run("rms_norm", 0 * x, weight, EPS, zero_centred=True), 0 * x)


@pytest.mark.parametrize(
    ("num_rows", "depth", "width", "swiglu", "dtype"),
    [
        (1, 1500, 10, False, torch.float32),
        (2, 64, 14, True, torch.bfloat16),
        (3, 1024, 6, False, torch.bfloat16),
        (4, 2100, 22, True, torch.float32),
        (1, 1500, 10, True, torch.float32),
        (4, 1024, 22, True, torch.bfloat16),
    ],
)
def test_norm_linear(
    num_rows: int, depth: int, width: int, swiglu: bool, dtype: torch.dtype, uncompiled_backend: Backend
) -> None:
    backend = uncompiled_backend
    x, delta = 3 * sliced(num_rows, depth, dtype=dtype), sliced(num_rows, depth, dtype=dtype)
    matrix, weight = sliced(width, depth, dtype=dtype) / depth**0.5, torch.randn(depth).to(dtype)
    total, _ = backend.check("norm_linear", x, delta, weight, EPS, matrix, swiglu=swiglu)
    # What layers go on from is what the norm's own kernel leaves.
    summed = x.clone()
    backend.run("add_rms_norm", summed, delta, weight, EPS)
    assert_close(total, summed, 1e-2 if backend.name == "interpreted" and dtype == torch.bfloat16 else 0)
    backend.check("norm_linear", x, None, weight, EPS, matrix, swiglu=swiglu)
    # Without a norm: the last product of a mixer and of a feed-forward network.
    plain, out = backend.check("norm_linear", x, None, None, EPS, matrix)
    assert torch.equal(plain, x)
    assert_close(out, torch.nn.functional.linear(x, matrix))


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_norm_linear_has_the_same_bits_in_any_company(
    dtype: torch.dtype, has_norm: bool, triton_backend: Backend
) -> None:
    """Also beside rows that hold no numbers."""
    x, delta, matrix = (torch.randn(rows, 1500).to(dtype) for rows in (4, 4, 10))
    weight = torch.ones(1500).to(dtype) if has_norm else None
    _, four = triton_backend.run("norm_linear", x, delta, weight, EPS, matrix)
    for rows in (slice(0, 2), slice(1, 4), slice(3, 4)):
        total, some = triton_backend.run("norm_linear", x[rows], delta[rows], weight, EPS, matrix)
        assert torch.equal(some, four[rows])
        assert torch.equal(total, (x[rows].float() + delta[rows].float()).to(dtype))
    x[1:3] = torch.nan
    _, beside = triton_backend.run("norm_linear", x, delta, weight, EPS, matrix)
    assert torch.equal(beside[[0, 3]], four[[0, 3]])
