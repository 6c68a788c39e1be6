"""The disk tier of the caches: entries still to be written, and reads for a chain.

Two executors do all file work; the methods here only submit it. Tensors are copied first, so a writer never reads a
block that another sequence has taken over.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field

import numpy as np
import torch

from qwen35mm.cache.chain import Chain
from qwen35mm.cache.disk import DiskStore, Kind
from qwen35mm.cache.sequence import CachePools
from qwen35mm.contract import MissReason

logger = logging.getLogger(__name__)

# Most bytes of copies that wait for the writer; other entries wait in the cache.
MAX_PENDING_BYTES = 256 << 20

Tensors = Mapping[str, torch.Tensor]
# Returns an entry's tensors by address, or None if it is gone.
GetTensors = Callable[[bytes], Tensors | None]


@dataclass(frozen=True, eq=False)
class Loaded:
    """The result of reading for a chain.

    Attributes:
        num_segments: a sequence can continue after this many segments; 0 if nothing useful was read.
        kv: KV of the segments that memory lacked, by index.
        state: conv and recurrent states at the end (see StatePool.save); None if memory has them.
        miss: why nothing was read, if the disk knows more than memory.
    """

    num_segments: int = 0
    kv: Mapping[int, Tensors] = field(default_factory=dict)
    state: Tensors | None = None
    miss: MissReason | None = None


class DiskTier:
    """Writes cached entries in the background, and reads them for a chain.

    Args:
        root: from which all addresses of this process are derived.
        pools: entries read must fit these.
        reader, writer: run calls that a request waits for, and calls that none waits for, each in order of arrival.
    """

    def __init__(self, store: DiskStore, root: bytes, pools: CachePools, *, reader: Executor, writer: Executor) -> None:
        self._store = store
        self._pools = pools
        self._reader = reader
        self._writer = writer
        self._other_roots = [other for other in store.addresses("root") if other != root]
        self._own_root: tuple[Kind, bytes] = ("root", root)
        self._dirty: OrderedDict[tuple[Kind, bytes], GetTensors] = OrderedDict()
        # In order of submission, which is the order of completion, too.
        self._pending: deque[tuple[Future[bool], int]] = deque()
        self._num_pending_bytes = 0

    def mark(self, kind: Kind, address: bytes, get_tensors: GetTensors) -> None:
        """Notes that an entry is to be written later, and where to get it."""
        self._dirty[kind, address] = get_tensors

    def discard(self, kind: Kind, address: bytes) -> None:
        """Removes an entry from disk, or from the list of entries to write."""
        if self._dirty.pop((kind, address), None) is None:
            self._writer.submit(self._store.remove, kind, address)

    @property
    def writing(self) -> bool:
        """Whether the writer has unfinished entries."""
        return self._pending_bytes() > 0

    def can_write(self) -> bool:
        """Whether `write_next` would do anything: there are entries to write, and the writer's backlog has room."""
        return bool(self._dirty) and self._pending_bytes() < MAX_PENDING_BYTES

    def write_next(self) -> None:
        """Hands the oldest listed entry to the writer, if `can_write`."""
        if self.can_write():
            self.save(*next(iter(self._dirty)))

    def save(self, kind: Kind, address: bytes) -> None:
        """Before an entry leaves memory: writes it if it is on the list and the backlog has room."""
        get_tensors = self._dirty.pop((kind, address), None)
        if get_tensors is None or self._pending_bytes() >= MAX_PENDING_BYTES:
            return
        tensors = get_tensors(address)
        if tensors is not None:
            num_bytes = sum(tensor.nbytes for tensor in tensors.values())
            self._pending.append((self._writer.submit(self._write, kind, address, tensors), num_bytes))
            self._num_pending_bytes += num_bytes

    def touch(self, addresses: Sequence[bytes]) -> None:
        """Marks a chain as used, its first segment as the most recent."""
        kinds: tuple[Kind, ...] = ("state", "kv")
        entries: list[tuple[Kind, bytes]] = [(kind, address) for address in reversed(addresses) for kind in kinds]
        self._writer.submit(self._store.touch, [*entries, self._own_root])

    def flush(self) -> None:
        """Hands all listed entries to the writer, and waits until they are written."""
        while self._dirty or self._pending:
            self.write_next()
            if not self.can_write():
                wait([future for future, _ in self._pending])
                self._pending_bytes()

    def load(self, chain: Chain, has_kv: Sequence[bool], has_state: Sequence[bool], more_than: int) -> Future[Loaded]:
        """Reads what memory lacks of a chain, if that gives more than its first `more_than` segments."""
        return self._reader.submit(self._load, chain, has_kv, has_state, more_than)

    def load_vision(self, addresses: Sequence[bytes]) -> Future[dict[bytes, torch.Tensor]]:
        """Reads the vision units' embeddings that exist."""
        return self._reader.submit(self._load_vision, addresses)

    def _write(self, kind: Kind, address: bytes, tensors: Tensors) -> bool:
        self._store.write(*self._own_root, {})  # with every entry, so that it is evicted after them
        return self._store.write(kind, address, tensors)

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
            if not has_state[last] and (state := self._read("state", chain, last)) is None:
                num_segments = last
                continue
            missing = [index for index in range(num_segments) if not has_kv[index] and index not in kv]
            lost = None
            for index in missing:
                tensors = self._read("kv", chain, index)
                if tensors is None:
                    lost = index
                    break
                kv[index] = tensors
            if lost is None:
                return Loaded(num_segments, {index: kv[index] for index in kv if index < num_segments}, state)
            num_segments = lost
        return Loaded(miss=self._why_missing(chain) if num_held == 0 and len(chain) else None)

    def _read(self, kind: Kind, chain: Chain, index: int) -> Tensors | None:
        """A segment's KV or state, or None if missing or not what its address says."""
        address = chain.addresses[index]
        tensors = self._store.read(kind, address)
        if tensors is None:
            return None
        if kind == "state":
            fits = self._pools.states.fits(tensors)
        else:
            ids, token_ids = chain.ids(index), tensors.pop("token_ids", torch.empty(0))
            fits = np.array_equal(token_ids.numpy(), ids) and self._pools.kv.fits(tensors, chain.num_rows(index))
        if fits:
            return tensors
        logger.warning("a %s entry on the disk is not what its address says; it is computed again", kind)
        self._store.remove(kind, address)
        return None

    def _why_missing(self, chain: Chain) -> MissReason | None:
        found = any(self._store.contains("kv", chain.first_address(root)) for root in self._other_roots)
        return "other model" if found else None

    def _pending_bytes(self) -> int:
        while self._pending and self._pending[0][0].done():
            self._num_pending_bytes -= self._pending.popleft()[1]
        return self._num_pending_bytes
