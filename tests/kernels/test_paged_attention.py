"""The paged operations against their twins and against attention over keys in one piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qwen35mm_kernels import paged_attention as paged
from qwen35mm_kernels.attention import naive_attention_decode, naive_attention_prefill
from tests.kernels.compare import DTYPES, LENGTHS, assert_close, sliced
from tests.kernels.paged import BLOCK_SIZE, Pool, projection

SCALE = 0.3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("rotated", [0, 16, 32])
def test_write_equals_its_twin(rotated: int, num_tokens: int, dtype: torch.dtype) -> None:
    case = projection(num_tokens, num_heads=4, num_kv_heads=2, head_dim=32, rotated=rotated, dtype=dtype)
    q, k_cache, v_cache = case.run(paged.qk_norm_rope_write)
    expected = case.run(paged.naive_qk_norm_rope_write)
    for actual, twin in zip((q, k_cache, v_cache), expected, strict=True):
        assert_close(actual.nan_to_num(7.0), twin.nan_to_num(7.0))
    assert torch.equal(k_cache.isnan(), expected[1].isnan())
    assert torch.equal(v_cache.isnan(), expected[2].isnan())


def test_padding_writes_nothing() -> None:
    case = projection(5, num_heads=4, num_kv_heads=2, head_dim=32, rotated=16, dtype=torch.float32)
    case.rows[1] = case.rows[4] = -1
    case.qkv[1] = float("nan")
    q, k_cache, v_cache = case.run(paged.qk_norm_rope_write)
    assert not q[[1, 4]].any()
    assert q[[0, 2, 3]].all()
    written = torch.zeros(len(k_cache), dtype=torch.bool)
    written[case.rows[[0, 2, 3]]] = True
    for cache in (k_cache, v_cache):
        assert cache[~written].isnan().all()
        assert not cache[written].isnan().any()


def test_the_gate_is_the_second_half_of_each_head() -> None:
    qkv = torch.arange(2.0)[:, None] * 100 + torch.arange(24.0)
    assert paged.split_gate(qkv, 4, 2)[1].tolist() == [[102, 103], [106, 107], [110, 111], [114, 115]]
    assert paged.split_gate(qkv, 4, 2).data_ptr() == qkv[:, 2:].data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_decode_equals_its_twin(gated: bool, dtype: torch.dtype) -> None:
    pool = Pool([0, *LENGTHS], num_kv_heads=2, head_dim=32, dtype=dtype)
    q = sliced(6, 4, 32, dtype=dtype)
    gate = sliced(6, 4, 32, dtype=dtype) if gated else None
    arguments = pool.k_cache, pool.v_cache, pool.block_table, pool.lengths
    actual = paged.paged_attention_decode(q, gate, *arguments, block_size=BLOCK_SIZE, scale=SCALE)
    assert_close(actual, paged.naive_paged_attention_decode(q, gate, *arguments, BLOCK_SIZE, SCALE))
    assert not actual[0].any()
    k, v = pool.sequence(2)
    expected = naive_attention_decode(q[2].float(), k.float(), v.float(), SCALE)
    assert_close(actual[2], (expected if gate is None else expected * gate[2].float().sigmoid()).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 63, 65])
@pytest.mark.parametrize("cached", [0, 1, 130])
@pytest.mark.parametrize("gated", [False, True])
def test_prefill_equals_its_twin(gated: bool, cached: int, num_tokens: int, dtype: torch.dtype) -> None:
    length = num_tokens + cached
    pool = Pool([length], num_kv_heads=2, head_dim=32, dtype=dtype)
    q = sliced(num_tokens, 4, 32, dtype=dtype)
    gate = sliced(num_tokens, 4, 32, dtype=dtype) if gated else None
    arguments = pool.k_cache, pool.v_cache, pool.block_table[0], length
    actual = paged.paged_attention_prefill(q, gate, *arguments, block_size=BLOCK_SIZE, scale=SCALE)
    assert_close(actual, paged.naive_paged_attention_prefill(q, gate, *arguments, BLOCK_SIZE, SCALE))
    if not gated:
        k, v = pool.sequence(0)
        assert_close(actual, naive_attention_prefill(q, k, v, SCALE))


def test_what_does_not_fit_is_refused() -> None:
    pool, q = Pool([5, 9], num_kv_heads=2, head_dim=32, dtype=torch.float32), torch.randn(2, 4, 32)

    def decode(**changed: Any) -> None:
        arguments: dict[str, Any] = {
            "q": q,
            "gate": None,
            "k_cache": pool.k_cache,
            "v_cache": pool.v_cache,
            "block_table": pool.block_table,
            "lengths": pool.lengths,
            "block_size": BLOCK_SIZE,
            "scale": SCALE,
        }
        paged.paged_attention_decode(**arguments | changed)

    with pytest.raises(TypeError, match=r"lengths must be torch.int32, got torch.int64"):
        decode(lengths=pool.lengths.long())
    with pytest.raises(ValueError, match=r"block_table must be \[B, max_blocks\] = \[2, any\], got \[1, 1\]"):
        decode(block_table=pool.block_table[:1])
    with pytest.raises(ValueError, match=r"gate must be the shape of q = \[2, 4, 32\]"):
        decode(gate=q[:1])
    with pytest.raises(ValueError, match=r"whole blocks of block_size = 63"):
        decode(block_size=63)
    with pytest.raises(ValueError, match="multiple of key heads, got Hq = 3 and Hkv = 2"):
        decode(q=q[:, :3])
    with pytest.raises(TypeError, match=r"v_cache must be torch.float32, got torch.bfloat16"):
        decode(v_cache=pool.v_cache.bfloat16())
    for length in (1, 65):
        with pytest.raises(ValueError, match=rf"got T = 2, length = {length}, 1 blocks of 64"):
            paged.paged_attention_prefill(
                q, None, pool.k_cache, pool.v_cache, pool.block_table[0], length, block_size=64, scale=SCALE
            )
    case = projection(2, num_heads=4, num_kv_heads=2, head_dim=32, rotated=16, dtype=torch.float32)
    case.qkv = case.qkv[:, 1:]
    with pytest.raises(ValueError, match=r"qkv must be .* = \[any, 384\], got \[2, 383\]"):
        case.run(paged.qk_norm_rope_write)
