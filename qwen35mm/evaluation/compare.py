"""Compares a checkpoint in several formats of weights, KV types and with adapters with a reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qwen35mm.assets import asset_path
from qwen35mm.cache import CacheSettings
from qwen35mm.cache.kv_types import AUTO, kv_formats_of
from qwen35mm.checkpoints.lora_choices import LoraChoice, read_choices
from qwen35mm.errors import ConfigError
from qwen35mm.evaluation.divergence import Divergence
from qwen35mm.evaluation.passages import Passage, diverge, hidden_states, text_passages
from qwen35mm.evaluation.skill_test import Accuracy, SkillTest
from qwen35mm.model import load
from qwen35mm.model.weight_formats import ROUNDED_FORMATS, Weight
from qwen35mm.model.weights import loaded_bytes

REFERENCES = ("bf16", "float32")
# `auto` keeps the format of a quantised checkpoint.
FORMATS = (*REFERENCES, *ROUNDED_FORMATS, "auto")
DEFAULT_TEXT = "evaluation.txt"
# Of keys and values.
ALL = "1"


@dataclass(frozen=True)
class Result:
    """The result of one format.

    Attributes:
        kv_dtype, kv_keep: the type of keys and values, and the share that is kept (see CacheSettings).
        num_bytes: size of the weights.
        kv_token_bytes: size of one token's K and V.
        divergence: from the reference; the reference's own has only a perplexity.
        accuracy: over all questions; None without questions.
        skills: accuracy by skill.
        lora: the adapter that is merged into the weights; None for the model alone.
    """

    weights: str
    kv_dtype: str
    kv_keep: str
    num_bytes: int
    kv_token_bytes: int
    divergence: Divergence
    accuracy: Accuracy | None
    skills: dict[str, Accuracy]
    lora: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON, with the divergence's numbers at the top level."""
        found = asdict(self)
        return {**found.pop("divergence"), **found}


@dataclass(frozen=True, eq=False)
class _Run:
    """What the comparison needs of a model: its sizes, output head, hidden states and right answers."""

    num_bytes: int
    kv_token_bytes: int
    head: Weight
    hidden: list[torch.Tensor]
    right: list[bool]


def compare(
    source: str | Path,
    formats: Sequence[str],
    *,
    reference: str = "bf16",
    kv_dtypes: Sequence[str] = (),
    kv_keeps: Sequence[str] = (),
    kv_gates: str = AUTO,
    loras: Sequence[str] = (),
    text: str | None = None,
    max_tokens: int = 8192,
    context: int | None = None,
    num_questions: int = 0,
    device: str = "cpu",
    rope_scaling: str | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Evaluates the reference, formats of weights, and the reference's weights with KV types, kept shares and adapters,
    in order.

    Args:
        source: a checkpoint's folder or Hub id.
        kv_dtypes, kv_keeps: values of CacheSettings. Formats of weights use their own KV type and keep everything.
        kv_gates: what chooses the kept ones (see CacheSettings).
        loras: adapters, as `load` takes them; each alone.
        text: to predict; None predicts the right answers if there are questions, else a bundled text.
        max_tokens: limit for the text.
        context: tokens of a window, computed on its own; None is 2,048.
        num_questions: for each of the bundled model's skills.
        device, rope_scaling: as for `load`.
        told: gets messages about the progress.

    Raises:
        CheckpointError, ConfigError: the checkpoint, a format or the text can't be used, or questions aren't possible.
    """
    if reference not in REFERENCES:
        raise ConfigError(f"The reference must be {' or '.join(REFERENCES)}; got '{reference}'.")
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not (formats or kv_dtypes or kv_keeps or loras):
        got = f"'{unknown[0]}'" if unknown else "none"
        raise ConfigError(f"weights must be some of {', '.join(FORMATS)}, with commas between; got {got}.")
    for kv_dtype in kv_dtypes:
        CacheSettings(kv_dtype=kv_dtype)
    for kv_keep in kv_keeps:
        CacheSettings(kv_keep=kv_keep)
    adapters = read_choices(loras)
    test = SkillTest(num_questions) if num_questions else None
    if text is None and test is None:
        text = asset_path(DEFAULT_TEXT).read_text("utf-8")
    passages: list[Passage] = []

    def run(weights: str, kv_dtype: str = AUTO, kv_keep: str = ALL, lora: LoraChoice | None = None) -> _Run:
        name = result_name(weights, kv_dtype, kv_keep, lora and lora.title)
        told(f"{name}: loading")
        dtype = "float32" if weights == "float32" else "bfloat16"
        taken = "auto" if weights == "float32" else weights
        merged = None if lora is None else replace(lora, name=None)
        loaded = load(source, dtype=dtype, device=device, weights=taken, rope_scaling=rope_scaling, lora=merged)
        if not passages:
            if text is not None:
                passages.extend(text_passages(loaded, text, max_tokens, context))
            elif test is not None:
                passages.extend(test.passages(loaded))
        told(f"{name}: reading")
        hidden = list(hidden_states(loaded, passages, kv_dtype, kv_keep, kv_gates))
        right = []
        if test is not None:
            told(f"{name}: answering {len(test.skills):,} questions")
            right = test.run(loaded, kv_dtype, kv_keep, kv_gates)
        formats = kv_formats_of(kv_dtype, loaded.model.dtype)
        token_bytes = loaded.config.kv_bytes_per_token(*formats)
        return _Run(loaded_bytes(loaded.model), token_bytes, loaded.model.head, hidden, right)

    def result(
        weights: str, run: _Run, kv_dtype: str = AUTO, kv_keep: str = ALL, lora: LoraChoice | None = None
    ) -> Result:
        divergence = diverge(passages, (kept.head, kept.hidden), (run.head, run.hidden))
        about = weights, kv_dtype, kv_keep, run.num_bytes, run.kv_token_bytes, divergence
        if test is None:
            return Result(*about, None, {}, lora and lora.title)
        answers: dict[str, tuple[list[bool], list[bool]]] = {}
        for skill, *pair in zip(test.skills, run.right, kept.right, strict=True):
            for answered, is_right in zip(answers.setdefault(skill, ([], [])), pair, strict=True):
                answered.append(is_right)
        skills = {skill: Accuracy.of(*pair) for skill, pair in answers.items()}
        return Result(*about, Accuracy.of(run.right, kept.right), skills, lora and lora.title)

    kept = run(reference)
    # Each model is freed before the next is loaded.
    results = [result(reference, kept), *(result(name, run(name)) for name in formats if name != reference)]
    others = [(kv_dtype, ALL, None) for kv_dtype in kv_dtypes]
    others += [(AUTO, kv_keep, None) for kv_keep in kv_keeps] + [(AUTO, ALL, lora) for lora in adapters]
    return results + [result(reference, run(reference, *other), *other) for other in others]


def result_name(weights: str, kv_dtype: str, kv_keep: str, lora: str | None) -> str:
    """What makes a result another than the reference's."""
    if lora is not None:
        return lora
    if kv_keep != ALL:
        return f"keeps {kv_keep}"
    return weights if kv_dtype == AUTO else f"KV {kv_dtype}"
