"""Decode steps of the running replies, sampling included.

On a GPU no step waits for a token: a step's inputs that the host knows beforehand (slots, places in the cache, lengths)
are written while the step before still runs, the tokens come from the sampler's table, where the step before leaves
them, and what a step has chosen is read one step later. A reply that turns out to have ended then has been given one
step too many, which nobody sees: its memory is used again by later work of the same stream only, and decoding never
enters the cache. On a CPU a step is over when it has run, and its tokens are read at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from qwen35mm.engine.running_request import Reply, StepResult
from qwen35mm.engine.runtime import Runtime
from qwen35mm.engine.sampler import Sampler
from qwen35mm.engine.step_graph import StepGraph, can_capture


def runs_ahead(device: torch.device) -> bool:
    """Whether steps are launched before the tokens of the ones before are known."""
    return device.type == "cuda"


def step_sizes(slots: int, device: torch.device, *, batch_invariant: bool) -> list[int]:
    """The numbers of rows that steps have; more replies than the last number are run in several steps.

    A GPU takes powers of two and the number of slots, and fills steps up: each is a graph of its own. Products have
    the same bits for each row where their number of rows is one and the same (on a GPU) or is one (on a CPU).
    """
    if device.type == "cpu":
        return [1] if batch_invariant else list(range(1, slots + 1))
    if batch_invariant:
        return [slots]
    return [*(1 << bit for bit in range((slots - 1).bit_length())), slots]


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


class Decoder:
    """Runs one token of several replies at a time.

    Args:
        banned_ids: ids that are never chosen.
        batch_invariant: see `EngineSettings`.
    """

    def __init__(self, runtime: Runtime, banned_ids: Iterable[int], *, batch_invariant: bool) -> None:
        self._model, pools = runtime.model, runtime.pools
        vocab_size = runtime.loaded.config.text.vocab_size
        self.sampler = Sampler(pools.states.num_slots, vocab_size, banned_ids, self._model.head_device)
        self._pools, self._max_blocks = pools, pools.kv.blocks_for(runtime.context_length)
        self._sizes = step_sizes(runtime.slots, self._model.device, batch_invariant=batch_invariant)
        self._runs_ahead = runs_ahead(self._model.device)
        # Each is captured when so many replies first run: a start waits for none of them.
        self._graphs: dict[int, StepGraph] = {}
        self._graph_memory = torch.cuda.graph_pool_handle() if can_capture(self._model) else None
        self._launched: _Launched | None = None
        self._context_length = runtime.context_length
        self._turn = 0

    def admit(self, reply: Reply) -> None:
        """A reply is in a slot that it hasn't been in before."""
        assert reply.cache is not None
        prompt, said = reply.request.prompt.token_ids, reply.output.token_ids
        self.sampler.admit(reply.cache.slot, reply.request.params, reply.seed, prompt, said)

    def begin(self, reply: Reply, logits: torch.Tensor) -> StepResult:
        """Enters a reply; its first token is chosen from the prompt's last logits [vocab]."""
        assert reply.cache is not None
        self.admit(reply)
        token_id = None if reply.needs_host else self.sampler.sample_one(reply.cache.slot, 0, logits)
        return StepResult(reply, reply.cache.length, token_id, logits)

    def step(self, replies: Sequence[Reply]) -> list[StepResult]:
        """Launches a step of the replies that go on, each with room for a token, and gives what is known by then.

        That is what the step before chose where steps run ahead, unless a reply needs the host between two tokens.
        """
        before, self._launched = self._launched, None
        flying = set() if before is None else set(before.replies)
        able = [reply for reply in replies if self._goes_on(reply, reply in flying)]
        # States of neighbouring slots are one view on a CPU.
        able.sort(key=lambda reply: reply.cache.slot if reply.cache else 0)
        found: list[StepResult] = []
        for start in range(0, len(able), self._sizes[-1]):
            found += self.drain()
            self._launched = self._launch(able[start : start + self._sizes[-1]], flying)
            # Two steps may be under way, no more.
            found += self._collect(before)
            before = None
        found += self._collect(before)
        if not self._runs_ahead or any(reply.needs_host for reply in able):
            found += self.drain()
        return found

    def drain(self) -> list[StepResult]:
        """Waits for the step that is under way; what it chose."""
        launched, self._launched = self._launched, None
        return self._collect(launched, None if launched is None else launched.graph.logits)

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
            step = len(reply.output.token_ids) + (reply in flying)
            inputs.set(row, cache, token_id=known, step=step, is_sampled=not reply.needs_host)
            nums_cached.append(cache.length + 1)
        graph.run(answer)
        for reply in replies:
            assert reply.cache is not None
            reply.cache.advance(1)
        return _Launched(tuple(replies), tuple(nums_cached), graph, answer)

    def _graph(self, size: int) -> StepGraph:
        if size not in self._graphs:
            arguments = self._model, self._pools, self.sampler, size, self._max_blocks
            self._graphs[size] = StepGraph(*arguments, self._graph_memory)
        return self._graphs[size]

    def _collect(self, launched: _Launched | None, logits: torch.Tensor | None = None) -> list[StepResult]:
        """What a step chose; `logits` are its own, None where another one has run since."""
        if launched is None:
            return []
        token_ids = launched.graph.token_ids(launched.answer)
        return [
            StepResult(
                reply,
                num_cached,
                None if reply.needs_host else token_ids[row],
                None if logits is None else logits[row],
            )
            for row, (reply, num_cached) in enumerate(zip(launched.replies, launched.nums_cached, strict=True))
        ]
