"""The objectives: what is at each merged token (vision heads), the answers' tokens, and the tokens after the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3_5ForConditionalGeneration

from qwen35mm.evaluation.scenes import COLORS, SHAPES
from training.data import IGNORE
from training.fast import text_states
from training.media import CLASSES, EDGES, KNOWN

_BOX_WEIGHT = 4.0
_DIGIT_WEIGHT = 0.3
_BEFORE_WEIGHT = 0.5
_KNOWN_WEIGHT = 0.4  # of each of `media.KNOWN`, where what was before has 1


class VisionHeads(nn.Module):
    """Linear probes on the merged tokens, thrown away after training: `media.CLASSES`, and the box around a shape.

    While `teach` is false they learn, and what they look at doesn't learn from them.
    """

    teach = True

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.classes = nn.Linear(hidden_size, sum(CLASSES.values()))
        self.box = nn.Linear(hidden_size, 4)
        self.before = nn.Linear(hidden_size, len(COLORS) + len(SHAPES) + 2)
        self.changed = nn.Linear(hidden_size, 1)
        self.known = nn.Linear(hidden_size, sum(KNOWN.values()))

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor, boxes: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """`tokens` [N, hidden], `targets` [N, CLASSES], `boxes` [N, 4]. Returns the loss, and each probe's accuracy.

        Accuracies count tokens where something is, and are NaN where nothing is; the box's is the mean distance of an
        edge, in thousandths. They stay on their device: who reads them there waits for it.
        """
        tokens = tokens if self.teach else tokens.detach()
        loss = tokens.new_zeros((), dtype=torch.float32)
        rights: list[torch.Tensor] = []
        logits = self.classes(tokens).float().split(list(CLASSES.values()), dim=-1)
        for index, (name, logit) in enumerate(zip(CLASSES, logits, strict=True)):
            target = targets[:, index]
            there = target > 0
            # Letters are rare: where none is, there is little to learn.
            if name.startswith("letter"):
                share = F.cross_entropy(logit, target, reduction="none")
                loss = loss + (share * torch.where(there, 1.0, 0.1)).sum() / (there.sum() + 0.1 * len(target))
            elif name.startswith(EDGES):
                share = F.cross_entropy(logit, target, reduction="none")
                loss = loss + _DIGIT_WEIGHT * (share * there).sum() / there.sum().clamp(1)
            else:
                loss = loss + F.cross_entropy(logit, target)
            rights.append(((logit.argmax(-1) == target) & there).sum() / there.sum())
        known = ~boxes.isnan()
        off = ((self.box(tokens).float() - boxes.nan_to_num()).abs() * known).sum() / known.sum().clamp(1)
        loss = loss + _BOX_WEIGHT * off
        return loss, dict(zip((*CLASSES, "box"), (*rights, 1000 * off.detach() / known.any()), strict=True))

    def compared(
        self, early: torch.Tensor, late: torch.Tensor, known: torch.Tensor, now: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Whether the decoder knows of a token what those before it tell.

        `early` and `late` [N, hidden]: its states at the merged tokens, behind the first layer of full attention, which
        have to say what was at the token's place before, and before the last one, which have to say whether it has
        changed, and all of `known` [N, KNOWN] (`media.to_know`): that layer can look for what has. `now` [N, 2]: colour
        and shape. From answers alone, what differs was hardly learned, and the time of a change was the one beside it.
        Nothing has changed where nothing was before: unasked, a clip's first frames were taken for a change.

        The figures are shares: of what has changed, what is named, noticed and timed; of shapes, those whose picture is
        known, and whose number among those of their kind.
        """
        early, late = (states if self.teach else states.detach() for states in (early, late))
        before = known[:, :2]
        compared = before[:, 0] >= 0
        changed = compared & (before != now).any(1)
        share = torch.where(changed, 3.0, torch.where(now[:, 0] > 0, 1.0, 0.1))
        noticed = self.changed(late)[:, 0].float()
        loss = _mean(F.binary_cross_entropy_with_logits(noticed, changed.float(), reduction="none"), share)
        colors, shapes = self.before(early).float().split((len(COLORS) + 1, len(SHAPES) + 1), dim=-1)
        losses = F.cross_entropy(colors, before[:, 0].clamp(0), reduction="none")
        losses = losses + F.cross_entropy(shapes, before[:, 1].clamp(0), reduction="none")
        loss = loss + _mean(losses, share * compared)
        asked = dict(zip(KNOWN, known.unbind(1), strict=True))
        right: dict[str, torch.Tensor] = {}
        guesses = self.known(late).float().split(list(KNOWN.values()), dim=-1)
        for (name, target), guess in zip(asked.items(), guesses, strict=True):
            each = F.cross_entropy(guess, target.clamp(0), reduction="none")
            loss = loss + _KNOWN_WEIGHT * _mean(each, share * (target >= 0))
            right[name] = guess.argmax(-1) == target
        named = (colors.argmax(-1) == before[:, 0]) & (shapes.argmax(-1) == before[:, 1])
        timed, shape, counted = changed & (asked["seconds"] >= 0), now[:, 1] > 0, asked["so far"] >= 0
        right_time = right["tens of seconds"] & right["seconds"] & right["tenths of seconds"]
        right_count = right["so far"] & right["so far of its color"] & right["so far of its shape"]
        # NaN where there is none.
        shown = {
            "before": (named & changed).sum() / changed.sum(),
            "changed": ((noticed > 0) & changed).sum() / changed.sum(),
            "timed": (right_time & timed).sum() / timed.sum(),
            "medium": (right["medium"] & shape).sum() / shape.sum(),
            "counted": (right_count & counted).sum() / counted.sum(),
        }
        return loss, shown


def _mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted; 0 where nothing has a weight."""
    return (values * weights).sum() / weights.sum().clamp(1e-6)


def answer_loss(
    model: Qwen3_5ForConditionalGeneration,
    batch: dict[str, Any],
    tokens: torch.Tensor | None,
    mtp_weight: float = 0.0,
    heads: VisionHeads | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Cross-entropy over the answers' tokens, with `mtp_weight` of that of the MTP layer and `heads.compared` added.

    Also returns both, and how many tokens of each answer were wrong, [answers]: under teacher forcing an answer whose
    every token is the likeliest one is what greedy decoding would write. Both stay on their device.
    """
    ids, labels = batch["input_ids"], batch["labels"]
    embeds = model.get_input_embeddings()(ids)
    is_media = (ids == model.config.image_token_id) | (ids == model.config.video_token_id)
    if tokens is not None:
        embeds = embeds.masked_scatter(is_media[..., None], tokens.to(embeds.dtype))
    hidden, inner, rotary, mask = text_states(model, embeds, batch["position_ids"], batch["segments"])
    learned = (labels.flatten() != IGNORE).nonzero()[:, 0]
    logits = model.lm_head(hidden.flatten(0, 1)[learned]).float()
    wanted, weights, answers = (x.flatten()[learned] for x in (labels, batch["weights"], batch["answers"]))
    loss = (F.cross_entropy(logits, wanted, reduction="none") * weights).sum() / weights.sum()
    shown = {"loss": loss.detach()}
    if tokens is not None and heads is not None:
        early, late = (states[is_media] for states in inner)
        compared, figures = heads.compared(early, late, batch["known"], batch["targets"][:, :2])
        loss = loss + _BEFORE_WEIGHT * compared
        shown |= figures
    wrong = torch.zeros(len(batch["skills"]), dtype=torch.long, device=ids.device)
    wrong.index_add_(0, answers, (logits.argmax(-1) != wanted).long())
    if mtp_weight:
        # Where the token after the next is learned too: labels one place on, within the same answer.
        after = torch.full_like(labels, IGNORE)
        same = batch["answers"][:, 1:] == batch["answers"][:, :-1]
        after[:, :-1] = torch.where(same, labels[:, 1:], IGNORE)
        following = torch.cat([embeds[:, 1:], embeds[:, -1:]], dim=1)
        states = model.mtp(hidden, following, rotary, mask)
        known = after != IGNORE
        guesses = model.lm_head(states[known]).float()
        mtp_loss = F.cross_entropy(guesses, after[known])
        shown["mtp"] = mtp_loss.detach()
        shown["mtp right"] = (guesses.argmax(-1) == after[known]).float().mean()
        loss = loss + mtp_weight * mtp_loss
    return loss, shown, wrong
