"""From logits to the next token id, for one sequence.

The order of operations and their formulas follow transformers' generation/logits_process.py, which the
tests use as the oracle; `presence_penalty` follows the OpenAI API (generated tokens only).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

import torch

from qwen35mm.model import LoadedModel
from qwen35mm.sampling import SamplingParams


class Sampler:
    """Chooses one sequence's tokens; holds its random generator and the tokens seen so far.

    Args:
        params: how to choose. Without a seed one is drawn and kept in `self.seed`.
        prompt_token_ids: the prompt, which `repetition_penalty` takes into account.
        banned_ids: ids that can never be chosen: vision placeholders and ids without a text.
        vocab_size: number of logits.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int],
        banned_ids: Iterable[int],
        vocab_size: int,
    ) -> None:
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self._generator = torch.Generator(device="cpu").manual_seed(self.seed)
        self._banned = torch.tensor(sorted(banned_ids), dtype=torch.int64)
        self._in_reply = torch.zeros(vocab_size, dtype=torch.bool)
        self._in_text = torch.zeros(vocab_size, dtype=torch.bool)
        self._in_text[torch.as_tensor(prompt_token_ids, dtype=torch.int64)] = True

    def sample(self, logits: torch.Tensor, allowed: torch.Tensor | None = None) -> int:
        """The next token id; it is remembered for the penalties.

        Args:
            logits: float32 `[vocab_size]`, on any device; not changed.
            allowed: bool `[vocab_size]`, what a grammar lets come next; None where there is none.
        """
        scores = logits.to(device="cpu", dtype=torch.float32, copy=True)
        self._penalise(scores)
        # Before the draw, so that top-k, top-p and min-p choose among what may come at all.
        scores[self._banned] = -torch.inf
        if allowed is not None:
            scores.masked_fill_(~allowed, -torch.inf)
        token_id = int(scores.argmax()) if self.params.greedy else self._draw(scores)
        self.observe(token_id)
        return token_id

    def observe(self, token_id: int) -> None:
        """Counts a token that was put into the reply without being sampled."""
        self._in_reply[token_id] = True
        self._in_text[token_id] = True

    def _penalise(self, scores: torch.Tensor) -> None:
        penalty = self.params.repetition_penalty
        if penalty != 1.0:
            penalised = torch.where(scores < 0, scores * penalty, scores / penalty)
            torch.where(self._in_text, penalised, scores, out=scores)
        if self.params.presence_penalty != 0.0:
            scores -= self.params.presence_penalty * self._in_reply

    def _draw(self, scores: torch.Tensor) -> int:
        params = self.params
        # Only the k likeliest are sorted: a full sort of 248,320 logits costs more than a decode step's norms.
        k = min(params.top_k, scores.numel()) if params.top_k else scores.numel()
        values, ids = torch.topk(scores / params.temperature, k)
        probs = torch.softmax(values, dim=-1)
        if params.top_p < 1.0:
            # A token stays if the likelier ones before it don't reach top_p yet: the first always stays.
            probs[probs.cumsum(dim=-1) - probs >= params.top_p] = 0.0
        if params.min_p > 0.0:
            probs[probs < params.min_p * probs[0]] = 0.0
        return int(ids[torch.multinomial(probs, 1, generator=self._generator)])


def ids_never_sampled(loaded: LoadedModel) -> set[int]:
    """Vision tokens, which only a prompt's media may place, and rows of the embedding that stand for no token."""
    config, tokenizer = loaded.config, loaded.tokenizer
    banned = {config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id}
    banned |= {id_ for text, id_ in tokenizer.control_ids.items() if text.startswith("<|vision_")}
    return banned | set(range(tokenizer.vocab_size, config.text.vocab_size))
