"""Products with weights: every way gives what the exact product gives."""

from __future__ import annotations

import pytest
import torch

from qwen35mm.model import dense


def operands(num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((num_rows, 48), (130, 48), (130,)))
    return x.to(dtype), (weight / 48**0.5).to(dtype), bias.to(dtype)


@pytest.mark.parametrize("has_bfloat16", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 4, 5, 15, 16, 63])
@pytest.mark.parametrize("with_bias", [True, False])
def test_product_is_exact_to_rounding(
    num_rows: int, dtype: torch.dtype, has_bfloat16: bool, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "computes_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(dense, "_BLOCK_ELEMENTS", 48 * 50)  # three blocks, the last one shorter
    x, weight, bias = operands(num_rows, dtype)
    exact = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    actual = dense.linear(x, weight, bias if with_bias else None)
    assert actual.dtype == dtype
    assert actual.shape == (num_rows, 130)
    rounding = 2**-7 if dtype == torch.bfloat16 else 1e-6
    assert torch.allclose(actual.double(), exact, rtol=rounding, atol=rounding)


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


# Sums long enough for a library to choose its way by the number of rows; one row of weights; odd sizes.
@pytest.mark.parametrize(("num_out", "num_in"), [(1024, 2048), (320, 64), (1, 2048), (130, 50)])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 8, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("library", [True, False], ids=["oneDNN", "rows"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_with_a_given_number_of_rows_is_free_of_its_company(
    num_out: int,
    num_in: int,
    num_rows: int,
    dtype: torch.dtype,
    library: bool,
    num_threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Small weights take a product a row by themselves.
    monkeypatch.setattr(dense, "_SMALL_ELEMENTS", 0)
    if not library:
        monkeypatch.setattr(dense, "computes_bfloat16", lambda: False)
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, num_in, generator=generator).to(dtype)
    weight = (torch.randn(num_out, num_in, generator=generator) / num_in**0.5).to(dtype)
    bias = torch.randn(num_out, generator=generator).to(dtype)
    exact = x.double() @ weight.double().T + bias.double()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        alone = torch.cat([dense.linear(row[None], weight, bias, num_rows=num_rows) for row in x])
        for count in range(1, num_rows + 1):
            # Rows from another place, and of a wider tensor, so that they start anywhere in memory.
            batch = torch.cat([x, x], dim=1).roll(count, 0)[:count, 1 : 1 + num_in]
            batch.copy_(x.roll(count, 0)[:count])
            expected = alone.roll(count, 0)[:count]
            assert torch.equal(dense.linear(batch, weight, bias, num_rows=num_rows), expected), count
    finally:
        torch.set_num_threads(before)
    rounding = 2**-7 if dtype == torch.bfloat16 else 1e-5
    assert alone.dtype == dtype
    assert torch.allclose(alone.double(), exact, rtol=rounding, atol=rounding)


def test_more_rows_than_were_asked_for_are_refused() -> None:
    x, weight, _ = operands(4, torch.float32)
    with pytest.raises(ValueError, match="4 rows don't fit into num_rows = 3"):
        dense.linear(x, weight, num_rows=3)
