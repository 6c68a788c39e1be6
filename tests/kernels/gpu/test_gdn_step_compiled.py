"""The decode step's, convolution's and norms' kernels as compiled for cards: registers, spills, barriers."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton has no package for this platform")

from tests.kernels.gpu.compiled import compile_kernel

GPU = "qwen35mm_kernels.gpu"
# Half of a multiprocessor's 65,536 registers, for a program of 8 warps.
TWO_PROGRAMS = 128


@pytest.mark.parametrize(
    ("group", "capability"),
    [(2, 90)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in ((1, 90), (3, 90), (4, 90), (2, 80), (4, 80), (2, 100), (4, 100))
    ],
)
def test_two_decode_steps_fit_on_a_multiprocessor(group: int, capability: int) -> None:
    pointers = ("mixed", "conv_weight", "norm_weight", "conv_states", "out")
    compiled = compile_kernel(
        f"{GPU}.gdn_step:_gdn_decode_step_kernel",
        dict.fromkeys(pointers, "*bf16:16")
        | dict.fromkeys(("A_log", "dt_bias", "recurrent_states"), "*fp32:16")
        | {"slots": "*i64:16", "eps": "fp32"}
        | dict.fromkeys(("stride_mixed", "stride_conv_slot", "stride_recurrent_slot", "stride_out"), "i32:16"),
        {
            "L2_EPS": 1e-6,
            "NUM_K_HEADS": 16,
            "GROUP": group,
            "GROUP_POW2": 4 if group == 3 else group,
            "K": 128,
            "V": 128,
            "WIDTH": 4,
            "WIDTH_POW2": 4,
            "BLOCK_V": 64 if group <= 2 else 32,
        },
        capability=capability,
        num_warps=8,
        num_stages=1,
    )
    assert compiled.num_registers <= TWO_PROGRAMS
    # Triton 3.5 and 3.6 lack up to four registers on an A100.
    assert compiled.spilled_bytes <= (16 if capability == 80 else 0)
    assert compiled.shared_bytes <= 48 << 10
    # The first tile and the next: 8 loads of 16 bytes to a thread each, and 8 stores; the rest is small.
    assert compiled.instructions["LDG"] <= 16 + 40
    assert compiled.instructions["STG"] <= 8 + 20


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_a_long_row_is_loaded_16_bytes_at_a_time(capability: int) -> None:
    compiled = compile_kernel(
        f"{GPU}.norms:_rms_norm_kernel",
        dict.fromkeys(("x", "delta", "weight", "out"), "*bf16:16")
        | {"num_rows": "i32", "eps": "fp32", "stride_x_outer": "i32:16", "stride_delta_outer": "i32:16"},
        {
            "inner": 1,
            "stride_x_inner": 5120,
            "stride_delta_inner": 5120,
            "D": 5120,
            "BLOCK_D": 8192,
            "ZERO_CENTRED": True,
            "ADD": True,
            "BLOCK_ROWS": 1,
        },
        capability=capability,
        num_warps=16,
        num_stages=1,
    )
    # 16 numbers to a thread: two loads of x, of delta and of the weight, two stores of x and of the result.
    assert (compiled.instructions["LDG"], compiled.instructions["STG"]) == (6, 4)
    assert compiled.spilled_bytes == 0
    assert compiled.num_registers <= 64


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_convolution_spills_nothing(capability: int) -> None:
    compiled = compile_kernel(
        f"{GPU}.conv1d:_causal_conv1d_kernel",
        dict.fromkeys(("x", "weight", "initial_state", "out", "final_state"), "*bf16:16")
        | {"num_tokens": "i32", "stride_x": "i32:16", "stride_state_c": "i32"},
        {"stride_state_w": 1, "C": 8192, "WIDTH": 4, "HAS_STATE": True, "BLOCK_T": 32, "BLOCK_C": 128},
        capability=capability,
        num_warps=4,
        num_stages=1,
    )
    assert compiled.spilled_bytes == 0
    # Five programs of 4 warps on a multiprocessor.
    assert compiled.num_registers <= 96
    assert compiled.shared_bytes <= 48 << 10
    # 32 x 128 numbers are 4 loads of 16 bytes to a thread for each of the 4 taps; the rest is for the states.
    assert compiled.instructions["LDG"] <= 16 + 40
