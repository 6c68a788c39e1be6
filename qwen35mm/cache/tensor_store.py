"""What is kept in host memory under a budget of bytes, least recently used first: states, vision embeddings, and KV
that had to leave a GPU."""

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

    New ones stay on their device until `offload`, since a copy to the host waits for the device (49 MiB of states at 9B
    as long as a good part of a segment's prefill), and most states are dropped at the next cut. The most recent ones
    have a copy there afterwards, too: whoever goes on from one of them waits for no transfer.

    Args:
        max_bytes: budget of all entries together, wherever they are; one that is larger is not kept.
        device_bytes: the most that stays on the device after `offload`.
        disk: the tier that outlives the process.
        on_evict: told of an entry that has just given way to others.
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
        # The next to leave first. Those that aren't in host memory yet are the very same in both.
        self._on_device: OrderedDict[bytes, Tensors] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def needs_offload(self) -> bool:
        """Whether entries wait for their copy to host memory."""
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
        """An entry, from its device where it is there."""
        return self._on_device.get(address) or self._entries.get(address)

    def put(self, address: bytes, tensors: Tensors, *, is_new: bool = True) -> None:
        """Keeps an entry, or the device's copy of one that is kept; `is_new` says that the disk doesn't have it."""
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
        """Takes an entry out of memory; what the disk was to have is handed to it."""
        if self._disk is not None:
            self._disk.save(self._kind, address)
        self.pop(address)

    def drop(self, address: bytes) -> None:
        """Takes an entry out of memory and off the disk."""
        self.pop(address)
        if self._disk is not None:
            self._disk.discard(self._kind, address)

    def pop(self, address: bytes) -> None:
        """Takes an entry out of memory, if it is there, whatever the disk has."""
        self._num_bytes -= _num_bytes(self._entries.pop(address, {}))
        self._on_device.pop(address, None)

    def touch(self, addresses: Sequence[bytes]) -> None:
        """Marks those that are here as used just now, the first as the last. Off the device go all but the last of them
        first: a conversation is gone on with from its newest cut."""
        for address in reversed(addresses):
            if address in self._entries:
                self._entries.move_to_end(address)
        for address in addresses:
            if address in self._on_device:
                self._on_device.move_to_end(address, last=address == addresses[-1])

    def offload(self) -> None:
        """Copies to host memory what isn't there yet, and takes off the device what is beyond its budget; waits for the
        device."""
        for address in self._on_device:
            self._on_host(address)
        self.leave_device(self.device_bytes)

    def make_room(self, num_bytes: int) -> None:
        """Takes off the device what leaves first, so that so many bytes more are within its budget; but the newest."""
        self.leave_device(self.device_bytes - num_bytes, but_newest=True)

    def leave_device(self, max_bytes: int = 0, *, but_newest: bool = False) -> None:
        """Takes entries off the device until `max_bytes` are left there, to host memory where they aren't yet."""
        num_bytes = sum(map(_num_bytes, self._on_device.values()))
        while num_bytes > max_bytes and len(self._on_device) > but_newest:
            address, tensors = next(iter(self._on_device.items()))
            self._on_host(address)
            del self._on_device[address]
            num_bytes -= _num_bytes(tensors)

    def check_integrity(self) -> None:
        """Asserts that the bytes are counted right and within the budget."""
        assert self._num_bytes == sum(map(_num_bytes, self._entries.values())), f"the bytes of {self._kind} are off"
        assert self._num_bytes <= self.max_bytes, f"{self._kind} is over its budget"
        assert self._on_device.keys() <= self._entries.keys(), f"{self._kind} that isn't kept is on the device"

    def _on_host(self, address: bytes) -> Tensors | None:
        tensors = self._entries.get(address)
        if tensors is not None and _is_on_device(tensors):
            tensors = self._entries[address] = to_host(tensors)
        return tensors


class VisionCache(TensorStore):
    """Features [num_tokens, hidden] of images and video units by `vision_address`: none is encoded twice."""

    def __init__(self, *, max_bytes: int, disk: DiskTier | None = None) -> None:
        super().__init__("vision", max_bytes=max_bytes, disk=disk)
        self._asked_for = RecentAddresses()

    def features(self, address: bytes) -> torch.Tensor | None:
        """The features of a unit, None where they aren't kept."""
        self.touch([address])
        entry = self.get(address)
        return None if entry is None else entry["features"]

    def keep(self, address: bytes, features: torch.Tensor, *, is_new: bool = True) -> None:
        """Keeps features; `is_new` says that the disk doesn't have them."""
        self.put(address, {"features": features}, is_new=is_new)

    def sight(self, addresses: Collection[bytes]) -> frozenset[bytes]:
        """Which of these were asked for before; from now on, all of them were."""
        seen = frozenset(address for address in addresses if address in self._asked_for)
        self._asked_for.add(addresses)
        return seen


def _is_on_device(tensors: Tensors) -> bool:
    return any(tensor.device.type != "cpu" for tensor in tensors.values())


def _num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
