"""Rows of a batch that have the bits that they have alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from qwen35mm.model.rows import each_row, few_rows, join_rows


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("threads", [1, 2, 3, 5], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_rows", [each_row, few_rows])
def test_elements_and_sums_are_those_of_a_row_alone(by_rows: type, dtype: torch.dtype, threads: int) -> None:
    """Widths that fill registers and don't, sizes for one thread and several; plain batches fail at most of them."""
    functions = (torch.sigmoid, F.silu, F.softplus, lambda x: x * x.float().square().sum(-1, keepdim=True).rsqrt())
    for width in (1, 16, 48, 64, 100, 1024, 12288, 17408):
        for count in (2, 3, 5, 13):
            x = random(count, width, dtype=dtype)
            for function in functions:
                alone = torch.cat([function(row[None].clone()) for row in x])
                assert torch.equal(by_rows(function, x, num_rows=16), alone), (width, count)


def test_which_rows_go_together() -> None:
    shapes: list[tuple[int, ...]] = []

    def plus_minus(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shapes.append(tuple(a.shape))
        return a + b, a - b

    for by_rows, width, num_rows, expected in (
        (each_row, 64, None, [5]),
        (each_row, 64, 8, [1, 1, 1, 1, 1]),
        (few_rows, 64, None, [5]),
        (few_rows, 64, 8, [5]),
        (few_rows, 65, 8, [1, 1, 1, 1, 1]),
        (few_rows, 12288, 8, [2, 2, 1]),
        (few_rows, 16384, 8, [1, 1, 1, 1, 1]),
        (few_rows, 1 << 16, 8, [1, 1, 1, 1, 1]),
    ):
        shapes.clear()
        a, b = random(5, width), random(5, 1)
        plus, minus = by_rows(plus_minus, a, b, num_rows=num_rows)
        assert shapes == [(count, width) for count in expected]
        assert torch.equal(plus, a + b)
        assert torch.equal(minus, a - b)


def test_a_product_starts_where_a_tensor_of_its_own_would() -> None:
    starts: list[int] = []

    def start(x: torch.Tensor) -> torch.Tensor:
        starts.append(x.data_ptr() % 64)
        return x

    each_row(start, random(4, 5), num_rows=4)
    assert starts == [0, 0, 0, 0]


def test_few_rows_may_write_to_their_inputs() -> None:
    for width in (64, 65):
        x = random(3, width)
        expected = x + 1
        few_rows(lambda rows: rows.add_(1), x, num_rows=4)
        assert torch.equal(x, expected)


def test_joined_rows() -> None:
    a, b = random(2, 3), random(1, 3)
    assert join_rows([a]) is a
    assert torch.equal(join_rows([a, b]), torch.cat([a, b]))
    assert [part.shape for part in join_rows([(a, a), (b, b)])] == [(3, 3), (3, 3)]
