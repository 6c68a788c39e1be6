"""How a reply's tokens are chosen and where it ends: a frozen description, no tensor work.

`engine/sampler.py` carries it out. Defaults come from the checkpoint's generation_config.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwen35mm.errors import CheckpointError, ConfigError

MAX_STOP_STRINGS = 16
MAX_JSON_SCHEMA_CHARS = 65_536
# A logit divided by less comes near to what float32 holds.
_MAX_GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """Everything that decides a reply besides the prompt.

    The order of operations is: penalties, temperature, then top-k, top-p and min-p on what is left,
    as in transformers' logits processors (generation/logits_process.py).

    Attributes:
        temperature: up to 1e-5 takes the likeliest token (greedy); above, the logits are divided by it.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; 1.0 keeps all.
        min_p: drop tokens less likely than this share of the likeliest one; 0.0 drops none.
        presence_penalty: subtracted once from the logit of each token generated so far.
        repetition_penalty: divides (multiplies, if negative) the logits of tokens in the prompt or the reply.
        seed: of the reply's own random generator; None draws one, which the result reports.
        max_tokens: most tokens of a reply, thinking included; None goes up to the end of the context.
        stop: strings that end the reply; they are not part of it. Only the answer is searched, not the thinking.
        thinking_budget: tokens of thinking after which it is closed; 0 allows none, None doesn't limit it.
        json_schema: a JSON schema as JSON text. The answer, not the thinking, is held to it token by token, and has
            satisfied it when the reply ends with "stop"; one that ends with "length" was cut off before. It knows no
            `stop`, which could cut the answer anywhere. Needs the extra `schema`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    thinking_budget: int | None = None
    json_schema: str | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("presence_penalty", self.presence_penalty, -10.0, 10.0)
        _check("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        _check_int("top_k", self.top_k, 0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**63 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        if self.thinking_budget is not None:
            _check_int("thinking_budget", self.thinking_budget, 0)
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise ConfigError(f"stop must be a tuple of non-empty strings; got {self.stop!r}.")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ConfigError(f"At most {MAX_STOP_STRINGS} stop strings are allowed; got {len(self.stop)}.")
        if self.json_schema is not None:
            _check_json_schema(self.json_schema)
            if self.stop:
                raise ConfigError("A reply that follows a JSON schema ends where the schema does: leave out stop.")

    @property
    def greedy(self) -> bool:
        """True where the likeliest token is always taken."""
        return self.temperature <= _MAX_GREEDY_TEMPERATURE or self.top_k == 1

    def with_overrides(self, **changes: Any) -> SamplingParams:
        """A copy in which every given value that isn't None replaces ours."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    @classmethod
    def from_generation_config(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The defaults that a generation_config.json states; `do_sample: false` means greedy.

        Raises:
            ConfigError: a value can't be used.
        """
        if not values.get("do_sample", False):
            return cls(temperature=0.0, repetition_penalty=values.get("repetition_penalty") or 1.0)
        names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "repetition_penalty")
        # transformers' own default, which a checkpoint that samples but names no top_k is meant to get.
        given: dict[str, Any] = {"top_k": 50} | {name: values[name] for name in names if values.get(name) is not None}
        if isinstance(given["top_k"], float) and given["top_k"].is_integer():
            given["top_k"] = int(given["top_k"])
        return cls(**given)


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's generation_config.json as a dict; empty where the file is missing.

    Raises:
        CheckpointError: the file is there and isn't a JSON object.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} is not readable JSON ({error}). Download the checkpoint again.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path.name} must hold a JSON object; got {type(values).__name__}.")
    return values


def _check(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf
    if not is_number or value > high or value < low or (low_open and value == low):
        bound = "above" if low_open else "from"
        raise ConfigError(f"{name} must be a number {bound} {low:g} to {high:g}; got {value!r}.")


def _check_json_schema(text: str) -> None:
    if not isinstance(text, str) or len(text) > MAX_JSON_SCHEMA_CHARS:
        came = f"{len(text):,}" if isinstance(text, str) else type(text).__name__
        raise ConfigError(f"json_schema must be JSON text of at most {MAX_JSON_SCHEMA_CHARS:,} characters; got {came}.")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"json_schema must be JSON text; it can't be read as that ({error}).") from error
    if not isinstance(schema, dict):
        raise ConfigError(f"json_schema must hold a JSON object; got {type(schema).__name__}.")


def _check_int(name: str, value: int, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        limit = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} must be a whole number {limit}; got {value!r}.")
