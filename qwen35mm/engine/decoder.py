"""Decodes running replies: a token of each per step, or several where drafts are right. Makes room in the pools.

On a GPU with Triton no step waits for a token. The host writes what it knows of a step (slots, places in the cache,
lengths) while the previous step runs. The device takes the tokens from the sampler's table, and the host reads them one
step later. So a reply that has ended may get one step too many. That is harmless: later work on the same stream reuses
its memory, and decoded tokens never enter the cache. Elsewhere, and with speculation, the host reads a step's tokens at
once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from qwen35mm.cache import OutOfBlocksError, OutOfSlotsError
from qwen35mm.engine.mtp_drafter import MTPDrafter, Wanted
from qwen35mm.engine.parts import can_capture, shared_memory
from qwen35mm.engine.reply import Reply, StepResult
from qwen35mm.engine.runtime import Runtime
from qwen35mm.engine.sampler import Sampler
from qwen35mm.engine.speculation import Draft, DraftTime, Offer, Origin, StepTimes, chosen_lengths
from qwen35mm.engine.step_graph import StepGraph
from qwen35mm_kernels.backend import runs_triton
from qwen35mm_kernels.cpu.native.library import find_library

logger = logging.getLogger(__name__)

# Steps of rows with adapters that stay recorded: there are many combinations of rows and adapters.
_MOST_ADAPTED = 8
# Tokens of a reply that the MTP layer may have to see later, while others draft.
_MOST_UNSEEN = 64


def runs_ahead(device: torch.device) -> bool:
    """Whether a step is launched before the previous step's tokens are known."""
    return runs_triton(device)


def step_sizes(slots: int, device: torch.device, *, batch_invariant: bool) -> list[int]:
    """The batch sizes of steps; more replies than the last one run in several steps.

    A GPU has one graph per size: powers of two and the number of slots, padded with unused rows. A row of a matrix
    product has the same bits at any batch size with the CPU's compiled kernels, at one fixed batch size on a GPU, and
    only at batch size one with torch on a CPU.
    """
    if device.type == "cpu":
        one_by_one = batch_invariant and find_library() is None
        return [1] if one_by_one else list(range(1, slots + 1))
    if batch_invariant:
        return [slots]
    return [*(1 << bit for bit in range((slots - 1).bit_length())), slots]


@dataclass(frozen=True)
class _Launched:
    """A step whose tokens aren't read yet.

    Attributes:
        replies: with their drafted tokens, in row order.
        answer: which buffer of the graph it writes.
        began_s: for `StepTimes`; None for a graph's first run, which also makes it.
    """

    replies: Sequence[tuple[Reply, tuple[int, ...]]]
    graph: StepGraph
    answer: int
    began_s: float | None


class Decoder:
    """Decodes several replies.

    Args:
        banned_ids: ids that are never sampled.
        batch_invariant: see `EngineSettings`.

    Attributes:
        running: replies in order of admission.
        preempted: replies, in the order in which they resume.
    """

    def __init__(self, runtime: Runtime, banned_ids: Iterable[int], *, batch_invariant: bool) -> None:
        self._model, self._pools = runtime.model, runtime.pools
        # Both end a sequence: so many tokens, and so many rows of keys and values.
        self._context_length, self._context_rows = runtime.context_length, runtime.plan.context_rows
        self._loaded = runtime.loaded
        vocab_size = runtime.loaded.config.text.vocab_size
        num_rows = self._pools.states.num_slots
        self.sampler = Sampler(num_rows, vocab_size, banned_ids, self._model.head_device)
        self._free_rows = list(range(num_rows))
        self._num_drafts = runtime.plan.num_drafts
        self._graph_memory = shared_memory(self._model)
        self._mtp: MTPDrafter | None = None
        if self._num_drafts and self._model.mtp is not None:
            sizes = {"num_sequences": runtime.slots, "context_rows": runtime.plan.context_rows}
            self._mtp = MTPDrafter(self._model, self._pools, self._graph_memory, **sizes)
        self._draft_time = DraftTime()
        # The last step's rows, seconds and replies; counted once these have drawn.
        self._timed: tuple[int, float, Sequence[Reply]] | None = None
        self.running: list[Reply] = []
        self.preempted: list[Reply] = []
        most_rows = runtime.slots + self._num_drafts
        self._sizes = step_sizes(most_rows, self._model.device, batch_invariant=batch_invariant)
        self._times = StepTimes(self._sizes)
        self._runs_ahead = runs_ahead(self._model.device) and not self._num_drafts
        self._graphs: dict[tuple[int, bool, tuple[int, ...] | None], StepGraph] = {}
        captures = can_capture(self._model)
        # Sizes still to capture, commonest first: one reply, then all slots. Startup doesn't wait for them.
        self._to_capture = [self._sizes[0], *self._sizes[:0:-1]] if captures else []
        self._launched: _Launched | None = None
        # Results read early because a reply was preempted.
        self._known: list[StepResult] = []
        self._turn = 0

    @property
    def can_step(self) -> bool:
        """Whether there are replies to run or results to return."""
        return bool(self.running or self._known)

    @property
    def can_prepare(self) -> bool:
        """Whether steps remain to be captured; otherwise the first replies would wait for that."""
        return bool(self._to_capture)

    def prepare(self) -> None:
        """Captures a step of one size while the engine is idle. If that fails, the first use tries again."""
        size = self._to_capture.pop(0)
        try:
            # An adapter that couldn't be merged is everybody's.
            adapters = (0,) * size if 0 in self._model.routes.numbers else None
            self._graph(size, has_drafts=False, adapters=adapters)
        except Exception:
            logger.warning("a step of %d replies couldn't be captured ahead", size, exc_info=True)

    def begin(self, reply: Reply, logits: torch.Tensor) -> StepResult:
        """Enters a reply. Chooses its first token from the prompt's last logits [vocab]."""
        row = self._admit(reply)
        token_id = None if reply.needs_host else self.sampler.sample_one(row, 0, logits)
        hidden = None if self._mtp is None else reply.prefill.last_hidden
        return StepResult(reply, token_id, logits[None], hidden=hidden)

    def remove(self, reply: Reply) -> None:
        """Removes a reply, running or preempted."""
        for replies in (self.running, self.preempted):
            if reply in replies:
                replies.remove(reply)
                self._leave(reply)
        if not (self.running or self.preempted):
            # No reply needs the results, and a launched step would keep its replies in memory until the next request.
            self._launched, self._known = None, []

    def resume(self) -> None:
        """Resumes preempted replies in order while there is room for them and for one more token of every reply.

        An error of another kind is that of the first one, which stays among the preempted ones.
        """
        while self.preempted and not self._known:
            reply = self.preempted[0]
            if self.running and not self.has_room(reply.num_preempted_tokens):
                return
            try:
                reply.resume(self._pools)
            except (OutOfBlocksError, OutOfSlotsError):
                return
            self._admit(reply)
            del self.preempted[0]

    def has_room(self, *nums_tokens: int) -> bool:
        """Whether sequences of these lengths fit beside the running replies, each with a block to grow into."""
        pool = self._pools.kv
        held = {block for reply in self.running for block in reply.cache.block_table}
        wanted = sum(map(pool.blocks_for, nums_tokens)) + len(self.running) + len(nums_tokens)
        return wanted <= pool.allocator.num_blocks - len(held)

    def make_room(self, give_way: Callable[[], bool]) -> bool:
        """Makes room for one more token of every reply; preempts the youngest ones to host memory if needed.

        A reply at the end of the context needs no more room: its last token is already being computed.

        Args:
            give_way: ends less urgent work that holds blocks; False if there is none.

        Returns:
            Whether there is room. False if a single reply finds none: then a prompt must give way.
        """
        for reply in list(self.running):
            while reply in self.running and self._room_after(reply) > 0:
                try:
                    reply.cache.prepare(1)
                    break
                except OutOfBlocksError:
                    if give_way() or reply.prefill.unpin():
                        continue
                    if len(self.running) == 1:
                        return False
                    self._preempt(self.running[-1])
        return True

    def step(self) -> list[StepResult]:
        """Launches a step of the replies that go on, each with room for a token, and returns the results known so far.

        Replies must take their results before the next step.

        Where steps run ahead, these are the previous step's results, unless a reply needs the host between two tokens.

        Returns:
            Results for replies to take, in order. Some replies may have left by now.
        """
        if self._known:
            # These first: the next step's input tokens are among them.
            known, self._known = self._known, []
            return known
        self._count_time()
        before, self._launched = self._launched, None
        flying = set() if before is None else {reply for reply, _ in before.replies}
        able = [reply for reply in self.running if self._goes_on(reply, reply in flying)]
        # On a CPU the states of neighbouring slots are one view. Rows with one adapter are one product.
        able.sort(key=lambda reply: (self._adapter(reply), reply.cache.slot))
        found: list[StepResult] = []
        for start in range(0, len(able), self._sizes[-1]):
            found += self._drain()
            together = able[start : start + self._sizes[-1]]
            self._launched = self._launch(together, self._drafts(together), flying)
            # At most two steps may be in flight.
            found += self._collect(before)
            before = None
        found += self._collect(before)
        if not self._runs_ahead or any(reply.needs_host for reply in able):
            found += self._drain()
        return found

    def _admit(self, reply: Reply) -> int:
        """Enters a reply in the sampler's tables: its row there."""
        row, prompt = self._free_rows.pop(), reply.request.prompt.token_ids
        reply.table = row
        self.running.append(reply)
        self.sampler.admit(row, reply.request.params, reply.seed, prompt, reply.output.token_ids)
        return row

    def _leave(self, reply: Reply) -> None:
        """Frees a reply's row in the sampler's tables."""
        if reply.table is not None:
            self._free_rows.append(reply.table)
            reply.table = None

    def _preempt(self, reply: Reply) -> None:
        logger.info("request %s is preempted; it resumes later", reply.request.id)
        reply.prefill.unpin()
        self._known += self._drain()
        reply.preempt(self._pools)
        self._leave(reply)
        self.running.remove(reply)
        self.preempted.insert(0, reply)

    def _goes_on(self, reply: Reply, flying: bool) -> bool:
        """Whether a reply may need another token after the one in flight."""
        limit = reply.request.params.max_tokens
        num_tokens = len(reply.output.token_ids) + flying
        return self._room_after(reply) > 0 and (limit is None or num_tokens < limit)

    def _room_after(self, reply: Reply) -> int:
        """How many more of a reply's tokens its context holds."""
        cache = reply.cache
        return min(self._context_length - cache.num_tokens, self._context_rows - cache.length)

    def _drafts(self, replies: Sequence[Reply]) -> list[tuple[int, ...]]:
        """Each reply's drafted tokens of the next step, with room for them; none where they wouldn't pay."""
        if not self._num_drafts:
            return [()] * len(replies)
        drafts = [reply.draft(self._most_drafts(reply)) for reply in replies]
        offers = [self._offer(*each, len(replies)) for each in zip(replies, drafts, strict=True)]
        most = min(self._num_drafts, self._sizes[-1] - len(replies))
        lengths = chosen_lengths(offers, self._times, most)
        lengths = [self._room_for(*each) for each in zip(replies, lengths, strict=True)]
        for index, draft in self._by_layer(replies, offers, lengths).items():
            drafts[index] = draft
        for reply, draft in zip(replies, drafts, strict=True):
            reply.trust.remember(draft)
        return [
            () if draft is None else draft.token_ids[:length] for draft, length in zip(drafts, lengths, strict=True)
        ]

    def _offer(self, reply: Reply, draft: Draft | None, num_replies: int) -> Offer:
        """What may be drafted for a reply: by its grammar, by a repetition, or by the MTP layer if that is better."""
        offer = Offer() if draft is None else Offer(reply.trust.chances(draft.origin)[: len(draft.token_ids)])
        if self._mtp is None:
            return offer
        chances = reply.trust.chances(Origin.MTP)[: self._most_drafts(reply)]
        by_layer = Offer(chances, self._draft_time.seconds)
        # Measured times may say that a row more takes less.
        row_s = max(self._times.expected(num_replies + 1) - self._times.expected(num_replies), 0.0)
        return max(offer, by_layer, key=lambda each: each.worth(row_s))

    def _by_layer(self, replies: Sequence[Reply], offers: Sequence[Offer], lengths: Sequence[int]) -> dict[int, Draft]:
        """The MTP layer's drafts of the replies that it should draft for."""
        if self._mtp is None:
            return {}
        asked = [index for index, offer in enumerate(offers) if offer.token_s and lengths[index]]
        for index, offer in enumerate(offers):
            if offer.token_s and replies[index].trust.rest(lengths[index], len(offer.chances)):
                self._draft_time.forget()
        for index in set(range(len(replies))).difference(asked):
            reply = replies[index]
            if len(reply.unseen.token_ids) > _MOST_UNSEEN:
                self._mtp.catch_up(reply.cache, reply.unseen)
        if not asked:
            return {}
        before_s, num_passes = time.monotonic(), self._mtp.num_passes
        found = self._mtp.draft([Wanted(replies[i].cache, replies[i].unseen, lengths[i]) for i in asked])
        # A pass's first run also records or compiles it.
        if self._mtp.num_passes == num_passes:
            self._draft_time.add((time.monotonic() - before_s) / sum(lengths[index] for index in asked))
        return {
            index: Draft(tuple(token_ids), Origin.MTP, len(replies[index].output.token_ids))
            for index, token_ids in zip(asked, found, strict=True)
        }

    def _most_drafts(self, reply: Reply) -> int:
        """How many tokens a reply may say after its next one."""
        limit, num_tokens = reply.request.params.max_tokens, len(reply.output.token_ids)
        left = self._room_after(reply) - 1
        return max(min(self._num_drafts, left if limit is None else min(left, limit - num_tokens - 1)), 0)

    def _room_for(self, reply: Reply, length: int) -> int:
        """`length`, with blocks and slots for so many drafted tokens; 0 if there are no blocks."""
        if length:
            try:
                reply.cache.prepare(1 + length)
            except OutOfBlocksError:
                return 0
            reply.cache.borrow(length)
        return length

    def _launch(self, replies: Sequence[Reply], drafts: Sequence[tuple[int, ...]], flying: set[Reply]) -> _Launched:
        num_rows = len(replies) + sum(map(len, drafts))
        size = min(size for size in self._sizes if size >= num_rows)
        numbers = [self._adapter(reply) for reply, drafted in zip(replies, drafts, strict=True) for _ in (0, *drafted)]
        has_any = not self._model.routes.numbers.isdisjoint(numbers)
        # Nobody reads what the last, unused rows are.
        adapters = (*numbers, *[numbers[-1]] * (size - num_rows)) if has_any else None
        is_new = (size, any(drafts), adapters) not in self._graphs
        graph, answer = self._graph(size, has_drafts=any(drafts), adapters=adapters), self._turn
        began_s = None if is_new else time.monotonic()
        self._turn = 1 - self._turn
        inputs, row = graph.inputs(answer), 0
        for reply, drafted in zip(replies, drafts, strict=True):
            known = None if reply in flying else reply.last_token_id
            step = len(reply.output.token_ids) + (reply in flying)
            table = None if drafted or reply.needs_host else reply.table
            for ahead, token_id in enumerate((known, *drafted)):
                inputs.set(row, reply.cache, token_id=token_id, ahead=ahead, step=step, table=table)
                row += 1
        graph.run(answer)
        for reply in replies:
            reply.cache.advance(1)
        return _Launched([*zip(replies, drafts, strict=True)], graph, answer, began_s)

    def _graph(self, size: int, *, has_drafts: bool, adapters: tuple[int, ...] | None) -> StepGraph:
        key = size, has_drafts, adapters
        if adapters is not None and len(set(adapters)) > 1:
            # The newest last: the oldest make room.
            known = self._graphs.pop(key, None)
            others = [each for each in self._graphs if each[2] is not None and len(set(each[2])) > 1]
            for old in others[: max(len(others) + 1 - _MOST_ADAPTED, 0)]:
                self._graphs.pop(old).close()
            if known is not None:
                self._graphs[key] = known
        if key not in self._graphs:
            max_blocks = self._pools.kv.blocks_for(self._context_rows)
            arguments = self._model, self._pools, self.sampler, size, max_blocks
            how = {"has_drafts": has_drafts, "adapters": adapters, "memory": self._graph_memory}
            self._graphs[key] = StepGraph(*arguments, **how)
        return self._graphs[key]

    def _adapter(self, reply: Reply) -> int:
        return self._loaded.adapter_number(reply.request.adapter)

    def _drain(self) -> list[StepResult]:
        """Waits for the step in flight and returns its results."""
        launched, self._launched = self._launched, None
        results = self._collect(launched, None if launched is None else launched.graph.logits)
        if self._num_drafts and launched is not None and launched.began_s is not None:
            replies = [reply for reply, drafted in launched.replies if drafted]
            self._timed = len(launched.graph.logits), time.monotonic() - launched.began_s, replies
        return results

    def _count_time(self) -> None:
        """Counts the last step's time. A drafted step's draws belong to it: a plain one's are in its graph."""
        timed, self._timed = self._timed, None
        if timed is not None:
            num_rows, seconds, replies = timed
            self._times.add(num_rows, seconds + sum(reply.drawn_s for reply in replies))

    def _collect(self, launched: _Launched | None, logits: torch.Tensor | None = None) -> list[StepResult]:
        """A step's results; `logits` are None if another step has overwritten them."""
        if launched is None:
            return []
        token_ids, results, row = launched.graph.token_ids(launched.answer), [], 0
        for reply, drafted in launched.replies:
            token_id = None if drafted or reply.needs_host else token_ids[row]
            rows = slice(row, row + 1 + len(drafted))
            hidden = None if self._mtp is None else launched.graph.hidden[rows]
            results.append(
                StepResult(reply, token_id, None if logits is None else logits[rows].float(), drafted, hidden)
            )
            row = rows.stop
        return results
