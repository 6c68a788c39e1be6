"""Decode and prefill over the paged cache against the naive twins. What no sequence holds is NaN."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from qwen35mm_kernels.attention import naive_attention_prefill
from qwen35mm_kernels.gpu import decode_attention as decode
from qwen35mm_kernels.gpu import prefill_attention as prefill
from qwen35mm_kernels.gpu.launch import Config
from qwen35mm_kernels.paged_attention import naive_paged_attention_decode, naive_paged_attention_prefill, split_gate
from tests.kernels.compare import DTYPES, LENGTHS, assert_close, moved
from tests.kernels.paged import BLOCK_SIZE, Pool

SCALE = 0.3


def run_decode(
    q: torch.Tensor, gate: torch.Tensor | None, pool: Pool, device: torch.device, scale: float = SCALE
) -> torch.Tensor:
    k, v, table, lengths = (moved(x, device) for x in (pool.k_cache, pool.v_cache, pool.block_table, pool.lengths))
    gate = None if gate is None else moved(gate, device)
    return decode.paged_attention_decode(moved(q, device), gate, k, v, table, lengths, BLOCK_SIZE, scale).cpu()


def expected_decode(q: torch.Tensor, gate: torch.Tensor | None, pool: Pool, scale: float = SCALE) -> torch.Tensor:
    return naive_paged_attention_decode(
        q, gate, pool.k_cache, pool.v_cache, pool.block_table, pool.lengths, BLOCK_SIZE, scale
    )


def run_prefill(
    q: torch.Tensor, gate: torch.Tensor | None, pool: Pool, device: torch.device, scale: float = SCALE
) -> torch.Tensor:
    k, v, table = (moved(x, device) for x in (pool.k_cache, pool.v_cache, pool.block_table[0]))
    gate = None if gate is None else moved(gate, device)
    length = int(pool.lengths[0])
    return prefill.paged_attention_prefill(moved(q, device), gate, k, v, table, length, BLOCK_SIZE, scale).cpu()


def expected_prefill(q: torch.Tensor, gate: torch.Tensor | None, pool: Pool, scale: float = SCALE) -> torch.Tensor:
    length = int(pool.lengths[0])
    return naive_paged_attention_prefill(
        q, gate, pool.k_cache, pool.v_cache, pool.block_table[0], length, BLOCK_SIZE, scale
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [*LENGTHS, 128, 129])
def test_decode_of_one_sequence_equals_its_twin(length: int, dtype: torch.dtype, device: torch.device) -> None:
    pool = Pool([length], num_kv_heads=2, head_dim=64, dtype=dtype)
    q = torch.randn(1, 4, 64).to(dtype)
    assert_close(run_decode(q, None, pool, device), expected_decode(q, None, pool))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (17, 1)])
def test_decode_of_a_batch_equals_its_twin(heads: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """With padding rows, a gate that is a view of the projection, and queries that are a slice."""
    num_heads, num_kv_heads = heads
    pool = Pool([0, 70, 1, 0, 140, 64], num_kv_heads=num_kv_heads, head_dim=32, dtype=dtype, max_blocks=6)
    qkv = torch.randn(6, 2 * (num_heads + num_kv_heads) * 32 + 8).to(dtype)
    gate = split_gate(qkv, num_heads, 32)
    q = torch.randn(6, num_heads + 1, 32).to(dtype)[:, 1:]
    actual = run_decode(q, gate, pool, device)
    assert_close(actual, expected_decode(q, gate, pool))
    assert not actual[[0, 3]].any()


def test_decode_at_the_real_sizes(device: torch.device) -> None:
    pool = Pool([150, 3], num_kv_heads=2, head_dim=256, dtype=torch.bfloat16)
    q, gate = torch.randn(2, 2, 16, 256).bfloat16()
    actual = run_decode(q, gate, pool, device, scale=0.0625)
    assert_close(actual, expected_decode(q, gate, pool, scale=0.0625))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [129, 256, 300])
def test_more_tokens_than_the_most_splits_of_the_least_length(
    length: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "MIN_SPLIT", 32)
    monkeypatch.setattr(decode, "SPLIT_STEP", 32)
    monkeypatch.setattr(decode, "MAX_SPLITS", 4)
    pool = Pool([length, 5, 64], num_kv_heads=1, head_dim=32, dtype=dtype)
    q = torch.randn(3, 2, 32).to(dtype)
    assert_close(run_decode(q, None, pool, device), expected_decode(q, None, pool))


def test_programs_that_take_several_splits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which program does which split changes no bit."""
    pool = Pool([300, 0, 129, 20], num_kv_heads=2, head_dim=32, dtype=torch.float32)
    q = torch.randn(4, 4, 32)
    plenty = run_decode(q, None, pool, device)
    assert_close(plenty, expected_decode(q, None, pool))
    monkeypatch.setattr(decode, "_PROGRAMS_PER_MULTIPROCESSOR", 1)
    for num_programs in (1, 5):
        monkeypatch.setattr(decode, "num_multiprocessors", lambda device, count=num_programs: count)
        assert torch.equal(run_decode(q, None, pool, device), plenty)


def test_a_sequence_has_the_same_bits_in_any_company(device: torch.device) -> None:
    """Neither the others' lengths, nor the width of the block table, nor the batch change a bit."""
    pool = Pool([130, 400, 0, 77], num_kv_heads=1, head_dim=64, dtype=torch.bfloat16, max_blocks=20)
    q = torch.randn(4, 4, 64).bfloat16()
    together = run_decode(q, None, pool, device)
    for b, width in ((0, 3), (3, 2), (1, 7)):
        alone = Pool([1], num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
        alone.k_cache, alone.v_cache = pool.k_cache, pool.v_cache
        alone.block_table, alone.lengths = pool.block_table[b : b + 1, :width], pool.lengths[b : b + 1]
        assert torch.equal(run_decode(q[b : b + 1], None, alone, device)[0], together[b])


@pytest.mark.gpu
def test_decode_can_be_captured_in_a_graph(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("graphs are a card's")
    pool = Pool([130, 400], num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    q, k, v, table, lengths = (
        x.to(device)
        for x in (torch.randn(2, 4, 64).bfloat16(), pool.k_cache, pool.v_cache, pool.block_table, pool.lengths)
    )
    decode.paged_attention_decode(q, None, k, v, table, lengths, BLOCK_SIZE, SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode.paged_attention_decode(q, None, k, v, table, lengths, BLOCK_SIZE, SCALE)
    lengths.copy_(torch.tensor([7, 259]))
    graph.replay()
    assert torch.equal(out, decode.paged_attention_decode(q, None, k, v, table, lengths, BLOCK_SIZE, SCALE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("cached", [0, 70])
def test_prefill_equals_its_twin(num_tokens: int, cached: int, dtype: torch.dtype, device: torch.device) -> None:
    pool = Pool([num_tokens + cached], num_kv_heads=1, head_dim=32, dtype=dtype, max_blocks=7)
    q = torch.randn(num_tokens, 3, 32).to(dtype)[:, 1:]
    gate = split_gate(torch.randn(num_tokens, 6 * 32).to(dtype), 2, 32)
    assert_close(run_prefill(q, gate, pool, device), expected_prefill(q, gate, pool))


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
def test_prefill_with_grouped_heads(
    heads: tuple[int, int], small: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the blocks of a Hopper card, and in those of a card with less shared memory."""
    monkeypatch.setattr(prefill, "shared_bytes", lambda device: (99 if small else 227) << 10)
    pool = Pool([100], num_kv_heads=heads[1], head_dim=64, dtype=torch.bfloat16)
    q = torch.randn(45, heads[0], 64).bfloat16()
    assert_close(run_prefill(q, None, pool, device), expected_prefill(q, None, pool))


def test_prefill_at_the_real_sizes(device: torch.device) -> None:
    pool = Pool([150], num_kv_heads=1, head_dim=256, dtype=torch.bfloat16)
    q = torch.randn(40, 8, 256).bfloat16()
    assert_close(run_prefill(q, None, pool, device, 0.0625), expected_prefill(q, None, pool, 0.0625))


@pytest.mark.parametrize("attend", [prefill.attention_prefill, prefill.causal_attention])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "length"), [(1, 1), (65, 65), (30, 101), (1, 90)])
def test_prefill_over_one_piece(
    attend: Callable[..., torch.Tensor], num_tokens: int, length: int, dtype: torch.dtype, device: torch.device
) -> None:
    q = torch.randn(num_tokens, 5, 64).to(dtype).to(device)[:, 1:]
    k, v = torch.randn(2, length, 2, 64).to(dtype).to(device)
    expected = naive_attention_prefill(q.cpu().float(), k.cpu().float(), v.cpu().float(), SCALE)
    assert_close(attend(q, k, v, SCALE).cpu(), expected.to(dtype))


def test_prefill_sees_nothing_of_the_future(device: torch.device) -> None:
    q, k, v = torch.randn(3, 90, 2, 32, device=device)
    before = prefill.causal_attention(q, k, v, SCALE)
    k[60:], v[60:] = 50.0, -1e4
    after = prefill.causal_attention(q, k, v, SCALE)
    assert torch.equal(before[:60], after[:60])
    assert not torch.equal(before[60:], after[60:])


def test_layouts_that_they_can_not_read_are_refused(device: torch.device) -> None:
    pool = Pool([5], num_kv_heads=1, head_dim=24, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"power of 2 of at least 16 .* got 24 and 64"):
        run_decode(torch.randn(1, 2, 24), None, pool, device)
    q, k = torch.randn(5, 2, 32, device=device), torch.randn(5, 32, 2, device=device).transpose(1, 2)
    with pytest.raises(ValueError, match="k_cache must be contiguous in the last dimension"):
        prefill.causal_attention(q, k, q, SCALE)


@pytest.mark.parametrize(
    ("capability", "shared_kb", "config"),
    [
        (80, 163, prefill._SMALL),
        (89, 99, prefill._SMALL),
        (90, 227, prefill._LARGE),
        (100, 227, prefill._BLACKWELL),
        (120, 99, prefill._SMALL),
    ],
)
def test_a_card_decides_the_tiles_of_prefill(
    capability: int, shared_kb: int, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "capability", lambda device: capability)
    monkeypatch.setattr(prefill, "shared_bytes", lambda device: shared_kb << 10)
    assert prefill._default(torch.bfloat16, torch.device("cuda")) == config
