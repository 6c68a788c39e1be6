"""One decode step of a fixed number of rows, sampling included.

One GPU with Triton captures it once and replays it. A CPU records its compiled operations and replays those, if torch
does none of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from qwen35mm.cache import CachePools
from qwen35mm.engine.batches import StepInputs
from qwen35mm.engine.capture import capture
from qwen35mm.engine.sampler import Sampler
from qwen35mm.model import Qwen35Model
from qwen35mm_kernels.backend import runs_triton
from qwen35mm_kernels.cpu.native.recording import Arena, record


def can_capture(model: Qwen35Model) -> bool:
    """Whether a CUDA graph can hold a step: it must run on one GPU, and nothing in it may wait."""
    return len(model.devices) == 1 and runs_triton(model.devices[0])


class StepGraph:
    """A decode step of `size` rows.

    Inputs and answers have two buffers each, used in turn: the host can read one answer and write the next inputs while
    a step runs. At most two steps may be in flight.

    If the model is on several devices, torch computes, or rows on a card have different adapters, the step's operations
    are launched one by one.

    Args:
        max_blocks: most blocks of one sequence.
        has_drafts: whether a sequence may have several rows.
        adapters: each row's, by number; None if no row has any.
        memory: what several steps share, of `shared_memory`; None for one step alone.

    Attributes:
        hidden: [size, hidden], of the last step, after the final norm.
        logits: [size, vocab], of the last step, in the head's dtype; sampling reads them as float32.
    """

    hidden: torch.Tensor
    logits: torch.Tensor

    def __init__(
        self,
        model: Qwen35Model,
        pools: CachePools,
        sampler: Sampler,
        size: int,
        max_blocks: int,
        *,
        has_drafts: bool = False,
        adapters: Sequence[int] | None = None,
        memory: Any = None,
    ) -> None:
        self._has_drafts = has_drafts
        self._groups = () if adapters is None else model.routes.groups_of(adapters, model.device)
        self._model, self._pools, self._sampler = model, pools, sampler
        device, self._head_device = model.device, model.head_device
        pinned = [each.type == "cuda" for each in (device, self._head_device)]
        unused = StepInputs.unused(size, max_blocks)
        self._inputs = unused.moved(lambda x: x.to(device, copy=True))
        self._unused = unused.numbers
        self._staging = [unused.moved(torch.Tensor.pin_memory if pinned[0] else torch.clone) for _ in range(2)]
        self._answers = [torch.zeros(size, dtype=torch.int64, pin_memory=pinned[1]) for _ in range(2)]
        self._events = [torch.cuda.Event() if pinned[1] else None for _ in range(2)]
        self._token_ids = self._answers[0]
        captures = can_capture(model) and len(self._groups) <= 1
        self._memory = memory
        self._replay: Callable[[], None] = capture(device, self.compute, memory) if captures else self._record

    def inputs(self, answer: int) -> StepInputs:
        """The buffer for the next step's inputs, all rows unused."""
        staging = self._staging[answer]
        staging.numbers.copy_(self._unused)
        return staging

    def run(self, answer: int) -> None:
        """Launches a step on `inputs(answer)`; `token_ids(answer)` gives its tokens."""
        self._inputs.take(self._staging[answer])
        self._replay()
        self._answers[answer].copy_(self._token_ids, non_blocking=True)
        event = self._events[answer]
        if event is not None:
            event.record(torch.cuda.current_stream(self._head_device))

    def token_ids(self, answer: int) -> list[int]:
        """Waits for a step and returns each row's token."""
        event = self._events[answer]
        if event is not None:
            event.synchronize()
        return self._answers[answer].tolist()

    @torch.inference_mode()
    def compute(self) -> None:
        """Computes logits and token ids of the inputs; unused rows touch nothing."""
        model, inputs = self._model, self._inputs
        embeds = model.embed_tokens(inputs.token_ids(self._sampler.newest))
        self.hidden = model(inputs.batch(self._pools, embeds, has_drafts=self._has_drafts, adapters=self._groups))
        self.logits = model.logits(self.hidden)
        tables, steps = (numbers.to(self._head_device) for numbers in inputs.sampled())
        self._token_ids = self._sampler.sample(self.logits, tables, steps)

    def _record(self) -> None:
        """Runs the first step if nothing is captured; on a CPU also records it."""
        self._replay = run_and_record(self._model, self.compute, self._memory)


def shared_memory(model: Qwen35Model) -> Any:
    """Memory for all steps of an engine, of which one runs at a time: a graph pool, or a CPU's arena."""
    return torch.cuda.graph_pool_handle() if can_capture(model) else Arena()


def run_and_record(model: Qwen35Model, compute: Callable[[], None], memory: Any) -> Callable[[], None]:
    """Runs a step that depends only on tensors: what to call from then on, on a CPU its recording if possible."""
    recording = None
    if all(device.type == "cpu" for device in model.devices):
        recording = record(compute, memory)
    else:
        compute()
    return compute if recording is None else recording.run
