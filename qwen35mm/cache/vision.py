"""Embeddings of images and video units, so that no picture goes through the vision tower twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch

from qwen35mm.cache.disk_tier import DiskTier, Tensors
from qwen35mm.cache.sightings import Sightings


class VisionCache:
    """Features [num_tokens, hidden] by vision address (see `address.vision_address`), in host memory.

    New ones stay on their device until `settle`: a copy would wait for the tower, and the prefill for the copy.

    Args:
        max_bytes: least recently used first, the units over this budget are dropped.
        disk: the tier that outlives the process.
    """

    def __init__(self, *, max_bytes: int, disk: DiskTier | None = None) -> None:
        self._max_bytes = max_bytes
        self._disk = disk
        self._features: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._num_bytes = 0
        self._unsettled: list[bytes] = []
        self._sightings = Sightings()
        if disk is not None:
            disk.provide("vision", self._tensors)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def has_unsettled(self) -> bool:
        """Whether features wait for their copy to host memory."""
        return bool(self._unsettled)

    def __contains__(self, address: bytes) -> bool:
        return address in self._features

    def get(self, address: bytes) -> torch.Tensor | None:
        """The features of a unit, None where they aren't kept."""
        features = self._features.get(address)
        if features is not None:
            self._features.move_to_end(address)
        return features

    def sight(self, addresses: Iterable[bytes]) -> frozenset[bytes]:
        """Which of these were asked for before; from now on, all of them were."""
        return frozenset(address for address in addresses if self._sightings.add([address]))

    def put(self, address: bytes, features: torch.Tensor, *, is_new: bool = True) -> None:
        """Keeps features; `is_new` says that the disk doesn't have them."""
        if address in self._features or features.nbytes > self._max_bytes:
            return
        while self._num_bytes + features.nbytes > self._max_bytes:
            oldest, dropped = next(iter(self._features.items()))
            if self._disk is not None:
                self._disk.save(oldest)
            del self._features[oldest]
            self._num_bytes -= dropped.nbytes
        self._features[address] = features
        self._num_bytes += features.nbytes
        if features.device.type != "cpu":
            self._unsettled.append(address)
        if self._disk is not None and is_new:
            self._disk.mark("vision", address)

    def settle(self) -> None:
        """Copies to host memory what isn't there yet; waits for the device."""
        while self._unsettled:
            address = self._unsettled.pop()
            if address in self._features:
                self._features[address] = self._features[address].to("cpu")

    def check_integrity(self) -> None:
        """Asserts that the bytes are counted right and within the budget."""
        assert self._num_bytes == sum(features.nbytes for features in self._features.values()), "vision bytes are off"
        assert self._num_bytes <= self._max_bytes, "the vision embeddings are over their budget"

    def _tensors(self, address: bytes) -> Tensors | None:
        self.settle()
        features = self._features.get(address)
        return None if features is None else {"features": features}
