"""What a training will take, known before it begins: memory by arithmetic, time by two measured steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from qwen35mm.checkpoints.sources import Source
from qwen35mm.config import ModelConfig
from qwen35mm.errors import ConfigError
from qwen35mm.model.devices import gib
from qwen35mm.model_library.memory import available_bytes
from qwen35mm.tuning.encoding import Encoded
from qwen35mm_preprocess.say import english

# The decoder's linear layers. The tower has none of these names, and a mixture's experts aren't linear layers of
# transformers' model.
TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
_FLOAT = 4
# Parameters, gradients, and AdamW's two moments.
_COPIES = 4
# Values of a token that a layer keeps for its gradient, in units of its widths, and while it is computed again with
# gradient checkpointing; measured with 0.8B and 320 tokens.
_KEPT_GDN, _KEPT_MLP = 6, 4
_LIVE_GDN, _LIVE_MLP = 24, 6
# Logits, their log-probabilities, and the gradients of both.
_LIVE_LOGITS = 4
# Python, torch, transformers, and what the allocator doesn't give back.
_PROGRAM_BYTES = 900 << 20
# Checkpointing takes a third more time, so it is used where training would take more of the available memory.
_COMFORTABLE = 0.8


@dataclass(frozen=True)
class Need:
    """Bytes that training takes: the weights, the adapter with its optimizer, and the longest sample's activations.

    Attributes:
        checkpointing: whether layers are computed again for their gradients.
    """

    weights: int
    adapter: int
    activations: int
    program: int
    checkpointing: bool

    @property
    def total(self) -> int:
        return self.weights + self.adapter + self.activations + self.program

    def __str__(self) -> str:
        parts = (("weights", self.weights), ("adapter", self.adapter), ("activations", self.activations))
        return ", ".join(f"{english(gib(each))} {name}" for name, each in parts)


def num_adapter_values(sources: Mapping[str, Source], rank: int) -> int:
    """Parameters of an adapter for a checkpoint's tensors."""
    shapes = [source.shape for name, source in sources.items() if _is_target(name)]
    return sum(rank * (rows + columns) for rows, columns in shapes)


def memory_need(
    sources: Mapping[str, Source],
    config: ModelConfig,
    samples: Iterable[Encoded],
    *,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Need:
    """What training of these samples takes, each alone; with gradient checkpointing where it wouldn't fit well."""
    text, size = config.text, dtype.itemsize
    width = text.intermediate_size or 0
    if text.moe is not None:
        width = text.moe.intermediate_size * text.moe.num_experts_per_tok + text.moe.shared_intermediate_size
    gdn = (text.conv_dim + text.value_dim) * _FLOAT
    kept = text.num_layers * (_KEPT_GDN * gdn + _KEPT_MLP * width * size)
    recomputed = text.num_layers * text.hidden_size * size + _LIVE_GDN * gdn + _LIVE_MLP * width * size
    logits = text.vocab_size * _FLOAT * _LIVE_LOGITS
    lengths = [(each.num_tokens, each.num_answer_tokens) for each in samples]

    def need(of_token: int, *, checkpointing: bool) -> Need:
        return Need(
            weights=sum(math.prod(source.shape) for source in sources.values()) * size,
            adapter=num_adapter_values(sources, rank) * _FLOAT * _COPIES,
            activations=max((tokens * of_token + answer * logits for tokens, answer in lengths), default=0),
            program=_PROGRAM_BYTES if device.type == "cpu" else 0,
            checkpointing=checkpointing,
        )

    plain = need(kept, checkpointing=False)
    fits_well = plain.total <= _COMFORTABLE * available_bytes(device)
    return plain if fits_well else need(recomputed, checkpointing=True)


def check_fits(need: Need, name: str, device: torch.device) -> None:
    """Raises ConfigError if the device has less memory available."""
    free = available_bytes(device)
    if need.total > free:
        raise ConfigError(
            f"Training {name} doesn't fit: it needs about {english(gib(need.total))} ({need}), and "
            f"{english(gib(free))} of memory is available on {device}. Choose a smaller model, a lower "
            "--max-image-tokens or --max-tokens, or close other programs."
        )


def seconds_needed(measured: Sequence[tuple[int, float]], lengths: Iterable[int]) -> float:
    """Seconds for samples of these lengths.

    Args:
        measured: lengths and seconds of one or two samples; a straight line goes through them.
    """
    (short, fast), (long, slow) = min(measured), max(measured)
    slope = (slow - fast) / (long - short) if long > short else 0.0
    # A noisy measurement may slope down, or meet the axis below zero: then time goes with length.
    if slope <= 0 or fast - slope * short < 0:
        slope, short, fast = slow / long, 0, 0.0
    return sum(fast + slope * (length - short) for length in lengths)


def _is_target(name: str) -> bool:
    *parents, module, kind = name.split(".")
    return module in TARGETS and kind == "weight" and "language_model" in parents
