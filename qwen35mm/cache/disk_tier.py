"""The disk behind the prefix cache: what is still to be written, and what can be read for a chain.

Everything that touches files runs in the background; the methods here only hand work over. Tensors are copied before
they are handed over, so that a writer never sees a block that has been given to somebody else.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import numpy as np
import torch

from qwen35mm.cache.background import Background
from qwen35mm.cache.chain import Chain, Checkpoint
from qwen35mm.cache.disk import DiskStore, Kind
from qwen35mm.cache.pools import CachePools
from qwen35mm.cache.report import MissReason

logger = logging.getLogger(__name__)

# Copies that wait for the disk; more of them wait where they are.
MAX_PENDING_BYTES = 256 << 20

Content = tuple[Mapping[str, torch.Tensor], Mapping[str, str]]
# Gives an entry's content by its address, or None where it is gone.
GetContent = Callable[[bytes], Content | None]


@dataclass(frozen=True, eq=False)
class Loaded:
    """What was read for a chain.

    Attributes:
        num_segments: the chain can be gone on from behind so many segments; 0 where nothing helped.
        kv: of the segments that memory lacked, by index.
        state: at the end; None where memory has it.
        miss: why there was nothing, where the disk knows better than memory.
    """

    num_segments: int = 0
    kv: Mapping[int, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    state: Checkpoint | None = None
    miss: MissReason | None = None


class DiskTier:
    """Writes cached entries behind the engine's back, and reads them for a chain.

    Args:
        pools: what is read must fit these.
    """

    def __init__(self, store: DiskStore, background: Background, pools: CachePools) -> None:
        self._store = store
        self._background = background
        self._pools = pools
        self._sources: dict[Kind, GetContent] = {}
        self._dirty: OrderedDict[tuple[Kind, bytes], None] = OrderedDict()
        self._pending: list[tuple[Future[bool], int]] = []

    @property
    def num_dirty(self) -> int:
        """Entries that are still to be handed to the writer."""
        return len(self._dirty)

    def provide(self, kind: Kind, get_content: GetContent) -> None:
        """Says who has the entries of a kind."""
        self._sources[kind] = get_content

    def mark(self, kind: Kind, address: bytes) -> None:
        """Notes that an entry is to be written some time."""
        self._dirty[kind, address] = None

    def discard(self, kind: Kind, address: bytes) -> None:
        """Takes an entry off the disk, or off the list of those to be written."""
        if (kind, address) in self._dirty:
            del self._dirty[kind, address]
        else:
            self._background.write(lambda: self._store.remove(kind, address))

    @property
    def writing(self) -> bool:
        """Whether something that was handed to the writer isn't written yet."""
        return self._pending_bytes() > 0

    def can_write(self) -> bool:
        """Whether `write_next` would do anything now."""
        return bool(self._dirty) and self._pending_bytes() < MAX_PENDING_BYTES

    def write_next(self) -> bool:
        """Hands the oldest entry on the list to the writer; False where there is none, or too much waits already."""
        if not self.can_write():
            return False
        (kind, address), _ = self._dirty.popitem(last=False)
        self._write(kind, address)
        return True

    def save(self, address: bytes) -> None:
        """An entry is about to leave memory: writes it now, unless too much waits already."""
        for kind in self._sources:
            if (kind, address) in self._dirty:
                del self._dirty[kind, address]
                if self._pending_bytes() < MAX_PENDING_BYTES:
                    self._write(kind, address)

    def touch(self, addresses: Sequence[bytes]) -> None:
        """Marks a chain as used, its first segment as the most recent."""
        kinds: tuple[Kind, ...] = ("state", "kv")
        entries: list[tuple[Kind, bytes]] = [(kind, address) for address in reversed(addresses) for kind in kinds]
        self._background.write(lambda: self._store.touch(entries))

    def flush(self) -> None:
        """Waits until the writer has done everything that it was handed."""
        wait([future for future, _ in self._pending])
        self._pending.clear()

    def load(self, chain: Chain, has_kv: Sequence[bool], has_state: Sequence[bool], more_than: int) -> Future[Loaded]:
        """Reads what a chain lacks in memory, where that gives more than its first `more_than` segments."""
        return self._background.read(lambda: self._load(chain, has_kv, has_state, more_than))

    def load_vision(self, addresses: Sequence[bytes]) -> Future[dict[bytes, torch.Tensor]]:
        """Reads those of the vision units' embeddings that are there."""
        return self._background.read(lambda: self._load_vision(addresses))

    def _load_vision(self, addresses: Sequence[bytes]) -> dict[bytes, torch.Tensor]:
        entries = {address: self._store.read("vision", address) for address in addresses}
        return {address: entry.tensors["features"] for address, entry in entries.items() if entry is not None}

    def _load(self, chain: Chain, has_kv: Sequence[bool], has_state: Sequence[bool], more_than: int) -> Loaded:
        limit = 0
        while limit < len(chain) and (has_kv[limit] or self._store.contains("kv", chain.addresses[limit])):
            limit += 1
        kv: dict[int, Mapping[str, torch.Tensor]] = {}
        num_segments = limit
        while num_segments > more_than:
            state = None
            if not has_state[num_segments - 1]:
                state = self._read_state(chain, num_segments - 1)
                if state is None:
                    num_segments -= 1
                    continue
            lost = next((i for i in range(num_segments) if not self._read_kv(chain, i, has_kv, kv)), None)
            if lost is None:
                return Loaded(num_segments, {i: kv[i] for i in kv if i < num_segments}, state)
            num_segments = lost
        return Loaded(miss=self._why_missing(chain) if limit == 0 and len(chain) else None)

    def _read_kv(
        self, chain: Chain, index: int, has_kv: Sequence[bool], kv: dict[int, Mapping[str, torch.Tensor]]
    ) -> bool:
        if has_kv[index] or index in kv:
            return True
        entry = self._store.read("kv", chain.addresses[index])
        if entry is None:
            return False
        tensors = dict(entry.tensors)
        token_ids = tensors.pop("token_ids", None)
        ids = chain.ids(index)
        if (
            token_ids is None
            or not np.array_equal(token_ids.numpy(), ids)
            or not self._pools.kv.fits(tensors, len(ids))
        ):
            logger.warning("a cached segment on the disk is not what its address says; it is computed again")
            self._store.remove("kv", chain.addresses[index])
            return False
        kv[index] = tensors
        return True

    def _read_state(self, chain: Chain, index: int) -> Checkpoint | None:
        if not self._store.contains("state", chain.addresses[index]):
            return None
        entry = self._store.read("state", chain.addresses[index])
        if entry is None:
            return None
        length, rope_delta = chain.segments[index].stop, chain.rope_deltas[index]
        expected = {"length": str(length), "rope_delta": str(rope_delta)}
        if any(entry.metadata.get(k) != v for k, v in expected.items()) or not self._pools.states.fits(entry.tensors):
            logger.warning("a checkpoint on the disk is not what its address says; it is computed again")
            self._store.remove("state", chain.addresses[index])
            return None
        return Checkpoint(length, rope_delta, entry.tensors)

    def _why_missing(self, chain: Chain) -> MissReason | None:
        others = self._store.other_roots()
        if any(self._store.contains_under(root, "kv", chain.first_address(root)) for root in others):
            return "other model"
        return None

    def _pending_bytes(self) -> int:
        self._pending = [(future, size) for future, size in self._pending if not future.done()]
        return sum(size for _, size in self._pending)

    def _write(self, kind: Kind, address: bytes) -> None:
        content = self._sources[kind](address)
        if content is None:
            return
        tensors, metadata = content
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        future = self._background.write(lambda: self._store.write(kind, address, tensors, metadata))
        self._pending.append((future, num_bytes))
