"""Products with packed matrices, by every compiled library, against float64 products."""

from __future__ import annotations

import random

import pytest
import torch

from qwen35mm_kernels.cpu.native.library import Library
from qwen35mm_kernels.cpu.native.products import GroupedRows, Groups, PackedMatrix
from qwen35mm_kernels.cpu.quantise import quantise
from tests.kernels.compare import dequantised, relative_error

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
# Formats and what they are multiplied by.
PAIRS = [
    ("float32", FLOAT32),
    ("bfloat16", BFLOAT16),
    ("int8", FLOAT32),
    ("int8", BFLOAT16),
    ("int4", FLOAT32),
    ("int4", BFLOAT16),
]
INTEGERS = ["int8", "int4"]
FORMATS = ["float32", "bfloat16", *INTEGERS]
# What rounding a format's weights may cost, of Gaussian ones; bfloat16's are given as bfloat16.
WEIGHT_ERRORS = {"float32": 0.0, "bfloat16": 0.0, "int8": 0.0065, "int4": 0.09}
# Of a product against its unpacked weights' in float64: sums in float32, and integers' rows in 8 bits.
PRODUCT_ERRORS = {"float32": 1e-6, "bfloat16": 1e-6, "int8": 0.007, "int4": 0.007}
# Outputs [out, in]: blocks of 16, vectors of 8, groups of 32 and panels of 1024, whole and with rests.
SHAPES = [(1, 1), (16, 32), (17, 33), (40, 96), (83, 500), (130, 1100)]
COUNTS = [*range(1, 14), 64, 70, 513, 1100]


def packed(library: Library, format: str, weight: torch.Tensor) -> PackedMatrix:
    matrix = PackedMatrix(library, format, len(weight), weight.shape[1])
    matrix.fill(0, weight)
    return matrix


def random_weight(format: str, *shape: int) -> torch.Tensor:
    weight = torch.randn(shape)
    return weight.bfloat16() if format == "bfloat16" else weight


def unpacked(matrix: PackedMatrix) -> torch.Tensor:
    return matrix.rows(torch.arange(matrix.out_features), FLOAT32)


def strided_rows(count: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows with NaN around each."""
    around = torch.full((count + 2, size + 7), torch.nan, dtype=dtype)
    around[1:-1, 3:-4] = torch.randn(count, size).to(dtype)
    return around[1:-1, 3:-4]


def assert_product(matrix: PackedMatrix, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiplies into rows between poison, compares with the unpacked weights' product, and gives the rows."""
    out_features = matrix.out_features
    around = torch.full((x.shape[0] + 2, out_features), 7.5, dtype=x.dtype)
    out = around[1:-1].fill_(torch.nan)
    assert matrix.linear(x, bias, out) is out
    assert (around[0] == 7.5).all()
    assert (around[-1] == 7.5).all()
    expected = x.double() @ unpacked(matrix).double().T
    if bias is not None:
        expected += bias.double()
    format = "int8" if isinstance(matrix.format, Groups) else matrix.format
    limit = PRODUCT_ERRORS[format] + (2.5e-3 if x.dtype == BFLOAT16 else 0)
    # Single outputs may cancel, and what is rounded before isn't smaller for it.
    scale = x.double().norm(dim=1, keepdim=True) * unpacked(matrix).double().norm(dim=1)
    assert ((out.double() - expected).abs() <= 4 * limit * scale + 2**-8 * expected.abs()).all()
    if expected.numel() > 100:
        assert relative_error(out, expected) <= limit
    return out


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("format", "dtype"), PAIRS)
def test_products(format: str, dtype: torch.dtype, count: int, native_library: Library) -> None:
    for index, shape in enumerate(SHAPES[:4] if count > 70 else SHAPES):
        matrix = packed(native_library, format, random_weight(format, *shape))
        bias = torch.randn(shape[0]).to(dtype) if index % 2 else None
        assert_product(matrix, strided_rows(count, shape[1], dtype), bias)


@pytest.mark.parametrize(("format", "dtype"), PAIRS)
def test_panels_of_many_rows(format: str, dtype: torch.dtype, native_library: Library) -> None:
    matrix = packed(native_library, format, random_weight(format, 50, 2100))
    assert_product(matrix, torch.randn(37, 2100).to(dtype), torch.randn(50).to(dtype))


@pytest.mark.parametrize(("format", "dtype"), PAIRS)
def test_a_row_has_the_same_bits_in_any_company(format: str, dtype: torch.dtype, native_library: Library) -> None:
    matrix = packed(native_library, format, random_weight(format, 200, 1072))
    x = torch.randn(530, 1072).to(dtype)
    together = matrix.linear(x)
    for count in (*range(1, 14), 16, 17, 31, 33, 48, 64, 70, 513):
        assert torch.equal(matrix.linear(x[:count]), together[:count]), count
        assert torch.equal(matrix.linear(x[530 - count :]), together[530 - count :]), count


@pytest.mark.parametrize(("format", "dtype"), PAIRS)
def test_bits_do_not_depend_on_the_number_of_threads(
    format: str, dtype: torch.dtype, native_library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = random_weight(format, 1500, 700), torch.randn(70, 700).to(dtype)
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        matrix = packed(native_library, format, weight)
        found.append((matrix.data, matrix.scales, matrix.linear(x), matrix.linear(x[:1]), unpacked(matrix)))
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_what_packing_keeps(format: str, native_library: Library) -> None:
    weight = random_weight(format, 83, 500)
    matrix = packed(native_library, format, weight)
    rows = unpacked(matrix)
    assert relative_error(rows, weight) <= WEIGHT_ERRORS[format]
    index = torch.tensor([82, 0, 15, 16, 82, 31, 7, 40, 41])
    assert torch.equal(matrix.rows(index, FLOAT32), rows[index])
    assert torch.equal(matrix.rows(index, BFLOAT16), rows[index].bfloat16())
    assert matrix.rows(index[:0], FLOAT32).shape == (0, 500)


@pytest.mark.parametrize("format", INTEGERS)
def test_packing_rounds_as_torch_does(format: str, native_library: Library) -> None:
    """Sums in another order choose another scale where two of int4's are as good."""
    weight = torch.randn(83, 500)
    integers, scales = quantise(weight, int(format[-1]))
    found, expected = unpacked(packed(native_library, format, weight)), integers * scales.float()[..., None]
    differ = (found != expected.flatten(1)[:, :500]).float().mean()
    assert differ == 0 if format == "int8" else differ < 0.01


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_a_matrix_is_packed_part_by_part(format: str, dtype: torch.dtype, native_library: Library) -> None:
    weight = torch.randn(83, 70).to(dtype)
    whole, parts = packed(native_library, format, weight), PackedMatrix(native_library, format, 83, 70)
    for first, end in ((47, 83), (0, 5), (5, 47)):
        parts.fill(first, weight[first:end].contiguous())
    assert torch.equal(parts.data, whole.data)
    assert torch.equal(parts.scales, whole.scales)
    # A bfloat16 is itself in every format of floats.
    if dtype == BFLOAT16 or format == "float32":
        assert format in INTEGERS or torch.equal(unpacked(whole), weight.float())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_packing_writes_every_byte_where_nothing_pads(format: str, dtype: torch.dtype, native_library: Library) -> None:
    weight = torch.randn(48, 96).to(dtype)
    num_bytes, num_scales = PackedMatrix.shapes(format, 48, 96)
    found = []
    for poison in (0, 255):
        memory = (
            torch.full((num_bytes,), poison, dtype=torch.uint8),
            torch.full((num_scales,), float(poison)).bfloat16(),
        )
        PackedMatrix(native_library, format, 48, 96, *memory).fill(0, weight)
        found.append(memory)
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


@pytest.mark.parametrize("format", INTEGERS)
def test_groups_of_zeros_and_of_huge_and_tiny_values(format: str, native_library: Library) -> None:
    sizes = torch.tensor([0.0, 1.0, 1e30, 1e-30, 1e-42, 1e20, 1e-20, 0.0]).repeat_interleave(32)
    weight = torch.randn(48, 256) * sizes
    rows = unpacked(packed(native_library, format, weight))
    assert rows.isfinite().all()
    for first in range(0, 256, 32):
        group = weight[:, first : first + 32]
        if sizes[first] > 1e-29:
            assert relative_error(rows[:, first : first + 32], group) < 1.3 * WEIGHT_ERRORS[format]
        else:
            assert (rows[:, first : first + 32].abs() <= 16 * group.abs().max()).all()

    weight = torch.randn(48, 256)
    matrix = packed(native_library, format, weight)
    for size in (1.0, 1e30, 1e-20):
        assert_product(matrix, torch.randn(3, 256) * size)
    assert (matrix.linear(torch.zeros(2, 256)) == 0).all()
    assert (matrix.linear(torch.full((2, 256), 1e-42)).abs() < 1e-28).all()
    mixed = torch.randn(3, 256) * torch.tensor([1.0, 1e-3, 0.0, 1e-42, 1e-35, 1e-25, 1.0, 30.0]).repeat_interleave(32)
    assert_product(matrix, mixed)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("format", "dtype"), PAIRS)
def test_what_is_not_finite_is_not_lost(format: str, dtype: torch.dtype, value: float, native_library: Library) -> None:
    matrix = packed(native_library, format, random_weight(format, 40, 100).abs() + 1)
    for place in (0, 3, 31, 32, 63, 99):
        for count in (1, 7, 20):
            x = torch.randn(count, 100).to(dtype)
            x[count // 2, place] = value
            is_finite = matrix.linear(x).isfinite()
            assert not is_finite[count // 2].any()
            assert is_finite.sum() == (count - 1) * 40


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_that_is_not_finite_is_not_hidden(format: str, value: float, native_library: Library) -> None:
    weight = random_weight(format, 20, 70)
    weight[17, 40] = value
    matrix = packed(native_library, format, weight)
    assert unpacked(matrix).isfinite().all(1).sum() == 19
    is_finite = matrix.linear(torch.ones(5, 70, dtype=BFLOAT16 if format == "bfloat16" else FLOAT32)).isfinite()
    assert not is_finite[:, 17].any()
    assert is_finite.sum() == 5 * 19


def test_extremes_of_integers(native_library: Library) -> None:
    """Sums of as large integers as there are, in 8 and 16 bits on the way."""
    for format, values in (("int8", (-127.0, 127.0)), ("int4", (-8.0, 7.0))):
        for low in (0, 1):
            weight = torch.full((16, 64), values[low])
            # The value that decides the scale.
            weight[:, ::32] = values[0]
            matrix = packed(native_library, format, weight)
            assert torch.equal(unpacked(matrix), weight)
            for row in (127.0, -127.0):
                x = torch.full((9, 64), row)
                assert torch.equal(matrix.linear(x), x @ weight.T)


@pytest.mark.parametrize("format", FORMATS)
def test_every_place_of_a_weight_meets_its_own_input(format: str, native_library: Library) -> None:
    """Rows with a single one give the weights' columns: what is stored elsewhere would be found."""
    weight = torch.randint(-8, 8, (40, 70)).float()
    weight[:, ::32] = -8.0
    x = torch.eye(70, dtype=BFLOAT16 if format == "bfloat16" else FLOAT32)
    for rows in (x, x[:3], x[35:36]):
        product = packed(native_library, format, weight).linear(rows).float()
        assert torch.allclose(product, rows.float() @ weight.T, atol=0.05)


@pytest.mark.parametrize(("format", "dtype"), PAIRS)
def test_no_row_gives_no_row(format: str, dtype: torch.dtype, native_library: Library) -> None:
    matrix = packed(native_library, format, random_weight(format, 20, 70))
    assert matrix.linear(torch.randn(0, 70).to(dtype)).shape == (0, 20)


@pytest.mark.parametrize("has_minima", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_a_checkpoint_are_held_exactly(bits: int, has_minima: bool, native_library: Library) -> None:
    """Of any width: rows are read back as they are, and products are those of their numbers, alone and together."""
    draw = random.Random(bits + has_minima)
    for _ in range(25):
        out_features, in_features = draw.randint(1, 140), draw.randint(1, 600)
        groups = Groups(bits, draw.choice([16, 32, 64, 96, 128, 256]), has_minima)
        low, high = (-128, 127) if bits == 8 else (0, 15) if has_minima else (-8, 7)
        per_group = out_features, -(-in_features // groups.width)
        integers = torch.randint(low, high + 1, (out_features, in_features), dtype=torch.int8)
        rows = GroupedRows(integers, torch.randn(per_group), torch.randn(per_group) * 8 if has_minima else None)
        matrix, cut = PackedMatrix(native_library, groups, out_features, in_features), draw.randint(0, out_features)
        matrix.fill_groups(cut, rows[cut:])
        matrix.fill_groups(0, rows[:cut])
        assert torch.equal(unpacked(matrix), dequantised(rows, groups.width))
        x = strided_rows(draw.choice([1, 2, 3, 5, 8, 17]), in_features, draw.choice([FLOAT32, BFLOAT16]))
        assert_product(matrix, x, torch.randn(out_features).to(x.dtype))
        bias = torch.zeros(out_features, dtype=x.dtype)
        together = matrix.linear(x, bias)
        assert torch.equal(together, torch.cat([matrix.linear(row[None], bias) for row in x]))
