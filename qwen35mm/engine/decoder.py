"""The replies that are being decoded: one token for each of them per step, and room in the pools for all of them.

On a GPU with Triton no step waits for a token: a step's inputs that the host knows beforehand (slots, places in the
cache, lengths) are written while the step before still runs, the tokens come from the sampler's table, where the step
before leaves them, and what a step has chosen is read one step later. A reply that turns out to have ended then has
been given one step too many, which nobody sees: its memory is used again by later work of the same stream only, and
decoding never enters the cache. Elsewhere a step is over when it has run, and its tokens are read at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from qwen35mm.cache import OutOfBlocksError, OutOfSlotsError
from qwen35mm.engine.reply import Reply, StepResult
from qwen35mm.engine.runtime import Runtime
from qwen35mm.engine.sampler import Sampler
from qwen35mm.engine.step_graph import StepGraph, can_capture
from qwen35mm_kernels.backend import runs_triton
from qwen35mm_kernels.cpu.native.library import find_library

logger = logging.getLogger(__name__)


def runs_ahead(device: torch.device) -> bool:
    """Whether steps are launched before the tokens of the ones before are known: where none waits for the device."""
    return runs_triton(device)


def step_sizes(slots: int, device: torch.device, *, batch_invariant: bool) -> list[int]:
    """The numbers of rows that steps have; more replies than the last number are run in several steps.

    A GPU takes powers of two and the number of slots, and fills steps up: each is a graph of its own. Products have
    the same bits for each row always (the CPU's compiled ones), where their number of rows is one and the same (on a
    GPU), or where it is one (torch's on a CPU).
    """
    if device.type == "cpu":
        one_by_one = batch_invariant and find_library() is None
        return [1] if one_by_one else list(range(1, slots + 1))
    if batch_invariant:
        return [slots]
    return [*(1 << bit for bit in range((slots - 1).bit_length())), slots]


@dataclass(frozen=True)
class _Launched:
    """A step that the device has not answered yet: its replies in the order of rows, what runs it, and which of the
    graph's answers it writes."""

    replies: Sequence[Reply]
    graph: StepGraph
    answer: int


class Decoder:
    """Runs one token of several replies at a time.

    Args:
        banned_ids: ids that are never chosen.
        batch_invariant: see `EngineSettings`.

    Attributes:
        running: replies in order of admission.
        suspended: those that had to make room, which come back first.
    """

    def __init__(self, runtime: Runtime, banned_ids: Iterable[int], *, batch_invariant: bool) -> None:
        self._model, self._pools = runtime.model, runtime.pools
        self._context_length = runtime.context_length
        vocab_size = runtime.loaded.config.text.vocab_size
        self.sampler = Sampler(self._pools.states.num_slots, vocab_size, banned_ids, self._model.head_device)
        self.running: list[Reply] = []
        self.suspended: list[Reply] = []
        self._sizes = step_sizes(runtime.slots, self._model.device, batch_invariant=batch_invariant)
        self._runs_ahead = runs_ahead(self._model.device)
        self._graphs: dict[int, StepGraph] = {}
        captures = can_capture(self._model)
        self._graph_memory = torch.cuda.graph_pool_handle() if captures else None
        # One reply alone is what comes most, and then all of them. A start waits for none of them.
        self._to_capture = [self._sizes[0], *self._sizes[:0:-1]] if captures else []
        self._launched: _Launched | None = None
        # What was drained before a reply had to leave.
        self._known: list[StepResult] = []
        self._turn = 0

    @property
    def can_step(self) -> bool:
        """Whether there is anything to run, or to tell of what has run."""
        return bool(self.running or self._known)

    @property
    def can_prepare(self) -> bool:
        """Whether there are steps to capture, which the first replies would wait for."""
        return bool(self._to_capture)

    def prepare(self) -> None:
        """Captures a step of one size; called where nobody waits. One that fails is tried again when it is to run."""
        size = self._to_capture.pop(0)
        try:
            self._graph(size)
        except Exception:
            logger.warning("a step of %d replies couldn't be captured ahead", size, exc_info=True)

    def begin(self, reply: Reply, logits: torch.Tensor) -> StepResult:
        """Enters a reply; its first token is chosen from the prompt's last logits [vocab]."""
        slot = self._admit(reply)
        return StepResult(reply, None if reply.needs_host else self.sampler.sample_one(slot, 0, logits), logits)

    def remove(self, reply: Reply) -> None:
        """Takes a reply out, wherever it is."""
        for replies in (self.running, self.suspended):
            if reply in replies:
                replies.remove(reply)
        if not (self.running or self.suspended):
            # Nobody is left who could be told; what is under way would hold its replies until the next request.
            self._launched, self._known = None, []

    def resume(self) -> None:
        """Brings suspended replies back, in order, as far as there is room for them and a token of everybody."""
        while self.suspended and not self._known:
            reply = self.suspended[0]
            if self.running and not self.has_room(reply.num_suspended_tokens):
                return
            try:
                reply.resume(self._pools)
            except (OutOfBlocksError, OutOfSlotsError):
                return
            self._admit(self.suspended.pop(0))

    def has_room(self, *nums_tokens: int) -> bool:
        """Whether sequences of so many tokens fit beside the running replies, each with a block to grow into."""
        pool = self._pools.kv
        held = {block for reply in self.running for block in reply.cache.block_table}
        wanted = sum(map(pool.blocks_for, nums_tokens)) + len(self.running) + len(nums_tokens)
        return wanted <= pool.allocator.num_blocks - len(held)

    def make_room(self) -> bool:
        """Makes room for one more token of every reply; the youngest ones leave for host memory where there is none.

        A reply at the end of the context has its last token under way and needs no place for another one.

        Returns:
            Whether there is room. False where one reply alone doesn't find any: then somebody else must give way.
        """
        for reply in list(self.running):
            while reply in self.running and reply.cache.length < self._context_length:
                try:
                    reply.cache.prepare(1)
                    break
                except OutOfBlocksError:
                    if reply.prefill.unpin():
                        continue
                    if len(self.running) == 1:
                        return False
                    self._suspend(self.running[-1])
        return True

    def step(self) -> list[StepResult]:
        """Launches a step of the replies that go on, each with room for a token, and gives what is known by then.

        That is what the step before chose where steps run ahead, unless a reply needs the host between two tokens.

        Returns:
            What replies are to take, in order; it may be more or less than one token of each, and some may be left by
            now.
        """
        if self._known:
            # They come first: what the next step begins with is among them.
            known, self._known = self._known, []
            return known
        before, self._launched = self._launched, None
        flying = set() if before is None else set(before.replies)
        able = [reply for reply in self.running if self._goes_on(reply, reply in flying)]
        # States of neighbouring slots are one view on a CPU.
        able.sort(key=lambda reply: reply.cache.slot)
        found: list[StepResult] = []
        for start in range(0, len(able), self._sizes[-1]):
            found += self._drain()
            self._launched = self._launch(able[start : start + self._sizes[-1]], flying)
            # Two steps may be under way, no more.
            found += self._collect(before)
            before = None
        found += self._collect(before)
        if not self._runs_ahead or any(reply.needs_host for reply in able):
            found += self._drain()
        return found

    def _admit(self, reply: Reply) -> int:
        """A reply runs in a slot that it hasn't been in before."""
        slot, prompt = reply.cache.slot, reply.request.prompt.token_ids
        self.sampler.admit(slot, reply.request.params, reply.seed, prompt, reply.output.token_ids)
        self.running.append(reply)
        return slot

    def _suspend(self, reply: Reply) -> None:
        logger.info("request %s makes room for others; it goes on later", reply.request.id)
        reply.prefill.unpin()
        self._known += self._drain()
        reply.suspend(self._pools)
        self.running.remove(reply)
        self.suspended.insert(0, reply)

    def _goes_on(self, reply: Reply, flying: bool) -> bool:
        """Whether a reply may have a token after the one that is under way, as far as is known now."""
        limit = reply.request.params.max_tokens
        num_tokens = len(reply.output.token_ids) + flying
        return reply.cache.length < self._context_length and (limit is None or num_tokens < limit)

    def _launch(self, replies: Sequence[Reply], flying: set[Reply]) -> _Launched:
        graph, answer = self._graph(min(size for size in self._sizes if size >= len(replies))), self._turn
        self._turn = 1 - self._turn
        inputs = graph.inputs(answer)
        for row, reply in enumerate(replies):
            known = None if reply in flying else reply.last_token_id
            step = len(reply.output.token_ids) + (reply in flying)
            inputs.set(row, reply.cache, token_id=known, step=step, is_sampled=not reply.needs_host)
        graph.run(answer)
        for reply in replies:
            reply.cache.advance(1)
        return _Launched(replies, graph, answer)

    def _graph(self, size: int) -> StepGraph:
        if size not in self._graphs:
            max_blocks = self._pools.kv.blocks_for(self._context_length)
            arguments = self._model, self._pools, self.sampler, size, max_blocks
            self._graphs[size] = StepGraph(*arguments, self._graph_memory)
        return self._graphs[size]

    def _drain(self) -> list[StepResult]:
        """Waits for the step that is under way; what it chose."""
        launched, self._launched = self._launched, None
        return self._collect(launched, None if launched is None else launched.graph.logits)

    def _collect(self, launched: _Launched | None, logits: torch.Tensor | None = None) -> list[StepResult]:
        """What a step chose; `logits` are its own, None where another one has run since."""
        if launched is None:
            return []
        token_ids = launched.graph.token_ids(launched.answer)
        return [
            StepResult(
                reply, None if reply.needs_host else token_ids[row], None if logits is None else logits[row].float()
            )
            for row, reply in enumerate(launched.replies)
        ]
