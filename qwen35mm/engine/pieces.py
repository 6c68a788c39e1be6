"""Runs pieces of prompts through the model. On a card a piece is padded to one of few sizes, and each is a CUDA graph.

A kernel takes a card less time than the host takes to launch it, so what is launched one by one waits for the host.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from qwen35mm.cache import CachePools, SequenceCache
from qwen35mm.engine.batches import PieceInputs
from qwen35mm.engine.capture import capture
from qwen35mm.engine.parts import can_capture, shared_memory
from qwen35mm.engine.settings import captured_rows, padded_rows, pads_pieces
from qwen35mm.model import Batch, Qwen35Model
from qwen35mm.model.adapters import Groups

logger = logging.getLogger(__name__)


class Pieces:
    """The ways in which an engine's pieces run: on one card with Triton captured, each size once, elsewhere by layers.

    Args:
        context_rows: most rows of K and V of a sequence.
        chunk_tokens: most tokens of a piece.
    """

    def __init__(self, model: Qwen35Model, pools: CachePools, context_rows: int, chunk_tokens: int) -> None:
        self._model, self._pools = model, pools
        self._max_blocks = pools.kv.blocks_for(context_rows)
        self._pads = pads_pieces(model.devices)
        self._graphs: dict[int, PieceGraph | None] = {}
        # An adapter that couldn't be merged is everybody's.
        self._adapters = model.routes.groups_of([0])
        # The largest first: the others fit into its memory.
        self._to_capture = captured_rows(chunk_tokens)[::-1] if self._pads and can_capture(model) else []
        self._memory: Any = None

    @property
    def can_prepare(self) -> bool:
        """Whether sizes remain to be captured; until then they are launched one by one."""
        return bool(self._to_capture)

    def prepare(self) -> None:
        """Captures one size while the engine is idle."""
        num_rows = self._to_capture.pop(0)
        self._graphs[num_rows] = self._capture(num_rows)

    def inputs(self, cache: SequenceCache, token_ids: np.ndarray, positions: np.ndarray) -> PieceInputs:
        """A piece on the host, padded as the model's devices want it; see `PieceInputs.of`."""
        count = len(token_ids)
        return PieceInputs.of(cache, token_ids, positions, padded_rows(count) if self._pads else count)

    def graph(self, num_rows: int, adapters: Groups) -> PieceGraph | None:
        """The graph for so many rows with these adapters.

        None where the rows are launched one by one: they are too many, have an adapter of their own, aren't captured
        yet, or there was no room for it. Both ways give the same bits.
        """
        return self._graphs.get(num_rows) if adapters == self._adapters else None

    @torch.inference_mode()
    def run(
        self, cache: SequenceCache, token_ids: torch.Tensor, positions: torch.Tensor, *, by_graph: bool = True
    ) -> torch.Tensor:
        """A sequence's next tokens without media, as an engine runs them, for benchmarks.

        Args:
            token_ids: [T], on the host.
            positions: [3, T], on the host.
            by_graph: where there is one.

        Returns:
            [T, hidden], which hold until the next run.
        """
        inputs = self.inputs(cache, token_ids.numpy(), positions.numpy())
        graph = self.graph(inputs.num_rows, self._adapters) if by_graph else None
        inputs = inputs.to(self._model.device) if graph is None else graph.take(inputs)
        embeds = self._model.embed_tokens(inputs.token_ids)
        if graph is not None:
            return graph.run(embeds, None)[: len(token_ids)]
        *_, hidden = by_layers(self._model, inputs.batch(self._pools, embeds, self._adapters), None)
        assert hidden is not None
        return hidden[: len(token_ids)]

    def _capture(self, num_rows: int) -> PieceGraph | None:
        model, width = self._model, self._model.config.text.hidden_size
        try:
            if self._memory is None:
                self._buffers = torch.zeros(2, num_rows, width, dtype=model.dtype, device=model.device)
                self._memory = shared_memory(model)[model.device]
            unused = PieceInputs.unused(num_rows, self._max_blocks, model.device)
            embeds, hidden = self._buffers[:, :num_rows]
            return PieceGraph(model, self._pools, unused, embeds, hidden, self._adapters, self._memory)
        except torch.cuda.OutOfMemoryError:
            logger.warning(
                "pieces of %d rows couldn't be captured and are launched one by one", num_rows, exc_info=True
            )
            return None


class PieceGraph:
    """A piece of one number of rows, from its embeddings to the final norm and the MTP layer's keys and values.

    Args:
        inputs: without a token.
        embeds, hidden: [num_rows, hidden], what it reads and what it writes; may be shared with others.
        adapters: of all rows.
        memory: a graph pool, shared with others, of which one runs at a time.
    """

    def __init__(
        self,
        model: Qwen35Model,
        pools: CachePools,
        inputs: PieceInputs,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        adapters: Groups,
        memory: Any,
    ) -> None:
        self._model, self._pools, self._inputs, self._adapters = model, pools, inputs, adapters
        self._embeds, self._hidden = embeds, hidden
        self._before = embeds.new_zeros(1, embeds.shape[1])
        self._replay = capture(model.device, self.compute, memory)

    def take(self, inputs: PieceInputs) -> PieceInputs:
        """Copies a piece from the host to where the graph reads it, and returns it there."""
        self._inputs.take(inputs)
        return self._inputs

    def run(self, embeds: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """Runs the piece that `take` was given: [num_rows, hidden], which hold until the next run.

        Args:
            before: see `by_layers`.
        """
        self._embeds.copy_(embeds)
        if self._model.mtp is not None:
            self._before.zero_() if before is None else self._before.copy_(before)
        self._replay()
        return self._hidden

    @torch.inference_mode()
    def compute(self) -> None:
        """Computes the hidden states of the inputs."""
        batch = self._inputs.batch(self._pools, self._embeds, self._adapters)
        *_, hidden = by_layers(self._model, batch, self._before)
        assert hidden is not None
        self._hidden.copy_(hidden)


def by_layers(model: Qwen35Model, batch: Batch, before: torch.Tensor | None) -> Iterator[torch.Tensor | None]:
    """`Qwen35Model.by_layers` for a piece, with the MTP layer's keys and values.

    Args:
        before: [1, hidden], the state of the place before the piece; None at a segment's start, and without that layer.
    """
    if model.mtp is None:
        yield from model.by_layers(batch)
        return
    # The layers overwrite the embeddings.
    embeds, hidden = batch.embeds.clone(), None
    for each in model.by_layers(batch):
        hidden = each
        yield None
    assert hidden is not None
    before = hidden.new_zeros(1, hidden.shape[1]) if before is None else before
    model.write_mtp(replace(batch, embeds=embeds), torch.cat([before, hidden[:-1]]))
    yield hidden
