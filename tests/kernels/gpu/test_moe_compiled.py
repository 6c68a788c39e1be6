"""What the compiler makes of the experts' kernel at the default configurations, for cards that aren't here."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from qwen35mm_kernels.gpu.moe import _DEFAULTS
from tests.kernels.gpu.compiled import Compiled, compile_kernel

# Of a consumer card; a data-centre card has more.
SHARED_BYTES = 99 << 10


def compile_experts(block_m: int, capability: int, *, swiglu: bool, grouped: bool) -> Compiled:
    """The 35B-A3B's experts: hidden 2048, width 512, 8 of 256."""
    config = _DEFAULTS[block_m][0 if swiglu else 1]
    kinds = {
        "*bf16:16": ("x_ptr", "matrix_ptr", "out_ptr"),
        "*i64:16": ("chosen_ptr",) if grouped else ("chosen_ptr", "pairs_ptr", "tiles_ptr"),
        "*i32:16": ("pairs_ptr", "tiles_ptr") if grouped else (),
        "i32:16": ("stride_x", "stride_expert", "stride_row"),
        "i32": ("stride_token", "stride_choice", "num_tokens"),
    }
    signature = {name: kind for kind, names in kinds.items() for name in names}
    constants = {"DEPTH": 2048, "WIDTH": 512} if swiglu else {"DEPTH": 512, "WIDTH": 2048}
    constants |= {"SWIGLU": swiglu, "TOP_K": 8, "TOP_K_PADDED": 8, "GROUPED": grouped, "PRECISION": "tf32"}
    return compile_kernel(
        "qwen35mm_kernels.gpu.moe:_experts_kernel",
        signature,
        {**constants, "BLOCK_M": block_m, **config.blocks},
        capability=capability,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def cases(*cards: tuple[int, int], slow: bool = False) -> list[ParameterSet]:
    marks = [pytest.mark.slow] if slow else []
    return [pytest.param(*card, swiglu, marks=marks) for card in cards for swiglu in (True, False)]


@pytest.mark.parametrize(
    ("block_m", "capability", "swiglu"),
    [
        *cases((16, 90), (64, 90)),
        *cases((16, 80), (64, 80), (128, 80), (128, 90), (16, 100), (64, 100), (128, 100), slow=True),
    ],
)
def test_defaults_spill_nothing_and_fit_a_consumer_cards_memory(block_m: int, capability: int, swiglu: bool) -> None:
    compiled = compile_experts(block_m, capability, swiglu=swiglu, grouped=block_m > 16)
    assert compiled.spilled_bytes == 0
    assert compiled.shared_bytes <= SHARED_BYTES
    # Weights come to shared memory while the last ones are worked on.
    assert compiled.instructions.get("LDGSTS", 0) > 0
    matrix_unit = "HGMMA" if capability == 90 and block_m >= 64 else "HMMA"
    if capability < 100:
        assert compiled.instructions.get(matrix_unit, 0) > 0
