"""Products with weights in eight-bit floats against the reference and, where they are exact, against float64."""

from __future__ import annotations

import pytest
import torch

from qwen35mm_kernels.reference.fp8 import GROUP, LARGEST
from tests.kernels.compare import DTYPES, Backend, assert_close, sliced

pytestmark = pytest.mark.usefixtures("_fp8_card")

# A row alone, vectors, and the three sizes of a tile, full and not.
ROWS = (17, 1, 3, 4, 5, 16, 257)
# Blocks of a matrix, whole and with rests.
SHAPES = ((128, 128), (200, 272), (24, 64), (129, 656))


@pytest.fixture
def backend(uncompiled_backend: Backend) -> Backend:
    """Compiled libraries leave it to torch."""
    return uncompiled_backend


def limit(dtype: torch.dtype, backend: Backend) -> float | None:
    """Hopper's matrix units keep about 13 bits of a sum of eight-bit floats' products."""
    return 1e-3 if backend.name == "cuda" and dtype == torch.float32 else None


def make(num_rows: int, num_out: int, num_in: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, values and scales of blocks; rows and groups of other sizes, so that no scale can stand for another."""
    x = sliced(num_rows, num_in, dtype=dtype) * torch.logspace(-2, 2, num_rows)[:, None].to(dtype)
    values = sliced(num_out, num_in).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-num_out // GROUP), -(-num_in // GROUP)) + 0.1
    return x, values, scales / num_in**0.5


@pytest.mark.parametrize(
    ("num_rows", "num_out", "num_in", "dtype"),
    [
        (rows, *SHAPES[(index + turn) % 4], dtype)
        for index, rows in enumerate(ROWS)
        for turn, dtype in enumerate(DTYPES)
    ],
)
def test_every_number_of_rows(num_rows: int, num_out: int, num_in: int, dtype: torch.dtype, backend: Backend) -> None:
    backend.check("fp8_linear", *make(num_rows, num_out, num_in, dtype), limit=limit(dtype, backend))


@pytest.mark.parametrize("num_rows", [2, 20])
@pytest.mark.parametrize("kind", ["rows", "rows and groups", "whole"])
def test_other_scales(kind: str, num_rows: int, backend: Backend) -> None:
    """One for each row, for each group of a row, and for all of a matrix."""
    x, values, _ = make(num_rows, 144, 272, torch.bfloat16)
    scales = {
        "rows": torch.rand(144, 1) + 0.1,
        "rows and groups": torch.rand(144, 3) + 0.1,
        "whole": torch.tensor(0.7).expand(2, 1),
    }[kind]
    backend.check("fp8_linear", x, values, scales)


@pytest.mark.parametrize("num_rows", [2, 20])
def test_a_result_written_to_columns_of_another(num_rows: int, backend: Backend) -> None:
    x, values, scales = make(num_rows, 40, 272, torch.bfloat16)
    out = torch.full((num_rows, 70), 7.0).bfloat16()[:, 10:50]
    backend.check("fp8_linear", x, values, scales, out)


@pytest.mark.parametrize("num_rows", [1, 20])
def test_what_eight_bits_hold_is_multiplied_exactly(num_rows: int, backend: Backend) -> None:
    """Whole numbers up to 15 and one of 448 in each group: the rounding changes nothing, and sums are small."""
    x = torch.randint(-15, 16, (num_rows, 2 * GROUP)).float()
    x[:, ::GROUP] = LARGEST
    values = torch.randint(-8, 9, (40, 2 * GROUP)).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5, 4.0]])
    weight = values.double() * scales.double().repeat_interleave(GROUP, dim=1)
    found = backend.run("fp8_linear", x, values, scales)
    assert torch.equal(found.double(), x.double() @ weight.T)


@pytest.mark.parametrize("num_rows", [1, 20])
def test_a_group_that_is_no_number_spoils_its_row_alone(num_rows: int, backend: Backend) -> None:
    x, values, scales = make(num_rows + 2, 24, 272, torch.bfloat16)
    expected = backend.run("fp8_linear", x, values, scales)
    x[0, 3], x[1, 200] = torch.nan, -torch.inf
    found = backend.run("fp8_linear", x, values, scales)
    assert found[:2].isnan().all()
    assert torch.equal(found[2:], expected[2:])
    assert not expected.isnan().any()


def test_zeros_and_no_rows(backend: Backend) -> None:
    x, values, scales = make(6, 24, 272, torch.bfloat16)
    x[1:] = 0
    found = backend.run("fp8_linear", x, values, scales)
    assert found[0].any()
    assert not found[1:].any()
    assert backend.run("fp8_linear", x[:0], values, scales).shape == (0, 24)


@pytest.mark.parametrize(("num_rows", "places"), [(4, (0, 3)), (16, (0, 9)), (200, (0, 77, 199))])
def test_a_row_has_the_same_bits_whatever_the_others_hold(
    num_rows: int, places: tuple[int, ...], triton_backend: Backend
) -> None:
    x, values, scales = make(num_rows, 24, 272, torch.bfloat16)
    whole = triton_backend.run("fp8_linear", x, values, scales)
    for place in places:
        other = torch.randn_like(x) * 50
        other[(place + 1) % num_rows :: 3] = torch.nan
        other[place] = x[place]
        assert torch.equal(triton_backend.run("fp8_linear", other, values, scales)[place], whole[place])


def test_a_vector_has_the_same_bits_among_up_to_four(triton_backend: Backend) -> None:
    x, values, scales = make(4, 24, 1040, torch.bfloat16)
    whole = triton_backend.run("fp8_linear", x, values, scales)
    for rows in (slice(1, 2), slice(1, 3), slice(0, 3)):
        assert torch.equal(triton_backend.run("fp8_linear", x[rows], values, scales), whole[rows])


def test_rows_are_rounded_as_torch_rounds_them(triton_backend: Backend) -> None:
    """Every bfloat16 from 0 to 448, with both signs: ties, and numbers that e4m3 has few bits for."""
    from qwen35mm_kernels.gpu.fp8 import rows_to_fp8

    numbers = torch.arange(1 << 15, dtype=torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers <= LARGEST]
    numbers = torch.cat([numbers, -numbers])
    padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % (8 * (GROUP - 1))))
    # In each group the largest is 448, so that its scale is 1.
    x = torch.nn.functional.pad(padded.view(-1, 8, GROUP - 1), (1, 0), value=LARGEST).flatten(1)
    codes, scales = rows_to_fp8(x.to(triton_backend.device))
    assert torch.equal(scales.cpu(), torch.ones(len(x), 8))
    assert torch.equal(codes.cpu().float(), x.to(torch.float8_e4m3fn).float())
    # And with scales that aren't powers of two.
    x = torch.randn(9, 3 * GROUP).bfloat16()
    codes, scales = rows_to_fp8(x.to(triton_backend.device))
    expected = x.float().unflatten(1, (3, GROUP)).abs().amax(2) / LARGEST
    assert torch.equal(scales.cpu(), expected)
    expected = x.float() / expected.repeat_interleave(GROUP, dim=1)
    assert torch.equal(codes.cpu().float(), expected.to(torch.float8_e4m3fn).float())


def test_vectors_and_tiles_differ_by_their_last_bits_alone(triton_backend: Backend) -> None:
    x, values, scales = make(20, 144, 656, torch.float32)
    some = triton_backend.run("fp8_linear", x[:4], values, scales)
    assert_close(triton_backend.run("fp8_linear", x, values, scales)[:4], some, limit(x.dtype, triton_backend) or 1e-6)
