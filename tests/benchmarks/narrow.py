"""Random checkpoints in the real layout with few and narrow layers, for tests that write them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import make_random


def narrow_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on `make_random` writes small checkpoints, in several shards."""
    full_config = make_random.make_config

    def narrow(size: str, dtype: str) -> dict[str, Any]:
        data = full_config(size, dtype)
        data["text_config"] |= {
            "hidden_size": 64,
            "intermediate_size": 96,
            "layer_types": ["linear_attention", "full_attention"],
            "moe_intermediate_size": 16,
            "num_experts": 16,
            "num_hidden_layers": 2,
            "vocab_size": 2000,
        }
        data["vision_config"] |= {"depth": 1, "hidden_size": 64, "num_heads": 4, "out_hidden_size": 64}
        return data

    monkeypatch.setattr(make_random, "make_config", narrow)
    monkeypatch.setattr(make_random, "SHARD_BYTES", 200_000)
