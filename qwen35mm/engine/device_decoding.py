"""Decoding that never waits for a token before it begins the next: the newest tokens stay on the device.

A step's inputs that the host knows beforehand (slots, places in the cache, lengths) are written while the step before
still runs; the tokens come from a table on the device, where the step before leaves them. What a step has chosen is
read one step later. A reply that turns out to have ended then has been given one step too many, which nobody sees: its
memory is used again by later work of the same stream only, and decoding never enters the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qwen35mm.engine.runtime import Runtime
from qwen35mm.engine.sequence import Next, Reply
from qwen35mm.engine.slot_tables import SlotTables
from qwen35mm.engine.step_graph import StepGraph, batch_sizes, can_capture


@dataclass(frozen=True)
class _Launched:
    """A step that the device has not answered yet.

    Attributes:
        replies: of its rows, in order.
        nums_cached: tokens in each reply's cache when its next token is chosen.
        graph: what runs it.
        answer: which of the graph's answers it writes.
    """

    replies: tuple[Reply, ...]
    nums_cached: tuple[int, ...]
    graph: StepGraph
    answer: int


class DeviceDecoder:
    """Runs decode steps of a batch on the device, sampling included.

    Args:
        runtime: model and pools.
        banned_ids: ids that are never sampled.
        num_rows: rows of every step, empty ones included; None takes the smallest prepared number that is enough.
    """

    def __init__(self, runtime: Runtime, banned_ids: Sequence[int], *, num_rows: int | None) -> None:
        self._model, pools = runtime.model, runtime.pools
        self._tables = SlotTables(
            pools.states.num_slots, runtime.loaded.config.text.vocab_size, banned_ids, self._model.head_device
        )
        self._pools, self._max_blocks = pools, pools.kv.blocks_for(runtime.context_length)
        self._sizes = [num_rows] if num_rows is not None else batch_sizes(runtime.slots)
        # Each is captured when so many replies first run: a start waits for none of them.
        self._graphs: dict[int, StepGraph] = {}
        self._graph_memory = torch.cuda.graph_pool_handle() if can_capture(self._model) else None
        self._launched: _Launched | None = None
        self._context_length = runtime.context_length
        self._turn = 0

    def begin(self, reply: Reply, logits: torch.Tensor) -> Next:
        """A reply's first token, from the prompt's last logits [vocab]; then the device knows its slot."""
        assert reply.cache is not None
        num_cached = reply.cache.length
        if reply.needs_host:
            return Next(reply, num_cached, logits=logits)
        self._tables.admit(reply.cache.slot, reply)
        return Next(reply, num_cached, token_id=self._tables.sample_one(reply.cache.slot, logits))

    def resume(self, reply: Reply) -> None:
        """A reply has another slot."""
        assert reply.cache is not None
        if not reply.needs_host:
            self._tables.admit(reply.cache.slot, reply)

    def step(self, replies: Sequence[Reply]) -> list[Next]:
        """Launches a step of the replies that go on, each with room for a token, and gives what the last one chose.

        Where a reply needs the host between two tokens, this step is waited for, too.
        """
        before = self._launched
        flying = set() if before is None else set(before.replies)
        able = [reply for reply in replies if self._goes_on(reply, reply in flying)]
        self._launched = self._launch(able, flying) if able else None
        found = [] if before is None else self._collect(before)
        if any(reply.needs_host for reply in able):
            found += self.drain()
        return found

    def drain(self) -> list[Next]:
        """Waits for the step that is under way; what it chose."""
        launched, self._launched = self._launched, None
        return [] if launched is None else self._collect(launched)

    def _goes_on(self, reply: Reply, flying: bool) -> bool:
        """Whether a reply may have a token after the one that is under way, as far as is known now."""
        assert reply.cache is not None
        limit = reply.request.params.max_tokens
        num_tokens = len(reply.output.token_ids) + flying
        return reply.cache.length < self._context_length and (limit is None or num_tokens < limit)

    def _launch(self, replies: Sequence[Reply], flying: set[Reply]) -> _Launched:
        size = min(size for size in self._sizes if size >= len(replies))
        graph, answer = self._graph(size), self._turn
        self._turn = 1 - self._turn
        nums_cached = []
        inputs = graph.inputs(answer)
        for row, reply in enumerate(replies):
            cache = reply.cache
            assert cache is not None
            known = None if reply in flying else reply.last_token_id
            inputs.set(row, cache, token_id=known, step=len(reply.output.token_ids) + (reply in flying))
            nums_cached.append(cache.length + 1)
        graph.run(answer)
        for reply in replies:
            assert reply.cache is not None
            reply.cache.advance(1)
        return _Launched(tuple(replies), tuple(nums_cached), graph, answer)

    def _graph(self, size: int) -> StepGraph:
        if size not in self._graphs:
            self._graphs[size] = StepGraph(
                self._model, self._pools, self._tables, size, self._max_blocks, self._graph_memory
            )
        return self._graphs[size]

    def _collect(self, launched: _Launched) -> list[Next]:
        token_ids = launched.graph.token_ids(launched.answer)
        return [
            Next(reply, num_cached, logits=launched.graph.logits[row].clone())
            if reply.needs_host
            else Next(reply, num_cached, token_id=token_ids[row])
            for row, (reply, num_cached) in enumerate(zip(launched.replies, launched.nums_cached, strict=True))
        ]
