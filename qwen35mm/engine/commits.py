"""History commits: compute finished conversations' new segments while the engine is idle."""

from __future__ import annotations

import logging
import uuid
from collections import OrderedDict

from qwen35mm.cache import OutOfBlocksError, OutOfSlotsError
from qwen35mm.engine.prefill import Prefill
from qwen35mm.engine.request import CachedPrompt
from qwen35mm.engine.runtime import Runtime
from qwen35mm_preprocess import MediaError

logger = logging.getLogger(__name__)

# Most pending commits, and most bytes of their media; beyond these the oldest are dropped.
_MAX_PENDING = 32
_MAX_MEDIA_BYTES = 256 << 20


class Commits:
    """One pending commit per conversation; the first may be partly done.

    A commit's work is in the cache up to its last cut, so ending it loses less than a segment.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._pending: OrderedDict[str, Prefill] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def begun(self) -> list[Prefill]:
        """The commit that holds blocks, if there is one."""
        return [prefill for prefill in self._pending.values() if prefill.start is not None]

    @property
    def blocked(self) -> bool:
        return any(prefill.blocked for prefill in self._pending.values())

    def add(self, source: CachedPrompt) -> None:
        """Adds a conversation's new history; drops an older one of the same conversation."""
        self.supersede(source.conversation)
        prefill = Prefill(self._runtime, source, with_tail=False)
        self._pending[source.conversation or uuid.uuid4().hex] = prefill
        while len(self._pending) > 1 and (len(self._pending) > _MAX_PENDING or self._media_bytes > _MAX_MEDIA_BYTES):
            self._end(next(iter(self._pending)))

    @property
    def _media_bytes(self) -> int:
        return sum(prefill.source.num_media_bytes for prefill in self._pending.values())

    def supersede(self, conversation: str | None) -> None:
        """Drops a conversation's pending commit: a newer prompt continues from the commit's last cut."""
        if conversation in self._pending:
            self._end(conversation)

    def give_way(self) -> bool:
        """Ends the commit that holds blocks, to free them; False if there is none."""
        if not self.begun:
            return False
        self._end(next(iter(self._pending)))
        return True

    def leave_tower(self) -> None:
        """Ends the commit that has a unit in the vision tower: memory is planned for one unit."""
        for key in [key for key, prefill in self._pending.items() if prefill.in_tower]:
            self._end(key)

    def clear(self) -> None:
        """Ends all pending commits."""
        for key in list(self._pending):
            self._end(key)

    def step(self) -> None:
        """Does one unit of work of the first commit. A failure ends only that commit."""
        key, prefill = next(iter(self._pending.items()))
        try:
            prefill.step()
        except (OutOfBlocksError, OutOfSlotsError, MediaError) as error:
            logger.info("a conversation's history is not kept for its next turn: %s", error)
            self._end(key)
        except Exception:
            logger.exception("a history commit failed")
            self._end(key)
        else:
            if prefill.done:
                self._end(key)

    def _end(self, key: str) -> None:
        self._pending.pop(key).close()
