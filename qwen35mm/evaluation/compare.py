"""One checkpoint in several formats of weights, and with several types of keys and values, one after the other, each
against a reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qwen35mm.assets import asset_path
from qwen35mm.cache import CacheSettings
from qwen35mm.cache.kv_types import AUTO, kv_formats_of
from qwen35mm.errors import ConfigError
from qwen35mm.evaluation.divergence import Divergence
from qwen35mm.evaluation.passages import Passage, diverge, hidden_states, text_passages
from qwen35mm.evaluation.skill_test import Accuracy, SkillTest
from qwen35mm.model import load
from qwen35mm.model.weight_formats import INTEGER_FORMATS, Weight
from qwen35mm.model.weights import loaded_bytes

REFERENCES = ("bf16", "float32")
# `auto` is as stored, for a quantised checkpoint.
FORMATS = (*REFERENCES, *INTEGER_FORMATS, "auto")
DEFAULT_TEXT = "evaluation.txt"


@dataclass(frozen=True)
class Result:
    """One format.

    Attributes:
        kv_dtype: what keys and values were kept as (see CacheSettings).
        num_bytes: of weights.
        kv_token_bytes: of K and V of one token.
        divergence: from the reference; its own is nothing but its perplexity.
        accuracy: over all questions; None where none were asked.
        skills: accuracy by skill.
    """

    weights: str
    kv_dtype: str
    num_bytes: int
    kv_token_bytes: int
    divergence: Divergence
    accuracy: Accuracy | None
    skills: dict[str, Accuracy]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the divergence's numbers stand among the others."""
        found = asdict(self)
        return {**found.pop("divergence"), **found}


@dataclass(frozen=True, eq=False)
class _Run:
    """What is kept of a model: too little to run it, and all that another one is compared with."""

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
    text: str | None = None,
    max_tokens: int = 8192,
    context: int | None = None,
    num_questions: int = 0,
    device: str = "cpu",
    rope_scaling: str | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Results of the reference, then of each format, then of the reference's weights with each type of keys and values.

    Args:
        source: a checkpoint's folder or Hub id.
        kv_dtypes: as CacheSettings takes them; formats of weights are computed with their own type.
        text: to foretell; without it the right answers where there are questions, else a text that comes with us.
        max_tokens: of the text.
        context: tokens of a window of it, each of which begins anew; without it, 2,048.
        num_questions: of each of the bundled model's skills.
        device, rope_scaling: as `load` takes them.
        told: called with what is being done.

    Raises:
        CheckpointError, ConfigError: the checkpoint, a format or the text can't be used, or there can't be questions.
    """
    if reference not in REFERENCES:
        raise ConfigError(f"The reference must be {' or '.join(REFERENCES)}; got '{reference}'.")
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not (formats or kv_dtypes):
        got = f"'{unknown[0]}'" if unknown else "none"
        raise ConfigError(f"weights must be some of {', '.join(FORMATS)}, with commas between; got {got}.")
    for kv_dtype in kv_dtypes:
        CacheSettings(kv_dtype=kv_dtype)
    test = SkillTest(num_questions) if num_questions else None
    if text is None and test is None:
        text = asset_path(DEFAULT_TEXT).read_text("utf-8")
    passages: list[Passage] = []

    def run(weights: str, kv_dtype: str = AUTO) -> _Run:
        name = weights if kv_dtype == AUTO else f"KV {kv_dtype}"
        told(f"{name}: loading")
        dtype = "float32" if weights == "float32" else "bfloat16"
        taken = "auto" if weights == "float32" else weights
        loaded = load(source, dtype=dtype, device=device, weights=taken, rope_scaling=rope_scaling)
        if not passages:
            if text is not None:
                passages.extend(text_passages(loaded, text, max_tokens, context))
            elif test is not None:
                passages.extend(test.passages(loaded))
        told(f"{name}: reading")
        hidden = list(hidden_states(loaded, passages, kv_dtype))
        right = []
        if test is not None:
            told(f"{name}: answering {len(test.skills):,} questions")
            right = test.run(loaded, kv_dtype)
        formats = kv_formats_of(kv_dtype, loaded.model.dtype)
        token_bytes = loaded.config.kv_bytes_per_token(*formats)
        return _Run(loaded_bytes(loaded.model), token_bytes, loaded.model.head, hidden, right)

    def result(weights: str, run: _Run, kv_dtype: str = AUTO) -> Result:
        divergence = diverge(passages, (kept.head, kept.hidden), (run.head, run.hidden))
        if test is None:
            return Result(weights, kv_dtype, run.num_bytes, run.kv_token_bytes, divergence, None, {})
        answers: dict[str, tuple[list[bool], list[bool]]] = {}
        for skill, *pair in zip(test.skills, run.right, kept.right, strict=True):
            for answered, is_right in zip(answers.setdefault(skill, ([], [])), pair, strict=True):
                answered.append(is_right)
        skills = {skill: Accuracy.of(*pair) for skill, pair in answers.items()}
        sizes = run.num_bytes, run.kv_token_bytes
        return Result(weights, kv_dtype, *sizes, divergence, Accuracy.of(run.right, kept.right), skills)

    kept = run(reference)
    # Each model is gone before the next is loaded.
    results = [result(reference, kept), *(result(name, run(name)) for name in formats if name != reference)]
    return results + [result(reference, run(reference, kv_dtype), kv_dtype) for kv_dtype in kv_dtypes]
