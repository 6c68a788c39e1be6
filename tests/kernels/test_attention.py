"""Attention against the reference and transformers. What no sequence holds is NaN."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import eager_attention_forward

from qwen35mm_kernels import cpu, split_gate
from qwen35mm_kernels.cpu.attention import aligned, attention_decode
from tests.card import Card, OnCard
from tests.kernels.compare import LENGTHS_AND_DTYPES, Backend, assert_close, sliced
from tests.kernels.paged import BLOCK_SIZE, Pool, projection

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
SCALE = 0.3  # not the default of torch's function
OPTIONS: dict[str, Any] = {"block_size": BLOCK_SIZE, "scale": SCALE}


def queries(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries as a slice, and a gate that is a view of the projection."""
    qkv = torch.randn(num_tokens, 2 * (num_heads + 1) * head_dim + 8).to(dtype)
    return torch.randn(num_tokens, num_heads + 1, head_dim).to(dtype)[:, 1:], split_gate(qkv, num_heads, head_dim)


def test_the_gate_is_the_second_half_of_each_head() -> None:
    qkv = torch.arange(2.0)[:, None] * 100 + torch.arange(24.0)
    assert split_gate(qkv, 4, 2)[1].tolist() == [[102, 103], [106, 107], [110, 111], [114, 115]]
    assert split_gate(qkv, 4, 2).data_ptr() == qkv[:, 2:].data_ptr()


# Writing.


@pytest.mark.parametrize(("num_tokens", "dtype"), LENGTHS_AND_DTYPES)
def test_write(num_tokens: int, dtype: torch.dtype, backend: Backend) -> None:
    """Rows that no token has stay NaN."""
    case = projection(num_tokens, num_heads=2, num_kv_heads=1, head_dim=64, rotated=16, dtype=dtype)
    backend.check("qk_norm_rope_write", *case, num_heads=2)


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((8, 2, 256, 64), BFLOAT16),
        ((4, 4, 32, 32), FLOAT32),
        ((6, 2, 64, 12), BFLOAT16),
        ((2, 1, 64, 0), FLOAT32),
    ],
)
def test_write_at_other_sizes(sizes: tuple[int, int, int, int], dtype: torch.dtype, backend: Backend) -> None:
    num_heads, num_kv_heads, head_dim, rotated = sizes
    case = projection(
        9, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rotated=rotated, dtype=dtype
    )
    backend.check("qk_norm_rope_write", *case, num_heads=num_heads)


def test_padding_is_neither_written_nor_read(backend: Backend) -> None:
    case = projection(11, num_heads=2, num_kv_heads=1, head_dim=64, rotated=16, dtype=torch.bfloat16)
    qkv, *_, k_cache, v_cache, rows = case
    padding = [0, 4, 9, 10]
    rows[padding], qkv[padding] = -1, float("nan")  # type: ignore[index]
    q = backend.check("qk_norm_rope_write", *case, num_heads=2)
    assert not q[padding].any()
    assert all(int(cache[:, 0, 0].isfinite().sum()) == 7 for cache in (k_cache, v_cache))  # type: ignore[index]


def test_a_written_token_has_the_same_bits_alone_and_among_others(kernel_backend: Backend) -> None:
    case = projection(37, num_heads=2, num_kv_heads=1, head_dim=256, rotated=64, dtype=torch.float32)
    qkv, cos, sin, *rest, rows = case
    q = kernel_backend.run("qk_norm_rope_write", *case, num_heads=2)
    k_cache = rest[3].clone()  # type: ignore[union-attr]
    rest[3].fill_(7.0)  # type: ignore[union-attr]
    one = [x[20:21] for x in (qkv, cos, sin)]  # type: ignore[index]
    alone = kernel_backend.run("qk_norm_rope_write", *one, *rest, rows[20:21], num_heads=2)  # type: ignore[index]
    assert torch.equal(alone[0], q[20])
    assert torch.equal(rest[3][rows[20]], k_cache[rows[20]])  # type: ignore[index]


# Decode.


def check_decode(backend: Backend, pool: Pool, num_heads: int, scale: float = SCALE) -> torch.Tensor:
    q, gate = queries(len(pool.lengths), num_heads, pool.k_cache.shape[2], pool.k_cache.dtype)
    past = pool.k_cache, pool.v_cache, pool.block_table, pool.lengths
    return backend.check("paged_attention_decode", q, gate, *past, block_size=BLOCK_SIZE, scale=scale)


@pytest.mark.parametrize(("length", "dtype"), [*LENGTHS_AND_DTYPES, (128, FLOAT32), (129, BFLOAT16)])
def test_decode_of_one_sequence(length: int, dtype: torch.dtype, backend: Backend) -> None:
    check_decode(backend, Pool([length], num_kv_heads=2, head_dim=64, dtype=dtype), 4)


@pytest.mark.parametrize(
    ("heads", "in_order", "dtype"),
    [((4, 4), False, FLOAT32), ((6, 2), True, BFLOAT16), ((6, 2), False, FLOAT32), ((17, 1), False, BFLOAT16)],
)
def test_decode_of_a_batch(heads: tuple[int, int], in_order: bool, dtype: torch.dtype, backend: Backend) -> None:
    """With padding rows, and with blocks in any order or side by side."""
    lengths = [0, 70, 1, 0, 140, 64]
    pool = Pool(lengths, num_kv_heads=heads[1], head_dim=32, dtype=dtype, max_blocks=6, in_order=in_order)
    assert not check_decode(backend, pool, heads[0])[[0, 3]].any()


def test_decode_at_the_real_sizes(backend: Backend) -> None:
    check_decode(backend, Pool([150, 3], num_kv_heads=2, head_dim=256, dtype=torch.bfloat16), 16, scale=0.0625)


def test_a_sequence_has_the_same_bits_in_any_company(backend: Backend) -> None:
    """Neither the others' lengths, nor the width of the block table, nor the batch change a bit."""
    pool = Pool([130, 400, 0, 77], num_kv_heads=1, head_dim=64, dtype=torch.bfloat16, max_blocks=20)
    q, gate = queries(4, 4, 64, torch.bfloat16)
    caches, tables = (pool.k_cache, pool.v_cache), (pool.block_table, pool.lengths)
    together = backend.run("paged_attention_decode", q, gate, *caches, *tables, **OPTIONS)
    for b, width in ((0, 3), (3, 2), (1, 7)):
        one = slice(b, b + 1)
        alone = pool.block_table[one, :width], pool.lengths[one]
        assert torch.equal(
            backend.run("paged_attention_decode", q[one], gate[one], *caches, *alone, **OPTIONS)[0], together[b]
        )


@pytest.mark.parametrize("op", ["paged_attention_decode", "paged_attention_prefill"])
def test_neither_threads_nor_where_blocks_lie_change_a_bit(
    op: str, kernel_backend: Backend, request: pytest.FixtureRequest
) -> None:
    length = 300 if kernel_backend.name == "interpreted" else 700
    pool = Pool([length], num_kv_heads=2, head_dim=32, dtype=torch.bfloat16)
    q, gate = queries(1 if op == "paged_attention_decode" else 40, 4, 32, torch.bfloat16)
    tables = (pool.block_table, pool.lengths) if len(q) == 1 else pool.past(len(q))[2:]
    before = kernel_backend.run(op, q, gate, pool.k_cache, pool.v_cache, *tables, **OPTIONS)
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1 if torch.get_num_threads() > 1 else 2)
    rows = pool.rows(0)
    pool.block_table[0] = pool.block_table[0].flip(0)
    for cache in (pool.k_cache, pool.v_cache):
        moved = cache[rows]
        cache.fill_(float("nan"))
        cache[pool.rows(0)] = moved
    after = kernel_backend.run(op, q, gate, pool.k_cache, pool.v_cache, *tables, **OPTIONS)
    assert torch.equal(before, after)


# Prefill.


def check_prefill(
    backend: Backend, pool: Pool, num_tokens: int, num_heads: int, scale: float = SCALE, op: str | None = None
) -> None:
    q, gate = queries(num_tokens, num_heads, pool.k_cache.shape[2], pool.k_cache.dtype)
    past = pool.past(num_tokens)
    backend.check(op or "paged_attention_prefill", q, gate, *past, block_size=BLOCK_SIZE, scale=scale)


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "cached"),
    [(*case, 0 if index % 2 else 70) for index, case in enumerate(LENGTHS_AND_DTYPES)],
)
def test_prefill(num_tokens: int, dtype: torch.dtype, cached: int, backend: Backend) -> None:
    check_prefill(
        backend, Pool([num_tokens + cached], num_kv_heads=1, head_dim=32, dtype=dtype, max_blocks=7), num_tokens, 2
    )


@pytest.mark.parametrize(("heads", "in_order"), [((6, 2), False), ((4, 4), True), ((8, 1), False)])
def test_prefill_with_grouped_heads(heads: tuple[int, int], in_order: bool, backend: Backend) -> None:
    pool = Pool([100], num_kv_heads=heads[1], head_dim=64, dtype=torch.bfloat16, in_order=in_order)
    check_prefill(backend, pool, 45, heads[0])


def test_prefill_at_the_real_sizes(backend: Backend) -> None:
    check_prefill(backend, Pool([150], num_kv_heads=1, head_dim=256, dtype=torch.bfloat16), 40, 8, scale=0.0625)


def test_prefill_equals_transformers(backend: Backend) -> None:
    pool = Pool([80], num_kv_heads=2, head_dim=64, dtype=torch.float32)
    q, gate = queries(50, 4, 64, torch.float32)
    future = torch.ones(50, 80, dtype=torch.bool).triu(31)
    theirs, _ = eager_attention_forward(
        SimpleNamespace(num_key_value_groups=2, training=False),  # type: ignore[arg-type]
        *(x.transpose(0, 1)[None] for x in (q, pool.k_cache[pool.rows(0)], pool.v_cache[pool.rows(0)])),
        attention_mask=torch.zeros(50, 80).masked_fill_(future, float("-inf")),
        scaling=SCALE,
    )
    found = backend.run("paged_attention_prefill", q, gate, *pool.past(50), **OPTIONS)
    assert_close(found, theirs[0] * gate.sigmoid())


def test_prefill_sees_nothing_of_the_future(backend: Backend) -> None:
    # Torch takes 256 at once, and a kernel fewer.
    count, cut = (300, 200) if backend.name == "cpu" else (130, 70)
    pool = Pool([count], num_kv_heads=2, head_dim=32, dtype=FLOAT32)
    q, gate = queries(count, 2, 32, FLOAT32)
    past = pool.past(count)
    before = backend.run("paged_attention_prefill", q, gate, *past, **OPTIONS)
    pool.k_cache[pool.rows(0)[cut:]], pool.v_cache[pool.rows(0)[cut:]] = 50.0, -1e4
    after = backend.run("paged_attention_prefill", q, gate, *past, **OPTIONS)
    assert torch.equal(before[:cut], after[:cut])
    assert not torch.equal(before[cut:], after[cut:])


@pytest.mark.parametrize(("count", "cached"), [(1, 0), (63, 30), (64, 64), (65, 0), (100, 200)])
def test_padding_reaches_nothing(count: int, cached: int, backend: Backend) -> None:
    """It is NaN here, in a tile with tokens and in tiles of its own."""
    pool = Pool([cached + count], num_kv_heads=1, head_dim=32, dtype=FLOAT32)
    q, gate = queries(150, 2, 32, FLOAT32)
    q[count:], gate[count:] = float("nan"), float("nan")
    out = backend.check("paged_attention_prefill", q, gate, *pool.past(count), **OPTIONS)
    assert not out[count:].any()
    if backend.name != "interpreted":
        return
    other = [torch.cat([x[:count], torch.zeros_like(x[count:])]) for x in (q, gate)]
    assert torch.equal(backend.run("paged_attention_prefill", *other, *pool.past(count), **OPTIONS), out)


# The vision tower.


@pytest.mark.parametrize(
    ("num_patches", "num_frames", "dtype"), [(48, 3, FLOAT32), (1, 1, BFLOAT16), (64, 1, FLOAT32), (48, 3, BFLOAT16)]
)
def test_vision_attention(num_patches: int, num_frames: int, dtype: torch.dtype, backend: Backend) -> None:
    q, k, v = (sliced(num_patches, 3, 32, dtype=dtype) for _ in range(3))
    backend.check("vision_attention", q, k, v, num_frames)


def test_a_card_gets_what_it_can_read_sixteen_bytes_at_a_time() -> None:
    """Others are dense copies there, and on a processor all stays where it is."""
    odd = sliced(6, 3, 32)
    whole = torch.randn(6, 3, 64)
    assert aligned(odd) is odd
    for tensor, stays in ((odd, False), (whole[1:, :, 4:36], True), (whole[:, :, 1:33], False), (whole.half(), True)):
        with Card():
            there = OnCard(tensor)
            found = aligned(there)
        assert (found is there) == stays
        assert isinstance(found, OnCard)
        assert torch.equal(found.inner, tensor)
        assert stays or (found.inner.is_contiguous() and found.inner.storage_offset() == 0)


def test_no_plan_is_built_for_each_shape_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's attention is left out there, and nothing but there."""
    allowed: list[bool] = []
    attend = F.scaled_dot_product_attention

    def watched(*args: Any, **options: Any) -> torch.Tensor:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    for device in ("meta", "cpu"):  # meta tensors take a card's way
        q, k = torch.empty(8, 2, 32, device=device), torch.empty(3, 2, 32, device=device)
        cpu.vision_attention(q, q, q, 1)
        attention_decode(q[0], k, k, scale=SCALE)
    assert allowed == [False, False, True, True]
    assert torch.backends.cuda.cudnn_sdp_enabled()
