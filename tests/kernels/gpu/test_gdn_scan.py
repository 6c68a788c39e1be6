"""How the scan of the gated delta rule is launched."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no package for this platform")

from qwen35mm_kernels.gpu.gdn_prefill import _scan_config
from qwen35mm_kernels.gpu.launch import trial
from qwen35mm_kernels.gpu.tables import Config


@pytest.mark.parametrize(("dtype", "may_have_one"), [(torch.bfloat16, False), (torch.float32, True)])
def test_a_table_cannot_take_prefetching_from_the_bfloat16_scan(dtype: torch.dtype, may_have_one: bool) -> None:
    """Without it, Hopper's scan had wrong sums."""
    v, one_stage = torch.empty(64, 32, 128, dtype=dtype), Config({"BLOCK_V": 32}, num_warps=4, num_stages=1)
    with trial({("gdn_scan", f"Hv32_K128_V128_{v.element_size() * 8}"): one_stage}):
        if may_have_one:
            assert _scan_config(v, 128) is one_stage
        else:
            with pytest.raises(AssertionError, match="gdn_scan needs two stages at least"):
                _scan_config(v, 128)
