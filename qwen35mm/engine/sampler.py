"""Chooses tokens on the logits' device: a table with a row for each reply, and one draw for a batch.

A draw depends only on logits, parameters, seed and the token's number in its reply (`reference/sampling.py` of the
kernels). So a seed gives one text, whatever else is in the batch, with or without a grammar.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from qwen35mm.contract import SamplingParams
from qwen35mm.contract.sampling import row_numbers
from qwen35mm.engine.batches import upload
from qwen35mm.model import LoadedModel
from qwen35mm_kernels import SamplingRows, select_backend
from qwen35mm_kernels.reference.sampling import MAX_COUNT, PARAMETERS

_NEUTRAL = SamplingParams()
assert {name: getattr(_NEUTRAL, name) for name in row_numbers()} == {
    name: column.neutral for name, column in PARAMETERS.items()
}, "SamplingParams and the kernels' SamplingRows must have the same parameters with the same neutral values"
_FLOATS = [name for name, column in PARAMETERS.items() if column.dtype == torch.float32]
_WHOLE = [name for name, column in PARAMETERS.items() if column.dtype == torch.int32]
# Parameters that must stay above 0 in float32.
_ABOVE_ZERO = frozenset(name for name, number in row_numbers().items() if number.is_open)
_SMALLEST = float(np.finfo(np.float32).tiny)


class Sampler:
    """Tables with a row for each reply, and a last one (-1) for a step's unused rows.

    Args:
        num_rows: replies at one time.
        banned_ids: ids that are never sampled.

    Attributes:
        newest: [num_rows + 1] int64, the token that each reply chose last.
    """

    def __init__(self, num_rows: int, vocab_size: int, banned_ids: Iterable[int], device: torch.device) -> None:
        self._ops = select_backend(device)
        self.newest = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        # A row for each parameter, so that a row is dense.
        self._floats = torch.ones(len(_FLOATS), num_rows + 1, dtype=torch.float32, device=device)
        # The last row is the seed.
        self._whole = torch.ones(len(_WHOLE) + 1, num_rows + 1, dtype=torch.int64, device=device)
        self._in_text = torch.zeros(num_rows + 1, vocab_size, dtype=torch.bool, device=device)
        self._counts = torch.zeros_like(self._in_text, dtype=torch.uint8)
        self._banned = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._banned[torch.tensor(sorted(banned_ids), dtype=torch.int64, device=device)] = True

    def admit(self, row: int, params: SamplingParams, seed: int, prompt: np.ndarray, said: Iterable[int]) -> None:
        """Enters a reply in its current state.

        Args:
            row: its row in the tables.
            prompt: [T] int64, the prompt's tokens, for `repetition_penalty`.
            said: the reply's own tokens, for all penalties.
        """
        device = self.newest.device
        values = {name: getattr(params, name) for name in PARAMETERS}
        values["temperature"] = 0.0 if params.greedy else params.temperature
        values |= {name: max(values[name], _SMALLEST) for name in _ABOVE_ZERO}
        # A value above the vocabulary's size means all of it; the size fits into 32 bits.
        whole = [min(values[name], len(self._banned)) for name in _WHOLE]
        self._floats[:, row] = upload(np.array([values[name] for name in _FLOATS], dtype=np.float32), device)
        self._whole[:, row] = upload(np.array([*whole, seed], dtype=np.int64), device)
        reply = np.array(list(said), dtype=np.int64)
        self._in_text[row] = False
        self._in_text[row, upload(np.concatenate([prompt, reply]), device)] = True
        self._counts[row] = 0
        if len(reply):
            token_ids, counts = np.unique(reply, return_counts=True)
            self._counts[row, upload(token_ids, device)] = upload(counts.clip(max=MAX_COUNT).astype(np.uint8), device)

    def sample(
        self, logits: torch.Tensor, tables: torch.Tensor, steps: torch.Tensor, banned: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Chooses each row's next token and remembers it.

        Args:
            logits: [B, vocab], any dtype; read as float32.
            tables: [B] int64, each reply's row in the tables, -1 for unused rows.
            steps: [B] int64, the number of the token in its reply.
            banned: [vocab] bool, ids that can't be sampled; None takes `banned_ids`.

        Returns:
            [B] int64.
        """
        # Kernels don't take negative indices.
        tables = torch.where(tables < 0, len(self.newest) - 1, tables)
        *whole, seeds = self._whole[:, tables]
        rows = SamplingRows(
            **dict(zip(_FLOATS, self._floats[:, tables], strict=True)),
            **{name: column.to(torch.int32) for name, column in zip(_WHOLE, whole, strict=True)},
            seeds=seeds,
            steps=steps,
            slots=tables,
        )
        banned = self._banned if banned is None else banned
        token_ids = self._ops.sample(logits, rows, self._in_text, self._counts, banned)
        self.newest[tables] = token_ids
        return token_ids

    def sample_one(self, row: int, step: int, logits: torch.Tensor, allowed: torch.Tensor | None = None) -> int:
        """One reply's next token; waits for the device.

        Args:
            step: the number of the token in its reply.
            logits: [vocab] float32.
            allowed: [vocab] bool in host memory, the ids that a grammar allows; None allows all. top-k, top-p and min-p
                choose among these.
        """
        device = logits.device
        banned = None if allowed is None else self._banned | ~upload(allowed.numpy(), device)
        rows, steps = torch.full((1,), row, device=device), torch.full((1,), step, device=device)
        return int(self.sample(logits[None], rows, steps, banned))

    def observe(self, row: int, token_id: int) -> None:
        """Counts a token that entered the reply without being sampled."""
        count = self._counts[row, token_id]
        count += count < MAX_COUNT
        self._in_text[row, token_id] = True


def ids_never_sampled(loaded: LoadedModel) -> set[int]:
    """The ids of vision tokens, which belong to prompts only, and of embedding rows without a token."""
    config, tokenizer = loaded.config, loaded.tokenizer
    banned = set(config.media_ids) | {
        id_ for text, id_ in tokenizer.control_ids.items() if text.startswith("<|vision_")
    }
    return banned | set(range(tokenizer.vocab_size, config.text.vocab_size))
