"""Formats of keys and values: each number as the naive twin has it, the error that is to be expected, and no more."""

from __future__ import annotations

import math
import re
from typing import get_type_hints

import pytest
import torch

from qwen35mm.settings import ModelOptions
from qwen35mm_kernels import reference as operations
from qwen35mm_kernels.kv_formats import FORMATS, GROUP, KVFormat
from qwen35mm_kernels.reference import kv_formats as reference
from tests.kernels.compare import Backend
from tests.kernels.paged import BLOCK_SIZE, Pool, projection
from tests.kernels.test_attention import SCALE, queries

PACKED = [name for name, format in FORMATS.items() if format.bits]
# Every format once as K and once as V, and beside another one.
PAIRS = [("int8", "int4"), ("int4", "fp8"), ("f16", "bf16"), ("bf16", "int8"), ("fp8_e5m2", "f16"), ("fp8", "fp8_e5m2")]
PAIRS += [("int4r", "tq3"), ("tq3", "tq4"), ("tq4", "int4r")]
# Each in one type of queries, so that every format is read beside both.
PAIRS_AND_DTYPES = [(pair, (torch.float32, torch.bfloat16)[index % 2]) for index, pair in enumerate(PAIRS)]
ROTATED = [name for name, format in FORMATS.items() if format.is_rotated]
Pair = tuple[KVFormat, KVFormat]


def rows_with_everything(head_dim: int = 64) -> torch.Tensor:
    """Heads [N, D]: ordinary, huge, tiny, outliers, values between two steps, zeros, one sign, equal extremes."""
    x = torch.randn(12, head_dim)
    x[1] *= 1e30
    x[2] *= 1e-30
    x[3, ::7] *= 40
    x[4] = torch.arange(head_dim) % 17 - 8.5
    x[5] = 0
    x[6, :GROUP] = 0
    x[7] = x[7].abs()
    x[8, 3], x[8, 9] = 5.0, -5.0
    x[9] = torch.arange(head_dim) / 127
    x[10] *= 1e-41  # its scale has no bits left
    return x


def rows_halfway(format: KVFormat, head_dim: int = 64) -> torch.Tensor:
    """Heads [N, D] of every value in the middle between two codes, each group with a scale of 1."""
    largest = -8.0 if format.bits == 4 else format.largest
    codes = torch.arange(abs(largest) * -1, abs(largest) + (format.bits == 8))
    if format.codes is not None:
        codes = torch.arange(256, dtype=torch.uint8).view(format.codes).float()
    known = codes[codes.isfinite()].unique()
    middles = (known[1:] + known[:-1]) / 2
    per_head = head_dim - head_dim // GROUP
    rows = torch.zeros(-(-len(middles) // per_head) * per_head)
    rows[: len(middles)] = middles
    groups = rows.view(-1, GROUP - 1)
    return torch.cat([torch.full((len(groups), 1), largest), groups], dim=1).view(-1, head_dim)


def test_every_format_is_tried_as_keys_and_as_values() -> None:
    """A format that no backend is asked for could be read as another one."""
    assert {k for k, _ in PAIRS} == {v for _, v in PAIRS} == FORMATS.keys() - {"float32"}


def test_the_option_names_every_format() -> None:
    help = get_type_hints(ModelOptions, include_extras=True)["kv_dtype"].__metadata__[0].help
    assert FORMATS.keys() - {"float32"} <= set(re.findall(r"\w+", help))


def formats_of(names: tuple[str, str], backend: Backend) -> Pair:
    if backend.is_triton and not all(FORMATS[name].on_cards for name in names):
        pytest.skip("Triton's kernels don't know it")
    return FORMATS[names[0]], FORMATS[names[1]]


@pytest.fixture(params=PAIRS, ids="-".join)
def pair(request: pytest.FixtureRequest, backend: Backend) -> Pair:
    return formats_of(request.param, backend)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_and_values_are_the_naive_twins(name: str, head_dim: int) -> None:
    format, x = FORMATS[name], rows_with_everything(head_dim)
    rows = format.quantise(x)
    assert torch.equal(
        rows.view(torch.uint8), torch.stack([reference.quantise(format, row) for row in x]).view(torch.uint8)
    )
    assert rows.shape == (len(x), format.row_width(head_dim))
    assert rows.nbytes == len(x) * format.row_bytes(head_dim)
    values = format.dequantise(rows, torch.float32)
    expected = torch.stack([reference.dequantise(format, row) for row in rows])
    assert torch.equal(values, expected)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_error_of_random_values_is_a_steps(name: str) -> None:
    """Evenly spread over a step: its square / 12, on average over groups with steps of their own."""
    format = FORMATS[name]
    x = torch.randn(4000, GROUP)
    rows = format.quantise(x)
    steps = rows[:, -2:].contiguous().view(torch.bfloat16).double()
    found = (format.dequantise(rows, torch.float32) - x).double().square().mean()
    # Of four bits the value opposite the extreme may be cut off; nothing of eight is.
    assert float(found) == pytest.approx(float(steps.square().mean() / 12), rel=0.08 if name == "int4" else 0.02)


@pytest.mark.parametrize(("name", "mantissa"), [("fp8", 3), ("fp8_e5m2", 2)])
def test_the_error_of_a_float_is_half_a_unit_of_its_own(name: str, mantissa: int) -> None:
    format, x = FORMATS[name], torch.randn(4000, GROUP)
    found = format.dequantise(format.quantise(x), torch.float32)
    scale = format.quantise(x)[:, -2:].contiguous().view(torch.bfloat16).float()
    unit = torch.exp2((x / scale).abs().log2().floor() - mantissa) * scale
    normal = (x / scale).abs() > 0.02
    assert ((found - x).abs() <= 0.5001 * unit)[normal].all()
    # The root of the mean of squares, over a unit that is spread evenly: 1 / sqrt(12) of it.
    ratio = ((found - x) / unit)[normal].double().square().mean().sqrt()
    assert float(ratio) == pytest.approx(1 / math.sqrt(12), rel=0.03)


@pytest.mark.parametrize(("name", "error"), [("tq4", 0.009497), ("tq3", 0.03454)])
def test_the_error_of_levels_is_lloyd_and_maxs(name: str, error: float) -> None:
    """Of a Gaussian's variance (Max 1960, table I); no more of rows with outliers, which are nearly one rotated."""
    format, x = FORMATS[name], torch.randn(2000, 256)

    def found() -> float:
        return float((format.dequantise(format.quantise(x), torch.float32) - x).square().sum() / x.square().sum())

    assert found() == pytest.approx(error, rel=0.02)
    x[:, [3, 70, 133, 210]] *= 20
    assert found() < 1.1 * error


@pytest.mark.parametrize("name", ROTATED)
def test_rotations_keep_products_and_spread_what_stands_out(name: str) -> None:
    """Rotated back they are as before, products are the same, and one channel and a constant row are spread evenly."""
    format, x, y = FORMATS[name], torch.randn(50, 256), torch.randn(50, 256)
    torch.testing.assert_close(format.rotate_back(format.rotate(x)), x)
    torch.testing.assert_close((format.rotate(x) * format.rotate(y)).sum(-1), (x * y).sum(-1), rtol=1e-4, atol=1e-4)
    for alone in (torch.eye(256)[3] * 16, torch.ones(256)):
        assert torch.equal(format.rotate(alone).abs(), torch.ones(256))


@pytest.mark.parametrize("name", ROTATED)
def test_outliers_cost_less_where_keys_are_rotated(name: str) -> None:
    """Of products with random queries: less than int4's error at its own bytes or fewer, but for three bits."""
    keys, queries = torch.randn(500, 256), torch.randn(100, 256)
    keys[:, [3, 70, 133, 210]] *= 20
    errors = {}
    for each in ("int4", name):
        found = FORMATS[each].dequantise(FORMATS[each].quantise(keys), torch.float32)
        errors[each] = float(((found - keys) @ queries.T).square().mean())
    assert errors[name] < errors["int4"] * (2 if name == "tq3" else 0.6)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("harm", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_not_made_one(name: str, harm: float) -> None:
    format, x = FORMATS[name], torch.randn(2, 64)
    x[1, 40] = harm
    rows = format.quantise(x)
    values = format.dequantise(rows, torch.float32)
    assert not values[1, 32:].isfinite().all()
    assert values[0].isfinite().all()
    assert [format.is_finite(rows[:1]), format.is_finite(rows)] == [True, False]


def test_write(pair: Pair, backend: Backend) -> None:
    """Values come out as the twin's, byte for byte; keys are normed and turned first, and a sum's last bit may be
    another: then a code may be the next one."""
    qkv, *arguments, _, _, rows = projection(
        9, num_heads=2, num_kv_heads=2, head_dim=64, rotated=16, dtype=torch.bfloat16
    )
    caches = [[torch.zeros(64, 2, format.row_width(64), dtype=format.dtype) for format in pair] for _ in range(2)]
    for kept, run in zip(caches, (Backend("reference", operations, backend.device), backend), strict=True):
        run.run("qk_norm_rope_write", qkv, *arguments, *kept, rows, num_heads=2, formats=pair)
    (expected_keys, expected_values), (keys, values) = caches
    assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8))
    differ = keys.view(torch.uint8) != expected_keys.view(torch.uint8)
    assert differ.float().mean() < 2e-3
    found, expected = (pair[0].dequantise(each, torch.float32) for each in (keys, expected_keys))
    assert ((found - expected).abs() <= 0.16 * expected.abs().amax(-1, keepdim=True)).all()


def test_values_of_every_kind_are_written_as_the_twins(pair: Pair, backend: Backend) -> None:
    x = rows_with_everything()
    if pair[1].bits and not pair[1].is_rotated:
        x = torch.cat([x, rows_halfway(pair[1])])
    qkv, *arguments, _, _, rows = projection(
        len(x), num_heads=1, num_kv_heads=1, head_dim=64, rotated=16, dtype=torch.float32
    )
    assert isinstance(qkv, torch.Tensor)
    qkv[:, -64:] = x
    caches = [torch.zeros(64, 1, format.row_width(64), dtype=format.dtype) for format in pair]
    backend.run("qk_norm_rope_write", qkv, *arguments, *caches, rows, num_heads=1, formats=pair)
    expected = torch.stack([reference.quantise(pair[1], row) for row in x])
    assert torch.equal(caches[1][rows, 0].view(torch.uint8), expected.view(torch.uint8))  # type: ignore[index]
    qkv[3, -40] = math.nan
    backend.run("qk_norm_rope_write", qkv, *arguments, *caches, rows, num_heads=1, formats=pair)
    found = pair[1].dequantise(caches[1][rows, 0], torch.float32)  # type: ignore[index]
    assert found[3, 24].isnan()


def quantised(pool: Pool, pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool's keys and values as codes; what no sequence holds has scales of NaN."""
    return pair[0].quantise(pool.k_cache), pair[1].quantise(pool.v_cache)


@pytest.mark.parametrize(("names", "dtype"), PAIRS_AND_DTYPES)
def test_decode(names: tuple[str, str], dtype: torch.dtype, backend: Backend) -> None:
    pair = formats_of(names, backend)
    pool = Pool([130, 0, 3], num_kv_heads=2, head_dim=64, dtype=dtype, max_blocks=5)
    q, gate = queries(3, 6, 64, dtype)
    past = *quantised(pool, pair), pool.block_table, pool.lengths
    # Torch takes them in the queries' type.
    limit = 1e-2 if backend.name == "cpu" and dtype == torch.bfloat16 else None
    options = {"block_size": BLOCK_SIZE, "scale": SCALE, "formats": pair}
    backend.check("paged_attention_decode", q, gate, *past, limit=limit, **options)


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize(("names", "dtype"), PAIRS_AND_DTYPES)
def test_prefill(names: tuple[str, str], head_dim: int, dtype: torch.dtype, backend: Backend) -> None:
    pair = formats_of(names, backend)
    pool = Pool([100], num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    q, gate = queries(20, 4, head_dim, dtype)
    past = *quantised(pool, pair), *pool.past(20)[2:]
    limit = 1e-2 if dtype == torch.bfloat16 else None
    options = {"block_size": BLOCK_SIZE, "scale": SCALE, "formats": pair}
    backend.check("paged_attention_prefill", q, gate, *past, limit=limit, **options)
