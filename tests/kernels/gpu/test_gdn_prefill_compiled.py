"""The prefill kernels of the gated delta rule, compiled for cards that aren't there, as configured by default."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.gpu.compiled import Compiled, compile_kernel

pytestmark = pytest.mark.slow  # five seconds a kernel

# Consumer cards give 99 KiB to a program, Hopper 227.
SHARED_BYTES = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}


def compile_scan(capability: int, block_v: int, num_warps: int, **flags: bool) -> Compiled:
    """As a bfloat16 layer's, all strides divisible by 16."""
    signature: dict[str, str] = dict.fromkeys(
        ("q_ptr", "k_ptr", "v_ptr", "solve_ptr", "attend_ptr", "out_ptr"), "*bf16:16"
    )
    signature |= dict.fromkeys(("factors_ptr", "decay_ptr", "initial_ptr", "final_ptr"), "*fp32:16")
    signature |= dict.fromkeys(("q_token", "q_head", "k_token", "k_head", "v_token", "v_head"), "i32:16")
    signature |= dict.fromkeys(("initial_row", "initial_head", "initial_k"), "i32:16")
    signature |= dict.fromkeys(("final_row", "final_head", "final_k", "out_token", "out_head"), "i32:16")
    signature |= dict.fromkeys(("num_tokens", "segment_tokens"), "i32")
    constants: dict[str, Any] = {"K": 128, "BLOCK_V": block_v, "GROUP": 2, "GIVEN_STATE": True, "WITH_VALUES": True}
    constants |= {"WITH_OUTPUT": True, "PACKED": False, "PRECISION": "tf32", "CHUNK": 64, "segments_ptr": None, **flags}
    return compile_kernel(
        "qwen35mm_kernels.gpu.gdn_scan:_scan_kernel",
        signature,
        constants,
        capability=capability,
        num_warps=num_warps,
        num_stages=3,
    )


def compile_prepare(capability: int) -> Compiled:
    """As a bfloat16 layer's, gates included."""
    names = ("q_ptr", "k_ptr", "log_decay_ptr", "rate_ptr", "A_log_ptr", "dt_bias_ptr", "solve_ptr", "attend_ptr")
    signature = dict.fromkeys(names, "*bf16:16") | dict.fromkeys(("factors_ptr", "decay_ptr"), "*fp32:16")
    strides = ("q_token", "q_head", "k_token", "k_head", "log_decay_token", "rate_token")
    signature |= dict.fromkeys(strides, "i32:16") | {"num_tokens": "i32"}
    constants: dict[str, Any] = {"K": 128, "GROUP": 2, "HEADS": 1, "RAW_GATES": True, "PACKED": False}
    constants |= {"PRECISION": "tf32", "CHUNK": 64, "chunks_ptr": None}
    return compile_kernel(
        "qwen35mm_kernels.gpu.gdn_prepare:_prepare_kernel",
        signature,
        constants,
        capability=capability,
        num_warps=4,
        num_stages=1,
    )


def check(compiled: Compiled, capability: int) -> None:
    """No spills, shared memory that the card has, and a Hopper card's own matrix instructions."""
    # Triton 3.7 lacks two registers on an A100.
    assert compiled.spilled_bytes <= (8 if capability == 80 else 0)
    assert compiled.shared_bytes <= SHARED_BYTES[capability]
    assert ("HGMMA" in compiled.instructions) == (capability == 90)
    assert "HMMA" not in compiled.instructions or capability == 80


@pytest.mark.parametrize(("capability", "block_v", "num_warps"), [(80, 32, 8), (90, 32, 4), (90, 64, 8), (100, 64, 8)])
def test_scan(capability: int, block_v: int, num_warps: int) -> None:
    compiled = compile_scan(capability, block_v, num_warps)
    check(compiled, capability)
    if capability == 90:
        # Tiles come two chunks ahead of their use, 16 bytes at a time: twice before the loop, and in it.
        tile_bytes = 2 * 64 * (128 + 128 + 64 + 64 + block_v)
        assert compiled.instructions["LDGSTS"] == 3 * tile_bytes // (16 * 32 * num_warps)


@pytest.mark.parametrize("with_values", [False, True])
def test_scan_of_a_segment_without_output(with_values: bool) -> None:
    check(compile_scan(90, 32, 4, GIVEN_STATE=False, WITH_OUTPUT=False, WITH_VALUES=with_values), 90)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_prepare(capability: int) -> None:
    compiled = compile_prepare(capability)
    check(compiled, capability)
    if capability == 90:
        # Three programs to a multiprocessor hide each other's waiting.
        assert compiled.num_registers <= 168
