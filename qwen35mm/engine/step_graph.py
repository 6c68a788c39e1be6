"""One decode step of a fixed number of rows, sampling included; on one GPU it is captured once and replayed."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from qwen35mm.cache import CachePools, SequenceCache
from qwen35mm.engine.slot_tables import SlotTables
from qwen35mm.model import Qwen35Model
from qwen35mm.model.cache_protocol import DecodeInputs

# Rows of a step's numbers; every column is a sequence. So each row is dense, also where there is one sequence.
_TOKEN, _POSITION, _SLOT, _CACHE_ROW, _LENGTH, _STEP = range(6)
_EMPTY = (0, 0, -1, -1, 0, 0)
_FROM_TABLE = -1
# Runs before a capture: kernels are compiled and libraries make their workspaces.
_NUM_WARM_UPS = 2


def can_capture(model: Qwen35Model) -> bool:
    """Whether a step fits into a CUDA graph: a graph holds the work of one GPU."""
    return [device.type for device in model.devices] == ["cuda"]


def batch_sizes(slots: int) -> list[int]:
    """The numbers of rows that steps are prepared for: powers of two, and the number of slots itself."""
    sizes = [1]
    while sizes[-1] * 2 < slots:
        sizes.append(sizes[-1] * 2)
    return sizes if slots == 1 else [*sizes, slots]


@dataclass(frozen=True)
class StepInputs:
    """A step's inputs, written by the host.

    Attributes:
        numbers: [6, B] int64.
        block_table: [B, max_blocks] int32.
    """

    numbers: torch.Tensor
    block_table: torch.Tensor

    @classmethod
    def empty(cls, size: int, max_blocks: int) -> StepInputs:
        """`size` rows that nobody uses."""
        return cls(torch.tensor(_EMPTY)[:, None].repeat(1, size), torch.zeros(size, max_blocks, dtype=torch.int32))

    def set(self, row: int, cache: SequenceCache, *, token_id: int | None, step: int) -> None:
        """Enters a sequence that has room for one more token.

        Args:
            token_id: the token that is to be computed; None where only the device knows it yet.
            step: the number, in its reply, of the token that will be chosen.
        """
        blocks, length = cache.block_table, cache.length
        size = cache.block_size
        self.numbers[:, row] = torch.tensor(
            [
                _FROM_TABLE if token_id is None else token_id,
                cache.next_position,
                cache.slot,
                blocks[length // size] * size + length % size,
                length + 1,
                step,
            ]
        )
        self.block_table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)


class StepGraph:
    """A step of `size` rows.

    Answers are written to two places in turn, so that one can be read while the next step runs; the same holds for
    what the host writes. No more than two steps may be under way.

    Where the model lies on several devices, or on a CPU, the step's operations are launched one by one.

    Args:
        tables: where rows find how they are sampled.
        max_blocks: of one sequence.
        memory: a graph pool that several steps share; None where nothing is captured.

    Attributes:
        logits: [size, vocab] float32, of the last step that ran.
    """

    def __init__(
        self,
        model: Qwen35Model,
        pools: CachePools,
        tables: SlotTables,
        size: int,
        max_blocks: int,
        memory: Any = None,
    ) -> None:
        self._model, self._pools, self._tables = model, pools, tables
        device, self._head_device = model.device, model.head_device
        pinned = [each.type == "cuda" for each in (device, self._head_device)]
        empty = StepInputs.empty(size, max_blocks)
        self._inputs = StepInputs(empty.numbers.to(device), empty.block_table.to(device))
        self._empty = empty.numbers.clone()
        self._staging = [
            StepInputs(*(x.pin_memory() if pinned[0] else x.clone() for x in (empty.numbers, empty.block_table)))
            for _ in range(2)
        ]
        self._answers = [torch.zeros(size, dtype=torch.int64, pin_memory=pinned[1]) for _ in range(2)]
        self._events = [torch.cuda.Event() if pinned[1] else None for _ in range(2)]
        self.logits, self._token_ids = self._compute()
        self._replay: Callable[[], None] = self._capture(memory) if can_capture(model) else self._run_now

    def inputs(self, answer: int) -> StepInputs:
        """Where the next step's inputs are written; nobody uses any of its rows yet."""
        staging = self._staging[answer]
        staging.numbers.copy_(self._empty)
        return staging

    def run(self, answer: int) -> None:
        """Launches a step on `inputs(answer)`; `token_ids(answer)` gives what it chose."""
        staging = self._staging[answer]
        self._inputs.numbers.copy_(staging.numbers, non_blocking=True)
        self._inputs.block_table.copy_(staging.block_table, non_blocking=True)
        self._replay()
        self._answers[answer].copy_(self._token_ids, non_blocking=True)
        event = self._events[answer]
        if event is not None:
            event.record(torch.cuda.current_stream(self._head_device))

    def token_ids(self, answer: int) -> list[int]:
        """Waits for a step; each row's token."""
        event = self._events[answer]
        if event is not None:
            event.synchronize()
        return self._answers[answer].tolist()

    @torch.inference_mode()
    def _compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[size, vocab] logits and [size] token ids of what the inputs hold; rows that nobody uses touch nothing."""
        token_ids, positions, slots, cache_rows, lengths, steps = self._inputs.numbers.unbind(0)
        tables = self._tables
        places = torch.where(slots < 0, tables.num_slots, slots).to(self._head_device)
        newest = tables.newest[places].to(token_ids.device)
        step = DecodeInputs(
            torch.where(token_ids == _FROM_TABLE, newest, token_ids),
            positions,
            slots,
            cache_rows,
            lengths.to(torch.int32),
            self._inputs.block_table,
        )
        logits = self._model.logits(self._model.decode_step(step, self._pools))
        return logits, tables.sample(logits, places, steps.to(self._head_device))

    def _run_now(self) -> None:
        self.logits, self._token_ids = self._compute()

    def _capture(self, memory: Any) -> Callable[[], None]:
        device = self._model.device
        with torch.cuda.device(device):
            current, stream = torch.cuda.current_stream(), _capture_stream(device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(_NUM_WARM_UPS):
                    self._compute()
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # A graph that Python finds to be garbage while another one is captured would spoil it.
            gc.collect()
            gc.disable()
            try:
                # Other threads (files, another engine) may go on with what this one must not do in a capture.
                with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
                    self.logits, self._token_ids = self._compute()
            finally:
                gc.enable()
                # One that fails doesn't leave its stream by itself.
                torch.cuda.set_stream(current)
        return graph.replay


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures on a device: the one that torch would take is of the first capture's device, and libraries
    keep a workspace for each stream."""
    return torch.cuda.Stream(device)
