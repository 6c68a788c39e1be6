"""Texts for a model to predict, and the hidden states that predict them.

A reference is kept as its final hidden states and its output head. Its logits would take a megabyte a token with a
vocabulary of 248,320, and keeping the whole model would mean two in memory at once.
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

# A text is cut into windows of this many tokens, each computed on its own.
WINDOW_TOKENS = 2048
# Logits computed at a time: 128 MiB for each model in float64.
_LOGITS_AT_ONCE = 1 << 24


@dataclass(frozen=True, eq=False)
class Passage:
    """A prompt with tokens to predict.

    Attributes:
        start: index of the first predicted token, at least 1.
        media: of the prompt.
    """

    prompt: Prompt
    start: int
    media: tuple[PreparedMedia, ...] = ()

    @property
    def targets(self) -> torch.Tensor:
        """[T] int64: the tokens to predict."""
        return torch.tensor(self.prompt.token_ids[self.start :])


def text_passages(loaded: LoadedModel, text: str, max_tokens: int, context: int | None = None) -> list[Passage]:
    """The first `max_tokens` tokens of a text, in windows of `context` or `WINDOW_TOKENS` tokens.

    Raises:
        ConfigError: the text has less than two tokens, or `context` exceeds the model's positions.
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


def hidden_states(
    loaded: LoadedModel,
    passages: Sequence[Passage],
    kv_dtype: str = "auto",
    kv_keep: str = "1",
    kv_gates: str = "auto",
) -> Iterator[torch.Tensor]:
    """Yields for each passage the final hidden states [T, hidden] that predict its targets.

    Args:
        kv_dtype, kv_keep, kv_gates: the type in which keys and values are stored and read, how many, and what chooses
            them (see CacheSettings).
    """
    longest = max(len(passage.prompt.token_ids) for passage in passages)
    # One passage at a time, without cache hits.
    cache = CacheSettings(reuse=False, kv_dtype=kv_dtype, kv_keep=kv_keep, kv_gates=kv_gates)
    kv_bytes = (longest + DEFAULT_BLOCK_SIZE) * loaded.config.kv_bytes_per_token(*cache.kv_formats(loaded.model.dtype))
    settings = EngineSettings(context_length=longest, slots=1)
    engine = Engine(loaded, settings, replace(cache, kv_bytes=kv_bytes))
    for passage in passages:
        reading = Reading("states", passage.start)
        engine.add(Request(passage.prompt, passage.media, "nothing", reading=reading, replies=False))
        while engine.has_unfinished:
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
    """Compares a model with a reference.

    Args:
        reference, model: an output head and the hidden states of the passages.
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
    """float32 logits on the CPU."""
    return head.product(hidden.to(head.device)).float().cpu()
