"""The replies that are being decoded: one token for each of them per step, and room in the pools for all of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from qwen35mm.cache import OutOfBlocksError, OutOfSlotsError
from qwen35mm.engine.runtime import Runtime
from qwen35mm.engine.sequence import Next, Reply
from qwen35mm.model import Qwen35Model

logger = logging.getLogger(__name__)


class Decoder(Protocol):
    """What runs steps: `HostDecoder` or `DeviceDecoder`."""

    def begin(self, reply: Reply, logits: torch.Tensor) -> Next:
        """A reply's first token, or the logits [vocab] to choose it from."""
        ...

    def resume(self, reply: Reply) -> None:
        """A reply has another slot, and its newest token is known."""
        ...

    def step(self, replies: Sequence[Reply]) -> list[Next]:
        """Runs one token of every reply, each of which has room for it."""
        ...

    def drain(self) -> list[Next]:
        """What steps have chosen that nobody has been told of."""
        ...


class HostDecoder:
    """Runs steps whose tokens are chosen by the host.

    Args:
        num_rows: rows of every decode call, empty ones included; None takes as many as there are replies.
    """

    def __init__(self, model: Qwen35Model, *, num_rows: int | None) -> None:
        self._model = model
        self._num_rows = num_rows

    def begin(self, reply: Reply, logits: torch.Tensor) -> Next:
        assert reply.cache is not None
        return Next(reply, reply.cache.length, logits=logits)

    def resume(self, reply: Reply) -> None:
        pass

    def step(self, replies: Sequence[Reply]) -> list[Next]:
        # Neighbouring slots are one view of the states.
        batch = sorted(replies, key=lambda reply: reply.cache.slot if reply.cache else 0)
        size = self._num_rows or len(batch)
        groups = [batch[start : start + size] for start in range(0, len(batch), size)]
        return [following for group in groups for following in self._run(group)]

    def drain(self) -> list[Next]:
        return []

    def _run(self, group: list[Reply]) -> list[Next]:
        model = self._model
        caches = [reply.cache for reply in group if reply.cache is not None]
        token_ids = torch.tensor([reply.last_token_id for reply in group], device=model.device)
        positions = torch.tensor([cache.next_position for cache in caches], device=model.device).expand(3, -1)
        hidden = model.decode(token_ids, positions, caches, num_rows=self._num_rows)
        logits = model.logits(hidden, num_rows=self._num_rows)
        return [Next(reply, cache.length, row) for reply, cache, row in zip(group, caches, logits, strict=True)]


class DecodeBatch:
    """Running replies in order of admission, and those that had to make room, which come back first.

    Args:
        decoder: what runs the steps.
    """

    def __init__(self, runtime: Runtime, decoder: Decoder) -> None:
        self._runtime = runtime
        self._decoder = decoder
        # What was drained before a reply had to leave.
        self._known: list[Next] = []
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
            self._decoder.resume(reply)
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
                    if reply.sequence.prefill.unpin():
                        continue
                    if len(self.running) == 1:
                        return False
                    self._suspend(self.running[-1])
        return True

    def begin(self, reply: Reply, logits: torch.Tensor) -> Next:
        """Enters a reply whose prompt is computed, with the prompt's last logits [vocab]."""
        self.running.append(reply)
        return self._decoder.begin(reply, logits)

    def step(self) -> list[Next]:
        """Runs one token of every reply.

        Returns:
            What replies are to take, in order; it may be more or less than one token of each, and some may be left by
            now.
        """
        if self._known:
            # They come first: what the next step begins with is among them.
            known, self._known = self._known, []
            return known
        return self._decoder.step(self.running)

    def _suspend(self, reply: Reply) -> None:
        logger.info("request %s makes room for others; it goes on later", reply.request.id)
        reply.sequence.prefill.unpin()
        self._known += self._decoder.drain()
        reply.suspend(self._runtime.pools)
        self.running.remove(reply)
        self.suspended.insert(0, reply)
