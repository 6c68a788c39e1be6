"""The disk behind the caches: what is still to be written, and what can be read for a chain.

Everything that touches files runs in the background; the methods here only hand work over. Tensors are copied before
they are handed over, so that a writer never sees a block that has been given to somebody else.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import torch

from qwen35mm.cache.chain import Chain
from qwen35mm.cache.disk import DiskStore, Kind
from qwen35mm.cache.report import MissReason
from qwen35mm.cache.sequence import CachePools

logger = logging.getLogger(__name__)

# Copies that wait for the disk; more of them wait where they are.
MAX_PENDING_BYTES = 256 << 20

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]
# Gives an entry's tensors by its address, or None where it is gone.
GetTensors = Callable[[bytes], Tensors | None]


class Background(Protocol):
    """Runs functions elsewhere, readers and writers each in the order in which they came."""

    def read(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function that somebody waits for."""
        ...

    def write(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function that nobody waits for."""
        ...


class Inline:
    """Runs them at once, in the caller's thread."""

    def read(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        return future

    def write(self, function: Callable[[], T]) -> Future[T]:
        return self.read(function)


@dataclass(frozen=True, eq=False)
class Loaded:
    """What was read for a chain.

    Attributes:
        num_segments: the chain can be gone on from behind so many segments; 0 where nothing helped.
        kv: of the segments that memory lacked, by index.
        state: conv and recurrent states at the end (see StatePool.save); None where memory has it.
        miss: why there was nothing, where the disk knows better than memory.
    """

    num_segments: int = 0
    kv: Mapping[int, Tensors] = field(default_factory=dict)
    state: Tensors | None = None
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
        self._sources: dict[Kind, GetTensors] = {}
        self._dirty: OrderedDict[tuple[Kind, bytes], None] = OrderedDict()
        self._pending: list[tuple[Future[bool], int]] = []

    def provide(self, kind: Kind, get_tensors: GetTensors) -> None:
        """Says who has the entries of a kind."""
        self._sources[kind] = get_tensors

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

    def save(self, kind: Kind, address: bytes) -> None:
        """An entry is about to leave memory: writes it now if it is on the list, unless too much waits already."""
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
        """Hands everything on the list to the writer, and waits until it has done all that."""
        while self._dirty or self._pending:
            if not self.write_next():
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
        return {address: tensors["features"] for address, tensors in entries.items() if tensors is not None}

    def _load(self, chain: Chain, has_kv: Sequence[bool], has_state: Sequence[bool], more_than: int) -> Loaded:
        num_held = 0
        while num_held < len(chain) and (has_kv[num_held] or self._store.contains("kv", chain.addresses[num_held])):
            num_held += 1
        kv: dict[int, Tensors] = {}
        num_segments = num_held
        while num_segments > more_than:
            last, state = num_segments - 1, None
            if not has_state[last] and (state := self._read_state(chain, last)) is None:
                num_segments = last
                continue
            lost = next((i for i in range(num_segments) if not (has_kv[i] or self._read_kv(chain, i, kv))), None)
            if lost is None:
                return Loaded(num_segments, {i: kv[i] for i in kv if i < num_segments}, state)
            num_segments = lost
        return Loaded(miss=self._why_missing(chain) if num_held == 0 and len(chain) else None)

    def _read_kv(self, chain: Chain, index: int, kv: dict[int, Tensors]) -> bool:
        if index in kv:
            return True
        tensors = self._store.read("kv", chain.addresses[index])
        if tensors is None:
            return False
        token_ids = tensors.pop("token_ids", torch.empty(0))
        ids = chain.ids(index)
        if not np.array_equal(token_ids.numpy(), ids) or not self._pools.kv.fits(tensors, len(ids)):
            self._remove_foreign("kv", chain.addresses[index])
            return False
        kv[index] = tensors
        return True

    def _read_state(self, chain: Chain, index: int) -> Tensors | None:
        tensors = self._store.read("state", chain.addresses[index])
        if tensors is None or self._pools.states.fits(tensors):
            return tensors
        self._remove_foreign("state", chain.addresses[index])
        return None

    def _remove_foreign(self, kind: Kind, address: bytes) -> None:
        logger.warning("a %s entry on the disk is not what its address says; it is computed again", kind)
        self._store.remove(kind, address)

    def _why_missing(self, chain: Chain) -> MissReason | None:
        found = any(self._store.contains("kv", chain.first_address(r), root=r) for r in self._store.other_roots())
        return "other model" if found else None

    def _pending_bytes(self) -> int:
        self._pending = [(future, size) for future, size in self._pending if not future.done()]
        return sum(size for _, size in self._pending)

    def _write(self, kind: Kind, address: bytes) -> None:
        tensors = self._sources[kind](address)
        if tensors is not None:
            num_bytes = sum(tensor.nbytes for tensor in tensors.values())
            future = self._background.write(lambda: self._store.write(kind, address, tensors))
            self._pending.append((future, num_bytes))
