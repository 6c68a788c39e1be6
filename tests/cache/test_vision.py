"""Embeddings of pictures: new ones stay on their device until nobody waits for a first token."""

from __future__ import annotations

from typing import Any

import torch

from qwen35mm.cache import VisionCache


class OnGPU:
    """Features on a device that this machine may not have."""

    device = torch.device("cuda")

    def __init__(self, features: torch.Tensor) -> None:
        self.features, self.nbytes, self.num_copies = features, features.nbytes, 0

    def to(self, device: str) -> torch.Tensor:
        assert device == "cpu"
        self.num_copies += 1
        return self.features


def on_gpu(seed: int) -> Any:
    return OnGPU(torch.rand(4, 8, generator=torch.Generator().manual_seed(seed)))


def test_features_are_copied_to_the_host_when_they_settle() -> None:
    cache = VisionCache(max_bytes=1024)
    features = on_gpu(0)
    cache.put(b"a", features)
    assert cache.has_unsettled
    assert cache.get(b"a") is features
    assert features.num_copies == 0
    cache.settle()
    cache.settle()
    assert not cache.has_unsettled
    assert cache.get(b"a") is features.features
    assert features.num_copies == 1
    cache.check_integrity()


def test_features_that_left_before_they_settled_are_not_copied() -> None:
    first, second = on_gpu(1), on_gpu(2)
    cache = VisionCache(max_bytes=first.nbytes)
    cache.put(b"a", first)
    cache.put(b"b", second)
    cache.settle()
    assert (first.num_copies, second.num_copies) == (0, 1)
    assert b"a" not in cache


def test_host_features_need_no_copy() -> None:
    cache = VisionCache(max_bytes=1024)
    features = torch.rand(4, 8)
    cache.put(b"a", features)
    assert not cache.has_unsettled
    assert cache.get(b"a") is features
