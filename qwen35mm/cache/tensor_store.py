"""LRU stores in host memory under byte budgets: states, vision embeddings, and KV evicted from a GPU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence, Set

import torch

from qwen35mm.cache.disk import Kind
from qwen35mm.cache.disk_tier import DiskTier, Tensors
from qwen35mm.cache.placement import to_host
from qwen35mm.cache.policy import RecentAddresses


class TensorStore:
    """Entries of one kind by address.

    New entries stay on their device until `offload`: a copy to the host waits for the device (9B's 49 MiB of states as
    long as a good part of a segment's prefill), and most states are dropped at the next cut. After `offload` the most
    recent entries also stay on the device, so that a sequence can continue from them without a transfer.

    Args:
        max_bytes: budget for all entries together, wherever they are; a larger entry is not kept.
        device_bytes: most bytes that stay on the device after `offload`.
        disk: the tier that outlives the process.
        on_evict: called with an entry's address after its eviction.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        max_bytes: int,
        device_bytes: int = 0,
        disk: DiskTier | None = None,
        on_evict: Callable[[bytes], None] = lambda address: None,
    ) -> None:
        self._kind: Kind = kind
        self.max_bytes, self.device_bytes = max_bytes, device_bytes
        self._disk = disk
        self._on_evict = on_evict
        self._entries: OrderedDict[bytes, Tensors] = OrderedDict()
        self._num_bytes = 0
        # Next to evict first. Entries not in host memory yet are the same objects in both dicts.
        self._on_device: OrderedDict[bytes, Tensors] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def needs_offload(self) -> bool:
        """Whether entries are still to be copied to host memory."""
        return any(self._entries[address] is tensors for address, tensors in self._on_device.items())

    @property
    def num_on_device(self) -> int:
        return len(self._on_device)

    def is_on_device(self, address: bytes) -> bool:
        return address in self._on_device

    @property
    def addresses(self) -> Set[bytes]:
        return self._entries.keys()

    def __contains__(self, address: bytes) -> bool:
        return address in self._entries

    def get(self, address: bytes) -> Tensors | None:
        """An entry, from its device if it is there."""
        return self._on_device.get(address) or self._entries.get(address)

    def put(self, address: bytes, tensors: Tensors, *, is_new: bool = True) -> None:
        """Keeps an entry, or the device copy of a kept one; `is_new` means that the disk doesn't have it."""
        num_bytes = _num_bytes(tensors)
        if num_bytes > self.max_bytes:
            return
        if _is_on_device(tensors) and address not in self._on_device:
            self._on_device[address] = tensors
        if address in self._entries:
            return
        while self._num_bytes + num_bytes > self.max_bytes:
            oldest = next(iter(self._entries))
            self.evict(oldest)
            self._on_evict(oldest)
        self._entries[address] = tensors
        self._num_bytes += num_bytes
        if self._disk is not None and is_new:
            self._disk.mark(self._kind, address, self._on_host)

    def evict(self, address: bytes) -> None:
        """Removes an entry from memory; writes it to disk first if that is pending."""
        if self._disk is not None:
            self._disk.save(self._kind, address)
        self.pop(address)

    def drop(self, address: bytes) -> None:
        """Removes an entry from memory and disk."""
        self.pop(address)
        if self._disk is not None:
            self._disk.discard(self._kind, address)

    def pop(self, address: bytes) -> None:
        """Removes an entry from memory, if it is there, but not from disk."""
        self._num_bytes -= _num_bytes(self._entries.pop(address, {}))
        self._on_device.pop(address, None)

    def touch(self, addresses: Sequence[bytes]) -> None:
        """Marks kept entries as just used, the first one as the most recent. All but the last one leave the device
        first: a conversation continues from its newest cut."""
        for address in reversed(addresses):
            if address in self._entries:
                self._entries.move_to_end(address)
        for address in addresses:
            if address in self._on_device:
                self._on_device.move_to_end(address, last=address == addresses[-1])

    def offload(self) -> None:
        """Copies entries to host memory, and removes those over its budget from the device; waits for the device."""
        for address in self._on_device:
            self._on_host(address)
        self.leave_device(self.device_bytes)

    def make_room(self, num_bytes: int) -> None:
        """Removes entries from the device so that `num_bytes` more fit its budget; keeps the newest."""
        self.leave_device(self.device_bytes - num_bytes, but_newest=True)

    def leave_device(self, max_bytes: int = 0, *, but_newest: bool = False) -> None:
        """Removes entries from the device until at most `max_bytes` are left there; copies them to the host first."""
        num_bytes = sum(map(_num_bytes, self._on_device.values()))
        while num_bytes > max_bytes and len(self._on_device) > but_newest:
            address, tensors = next(iter(self._on_device.items()))
            self._on_host(address)
            del self._on_device[address]
            num_bytes -= _num_bytes(tensors)

    def check_integrity(self) -> None:
        """Asserts that the byte counts are right and within the budget."""
        assert self._num_bytes == sum(map(_num_bytes, self._entries.values())), f"the bytes of {self._kind} are off"
        assert self._num_bytes <= self.max_bytes, f"{self._kind} is over its budget"
        assert self._on_device.keys() <= self._entries.keys(), f"{self._kind} that isn't kept is on the device"

    def _on_host(self, address: bytes) -> Tensors | None:
        tensors = self._entries.get(address)
        if tensors is not None and _is_on_device(tensors):
            tensors = self._entries[address] = to_host(tensors)
        return tensors


class VisionCache(TensorStore):
    """Features [num_tokens, hidden] of images and video units by `vision_address`."""

    def __init__(self, *, max_bytes: int, disk: DiskTier | None = None) -> None:
        super().__init__("vision", max_bytes=max_bytes, disk=disk)
        self._asked_for = RecentAddresses()

    def features(self, address: bytes) -> torch.Tensor | None:
        """A unit's features; None if they aren't cached."""
        self.touch([address])
        entry = self.get(address)
        return None if entry is None else entry["features"]

    def keep(self, address: bytes, features: torch.Tensor, *, is_new: bool = True) -> None:
        """Keeps features; `is_new` means that the disk doesn't have them."""
        self.put(address, {"features": features}, is_new=is_new)

    def sight(self, addresses: Collection[bytes]) -> frozenset[bytes]:
        """Which of these were asked for before. Records all of them as asked for."""
        seen = frozenset(address for address in addresses if address in self._asked_for)
        self._asked_for.add(addresses)
        return seen


def _is_on_device(tensors: Tensors) -> bool:
    return any(tensor.device.type != "cpu" for tensor in tensors.values())


def _num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
