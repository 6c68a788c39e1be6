"""The replies that are being decoded: one token for each of them per step, and room in the pools for all of them."""

from __future__ import annotations

import logging

import torch

from qwen35mm.cache import OutOfBlocksError, OutOfSlotsError
from qwen35mm.engine.decoder import Decoder
from qwen35mm.engine.running_request import Reply, StepResult
from qwen35mm.engine.runtime import Runtime

logger = logging.getLogger(__name__)


class DecodeBatch:
    """Running replies in order of admission, and those that had to make room, which come back first.

    Args:
        decoder: what runs the steps.
    """

    def __init__(self, runtime: Runtime, decoder: Decoder) -> None:
        self._runtime = runtime
        self.decoder = decoder
        # What was drained before a reply had to leave.
        self._known: list[StepResult] = []
        self.running: list[Reply] = []
        self.suspended: list[Reply] = []

    @property
    def can_step(self) -> bool:
        """Whether there is anything to run, or to tell of what has run."""
        return bool(self.running or self._known)

    def remove(self, reply: Reply) -> None:
        """Takes a reply out, wherever it is."""
        for replies in (self.running, self.suspended):
            if reply in replies:
                replies.remove(reply)

    def resume(self) -> None:
        """Brings suspended replies back, in order, as far as there is room for them and a token of everybody."""
        pools = self._runtime.pools
        while self.suspended and not self._known:
            reply = self.suspended[0]
            if self.running and not self.has_room(reply.num_suspended_tokens):
                return
            try:
                reply.resume(pools)
            except (OutOfBlocksError, OutOfSlotsError):
                return
            self.decoder.admit(reply)
            self.running.append(self.suspended.pop(0))

    def has_room(self, num_tokens: int) -> bool:
        """Whether so many tokens fit beside the running replies, each with a block to grow into."""
        pool = self._runtime.pools.kv
        held = {block for reply in self.running if reply.cache is not None for block in reply.cache.block_table}
        wanted = pool.blocks_for(num_tokens) + len(self.running) + 1
        return wanted <= pool.allocator.num_blocks - len(held)

    def prepare(self) -> bool:
        """Makes room for one more token of every reply; the youngest ones leave for host memory where there is none.

        A reply at the end of the context has its last token under way and needs no place for another one.

        Returns:
            Whether there is room. False where one reply alone doesn't find any: then somebody else must give way.
        """
        for reply in list(self.running):
            while reply in self.running:
                assert reply.cache is not None
                if reply.cache.length >= self._runtime.context_length:
                    break
                try:
                    reply.cache.prepare(1)
                    break
                except OutOfBlocksError:
                    if reply.running.prefill.unpin():
                        continue
                    if len(self.running) == 1:
                        return False
                    self._suspend(self.running[-1])
        return True

    def begin(self, reply: Reply, logits: torch.Tensor) -> StepResult:
        """Enters a reply whose prompt is computed, with the prompt's last logits [vocab]."""
        self.running.append(reply)
        return self.decoder.begin(reply, logits)

    def step(self) -> list[StepResult]:
        """Runs one token of every reply.

        Returns:
            What replies are to take, in order; it may be more or less than one token of each, and some may be left by
            now.
        """
        if self._known:
            # They come first: what the next step begins with is among them.
            known, self._known = self._known, []
            return known
        return self.decoder.step(self.running)

    def _suspend(self, reply: Reply) -> None:
        logger.info("request %s makes room for others; it goes on later", reply.request.id)
        reply.running.prefill.unpin()
        self._known += self.decoder.drain()
        reply.suspend(self._runtime.pools)
        self.running.remove(reply)
        self.suspended.insert(0, reply)
