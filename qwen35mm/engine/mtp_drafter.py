"""Drafts tokens of running replies by the model's own layer of multi-token prediction (MTP).

The layer's keys and values lie in the sequences' own blocks. Whatever it writes there for tokens that it drafted itself
is written again, with the decoder's true states, before the next drafts: `Unseen` keeps the states until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qwen35mm.cache import CachePools, SequenceCache
from qwen35mm.engine.parts import Memory, run_and_record
from qwen35mm.model import Batch, Qwen35Model

# Older unseen tokens of a sequence are written first, in a pass that isn't recorded.
_NEWEST = 8


@dataclass(eq=False)
class Unseen:
    """The newest tokens of one reply, which the layer hasn't seen.

    Attributes:
        token_ids: in order; the last one is the reply's newest, which the decoder hasn't processed either.
        hidden: for each token the decoder's hidden state of the place before, [hidden], after the final norm.
    """

    token_ids: list[int] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        """Adds accepted tokens.

        Args:
            hidden: [tokens, hidden], the states that each was chosen from; copied.
        """
        assert len(token_ids) == len(hidden)
        self.token_ids += token_ids
        self.hidden += hidden.clone().unbind()

    def clear(self) -> None:
        self.token_ids.clear()
        self.hidden.clear()


@dataclass(frozen=True, eq=False)
class Wanted:
    """Drafts of one reply that a step may verify.

    Attributes:
        cache: its sequence, with room for as many tokens more (`SequenceCache.prepare`). It holds all tokens but the
            newest.
        unseen: its tokens that the layer hasn't seen; emptied.
        count: how many drafts, 1 or more.
    """

    cache: SequenceCache
    unseen: Unseen
    count: int


class MTPDrafter:
    """Drafts by the MTP layer of a model that has one.

    On a CPU the operations of a pass are recorded once for each number of rows and sequences.
    """

    def __init__(
        self, model: Qwen35Model, pools: CachePools, memory: Memory, *, num_sequences: int, context_rows: int
    ) -> None:
        """num_sequences: the most in one call; memory: see `StepGraph`."""
        self._model, self._pools, self._memory = model, pools, memory[model.device]
        max_blocks = pools.kv.blocks_for(context_rows)
        mtp_device = model.layer_devices[-1]
        width = model.config.text.hidden_size
        self._table = torch.zeros(num_sequences, max_blocks, dtype=torch.int32, device=mtp_device)
        self._table_keys: list[object] = [None] * num_sequences
        # The last pass's output, which the next one takes.
        self._states = torch.zeros(num_sequences, width, dtype=model.dtype, device=mtp_device)
        self._drafts = torch.zeros(num_sequences, dtype=torch.int64, device=model.head_device)
        self._passes: dict[tuple[int, int, bool], _Pass] = {}

    @property
    def num_passes(self) -> int:
        """Kinds of passes that have run."""
        return len(self._passes)

    @torch.inference_mode()
    def draft(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """The drafts of each, in order; the layer's own choice, whatever the sampling parameters are."""
        # Those with most drafts come first, so that the others leave at the end.
        order = sorted(range(len(wanted)), key=lambda index: -wanted[index].count)
        longest_first = [wanted[index] for index in order]
        for each in longest_first:
            self._catch_up(each, _NEWEST)
        self._enter_tables([each.cache for each in longest_first])
        self._run_first(longest_first)
        rounds = [self._drafts.tolist()]
        for step in range(1, longest_first[0].count):
            going = [each for each in longest_first if each.count > step]
            self._run_next([each.cache for each in going], step)
            rounds.append(self._drafts[: len(going)].tolist())
        found: list[list[int]] = [[] for _ in wanted]
        for row, index in enumerate(order):
            wanted[index].unseen.clear()
            found[index] = [drafts[row] for drafts in rounds[: wanted[index].count]]
        return found

    @torch.inference_mode()
    def catch_up(self, cache: SequenceCache, unseen: Unseen) -> None:
        """Writes all but the newest unseen token, for a reply that goes on without drafts."""
        self._catch_up(Wanted(cache, unseen, 0), 1)

    def _catch_up(self, each: Wanted, most: int) -> None:
        unseen, count = each.unseen, len(each.unseen.token_ids) - most
        if count <= 0:
            return
        places = self._places(each)[:count]
        token_ids = torch.tensor(unseen.token_ids[:count], device=self._model.device)
        positions = torch.tensor([each.cache.position(place) for place in places], device=self._model.device)
        rows = torch.tensor([each.cache.row(place) for place in places], device=self._model.device)
        batch = Batch(
            self._model.embed_tokens(token_ids),
            positions.expand(3, -1),
            slot_mapping=rows,
            block_table=self._table[:0],
            lengths=rows[:0],
            slots=rows[:0],
            pools=self._pools.layers,
            block_size=self._pools.kv.block_size,
            kv_formats=self._pools.kv.formats,
        )
        self._model.write_mtp(batch, torch.stack(unseen.hidden[:count]))
        del unseen.token_ids[:count], unseen.hidden[:count]

    @staticmethod
    def _places(each: Wanted) -> range:
        """The places of the unseen tokens' keys and values."""
        stop = each.cache.length + 1
        return range(stop - len(each.unseen.token_ids), stop)

    def _enter_tables(self, caches: Sequence[SequenceCache]) -> None:
        for row, cache in enumerate(caches):
            if self._table_keys[row] is not cache.table_key:
                blocks = torch.frombuffer(cache.block_table, dtype=torch.int32)
                self._table[row, : len(blocks)] = blocks
                self._table_keys[row] = cache.table_key

    def _run_first(self, wanted: Sequence[Wanted]) -> None:
        """Runs all unseen tokens; the last one of each sequence gives a draft."""
        numbers, last = [], []
        for each in wanted:
            for place, token_id in zip(self._places(each), each.unseen.token_ids, strict=True):
                numbers.append((token_id, each.cache.position(place), each.cache.row(place)))
            last.append(len(numbers) - 1)
        made = self._pass(len(numbers), len(wanted), is_first=True)
        made.hidden.copy_(torch.stack([state for each in wanted for state in each.unseen.hidden]))
        made.run(numbers, [each.cache.length + 1 for each in wanted], last)

    def _run_next(self, caches: Sequence[SequenceCache], step: int) -> None:
        """Runs the last drafts, `step` places behind the newest tokens."""
        made = self._pass(len(caches), len(caches), is_first=False)
        places = [cache.length + step for cache in caches]
        pairs = zip(places, caches, strict=True)
        numbers = [(0, cache.position(place), cache.row(place)) for place, cache in pairs]
        made.run(numbers, [place + 1 for place in places], range(len(caches)))

    def _pass(self, num_rows: int, num_sequences: int, *, is_first: bool) -> _Pass:
        key = num_rows, num_sequences, is_first
        if key not in self._passes:
            outputs = self._drafts[:num_sequences], self._states[:num_sequences]
            table = self._table[:num_sequences]
            given = self._model, self._pools, self._memory, num_rows, table
            self._passes[key] = _Pass(*given, *outputs, is_first=is_first)
        return self._passes[key]


class _Pass:
    """One pass of the layer over the rows of several sequences, of which the last ones give drafts.

    Args:
        block_table: [S, max_blocks] int32.
        drafts, states: [S] int64 and [S, hidden], written; read first unless `is_first`.

    Attributes:
        hidden: [num_rows, hidden], the states before the rows' tokens.
    """

    def __init__(
        self,
        model: Qwen35Model,
        pools: CachePools,
        memory: Any,
        num_rows: int,
        block_table: torch.Tensor,
        drafts: torch.Tensor,
        states: torch.Tensor,
        *,
        is_first: bool,
    ) -> None:
        self._model, self._pools, self._memory, self._table = model, pools, memory, block_table
        self._states, self._is_first = states, is_first
        self._drafts = drafts
        self.hidden = states.new_zeros(num_rows, states.shape[1]) if is_first else states
        # Rows of the tokens, their positions and their places in the pool; then lengths and rows of the last ones.
        self._numbers = torch.zeros(3, num_rows, dtype=torch.int64, device=states.device)
        self._ends = torch.zeros(2, len(states), dtype=torch.int64, device=states.device)
        self._replay: Callable[[], None] = self._record

    def run(self, numbers: Sequence[tuple[int, int, int]], lengths: Sequence[int], last: Sequence[int]) -> None:
        """Runs rows of (token, position, row of the pool). For each sequence: its length with its last row, and that
        row's index."""
        self._numbers.copy_(torch.tensor(numbers).T)
        self._ends.copy_(torch.tensor([list(lengths), list(last)]))
        self._replay()

    @torch.inference_mode()
    def compute(self) -> None:
        model, num_ends = self._model, len(self._states)
        assert model.mtp is not None
        token_ids = self._numbers[0] if self._is_first else self._drafts
        embeds = model.embed_tokens(token_ids.to(model.device)).to(self._states.device)
        cos, sin = model.rope(self._numbers[1].expand(3, -1).to(model.device))
        batch = Batch(
            embeds,
            self._numbers[1].expand(3, -1),
            slot_mapping=self._numbers[2],
            block_table=self._table,
            lengths=self._ends[0].to(torch.int32),
            slots=self._numbers[2],
            pools=self._pools.layers,
            block_size=self._pools.kv.block_size,
            kv_formats=self._pools.kv.formats,
        )
        last = None if num_ends == len(embeds) else self._ends[1]
        rope = cos.to(self._states.device), sin.to(self._states.device)
        states = model.mtp(self.hidden, rope, batch, last)
        self._drafts.copy_(model.drafts(states))
        self._states.copy_(states)

    def _record(self) -> None:
        """Runs the pass for the first time; on a CPU also records it."""
        self._replay = run_and_record(self._model.devices, self.compute, self._memory)
