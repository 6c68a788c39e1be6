"""Texts whose tokens a model is to foretell, and the hidden states that it foretells them from.

What a reference thinks of a text is kept as its final hidden states, which are small, beside its output head: full
logits of a vocabulary of 248,320 would be a megabyte a token, and two whole models are never held at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from qwen35mm.cache import CachePools
from qwen35mm.engine.batches import prefill_batch
from qwen35mm.engine.settings import CPU_PIECE_TOKENS
from qwen35mm.engine.vision import encode, needed_units, place
from qwen35mm.errors import ConfigError
from qwen35mm.evaluation.divergence import Divergence, TokenScores, score_tokens, summarise
from qwen35mm.model import LoadedModel, Qwen35Model
from qwen35mm.model.weight_formats import Weight
from qwen35mm.prompt import Prompt
from qwen35mm_preprocess import PreparedMedia

# Tokens that a text is cut into: each window begins anew.
WINDOW_TOKENS = 2048
# Numbers of logits at a time: 128 MiB of each in float64.
_LOGITS_AT_ONCE = 1 << 24


@dataclass(frozen=True, eq=False)
class Passage:
    """A beginning, and what comes then.

    Attributes:
        start: the first token that is foretold; from the first one on, nothing is.
        media: the prompt's.
    """

    prompt: Prompt
    start: int
    media: tuple[PreparedMedia, ...] = ()

    @property
    def targets(self) -> torch.Tensor:
        """[T] int64: the tokens that are foretold."""
        return torch.tensor(self.prompt.token_ids[self.start :])


def text_passages(loaded: LoadedModel, text: str, max_tokens: int) -> list[Passage]:
    """The first `max_tokens` tokens of a text, in windows.

    Raises:
        ConfigError: it has less than two tokens.
    """
    ids = np.array(loaded.tokenizer.encode_plain(text)[:max_tokens], dtype=np.int64)
    size = min(WINDOW_TOKENS, loaded.config.text.max_position_embeddings)
    windows = [ids[start : start + size].copy() for start in range(0, len(ids), size)]
    passages = [_plain_passage(window) for window in windows if len(window) > 1]
    if not passages:
        raise ConfigError("The text has less than two tokens: there is nothing to foretell. Give a longer one.")
    return passages


def _plain_passage(token_ids: np.ndarray) -> Passage:
    positions = np.tile(np.arange(len(token_ids), dtype=np.int64), (3, 1))
    return Passage(Prompt(token_ids, (), positions, rope_delta=0, segments=(), tail_start=0), start=1)


def hidden_states(model: Qwen35Model, passages: Sequence[Passage]) -> Iterator[torch.Tensor]:
    """Of each passage the final hidden states [T, hidden] that its targets are foretold from."""
    longest = max(len(passage.prompt.token_ids) for passage in passages)
    pools = CachePools(model.config, num_slots=1, num_tokens=longest, dtype=model.dtype, device=model.layer_devices)
    for passage in passages:
        yield _hidden_states(model, pools, passage)


@torch.inference_mode()
def _hidden_states(model: Qwen35Model, pools: CachePools, passage: Passage) -> torch.Tensor:
    """In the engine's pieces, since products' last bits depend on how many rows there are."""
    prompt, num_tokens = passage.prompt, len(passage.prompt.token_ids)
    token_ids = torch.tensor(prompt.token_ids, device=model.device)
    positions = torch.tensor(prompt.positions, device=model.device)
    plans = [medium.plan for medium in passage.media]
    units = needed_units(prompt, plans, 0, num_tokens, root=b"", salt=b"")
    features = {
        unit.address: features
        for unit in units.values()
        for _, features in encode(model.visual, unit, passage.media[unit.media_index])
        if features is not None
    }
    cache, parts = pools.new_sequence(), []
    for begin in range(0, num_tokens, CPU_PIECE_TOKENS):
        piece = slice(begin, min(begin + CPU_PIECE_TOKENS, num_tokens))
        cache.prepare(piece.stop - begin)
        embeds = model.embed_tokens(token_ids[piece])
        place(prompt, units, features, embeds, begin)
        parts.append(model(prefill_batch(cache, embeds, positions[:, piece])))
        cache.advance(piece.stop - begin)
    cache.free()
    return torch.cat(parts)[passage.start - 1 : -1].clone()


def diverge(
    passages: Sequence[Passage],
    reference: tuple[Weight, Sequence[torch.Tensor]],
    model: tuple[Weight, Sequence[torch.Tensor]],
) -> Divergence:
    """A model against a reference.

    Args:
        reference, model: an output head and the passages' hidden states.
    """
    return summarise(_scores(passages, reference, model))


@torch.inference_mode()
def _scores(
    passages: Sequence[Passage],
    reference: tuple[Weight, Sequence[torch.Tensor]],
    model: tuple[Weight, Sequence[torch.Tensor]],
) -> Iterator[TokenScores]:
    size = max(1, _LOGITS_AT_ONCE // model[0].out_features)
    for index, passage in enumerate(passages):
        targets = passage.targets
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            expected, found = (_logits(head, hidden[index][part]) for head, hidden in (reference, model))
            yield score_tokens(expected, found, targets[part])


def _logits(head: Weight, hidden: torch.Tensor) -> torch.Tensor:
    """On the CPU, in float32."""
    return head.product(hidden.to(head.device)).float().cpu()
