"""The replies that are being decoded: one token for each of them per step, and room in the pools for all of them."""

from __future__ import annotations

import logging

import torch

from qwen35mm.cache import OutOfBlocksError, OutOfSlotsError
from qwen35mm.engine.runtime import Runtime
from qwen35mm.engine.sequence import Reply

logger = logging.getLogger(__name__)


class DecodeBatch:
    """Running replies in order of admission, and those that had to make room, which come back first.

    Args:
        num_rows: rows of every decode call, empty ones included; None takes as many as there are replies.
    """

    def __init__(self, runtime: Runtime, *, num_rows: int | None) -> None:
        self._runtime = runtime
        self._num_rows = num_rows
        self.running: list[Reply] = []
        self.suspended: list[Reply] = []

    @property
    def num_rows(self) -> int | None:
        return self._num_rows

    def remove(self, reply: Reply) -> None:
        """Takes a reply out, wherever it is."""
        for replies in (self.running, self.suspended):
            if reply in replies:
                replies.remove(reply)

    def resume(self) -> None:
        """Brings suspended replies back, in order, as far as there is room for them and a token of everybody."""
        pools = self._runtime.pools
        while self.suspended:
            reply = self.suspended[0]
            if self.running and not self.has_room(reply.num_suspended_tokens):
                return
            try:
                reply.resume(pools)
            except (OutOfBlocksError, OutOfSlotsError):
                return
            self.running.append(self.suspended.pop(0))

    def has_room(self, num_tokens: int) -> bool:
        """Whether so many tokens fit beside the running replies, each with a block to grow into."""
        pool = self._runtime.pools.kv
        held = {block for reply in self.running if reply.cache is not None for block in reply.cache.block_table}
        wanted = pool.blocks_for(num_tokens) + len(self.running) + 1
        return wanted <= pool.allocator.num_blocks - len(held)

    def prepare(self) -> bool:
        """Makes room for one more token of every reply; the youngest ones leave for host memory where there is none.

        Returns:
            Whether there is room. False where one reply alone doesn't find any: then somebody else must give way.
        """
        for reply in list(self.running):
            while reply in self.running:
                assert reply.cache is not None
                try:
                    reply.cache.prepare(1)
                    break
                except OutOfBlocksError:
                    if reply.sequence.prefill.unpin():
                        continue
                    if len(self.running) == 1:
                        return False
                    self._suspend(self.running[-1])
        return True

    def step(self) -> list[tuple[Reply, torch.Tensor]]:
        """Runs one token of every reply.

        Returns:
            Each reply with the logits [vocab] of its next token.
        """
        # Neighbouring slots are one view of the states.
        batch = sorted(self.running, key=lambda reply: reply.cache.slot if reply.cache else 0)
        size = self._num_rows or len(batch)
        groups = [batch[start : start + size] for start in range(0, len(batch), size)]
        return [pair for group in groups for pair in self._run(group)]

    def _run(self, group: list[Reply]) -> list[tuple[Reply, torch.Tensor]]:
        model = self._runtime.model
        caches = [reply.cache for reply in group if reply.cache is not None]
        token_ids = torch.tensor([reply.last_token_id for reply in group], device=model.device)
        positions = torch.tensor([cache.next_position for cache in caches], device=model.device).expand(3, -1)
        hidden = model.decode(token_ids, positions, caches, num_rows=self._num_rows)
        return list(zip(group, model.logits(hidden, num_rows=self._num_rows), strict=True))

    def _suspend(self, reply: Reply) -> None:
        logger.info("request %s makes room for others; it goes on later", reply.request.id)
        reply.sequence.prefill.unpin()
        reply.suspend(self._runtime.pools)
        self.running.remove(reply)
        self.suspended.insert(0, reply)
