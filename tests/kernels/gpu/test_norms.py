"""The norms' and gates' kernels against their twins."""

from __future__ import annotations

import pytest
import torch

from qwen35mm_kernels import norm
from qwen35mm_kernels.gated_delta_rule.naive import naive_gdn_gates
from qwen35mm_kernels.gpu.norms import add_rms_norm, gated_rms_norm, gdn_gates, rms_norm
from qwen35mm_kernels.norm import naive_add_rms_norm, naive_gated_rms_norm, naive_rms_norm
from tests.kernels.compare import DTYPES, LENGTHS, assert_close, moved, relative_error, sliced

EPS = 1e-6


def limit(x: torch.Tensor) -> float | None:
    """The default one. But Triton's interpreter cuts bfloat16 off where a card rounds."""
    return 1e-2 if x.dtype == torch.bfloat16 and x.device.type == "cpu" else None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("zero_centred", [True, False])
def test_rms_norm_equals_its_twin(
    num_tokens: int, dtype: torch.dtype, zero_centred: bool, device: torch.device
) -> None:
    x, weight = moved(sliced(num_tokens, 5, 48, dtype=dtype), device), torch.randn(48).to(dtype).to(device)
    out = rms_norm(x, weight, EPS, zero_centred)
    assert_close(out, naive_rms_norm(x, weight, EPS, zero_centred), limit(out))


@pytest.mark.parametrize("shape", [(7,), (3, 1024), (2, 5120), (1, 8192), (2, 3, 2, 128), (0, 64), (9, 256)])
def test_rows_of_any_shape(shape: tuple[int, ...], device: torch.device) -> None:
    x, weight = torch.randn(shape).to(device), torch.randn(shape[-1]).to(device)
    out, expected = rms_norm(x, weight, EPS, True), naive_rms_norm(x, weight, EPS, True)
    if x.numel():
        assert_close(out, expected)
    assert out.shape == expected.shape


def test_rows_between_others(device: torch.device) -> None:
    """As the queries lie beside their gates in a projection."""
    wide = torch.randn(6, 4, 2, 64).to(device)
    x, weight = wide[:, :, 0], torch.randn(64).to(device)
    assert_close(rms_norm(x, weight, EPS, True), naive_rms_norm(x, weight, EPS, True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_gated_rms_norm_equals_its_twin(num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    x, z = torch.randn(num_tokens, 3, 128).to(dtype).to(device), moved(sliced(num_tokens, 3, 128, dtype=dtype), device)
    weight = torch.randn(128).to(dtype).to(device)
    out = gated_rms_norm(x, z, weight, EPS)
    assert_close(out, naive_gated_rms_norm(x, z, weight, EPS), limit(out))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1024), (5, 2048), (3, 2, 100)])
def test_add_rms_norm_equals_its_twin(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    wide = torch.randn(shape[0] + 2, *shape[1:]).to(dtype).to(device)
    before = wide.clone()
    delta = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype).to(device)[..., shape[-1] :]
    weight = torch.randn(shape[-1]).to(dtype).to(device)
    x, expected = wide[1:-1], before[1:-1].clone()
    out = add_rms_norm(x, delta, weight, EPS)
    assert_close(out, naive_add_rms_norm(expected, delta, weight, EPS), limit(out))
    if limit(out) is None:
        assert torch.equal(x, expected)
    # What is normed is the sum that stays.
    assert relative_error(out, naive_rms_norm(x.float(), weight, EPS, True)) <= (limit(out) or 5e-3)
    assert torch.equal(wide[[0, -1]], before[[0, -1]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_torch_version_of_add_rms_norm(dtype: torch.dtype) -> None:
    x, delta, weight = torch.randn(3, 4, 48).to(dtype), sliced(3, 4, 48, dtype=dtype), torch.randn(48).to(dtype)
    expected, two_steps = x.clone(), x + delta
    out = norm.add_rms_norm(x, delta, weight, EPS)
    assert_close(out, naive_add_rms_norm(expected, delta, weight, EPS))
    assert torch.equal(x, expected)
    assert torch.equal(x, two_steps)
    assert torch.equal(out, norm.rms_norm(two_steps, weight, EPS, zero_centred=True))
    with pytest.raises(ValueError, match=r"delta must be the shape of x = \[3, 4, 48\], got \[3, 4, 47\]"):
        norm.add_rms_norm(x, delta[..., 1:], weight, EPS)
    with pytest.raises(ValueError, match=r"weight must be .* = \[48\], got \[47\]"):
        norm.add_rms_norm(x, delta, weight[1:], EPS)


@pytest.mark.parametrize("size", [48, 128, 2048])
def test_a_row_has_the_same_bits_alone_and_among_others(size: int, device: torch.device) -> None:
    x, z, weight = torch.randn(19, size).to(device), torch.randn(19, size).to(device), torch.randn(size).to(device)
    normed, gated = rms_norm(x, weight, EPS, True), gated_rms_norm(x, z, weight, EPS)
    for row in (0, 7, 18):
        one = slice(row, row + 1)
        assert torch.equal(rms_norm(x[one], weight, EPS, True), normed[one])
        assert torch.equal(gated_rms_norm(x[one], z[one], weight, EPS), gated[one])


def test_eps_keeps_tiny_rows_small(device: torch.device) -> None:
    x, weight = torch.full((2, 8), 1e-4).to(device), torch.ones(8).to(device)
    assert_close(rms_norm(x, weight, EPS, False), x / (1e-8 + EPS) ** 0.5)
    assert torch.equal(rms_norm(0 * x, weight, EPS, True), 0 * x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_gates_equal_their_twin(num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    a, b = (4 * sliced(num_tokens, 6, dtype=dtype) for _ in range(2))
    A_log, dt_bias = torch.randn(6).to(device), torch.randn(6).to(device)
    inputs = moved(a, device)[:, 1:], moved(b, device)[:, :-1], A_log[1:], dt_bias[:-1]
    for actual, expected in zip(gdn_gates(*inputs), naive_gdn_gates(*inputs), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("a", [-80.0, -17.0, -3.0, 0.0, 5.0, 90.0, 500.0])
def test_a_gate_of_any_size_is_exact(a: float, device: torch.device) -> None:
    a_row, zero = torch.full((1, 2), a).to(device), torch.zeros(1, 2).to(device)
    g, beta = gdn_gates(a_row, a_row, zero[0], zero[0])
    assert_close(g, -torch.nn.functional.softplus(a_row.double(), threshold=1000).float())
    assert_close(beta, a_row.double().sigmoid().float())
