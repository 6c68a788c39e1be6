"""Experts of eight-bit floats against the reference, and against the same experts' products one by one."""

from __future__ import annotations

from typing import TypeAlias

import pytest
import torch

from qwen35mm_kernels.reference.fp8 import GROUP
from tests.kernels.compare import DTYPES, Backend, assert_close
from tests.kernels.test_fp8 import limit
from tests.kernels.test_moe import TOP_K, make, padded

pytestmark = pytest.mark.usefixtures("_fp8_card")

Matrix: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Arguments: TypeAlias = tuple[torch.Tensor, Matrix, Matrix, torch.Tensor, torch.Tensor]
EXPERTS = 5
# Hidden sizes and widths with scales of blocks, of rows and groups, and of rows alone. Gate and up have blocks of their
# own; where rows have scales, they fill no tile, and columns fill no group.
KINDS = {"blocks": (192, 128), "groups": (144, 40), "rows": (144, 40)}


def matrices(num_rows: int, num_in: int, kind: str) -> Matrix:
    """Each of `EXPERTS`' values and scales, no two alike, whose products stay near 1."""
    values = torch.randn(EXPERTS, num_rows, num_in).to(torch.float8_e4m3fn)
    rows = -(-num_rows // GROUP) if kind == "blocks" else num_rows
    scales = torch.rand(EXPERTS, rows, 1 if kind == "rows" else -(-num_in // GROUP)) + 0.1
    return values, scales / num_in**0.5


def cases(num_tokens: int, dtype: torch.dtype, kind: str) -> Arguments:
    hidden, width = KINDS[kind]
    x, _, _, chosen, weights = make(num_tokens, dtype, hidden=hidden, width=width, experts=EXPERTS)
    return x, matrices(2 * width, hidden, kind), matrices(hidden, width, kind), chosen, weights


def near(dtype: torch.dtype, backend: Backend) -> float:
    """SwiGLU's last bits move a code by a step, here and there."""
    return limit(dtype, backend) or 1e-2


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "kind"),
    [
        (tokens, dtype, kind)
        for dtype, tokens, kind in (
            (torch.bfloat16, 20, "blocks"),
            *((dtype, tokens, kind) for kind in KINDS for tokens in (1, 7, 33) for dtype in DTYPES),
        )
    ],
)
def test_experts(num_tokens: int, dtype: torch.dtype, kind: str, uncompiled_backend: Backend) -> None:
    arguments = cases(num_tokens, dtype, kind)
    uncompiled_backend.check("fp8_experts", *arguments, limit=near(dtype, uncompiled_backend))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 16, 40])
def test_experts_in_tiles(
    num_tokens: int, kind: str, dtype: torch.dtype, triton_backend: Backend, block_m: int
) -> None:
    arguments = cases(num_tokens, dtype, kind)
    triton_backend.check("fp8_experts", *arguments, limit=near(dtype, triton_backend))


@pytest.mark.emulated
@pytest.mark.parametrize("kind", ["groups", "blocks"])
def test_tiles_of_128_rows(kind: str, triton_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    from qwen35mm_kernels.gpu import moe

    monkeypatch.setattr(moe, "rows_of_a_tile", lambda num_pairs, num_experts: 128)
    triton_backend.check("fp8_experts", *cases(140, torch.bfloat16, kind), limit=1e-2)


def test_strided_inputs(triton_backend: Backend) -> None:
    """Experts of which each lies behind something else, such as another layer's; scales that lie by columns."""

    def apart(numbers: torch.Tensor) -> torch.Tensor:
        wide = torch.full((EXPERTS, numbers.shape[1] + 1, numbers.shape[2] + 16), 7.0).to(numbers.dtype)
        wide.view(torch.uint8)[:, 1:, : numbers.shape[2] * numbers.itemsize] = numbers.view(torch.uint8)
        return wide[:, 1:, : numbers.shape[2]]

    x, gate_up, down, chosen, weights = cases(7, torch.bfloat16, "groups")
    every_other = torch.full((7, 2 * TOP_K), -7, dtype=torch.int64)
    every_other[:, ::2] = chosen
    shares = weights.t().contiguous().t()
    gate_up, (values, scales) = (apart(gate_up[0]), apart(gate_up[1])), down
    down = apart(values), scales.mT.contiguous().mT
    triton_backend.check("fp8_experts", x, gate_up, down, every_other[:, ::2], shares, limit=1e-2)


@pytest.mark.parametrize("kind", ["rows", "blocks"])
def test_a_token_has_the_same_bits_in_any_company(kind: str, triton_backend: Backend, block_m: int) -> None:
    """In tiles of one size: alone and padded (no grouping), among so many that they are grouped, and among padding."""
    x, gate_up, down, chosen, weights = cases(18, torch.bfloat16, kind)
    many = triton_backend.run("fp8_experts", x, gate_up, down, chosen, weights)
    for rows in (slice(7, 8), slice(1, 17)):
        some = triton_backend.run("fp8_experts", x[rows], gate_up, down, chosen[rows], weights[rows])
        assert torch.equal(some, many[rows])
    x, chosen, weights = padded(x, chosen, weights, 5)
    found = triton_backend.run("fp8_experts", x, gate_up, down, chosen, weights)
    assert torch.equal(found[:5], many[:5])


def test_one_expert_is_its_two_products(triton_backend: Backend) -> None:
    """With rows for tiles of 16, where sums have one order: gate and up as one matrix, SwiGLU, and down."""
    x, gate_up, down, _, _ = cases(9, torch.float32, "blocks")
    chosen, weights = torch.full((9, 1), 3), torch.ones(9, 1)
    found = triton_backend.run("fp8_experts", x, gate_up, down, chosen, weights)
    products = triton_backend.run("fp8_linear", x, *(part[3] for part in gate_up))
    gate, up = products.chunk(2, dim=1)
    inner = gate / (1 + torch.exp(-gate)) * up
    assert_close(found, triton_backend.run("fp8_linear", inner, *(part[3] for part in down)), 1e-3)


def test_no_token_gives_no_row(uncompiled_backend: Backend) -> None:
    x, gate_up, down, chosen, weights = cases(1, torch.float32, "rows")
    found = uncompiled_backend.run("fp8_experts", x[:0], gate_up, down, chosen[:0], weights[:0])
    assert found.shape == (0, x.shape[1])
