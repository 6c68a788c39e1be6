"""Texts whose tokens a model is to foretell, and the hidden states that it foretells them from.

What a reference thinks of a text is kept as its final hidden states, which are small, beside its output head: full
logits of a vocabulary of 248,320 would be a megabyte a token, and two whole models are never held at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from qwen35mm.cache import CacheSettings
from qwen35mm.cache.kv_pool import DEFAULT_BLOCK_SIZE
from qwen35mm.contract import PromptRead
from qwen35mm.engine import Engine, EngineSettings, Reading, Request
from qwen35mm.errors import ConfigError, Qwen35mmError
from qwen35mm.evaluation.divergence import Divergence, TokenScores, score_tokens, summarise
from qwen35mm.model import LoadedModel
from qwen35mm.model.weight_formats import Weight
from qwen35mm.prompt import Prompt, PromptBuilder
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


def text_passages(loaded: LoadedModel, text: str, max_tokens: int, context: int | None = None) -> list[Passage]:
    """The first `max_tokens` tokens of a text, in windows of `context`, or of `WINDOW_TOKENS`.

    Raises:
        ConfigError: it has less than two tokens, or so many positions aren't the model's.
    """
    builder = PromptBuilder(loaded.tokenizer, loaded.template, loaded.config)
    ids = loaded.tokenizer.encode_plain(text)[:max_tokens]
    most = loaded.config.text.max_position_embeddings
    size = min(WINDOW_TOKENS, most) if context is None else context
    if size > most:
        raise ConfigError(f"The model has {most:,} positions; got a context of {size:,} tokens.")
    windows = [ids[start : start + size] for start in range(0, len(ids), size)]
    passages = [Passage(builder.plain(window), start=1) for window in windows if len(window) > 1]
    if not passages:
        raise ConfigError("The text has less than two tokens: there is nothing to foretell. Give a longer one.")
    return passages


def hidden_states(loaded: LoadedModel, passages: Sequence[Passage], kv_dtype: str = "auto") -> Iterator[torch.Tensor]:
    """Of each passage the final hidden states [T, hidden] that its targets are foretold from.

    Args:
        kv_dtype: what keys and values are kept as, and read as by every token (see CacheSettings).
    """
    longest = max(len(passage.prompt.token_ids) for passage in passages)
    # One passage at a time, and nothing is kept of it.
    cache = CacheSettings(reuse=False, kv_dtype=kv_dtype)
    kv_bytes = (longest + DEFAULT_BLOCK_SIZE) * loaded.config.kv_bytes_per_token(*cache.kv_formats(loaded.model.dtype))
    settings = EngineSettings(context_length=longest, slots=1)
    engine = Engine(loaded, settings, replace(cache, kv_bytes=kv_bytes))
    for passage in passages:
        reading = Reading("states", passage.start)
        engine.add(Request(passage.prompt, passage.media, "nothing", reading=reading, replies=False))
        while engine.has_work:
            for output in engine.step():
                if isinstance(output.event, Qwen35mmError):
                    raise output.event
                if isinstance(output.event, PromptRead):
                    assert output.event.states is not None
                    yield output.event.states


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
            yield score_tokens(expected, found, targets[part], passage.start + start)


def _logits(head: Weight, hidden: torch.Tensor) -> torch.Tensor:
    """On the CPU, in float32."""
    return head.product(hidden.to(head.device)).float().cpu()
