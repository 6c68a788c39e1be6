"""How much the engine does at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qwen35mm.config import TextConfig
from qwen35mm.engine.speculation import SPECULATE, num_drafts
from qwen35mm.errors import ConfigError
from qwen35mm_kernels.backend import runs_triton
from qwen35mm_preprocess.say import say

DEFAULT_CONTEXT_LENGTH = 32_768
CPU_CHUNK_TOKENS = 512
GPU_CHUNK_TOKENS = 2048
# From here on attention dominates a CPU's step (0.8B). Longer prefixes get smaller chunks, so that a step's attention
# never takes longer than it does here.
CPU_DEEP_TOKENS = 32_768
CPU_LEAST_CHUNK_TOKENS = 64
# Few rows take as long as weights take to read, and padding costs nothing: powers of two. More are padded by less.
_LEAST_ROWS, _FINE_ROWS, _STEP_ROWS = 64, 512, 256


@dataclass(frozen=True)
class EngineSettings:
    """How much the engine may do at once.

    Attributes:
        context_length: most tokens of a prompt and its reply; None takes the checkpoint's limit, at most 32,768.
        chunk_tokens: most prompt tokens of one pass through the model; None takes 512 on a CPU and 2,048 on a GPU. It
            decides bits, so another value needs another cache. A CPU takes half of it after 32,768 tokens, a quarter
            after 65,536, and so on (see `chunk_tokens_at`).
        slots: concurrent requests.
        max_waiting: most requests in the queue; further ones are refused.
        batch_invariant: whether a reply has the same bits whatever else is in its batch. It costs a GPU little (every
            step has one row per slot), a CPU nothing, and a CPU without the compiled kernels much: it decodes replies
            one by one. The cache is exact either way: it never comes from decoding.
        prompts_first: whether running replies wait for prompts. Then more replies share each step, which reads the
            weights once. For work that nobody watches: a reply pauses whenever a prompt comes.
        speculate: how a step may compute several tokens of a reply: see `speculation`. `auto` takes repetitions and
            grammars for drafts where that gives the same bits, `ngram` everywhere; `mtp` also asks the checkpoint's
            layer for drafts, which must be loaded (`load(mtp=True)`). `model_library.fit` turns `auto` into `mtp`
            where that pays.
    """

    context_length: int | None = None
    chunk_tokens: int | None = None
    slots: int = 4
    max_waiting: int = 16
    batch_invariant: bool = False
    prompts_first: bool = False
    speculate: str = "auto"

    def __post_init__(self) -> None:
        for name in ("context_length", "chunk_tokens", "slots", "max_waiting"):
            value = getattr(self, name)
            may_be_none = name in ("context_length", "chunk_tokens")
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not (is_count or (value is None and may_be_none)):
                raise ConfigError(f"{name} must be a whole number, 1 or more; got {value!r}.")
        for name in ("batch_invariant", "prompts_first"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False; got {value!r}.")
        if self.speculate not in SPECULATE:
            raise ConfigError(f"speculate must be one of {', '.join(SPECULATE)}; got {self.speculate!r}.")

    def context_length_of(self, text: TextConfig, name: str = "this model") -> int:
        """Most tokens of a prompt and its reply together, for a model's number of positions.

        Args:
            name: what to call the model in a message.

        Raises:
            ConfigError: the setting is above the model's number of positions.
        """
        num_positions, yarn = text.max_position_embeddings, text.rope.yarn
        context_length = self.context_length or min(num_positions, DEFAULT_CONTEXT_LENGTH)
        if context_length > num_positions and yarn is not None:
            raise ConfigError(
                say(
                    "A context of {n} tokens was asked for; {name} has {most}: YaRN makes {factor} times as many of "
                    "{original}. A larger factor (--rope-scaling yarn,factor=N) makes more.",
                    n=context_length,
                    name=name,
                    most=num_positions,
                    factor=f"{yarn.factor:g}",
                    original=yarn.original_positions,
                )
            )
        if context_length > num_positions:
            raise ConfigError(
                say(
                    "A context of {n} tokens was asked for; {name} has {most}. YaRN makes more of them: --rope-scaling "
                    "yarn,factor={factor}.",
                    n=context_length,
                    name=name,
                    most=num_positions,
                    factor=str(-(-context_length // num_positions)),
                )
            )
        return context_length

    @property
    def wants_mtp(self) -> bool:
        """Whether the checkpoint's MTP layer should be loaded."""
        return self.speculate == "mtp"

    def num_drafts_on(self, device: torch.device) -> int:
        """Most drafted rows of a step on a device; 0 without speculation."""
        return num_drafts(self.speculate, device)

    def chunk_tokens_on(self, device: torch.device) -> int:
        """Most prompt tokens of one step on a device."""
        return self.chunk_tokens or (GPU_CHUNK_TOKENS if device.type == "cuda" else CPU_CHUNK_TOKENS)


def pauses_in_chunks(device: torch.device) -> bool:
    """Whether steps end between a chunk's layers. A GPU's chunk is short, and its layers are bound by launches."""
    return device.type == "cpu"


def pads_pieces(devices: Sequence[torch.device]) -> bool:
    """Whether pieces of prompts are padded on these devices: where they can be captured, on one card with Triton."""
    return len(set(devices)) == 1 and runs_triton(devices[0])


def padded_rows(num_tokens: int) -> int:
    """Rows of a padded piece. They depend on its tokens alone, since another number of rows may give other bits."""
    if num_tokens <= _FINE_ROWS:
        return max(_LEAST_ROWS, 1 << (num_tokens - 1).bit_length())
    return -(-num_tokens // _STEP_ROWS) * _STEP_ROWS


def captured_rows(chunk_tokens: int) -> list[int]:
    """All numbers of rows that pieces of up to `chunk_tokens` tokens are captured with, up to 2,048."""
    return sorted(set(map(padded_rows, range(1, min(chunk_tokens, GPU_CHUNK_TOKENS) + 1))))


def chunk_tokens_at(start: int, most: int, device: torch.device) -> int:
    """Prompt tokens of one chunk in a segment that begins after `start` tokens; `most` at the prompt's start.

    It depends on the prompt alone: other chunks would give other bits.
    """
    size = most
    while device.type == "cpu" and size * start > most * CPU_DEEP_TOKENS and size // 2 >= CPU_LEAST_CHUNK_TOKENS:
        size //= 2
    return size
