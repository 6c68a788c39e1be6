"""Experts of integers beside scales against the reference, and against the same experts as floats."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qwen35mm_kernels.cpu.quantise import dequantise, pack
from tests.kernels.compare import DTYPES, LENGTHS_AND_DTYPES, Backend, assert_close
from tests.kernels.test_moe import EXPERTS, HIDDEN, TOP_K, WIDTH, make, padded

Matrix = tuple[torch.Tensor, ...]
# Bits and columns of a group of gate and up and of down, and whether each has minima: as we round, as checkpoints are.
KINDS = (
    ((8, 32, False), (8, 32, False)),
    ((4, 32, False), (4, 32, False)),
    ((4, 16, True), (8, 16, False)),
    ((4, 64, True), (8, 48 * 2, True)),
)
# Groups that fill no row, and rows that fill no tile.
SIZES = {"hidden": 272, "width": 80}


def integers(num_rows: int, num_in: int, kind: tuple[int, int, bool]) -> Matrix:
    """An expert's words, scales and perhaps minima for each of `EXPERTS`, whose products stay near 1."""
    bits, width, has_minima = kind
    low, high = (-128, 128) if bits == 8 else (0, 16)
    codes = torch.randint(low, high, (EXPERTS * num_rows, num_in)).to(torch.int8)
    words = pack(codes, bits).view(EXPERTS, num_rows, -1)
    own = torch.float32 if has_minima else torch.bfloat16
    scales = ((torch.rand(EXPERTS, num_rows, -(-num_in // width)) + 0.1) / ((1 << bits) * num_in**0.5)).to(own)
    return (words, scales, -7.5 * scales * torch.rand(scales.shape)) if has_minima else (words, scales)


def cases(num_tokens: int, dtype: torch.dtype, kinds: Any, **sizes: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    hidden, width = sizes.get("hidden", HIDDEN), sizes.get("width", WIDTH)
    x, _, _, chosen, weights = make(num_tokens, dtype, hidden=hidden, width=width)
    gate_up, down = integers(2 * width, hidden, kinds[0]), integers(hidden, width, kinds[1])
    return (x, gate_up, down, chosen, weights), {"formats": tuple(kind[:2] for kind in kinds)}


def limit(dtype: torch.dtype) -> float | None:
    """Weights are rounded to bfloat16, as those of a bfloat16 model are."""
    return 1e-2 if dtype == torch.bfloat16 else None


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize(("num_tokens", "dtype"), LENGTHS_AND_DTYPES[1:5])
def test_experts(num_tokens: int, dtype: torch.dtype, kinds: Any, uncompiled_backend: Backend) -> None:
    arguments, how = cases(num_tokens, dtype, kinds, **SIZES)
    uncompiled_backend.check("integer_experts", *arguments, limit=limit(dtype), **how)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kinds", KINDS[:3], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 65])
def test_experts_in_tiles(
    num_tokens: int, kinds: Any, dtype: torch.dtype, triton_backend: Backend, block_m: int
) -> None:
    arguments, how = cases(num_tokens, dtype, kinds)
    triton_backend.check("integer_experts", *arguments, limit=limit(dtype), **how)


@pytest.mark.parametrize("kinds", KINDS[1:3], ids=str)
def test_tiles_of_128_rows(kinds: Any, triton_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    from qwen35mm_kernels.gpu import moe

    monkeypatch.setattr(moe, "rows_of_a_tile", lambda num_pairs, num_experts: 128)
    arguments, how = cases(140, torch.bfloat16, kinds)
    triton_backend.check("integer_experts", *arguments, limit=1e-2, **how)


@pytest.mark.parametrize("kinds", KINDS[:2], ids=str)
def test_they_are_the_experts_of_the_floats_that_they_stand_for(kinds: Any, triton_backend: Backend) -> None:
    """In float32, where nothing is rounded but the sums."""
    (x, *matrices, chosen, weights), how = cases(20, torch.float32, kinds)
    floats = []
    for (words, scales), (bits, width), num_in in zip(matrices, how["formats"], (HIDDEN, WIDTH), strict=True):
        read: dict[str, Any] = {"bits": bits, "width": width, "in_features": num_in, "dtype": torch.float32}
        floats.append(torch.stack([dequantise(*each, None, **read) for each in zip(words, scales, strict=True)]))
    found = triton_backend.run("integer_experts", x, *matrices, chosen, weights, **how)
    assert_close(found, triton_backend.run("moe_experts", x, *floats, chosen, weights), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs(dtype: torch.dtype, triton_backend: Backend) -> None:
    """Experts of which each lies behind something else, such as another layer's."""

    def apart(numbers: torch.Tensor) -> torch.Tensor:
        wide = torch.full((EXPERTS, numbers.shape[1] + 1, numbers.shape[2] + 4), -1, dtype=numbers.dtype)
        wide[:, 1:, :-4] = numbers
        return wide[:, 1:, :-4]

    (x, *matrices, chosen, weights), how = cases(20, dtype, KINDS[2])
    gate_up, down = (tuple(map(apart, parts)) for parts in matrices)
    every_other = torch.full((20, 2 * TOP_K), -7, dtype=torch.int64)
    every_other[:, ::2] = chosen
    shares = weights.t().contiguous().t()
    arguments = x, gate_up, down, every_other[:, ::2], shares
    triton_backend.check("integer_experts", *arguments, limit=limit(dtype), **how)


@pytest.mark.parametrize("kinds", KINDS[:2], ids=str)
def test_a_token_has_the_same_bits_in_any_company(kinds: Any, triton_backend: Backend, block_m: int) -> None:
    """In tiles of one size: alone and padded (no grouping), among so many that they are grouped, and among padding."""
    (x, *matrices, chosen, weights), how = cases(24, torch.bfloat16, kinds)
    many = triton_backend.run("integer_experts", x, *matrices, chosen, weights, **how)
    for rows in (slice(7, 8), slice(3, 19), slice(3, 23)):
        some = triton_backend.run("integer_experts", x[rows], *matrices, chosen[rows], weights[rows], **how)
        assert torch.equal(some, many[rows])
    x, chosen, weights = padded(x, chosen, weights, 5)
    found = triton_backend.run("integer_experts", x, *matrices, chosen, weights, **how)
    assert torch.equal(found[:5], many[:5])


def test_no_token_gives_no_row(uncompiled_backend: Backend) -> None:
    (x, *matrices, chosen, weights), how = cases(1, torch.float32, KINDS[0])
    found = uncompiled_backend.run("integer_experts", x[:0], *matrices, chosen[:0], weights[:0], **how)
    assert found.shape == (0, HIDDEN)
