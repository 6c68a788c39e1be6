"""The attention and rotary kernels as compiled for cards that aren't here, in their default configurations."""

from __future__ import annotations

import pytest
import torch

from qwen35mm_kernels.gpu import decode_attention, prefill_attention, rope_kv
from qwen35mm_kernels.gpu.launch import Config
from tests.kernels.gpu.compiled import Compiled, compile_kernel

# Six compilations of half a minute on a busy machine.
pytestmark = pytest.mark.slow

# What a program may take on the smallest of today's cards.
CONSUMER_SHARED_BYTES = 99 << 10
HOPPER_SHARED_BYTES = 227 << 10


def compile_write(capability: int) -> Compiled:
    signature = dict.fromkeys(("qkv", "q_norm", "k_norm", "q", "k_cache", "v_cache"), "*bf16:16")
    signature |= {"cos": "*fp32:16", "sin": "*fp32:16", "eps": "fp32", "rows": "*i64:16", "num_tokens": "i32"}
    signature |= dict.fromkeys(("stride_qkv", "stride_cos", "stride_sin", "stride_k", "stride_v"), "i32:16")
    sizes = {"NUM_HEADS": 16, "NUM_KV_HEADS": 2, "HEAD_DIM": 256, "NUM_PAIRS": 32, "BLOCK_PAIRS": 32}
    config = rope_kv._DEFAULT
    return compile_kernel(
        "qwen35mm_kernels.gpu.rope_kv:_qk_norm_rope_write_kernel",
        signature,
        {**sizes, **config.blocks},
        capability=capability,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def compile_decode(capability: int) -> Compiled:
    signature = dict.fromkeys(("q", "k_cache", "v_cache"), "*bf16:16")
    signature |= {"block_table": "*i32:16", "lengths": "*i32:16", "batch_size": "i32", "max_splits": "i32"}
    signature |= dict.fromkeys(("sums", "maxima", "weights"), "*fp32:16") | {
        "stride_table": "i32",
        "scale_log2": "fp32",
    }
    strides = ("q_sequence", "q_head", "k_row", "k_head", "v_row", "v_head")
    signature |= {f"stride_{name}": "i32:16" for name in strides}
    sizes = {"NUM_KV_HEADS": 2, "GROUP": 8, "HEAD_DIM": 256, "BLOCK_SIZE": 64, "BLOCK_B": 16, "BLOCK_G": 16}
    cut = {name: getattr(decode_attention, name) for name in ("MIN_SPLIT", "SPLIT_STEP", "MAX_SPLITS")}
    config = decode_attention._DEFAULT[torch.bfloat16]
    return compile_kernel(
        "qwen35mm_kernels.gpu.decode_attention:_decode_splits_kernel",
        signature,
        {**sizes, **cut, **config.blocks},
        capability=capability,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def compile_prefill(capability: int, config: Config) -> Compiled:
    signature = dict.fromkeys(("q", "gate", "k", "v", "out"), "*bf16:16") | {"block_table": "*i32:16"}
    signature |= dict.fromkeys(("num_rows", "first_place", "length"), "i32") | {"scale_log2": "fp32"}
    strides = ("q_token", "q_head", "gate_token", "gate_head", "k_row", "k_head", "v_row", "v_head")
    signature |= {f"stride_{name}": "i32:16" for name in strides}
    sizes = {"NUM_KV_HEADS": 2, "GROUP": 8, "HEAD_DIM": 256, "BLOCK_SIZE": 64, "PAGED": True, "HAS_GATE": True}
    return compile_kernel(
        "qwen35mm_kernels.gpu.prefill_attention:_prefill_kernel",
        signature,
        {**sizes, **config.blocks},
        capability=capability,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def test_the_write_needs_few_registers() -> None:
    for capability in (80, 90, 100):
        compiled = compile_write(capability)
        assert compiled.spilled_bytes == 0
        assert compiled.num_registers <= 64
        assert compiled.shared_bytes <= 1024


def test_decode_keeps_loads_in_flight_on_every_card() -> None:
    for capability in (80, 90, 100):
        compiled = compile_decode(capability)
        assert compiled.spilled_bytes == 0
        # Three programs of a multiprocessor; on Blackwell Triton 3.7 leaves room for two.
        assert compiled.num_registers <= (168 if capability < 100 else 184)
        # Two tiles of keys and values while a third is used, or nearly: less would mean the loop isn't pipelined.
        assert 64 << 10 <= compiled.shared_bytes <= CONSUMER_SHARED_BYTES
        assert compiled.instructions["HMMA"] > 0
        assert compiled.instructions["LDGSTS"] >= 48


def test_prefill_uses_the_matrix_units_of_a_hopper_card() -> None:
    compiled = compile_prefill(90, prefill_attention._LARGE)
    # Two registers once after the loops; 255 are all there are.
    assert compiled.spilled_bytes <= 16
    assert compiled.shared_bytes <= HOPPER_SHARED_BYTES
    assert compiled.instructions["HGMMA"] >= 40
    assert "HMMA" not in compiled.instructions


def test_prefill_fits_cards_with_little_shared_memory() -> None:
    compiled = compile_prefill(80, prefill_attention._SMALL)
    assert compiled.spilled_bytes == 0
    assert compiled.shared_bytes <= CONSUMER_SHARED_BYTES


def test_prefill_uses_the_matrix_units_of_a_blackwell_card() -> None:
    compiled = compile_prefill(100, prefill_attention._BLACKWELL)
    assert compiled.spilled_bytes == 0
    assert compiled.shared_bytes <= HOPPER_SHARED_BYTES
    assert compiled.instructions["UTCHMMA"] > 0
    assert "HMMA" not in compiled.instructions
