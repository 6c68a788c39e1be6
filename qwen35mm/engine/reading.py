"""Reads log-probabilities or hidden states of a prompt's own tokens during prefill.

With a vocabulary of 248,320 the logits take a megabyte a token, so only a few exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from qwen35mm.contract import CacheReport, PromptRead, TokenLogprob
from qwen35mm.engine.logprobs import token_logprobs
from qwen35mm.model import LoadedModel
from qwen35mm.prompt import Prompt

# Logits at a time: 64 MiB of float32.
LOGITS_AT_ONCE = 1 << 24

What = Literal["logprobs", "states", "last", "mean"]


@dataclass(frozen=True)
class Reading:
    """What to read of a prompt's own tokens.

    Attributes:
        what: `logprobs` of the tokens from `start` on; the final hidden `states` that predict these; the `last` token's
            hidden state; or the `mean` of all hidden states.
        start: the first predicted token, 1 or later.
        num_top: number of likeliest tokens reported with each.
    """

    what: What
    start: int = 1
    num_top: int = 0

    def first_row(self, num_tokens: int) -> int:
        """The first token of a prompt whose hidden state is needed; tokens before it may come from the cache."""
        return {"mean": 0, "last": num_tokens - 1}.get(self.what, self.start - 1)


class PromptReader:
    """Reads one prompt, chunk by chunk.

    Args:
        check: called with logits before their use; raises if they aren't finite.

    Attributes:
        first_row: the first token whose hidden state is needed.
    """

    def __init__(
        self, reading: Reading, prompt: Prompt, loaded: LoadedModel, check: Callable[[torch.Tensor], None]
    ) -> None:
        self.first_row = reading.first_row(len(prompt.token_ids))
        self._reading = reading
        self._token_ids = torch.tensor(prompt.token_ids)
        self._model, self._tokenizer = loaded.model, loaded.tokenizer
        self._check = check
        self._logprobs: list[TokenLogprob] = []
        self._states: list[torch.Tensor] = []
        self._sum: torch.Tensor | None = None

    def take(self, hidden: torch.Tensor, begin: int) -> Iterator[None]:
        """Takes the final hidden states [N, hidden] of the tokens from `begin` on, in bounded units of work."""
        foretells = self._reading.what in ("logprobs", "states")
        stop = min(begin + len(hidden), len(self._token_ids) - foretells)
        rows = hidden[max(self.first_row - begin, 0) : stop - begin]
        if not len(rows):
            return
        if self._reading.what == "logprobs":
            yield from self._score(rows, stop - len(rows))
        elif self._reading.what == "mean":
            # In float64, because the sum is long.
            added = rows.double().sum(dim=0)
            self._sum = added if self._sum is None else self._sum + added
        else:
            self._states.append(rows.clone())  # a view would keep all of them

    def _score(self, rows: torch.Tensor, begin: int) -> Iterator[None]:
        size = max(1, LOGITS_AT_ONCE // self._model.head.out_features)
        for start in range(0, len(rows), size):
            logits = self._model.logits(rows[start : start + size]).float()
            self._check(logits)
            first = begin + start + 1
            token_ids = self._token_ids[first : first + len(logits)]
            self._logprobs += token_logprobs(logits, token_ids, self._reading.num_top, self._tokenizer)
            del logits
            yield

    def result(self, report: CacheReport) -> PromptRead:
        """What was read; call it after the whole prompt."""
        states = torch.cat(self._states) if self._states else None
        if self._sum is not None:
            states = (self._sum / len(self._token_ids))[None]
        if states is not None and self._reading.what != "states":
            states = states.float().cpu()
        return PromptRead(tuple(self._token_ids.tolist()), tuple(self._logprobs), states, report)
