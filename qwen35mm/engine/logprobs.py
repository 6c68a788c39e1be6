"""Log-probabilities of tokens by the model's logits, before any sampling parameter."""

from __future__ import annotations

import torch

from qwen35mm.contract import TokenLogprob
from qwen35mm.tokenizer import Tokenizer


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, tokenizer: Tokenizer
) -> list[TokenLogprob]:
    """The log-probability of each row's token; waits for the device.

    Args:
        logits: [N, vocab] float32.
        token_ids: [N] int64.
        num_top: number of likeliest tokens reported with each.
    """
    top = logits.topk(min(num_top, logits.shape[-1]), dim=-1)
    total = logits.logsumexp(dim=-1, keepdim=True)
    own = (logits.gather(1, token_ids.to(logits.device)[:, None]) - total)[:, 0]
    columns = (token_ids, own, top.indices, top.values - total)
    found = []
    for token_id, logprob, ids, values in zip(*(column.tolist() for column in columns), strict=True):
        likeliest = tuple(described(tokenizer, *each) for each in zip(ids, values, strict=True))
        found.append(described(tokenizer, token_id, logprob, likeliest))
    return found


def described(tokenizer: Tokenizer, token_id: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    """A token's log-probability with its text and bytes."""
    spelt = tokenizer.token_bytes(token_id)
    return TokenLogprob(spelt.decode("utf-8", "replace"), logprob, tuple(spelt), token_id, top)
