"""What happened inside the engines of the state machine: a walk that never met an eviction has proved nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from qwen35mm.cache import PrefixCache, SequenceCache
from qwen35mm.engine import Engine
from qwen35mm.engine.commits import Commits
from qwen35mm.engine.decoder import Decoder

# What happened to all machines since it was cleared.
seen: Counter[str] = Counter()


def counting(patch: pytest.MonkeyPatch) -> None:
    """Notes what happens inside."""

    def watch(owner: Any, name: str, what: Callable[..., str | None]) -> None:
        original = getattr(owner, name)

        def watched(self: Any, *args: Any, **options: Any) -> Any:
            before = what(self, *args)
            result = original(self, *args, **options)
            if before is not None and result is not False:
                seen[before] += 1
            return result

        patch.setattr(owner, name, watched)

    def evicted(self: PrefixCache, segment: Any) -> str:
        num_bytes = len(segment.token_ids) * self._pools.kv.token_bytes
        return "evicted a segment" if num_bytes > self._host_kv.max_bytes else "moved a segment to the host"

    watch(PrefixCache, "_evict", evicted)
    watch(PrefixCache, "_state_evicted", lambda *_: "dropped a state")
    watch(SequenceCache, "_copy_last", lambda *_: "copied a shared block")
    watch(Engine, "_wait_for_room", lambda *_: "waited for room")
    watch(Decoder, "_preempt", lambda *_: "swapped a reply out")

    def given_up(self: Engine, reply: Any) -> str | None:
        return "began again" if any(each.prefill.start is not None for each in self._prefilling) else None

    watch(Engine, "_give_way_to", given_up)
    watch(Commits, "give_way", lambda self: "ended a commit for room" if self.begun else None)
