from __future__ import annotations

import pytest
import torch

from qwen35mm.cache import CachePools
from qwen35mm.config import ModelConfig
from tests.tiny import DENSE, config_dict

BLOCK_SIZE = 4


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    """Three linear-attention layers, then one with full attention (2 KV heads of 64)."""
    return ModelConfig.from_dict({"model_type": "qwen3_5", **config_dict(DENSE)})


@pytest.fixture
def pools(config: ModelConfig) -> CachePools:
    """Eight blocks of four tokens and three slots, poisoned: what was never written must never be read."""
    pools = CachePools(config, num_slots=3, num_tokens=32, dtype=torch.float32, block_size=BLOCK_SIZE)
    for pair in pools.layers.values():
        for tensor in pair:
            tensor.fill_(float("nan"))
    return pools
