"""What the device knows of each slot's reply: how it is sampled, which tokens it has seen, and its newest one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from qwen35mm.engine.sequence import Reply
from qwen35mm.model.upload import upload
from qwen35mm_kernels import SamplingRows, sample

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")


class SlotTables:
    """Tensors with a row for each slot, and a last one for rows of a step that nobody uses.

    Args:
        banned_ids: ids that are never sampled.

    Attributes:
        newest: [num_slots + 1] int64, the token that each slot chose last.
    """

    def __init__(self, num_slots: int, vocab_size: int, banned_ids: Sequence[int], device: torch.device) -> None:
        self.num_slots = num_slots
        self.newest = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        # A row for each parameter, so that those of one slot are dense, too.
        self._params = torch.ones(len(_FLOATS), num_slots + 1, dtype=torch.float32, device=device)
        # top_k and seed.
        self._whole = torch.ones(2, num_slots + 1, dtype=torch.int64, device=device)
        self._in_text = torch.zeros(num_slots + 1, vocab_size, dtype=torch.bool, device=device)
        self._in_reply = torch.zeros_like(self._in_text)
        self._banned = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._banned[torch.tensor(banned_ids, dtype=torch.int64, device=device)] = True

    def admit(self, slot: int, reply: Reply) -> None:
        """Enters a reply as it stands: its parameters, and the tokens of prompt and reply."""
        params, said = reply.request.params, reply.output.token_ids
        device = self.newest.device
        floats = [getattr(params, name) for name in _FLOATS]
        self._params[:, slot] = upload(np.array(floats, dtype=np.float32), device)
        top_k = min(params.top_k, len(self._banned))
        self._whole[:, slot] = upload(np.array([top_k, reply.sampler.seed], dtype=np.int64), device)
        in_reply = upload(np.array(said, dtype=np.int64), device)
        prompt = upload(reply.request.prompt.token_ids, device)
        for table, token_ids in ((self._in_reply, in_reply), (self._in_text, torch.cat([prompt, in_reply]))):
            table[slot] = False
            table[slot, token_ids] = True

    def sample(self, logits: torch.Tensor, slots: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Chooses each row's next token and remembers it.

        Args:
            logits: [B, vocab] float32.
            slots: [B] int64, `num_slots` for rows that nobody uses.
            steps: [B] int64, the number of the token in its reply.

        Returns:
            [B] int64.
        """
        top_k, seeds = self._whole[:, slots]
        rows = SamplingRows(
            **dict(zip(_FLOATS, self._params[:, slots], strict=True)),
            top_k=top_k.to(torch.int32),
            seeds=seeds,
            steps=steps,
            slots=slots,
        )
        token_ids = sample(logits, rows, self._in_text, self._in_reply, self._banned)
        self.newest[slots] = token_ids
        return token_ids

    def sample_one(self, slot: int, logits: torch.Tensor) -> int:
        """The first token of the reply in a slot, from logits [vocab]."""
        slots = torch.full((1,), slot, device=logits.device)
        return int(self.sample(logits[None], slots, torch.zeros_like(slots)))
