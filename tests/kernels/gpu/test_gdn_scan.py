"""How the scan of the gated delta rule is launched."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no package for this platform")

from qwen35mm_kernels.gpu.gdn_prefill import _scan_config
from qwen35mm_kernels.gpu.gdn_prepare import CHUNK
from qwen35mm_kernels.gpu.launch import trial
from qwen35mm_kernels.gpu.tables import Config

CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "may_have_one"), [(torch.bfloat16, False), (torch.float32, True)])
def test_a_table_cannot_take_prefetching_from_the_bfloat16_scan(dtype: torch.dtype, may_have_one: bool) -> None:
    """Without it, Hopper's scan had wrong sums."""
    one_stage = Config({"BLOCK_V": 32}, num_warps=4, num_stages=1)
    with trial({("gdn_scan", f"Hv32_K128_V128_{dtype.itemsize * 8}"): one_stage}):
        if may_have_one:
            assert _scan_config(32, 128, 128, dtype, CPU) is one_stage
        else:
            with pytest.raises(AssertionError, match="gdn_scan needs two stages at least"):
                _scan_config(32, 128, 128, dtype, CPU)


@pytest.mark.parametrize(("num_v_heads", "num_stages"), [(16, 3), (32, 3), (48, 2)])
def test_no_warp_computes_what_another_does_and_all_programs_run_at_once(num_v_heads: int, num_stages: int) -> None:
    """0.8B, 9B and 27B on a card of 132 multiprocessors. `make test-emulated` reads it from the compiled code."""
    config = _scan_config(num_v_heads, 128, 128, torch.bfloat16, CPU)
    assert config == Config({"BLOCK_V": 32}, num_warps=4, num_stages=num_stages)
    assert 16 * config.num_warps <= CHUNK
    assert num_v_heads * 128 // 32 <= 132 * (1 if num_stages == 3 else 2)
