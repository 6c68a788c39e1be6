"""One decode step of a fixed number of rows, sampling included.

A card with Triton captures its part of the step once and replays it. A CPU records its compiled operations and replays
those, if torch does none of the work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import torch

from qwen35mm.cache import CachePools
from qwen35mm.engine.batches import StepInputs
from qwen35mm.engine.parts import Memory, Part, Tensors
from qwen35mm.engine.sampler import Sampler
from qwen35mm.model import Qwen35Model
from qwen35mm.model.devices import runs_of


class StepGraph:
    """A decode step of `size` rows: a part for each run of its work on one device, and one for a model on one device.

    Inputs and answers have two buffers each, used in turn: the host can read one answer and write the next inputs while
    a step runs. At most two steps may be in flight. Each device has the inputs; hidden states go from part to part.

    If torch computes, or rows on a card have different adapters, the step's operations are launched one by one.

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
        memory: Memory | None = None,
    ) -> None:
        self._has_drafts = has_drafts
        self._model, self._pools, self._sampler = model, pools, sampler
        self._head_device = head = model.head_device
        devices = list(dict.fromkeys((model.device, *model.layer_devices, head)))
        self._groups = {each: () if adapters is None else model.routes.groups_of(adapters, each) for each in devices}
        unused = StepInputs.unused(size, max_blocks)
        copies = [functools.partial(torch.Tensor.to, device=each, copy=True) for each in devices]
        self._inputs = dict(zip(devices, map(unused.moved, copies), strict=True))
        self._unused = unused.numbers
        pins = any(each.type == "cuda" for each in devices)
        self._staging = [unused.moved(torch.Tensor.pin_memory if pins else torch.clone) for _ in range(2)]
        is_pinned = head.type == "cuda"
        self._answers = [torch.zeros(size, dtype=torch.int64, pin_memory=is_pinned) for _ in range(2)]
        self._events = [torch.cuda.Event() if is_pinned else None for _ in range(2)]
        self._token_ids = self._answers[0]
        has_one = all(len(groups) <= 1 for groups in self._groups.values())
        self._parts = [
            Part(device, [each for _, each in work], memory, may_capture=has_one)
            for device, work in groupby(self._work(), key=itemgetter(0))
        ]
        if any(part.captures for part in self._parts):
            self._pass(Part.prepare)

    def inputs(self, answer: int) -> StepInputs:
        """The buffer for the next step's inputs, all rows unused."""
        staging = self._staging[answer]
        staging.numbers.copy_(self._unused)
        return staging

    def run(self, answer: int) -> None:
        """Launches a step on `inputs(answer)`; `token_ids(answer)` gives its tokens."""
        for inputs in self._inputs.values():
            inputs.take(self._staging[answer])
        self._pass(Part.run)
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

    def close(self) -> None:
        """Frees the graphs: parts and step refer to each other, and would stay until garbage collection."""
        self._parts.clear()

    def compute(self) -> None:
        """Computes logits and token ids of the inputs, launch by launch; unused rows touch nothing."""
        self._pass(Part.compute)

    def _pass(self, run: Callable[[Part], None]) -> None:
        """Runs the parts one after another."""
        # Where tokens go in on the device that chooses them, they aren't copied.
        left: Tensors = () if self._head_device == self._model.device else (self._sampler.newest,)
        for part in self._parts:
            part.enter(left)
            run(part)
            left = part.out
        (self._token_ids,) = self._parts[-1].out

    def _work(self) -> Iterator[tuple[torch.device, Callable[..., Tensors]]]:
        """The step in its order, with the devices."""
        model = self._model
        yield model.device, self._embed
        for device, layers in runs_of(model.layer_devices):
            yield device, functools.partial(self._run_layers, device, layers)
        yield model.norm.weight.device, self._add_norm
        yield model.head_device, self._choose

    def _embed(self, newest: torch.Tensor | None = None) -> Tensors:
        inputs = self._inputs[self._model.device]
        embeds = self._model.embed_tokens(inputs.token_ids(self._sampler.newest if newest is None else newest))
        return *self._model.rope(inputs.positions()), embeds

    def _run_layers(
        self,
        device: torch.device,
        layers: range,
        cos: torch.Tensor,
        sin: torch.Tensor,
        x: torch.Tensor,
        delta: torch.Tensor | None = None,
    ) -> Tensors:
        groups = self._groups[device]
        batch = self._inputs[device].batch(self._pools, x, has_drafts=self._has_drafts, adapters=groups)
        with self._model.routes.using(groups):
            for index in layers:
                x, delta = self._model.layers[index](x, delta, (cos, sin), batch)
        assert delta is not None
        return (x, delta) if layers.stop == len(self._model.layers) else (cos, sin, x, delta)

    def _add_norm(self, x: torch.Tensor, delta: torch.Tensor) -> Tensors:
        self.hidden = self._model.norm.add(x, delta)
        return (self.hidden,)

    def _choose(self, hidden: torch.Tensor) -> Tensors:
        self.logits = self._model.logits(hidden)
        return (self._sampler.sample(self.logits, *self._inputs[self._head_device].sampled()),)
