"""Products with weights that are integers beside scales against the reference and, where they are exact, float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qwen35mm_kernels import reference
from qwen35mm_kernels.cpu.quantise import dequantise, pack
from tests.kernels.compare import DTYPES, Backend, assert_close, sliced

# A row alone, the forms of tiles, full and not, and more than they are for.
ROWS = (1, 2, 5, 16, 17, 64, 65, 256, 300)
# Bits, columns of a group, and whether something is added: as we round, as checkpoints are.
FORMATS = ((8, 32, False), (4, 32, False), (4, 128, True), (4, 32, True), (8, 16, False), (4, 16, True), (4, 64, False))
# Columns that fill no word, no group and no tile, and rows that fill no block.
SHAPES = ((21, 272), (5, 1040))
# A few of them in `make test`.
CASES = [
    pytest.param(*case, marks=[pytest.mark.emulated] if index % 65 else [])
    for index, case in enumerate(itertools.product(ROWS, SHAPES, FORMATS, DTYPES))
]


def make(
    num_rows: int, num_out: int, num_in: int, dtype: torch.dtype, kind: tuple[int, int, bool]
) -> tuple[tuple[Any, ...], dict[str, int]]:
    """x, words, scales, minima and out; bits and width. Rows and groups have other sizes: none stands for another."""
    bits, width, has_minima = kind
    x = sliced(num_rows, num_in, dtype=dtype) * torch.logspace(-2, 2, num_rows)[:, None].to(dtype)
    low, high = (-128, 128) if bits == 8 else (0, 16)
    words = pack(torch.randint(low, high, (num_out, num_in)).to(torch.int8), bits)
    sizes = num_out, -(-num_in // width)
    own = torch.float32 if has_minima else torch.bfloat16
    scales = ((torch.rand(sizes) + 0.1) / (8 << bits)).to(own)
    minima = -7.5 * scales * torch.rand(sizes) if has_minima else None
    return (x, words, scales, minima, sliced(num_rows, num_out, dtype=dtype)), {"bits": bits, "width": width}


def limit(dtype: torch.dtype) -> float | None:
    """A tile's weights are rounded to bfloat16, as those of a bfloat16 model are."""
    return 1e-2 if dtype == torch.bfloat16 else None


@pytest.mark.parametrize(("num_rows", "shape", "kind", "dtype"), CASES)
def test_every_format_and_number_of_rows(
    num_rows: int, shape: tuple[int, int], kind: tuple[int, int, bool], dtype: torch.dtype, triton_backend: Backend
) -> None:
    arguments, how = make(num_rows, *shape, dtype, kind)
    triton_backend.check("integer_linear", *arguments, limit=limit(dtype) if num_rows > 1 else None, **how)


@pytest.mark.parametrize("num_rows", [1, 5, 65])
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind[1] == 16], ids=str)
def test_no_scale_behind_a_row_is_read(kind: tuple[int, int, bool], num_rows: int, triton_backend: Backend) -> None:
    """Half a unit of words is the row's last: times the zeros behind x, what lies there may still be no number."""
    (x, words, scales, minima, out), how = make(num_rows, 21, 272, torch.float32, kind)

    def fenced(numbers: torch.Tensor) -> torch.Tensor:
        wide = torch.full((len(numbers), numbers.shape[1] + 3), torch.nan, dtype=numbers.dtype)
        wide[:, : numbers.shape[1]] = numbers
        return wide[:, : numbers.shape[1]]

    minima = None if minima is None else fenced(minima)
    triton_backend.check("integer_linear", x, words, fenced(scales), minima, out, **how)


@pytest.mark.parametrize("kind", FORMATS[1:3], ids=str)
def test_a_matrix_that_is_made_in_slices(
    kind: tuple[int, int, bool], triton_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one is smaller; none may write over another's columns."""
    from qwen35mm_kernels.gpu import integers

    arguments, how = make(70, 50, 272, torch.bfloat16, kind)
    whole = triton_backend.run("integer_linear", *arguments[:4], **how)
    monkeypatch.setattr(integers, "_SLICE", 20 * 272 + 5)
    triton_backend.check("integer_linear", *arguments, limit=1e-2, **how)
    assert_close(triton_backend.run("integer_linear", *arguments[:4], **how), whole, 1e-2)


@pytest.mark.parametrize("num_rows", [5, 20, 64])
@pytest.mark.parametrize("kind", FORMATS[1:3], ids=str)
def test_tiles_for_many_columns(
    kind: tuple[int, int, bool], num_rows: int, triton_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card of no multiprocessors has enough programs always."""
    from qwen35mm_kernels.gpu import integers

    monkeypatch.setattr(integers, "num_multiprocessors", lambda device: 0)
    arguments, how = make(num_rows, 140, 272, torch.bfloat16, kind)
    triton_backend.check("integer_linear", *arguments, limit=1e-2, **how)


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_torch(kind: tuple[int, int, bool], make_backend: Callable[[str], Backend]) -> None:
    arguments, how = make(5, 24, 72, torch.bfloat16, kind)
    make_backend("cpu").check("integer_linear", *arguments, **how)


@pytest.mark.parametrize("num_rows", [1, 4, 20])
def test_a_group_as_wide_as_a_row_and_one_of_three_words(num_rows: int, triton_backend: Backend) -> None:
    for width, num_in in ((640, 640), (288, 280), (96, 288)):
        arguments, how = make(num_rows, 9, num_in, torch.bfloat16, (4, width, True))
        triton_backend.check("integer_linear", *arguments[:4], limit=limit(torch.bfloat16), **how)


@pytest.mark.parametrize("num_rows", [1, 20, 65])
@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_what_floats_hold_is_multiplied_exactly(
    kind: tuple[int, int, bool], num_rows: int, triton_backend: Backend
) -> None:
    """Small whole numbers, and scales that are powers of two: nothing is rounded, and every place of a word counts."""
    (x, words, scales, minima, _), how = make(num_rows, 40, 288, torch.float32, kind)
    x = torch.randint(-3, 4, x.shape).float()
    scales = torch.exp2(torch.randint(-1, 2, scales.shape)).to(scales.dtype)
    minima = None if minima is None else torch.randint(-4, 5, minima.shape).float()
    weight = dequantise(words, scales, minima, **how, in_features=288, dtype=torch.float64)
    found = triton_backend.run("integer_linear", x, words, scales, minima, **how)
    assert torch.equal(found.double(), x.double() @ weight.T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [3, 20])
@pytest.mark.parametrize("kind", FORMATS[:3], ids=str)
def test_a_sum_in_parts(
    kind: tuple[int, int, bool], num_rows: int, dtype: torch.dtype, triton_backend: Backend
) -> None:
    """Five parts, the last with a rest; into columns of another tensor, too. A row has the same bits among others, but
    for NumPy's products in float32, whose rows know their place.
    """
    arguments, how = make(num_rows, 24, 1240, dtype, kind)
    out = torch.full((num_rows, 70), 7.0, dtype=dtype)[:, 10:34]
    found = triton_backend.check("integer_linear", *arguments[:4], out, limit=limit(dtype), **how)
    x, *matrix = arguments[:4]
    form = slice(1, 3) if num_rows == 3 else slice(2, 19)
    near = 1e-6 if triton_backend.name == "interpreted" and dtype == torch.float32 else 0
    assert_close(triton_backend.run("integer_linear", x[form], *matrix, **how), found[form], near)


def test_sums_are_cut_where_programs_are_few() -> None:
    """By the shape alone. 0.8B's out_proj and down_proj, 9B's; not what has columns enough, or turns too few."""
    pytest.importorskip("triton", reason="Triton has no package for this platform")
    from qwen35mm_kernels.gpu.integers import columns_of_a_part

    cut = {(1024, 2048): 256, (1024, 3584): 512, (4096, 4096): 1024, (4096, 12288): 3072, (5120, 17408): 5888}
    whole = {(8192, 1024): 1024, (5120, 1024): 1024, (24576, 4096): 4096, (2048, 512): 512, (248320, 1024): 1024}
    for shape, span in (cut | whole).items():
        assert columns_of_a_part(*shape) == span, shape


@pytest.mark.parametrize("bits", [8, 4])
def test_packing_and_back_is_what_the_reference_reads(bits: int) -> None:
    codes = torch.randint(-128, 128, (5, 72)).to(torch.int8) if bits == 8 else torch.randint(0, 16, (5, 72)).char()
    words, ones = pack(codes, bits), torch.ones(5, 3)
    how: dict[str, Any] = {"bits": bits, "width": 32}
    zeros = torch.zeros(5, 3)
    assert torch.equal(dequantise(words, ones, zeros, **how, in_features=72, dtype=torch.float32), codes.float())
    assert torch.equal(reference.integer_linear(torch.eye(72), words, ones, zeros, **how), codes.T.float())


def test_no_rows(triton_backend: Backend) -> None:
    arguments, how = make(2, 24, 40, torch.bfloat16, FORMATS[0])
    assert triton_backend.run("integer_linear", arguments[0][:0], *arguments[1:4], **how).shape == (0, 24)


@pytest.mark.parametrize("kind", [FORMATS[0], FORMATS[2]], ids=str)
@pytest.mark.parametrize(("num_rows", "places"), [(4, (0, 1, 3)), (16, (0, 9)), (200, (0, 77, 199))])
def test_a_row_has_the_same_bits_whatever_the_others_hold(
    num_rows: int, places: tuple[int, ...], kind: tuple[int, int, bool], triton_backend: Backend
) -> None:
    (x, *matrix, _), how = make(num_rows, 9, 272, torch.bfloat16, kind)
    whole = triton_backend.run("integer_linear", x, *matrix, **how)
    for place in places:
        other = torch.randn_like(x) * 50
        other[(place + 1) % num_rows :: 3] = torch.nan
        other[place] = x[place]
        assert torch.equal(triton_backend.run("integer_linear", other, *matrix, **how)[place], whole[place])


def test_a_vector_and_tiles_differ_by_their_last_bits_alone(triton_backend: Backend) -> None:
    (x, *matrix, _), how = make(20, 24, 656, torch.float32, FORMATS[3])
    alone = triton_backend.run("integer_linear", x[:1], *matrix, **how)
    assert_close(triton_backend.run("integer_linear", x, *matrix, **how)[:1], alone, 1e-6)
