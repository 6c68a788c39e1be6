"""How the attention kernels are cut: into splits, programs and tiles that change no result."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no package for this platform")

from qwen35mm_kernels.gpu import attention_decode as decode
from qwen35mm_kernels.gpu import attention_prefill as prefill
from qwen35mm_kernels.gpu.launch import Config, trial
from qwen35mm_kernels.kv_formats import FORMATS
from tests.kernels.compare import DTYPES, Backend, assert_close
from tests.kernels.paged import Pool
from tests.kernels.test_attention import OPTIONS, check_decode, check_prefill, queries


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [129, 256, 300])
def test_more_tokens_than_the_most_splits_of_the_least_length(
    length: int, dtype: torch.dtype, triton_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "MIN_SPLIT", 32)
    monkeypatch.setattr(decode, "SPLIT_STEP", 32)
    monkeypatch.setattr(decode, "MAX_SPLITS", 4)
    check_decode(triton_backend, Pool([length, 5, 64], num_kv_heads=1, head_dim=32, dtype=dtype), 2)


def test_which_program_does_which_split_changes_no_bit(
    triton_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool([300, 0, 20], num_kv_heads=2, head_dim=32, dtype=torch.float32)
    arguments = *queries(3, 2, 32, torch.float32), pool.k_cache, pool.v_cache, pool.block_table, pool.lengths
    plenty = triton_backend.check("paged_attention_decode", *arguments, **OPTIONS)
    monkeypatch.setattr(decode, "_PROGRAMS_PER_MULTIPROCESSOR", 1)
    for num_programs in (1, 5):
        monkeypatch.setattr(decode, "num_multiprocessors", lambda device, count=num_programs: count)
        assert torch.equal(triton_backend.run("paged_attention_decode", *arguments, **OPTIONS), plenty)


@pytest.mark.gpu
def test_decode_can_be_captured_in_a_graph() -> None:
    if not torch.cuda.is_available():
        pytest.skip("graphs are a card's")
    pool = Pool([130, 400], num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    q, gate, k, v, table, lengths = (
        x.cuda()
        for x in (*queries(2, 4, 64, torch.bfloat16), pool.k_cache, pool.v_cache, pool.block_table, pool.lengths)
    )
    decode.paged_attention_decode(q, gate, k, v, table, lengths, **OPTIONS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode.paged_attention_decode(q, gate, k, v, table, lengths, **OPTIONS)
    lengths.copy_(torch.tensor([7, 259]))
    graph.replay()
    assert torch.equal(out, decode.paged_attention_decode(q, gate, k, v, table, lengths, **OPTIONS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "length", "heads"), [(1, 97, (2, 1)), (9, 300, (6, 2)), (70, 150, (2, 2))])
def test_prefill_in_parts(
    num_tokens: int,
    length: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    triton_backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also such that some rows of a tile see nothing of."""
    monkeypatch.setattr(prefill, "_MIN_PART", 32)
    check_prefill(triton_backend, Pool([length], num_kv_heads=heads[1], head_dim=32, dtype=dtype), num_tokens, heads[0])


@pytest.mark.parametrize("count", [0, 1, 33, 40])
@pytest.mark.parametrize(("length", "expected"), [(40, -1), (65, 2), (300, 3)])
def test_parts_follow_from_the_length_and_padding_has_none(
    count: int, length: int, expected: int, triton_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most three: this is a card of twelve programs, and each key head has two tiles of 32 tokens."""
    monkeypatch.setattr(prefill, "_MIN_PART", 64)
    monkeypatch.setattr(prefill, "_PROGRAMS", 12)
    monkeypatch.setattr(prefill, "_FLOAT32", Config({"BLOCK_M": 32, "BLOCK_N": 32}, num_warps=8, num_stages=1))
    seen: list[torch.Tensor] = []

    def combine(sums: torch.Tensor, maxima: torch.Tensor, *rest: torch.Tensor) -> None:
        seen.append(rest[1].cpu())
        decode.combine_splits(sums, maxima, *rest)

    monkeypatch.setattr(prefill, "combine_splits", combine)
    pool = Pool([length], num_kv_heads=2, head_dim=32, dtype=torch.float32)
    q, gate = queries(40, 2, 32, torch.float32)
    q[count:], gate[count:] = float("nan"), float("nan")
    past = pool.past(count) if count else (*pool.past(0)[:3], torch.tensor([0]), torch.tensor([0]))
    out = triton_backend.check("paged_attention_prefill", q, gate, *past, **OPTIONS)
    assert not out[count:].any()
    splits = expected if expected < 0 else expected * decode.MIN_SPLIT
    assert seen[0].tolist() == [splits] * count + [0] * (40 - count)


@pytest.mark.parametrize(
    ("rows", "most_parts"), [(64, 16), (128, 8), (512, 2), (768, 1), (2048, 1)], ids=lambda value: str(value)
)
def test_parts_are_few_where_tiles_fill_a_card(rows: int, most_parts: int) -> None:
    """9B: four key heads, and a tile for every 32 tokens."""
    grids = []
    meta = torch.device("meta")
    q, cache = torch.empty(rows, 16, 256, device=meta, dtype=torch.bfloat16), torch.empty(64, 4, 256, device=meta)
    number = torch.empty(1, dtype=torch.int64, device=meta)
    past = cache.bfloat16(), cache.bfloat16(), torch.empty(1, dtype=torch.int32, device=meta), number, number
    with trial({}, lambda kernel, grid, *args, **options: grids.append(grid)):
        prefill.paged_attention_prefill(q, q, *past, **OPTIONS)
    assert grids[0] == (4, rows // 32, most_parts)
    assert len(grids) == 1 + (most_parts > 1)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
def test_prefill_on_a_card_with_less_shared_memory(
    heads: tuple[int, int], triton_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "shared_bytes", lambda device: 99 << 10)
    check_prefill(triton_backend, Pool([100], num_kv_heads=heads[1], head_dim=64, dtype=torch.bfloat16), 45, heads[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "length"), [(1, 1), (65, 65), (30, 101)])
def test_torchs_flash_attention_can_take_the_place_of_ours(
    num_tokens: int, length: int, dtype: torch.dtype, triton_backend: Backend
) -> None:
    if triton_backend.name == "interpreted" and dtype == torch.bfloat16:
        pytest.skip("flash attention is a card's")
    pool = Pool([length], num_kv_heads=2, head_dim=64, dtype=dtype)
    arguments = *queries(num_tokens, 4, 64, dtype), *pool.past(num_tokens)
    there = [x.to(triton_backend.device) if isinstance(x, torch.Tensor) else x for x in arguments]
    ours = triton_backend.run("paged_attention_prefill", *arguments, **OPTIONS)
    assert_close(prefill.flash_attention_prefill(*there, **OPTIONS).cpu(), ours)  # type: ignore[arg-type]
    formats = FORMATS["int8"], FORMATS["int4"]
    arguments = *arguments[:2], formats[0].quantise(pool.k_cache), formats[1].quantise(pool.v_cache), *arguments[4:]
    there = [x.to(triton_backend.device) if isinstance(x, torch.Tensor) else x for x in arguments]
    ours = triton_backend.run("paged_attention_prefill", *arguments, formats=formats, **OPTIONS)
    assert_close(prefill.flash_attention_prefill(*there, formats=formats, **OPTIONS).cpu(), ours)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("formats", [("int8", "int4"), ("fp8", "fp8_e5m2"), ("f16", "int8")], ids="-".join)
def test_codes_are_read_as_the_values_that_they_stand_for(
    formats: tuple[str, str], dtype: torch.dtype, triton_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut alike, attention over codes has the bits of attention over what torch makes of them."""
    monkeypatch.setattr(decode, "_KEPT", decode._DEFAULT[dtype])
    monkeypatch.setattr(prefill, "_LARGE_KEPT", prefill._LARGE)
    pair = FORMATS[formats[0]], FORMATS[formats[1]]
    pool = Pool([70], num_kv_heads=1, head_dim=64, dtype=dtype)
    q, gate = queries(1, 2, 64, dtype)
    caches = [format.quantise(cache) for format, cache in zip(pair, (pool.k_cache, pool.v_cache), strict=True)]
    values = [format.dequantise(cache, dtype) for format, cache in zip(pair, caches, strict=True)]
    for op, where in (
        ("paged_attention_decode", (pool.block_table, pool.lengths)),
        ("paged_attention_prefill", pool.past(1)[2:]),
    ):
        found = triton_backend.run(op, q, gate, *caches, *where, formats=pair, **OPTIONS)
        assert torch.equal(found, triton_backend.run(op, q, gate, *values, *where, **OPTIONS))


@pytest.mark.parametrize("op", ["paged_attention_decode", "paged_attention_prefill"])
def test_a_head_that_is_no_power_of_2_is_refused(op: str, triton_backend: Backend) -> None:
    pool = Pool([5], num_kv_heads=1, head_dim=24, dtype=torch.float32)
    check = check_decode if op == "paged_attention_decode" else check_prefill
    with pytest.raises(AssertionError, match="power of 2, got 24"):
        check(triton_backend, pool, 2, 2)


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
    assert prefill._default(torch.bfloat16, torch.device("cuda"), False) == config
    kept = prefill._default(torch.bfloat16, torch.device("cuda"), True)
    assert kept == (prefill._LARGE_KEPT if shared_kb > 200 else prefill._SMALL_KEPT)
