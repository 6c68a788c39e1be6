"""The two objectives: what is at each merged token (vision heads), and the answers' tokens (language)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3_5ForConditionalGeneration

from training.data import IGNORE
from training.scenes import COLORS, PLACES, SHAPES

_CLASSES = (len(COLORS) + 1, len(SHAPES) + 1, len(sum(PLACES, ())) + 1, 2)


class VisionHeads(nn.Module):
    """Linear probes on the merged tokens, thrown away after training: color, shape, place, centre."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(hidden_size, count) for count in _CLASSES])

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`tokens` [N, hidden], `targets` [N, 4]. Returns the loss, and each head's accuracy where a shape is."""
        loss, hits = tokens.new_zeros(()), []
        something = targets[:, 0] > 0
        for index, head in enumerate(self.heads):
            logits = head(tokens)
            loss = loss + F.cross_entropy(logits, targets[:, index])
            hits.append((logits.argmax(-1) == targets[:, index])[something].float().mean())
        return loss, torch.stack(hits)


def vision_tokens(model: Qwen3_5ForConditionalGeneration, batch: dict[str, Any]) -> torch.Tensor:
    """Merged vision tokens of the batch's spans, in prompt order: [spans * tokens, hidden]."""
    return model.model.visual(batch["pixels"], grid_thw=batch["grid_thw"]).pooler_output


def answer_loss(
    model: Qwen3_5ForConditionalGeneration, batch: dict[str, Any], tokens: torch.Tensor | None
) -> tuple[torch.Tensor, dict[str, list[bool]]]:
    """Cross-entropy over the answers' tokens, and per skill whether each answer was wholly right.

    Under teacher forcing an answer whose every token is the likeliest one is what greedy decoding would write.
    """
    ids, labels = batch["input_ids"], batch["labels"]
    embeds = model.get_input_embeddings()(ids)
    if tokens is not None:
        is_media = (ids == model.config.image_token_id) | (ids == model.config.video_token_id)
        embeds = embeds.masked_scatter(is_media[..., None], tokens.to(embeds.dtype))
    hidden = model.model.language_model(
        inputs_embeds=embeds, position_ids=batch["position_ids"], use_cache=False
    ).last_hidden_state
    learned = labels != IGNORE
    logits = model.lm_head(hidden[learned])
    loss = F.cross_entropy(logits.float(), labels[learned])
    wrong = torch.zeros(len(batch["skills"]), dtype=torch.long, device=ids.device)
    wrong.index_add_(0, batch["answers"][learned], (logits.argmax(-1) != labels[learned]).long())
    results: dict[str, list[bool]] = {}
    for skill, errors in zip(batch["skills"], wrong.tolist(), strict=True):
        results.setdefault(skill, []).append(errors == 0)
    return loss, results
