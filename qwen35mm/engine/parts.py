"""Work that goes from device to device: each device's part is captured, recorded or computed for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from qwen35mm.engine.capture import capture
from qwen35mm.model import Qwen35Model
from qwen35mm_kernels.backend import runs_triton
from qwen35mm_kernels.cpu.native.recording import Arena, record

Tensors = tuple[torch.Tensor, ...]
# By device, for work that never runs at the same time: a card's graph pool, a CPU's arena.
Memory = Mapping[torch.device, Any]


class Part:
    """What runs on one device, with copies of what the part before it left.

    A card with Triton captures it, a CPU records it if torch does none of the work, and else it is computed each time.

    A copy between two cards waits for both cards' streams, and they wait for it: torch's `copy_` does that. So copies
    and replays run in order, and the host waits for none. A copy from or to the processor waits.

    Args:
        work: each takes what the one before it returns.
        may_capture: whether a card with Triton may capture it.
        memory: None for a part alone.

    Attributes:
        captures: whether `prepare` captures it.
        out: what it left last.
    """

    out: Tensors

    def __init__(
        self, device: torch.device, work: Sequence[Callable[..., Tensors]], memory: Memory | None, *, may_capture: bool
    ) -> None:
        self.device, self.captures = device, may_capture and runs_triton(device)
        self._work, self._memory = work, None if memory is None else memory[device]
        self._given: Tensors | None = None
        self._replay: Callable[[], None] = self._record

    @torch.inference_mode()
    def enter(self, given: Tensors) -> None:
        """Copies what the part before left."""
        if self._given is None:
            self._given = tuple(torch.zeros_like(x, device=self.device) for x in given)
        for own, x in zip(self._given, given, strict=True):
            own.copy_(x)

    def prepare(self) -> None:
        """Captures it, or computes it once. The next part can be entered with what it left."""
        if self.captures:
            self._replay = capture(self.device, self.compute, self._memory)
            self._replay()
        else:
            self.compute()

    def run(self) -> None:
        """Replays it, or runs it for the first time."""
        self._replay()

    @torch.inference_mode()
    def compute(self) -> None:
        found = self._given or ()
        for each in self._work:
            found = each(*found)
        self.out = found

    def _record(self) -> None:
        self._replay = run_and_record([self.device], self.compute, self._memory)


def can_capture(model: Qwen35Model) -> bool:
    """Whether CUDA graphs can hold parts of a step: nothing in them may wait."""
    return any(map(runs_triton, model.devices))


def shared_memory(model: Qwen35Model) -> Memory:
    """Memory for all steps of an engine, of which one runs at a time."""
    devices = *model.devices, model.head_device
    return {each: torch.cuda.graph_pool_handle() if runs_triton(each) else Arena() for each in dict.fromkeys(devices)}


def run_and_record(devices: Iterable[torch.device], compute: Callable[[], None], memory: Any) -> Callable[[], None]:
    """Runs work that depends only on tensors: what to call from then on, on a CPU its recording if possible.

    Args:
        memory: an arena.
    """
    recording = None
    if all(device.type == "cpu" for device in devices):
        recording = record(compute, memory)
    else:
        compute()
    return compute if recording is None else recording.run
