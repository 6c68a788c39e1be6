"""Products with weights: every way gives what the exact product gives."""

from __future__ import annotations

import pytest
import torch

from qwen35mm.model import dense

BFLOAT16 = torch.bfloat16


def operands(num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((num_rows, 48), (130, 48), (130,)))
    return x.to(dtype), (weight / 48**0.5).to(dtype), bias.to(dtype)


@pytest.mark.parametrize(("has_bfloat16", "dtype"), [(False, BFLOAT16), (True, BFLOAT16), (False, torch.float32)])
@pytest.mark.parametrize("num_rows", [1, 2, 4, 5, 15, 16, 63])
def test_product_is_exact_to_rounding(
    num_rows: int, dtype: torch.dtype, has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "computes_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(dense, "_BLOCK_ELEMENTS", 48 * 50)  # three blocks, the last one shorter
    monkeypatch.setattr(dense, "_SMALL_ELEMENTS", 0)
    x, weight, bias = operands(num_rows, dtype)
    exact, rounding = x.double() @ weight.double().T, 2**-7 if dtype == BFLOAT16 else 1e-6
    for actual, expected in (
        (dense.linear(x, weight), exact),
        (dense.linear(x, weight, bias), exact + bias.double()),
    ):
        assert (actual.dtype, actual.shape) == (dtype, (num_rows, 130))
        assert torch.allclose(actual.double(), expected, rtol=rounding, atol=rounding)


def test_a_row_is_the_same_alone_and_beside_a_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "computes_bfloat16", lambda: False)
    x, weight, bias = operands(4, torch.bfloat16)
    alone = torch.cat([dense.linear(row[None], weight, bias) for row in x])
    assert torch.equal(dense.linear(x, weight, bias), alone)


def test_strided_rows_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "computes_bfloat16", lambda: False)
    for num_rows in (2, 20):
        x, weight, _ = operands(num_rows, torch.bfloat16)
        wide = torch.cat([x, x.neg()], dim=1)
        assert torch.equal(dense.linear(wide[:, :48], weight), dense.linear(x, weight))
