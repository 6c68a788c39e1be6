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
from qwen35mm.outside_json import read_json

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_JSON_SCHEMA_CHARS = 65_536
# A logit divided by less comes near to what float32 holds.
_MAX_GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """Everything that decides a reply besides the prompt.

    The order of operations is: biases, penalties (repetition, presence, frequency), what can't be chosen (vision
    tokens, ends before `min_tokens`, what a grammar forbids), temperature, then top-k, top-p and min-p on what is left,
    as in transformers' logits processors (generation/logits_process.py). Logprobs are of the model's own distribution:
    of its logits before all of that.

    Attributes:
        temperature: up to 1e-5 takes the likeliest token (greedy); above, the logits are divided by it.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; 1.0 keeps all.
        min_p: drop tokens less likely than this share of the likeliest one; 0.0 drops none.
        presence_penalty: subtracted once from the logit of each token generated so far.
        frequency_penalty: subtracted from the logit of each token for each time that it was generated so far, 255 times
            at most.
        repetition_penalty: divides (multiplies, if negative) the logits of tokens in the prompt or the reply.
        seed: of the reply's own random generator; None draws one, which the result reports.
        max_tokens: most tokens of a reply, thinking included; None goes up to the end of the context.
        stop: strings that end the reply, or a single one; they are not part of it. Only the answer is searched, not the
            thinking.
        thinking_budget: tokens of thinking after which it is closed; 0 allows none, None doesn't limit it.
        json_schema: a JSON schema as JSON text; given as a dict, or as a pydantic class, it becomes that. The answer,
            not the thinking, is held to it token by token, and has satisfied it when the reply ends with "stop"; one
            that ends with "length" was cut off before. It knows no `stop`, which could cut the answer anywhere. Needs
            the extra `schema`.
        min_tokens: tokens, thinking included, before which the reply doesn't end: neither its end nor one of
            `stop_token_ids` is chosen, and text of that many tokens isn't searched for `stop`.
        ignore_eos: whether the model's own end is a token like others, so that the reply goes on behind it.
        stop_token_ids: ids that end the reply, wherever they come; their text is not part of it.
        logit_bias: -100 to 100 by token id, added to the logits; kept as pairs in the order of ids.
        logprobs: whether the log probability of each token is told, and of how many of the likeliest beside it, 0 to
            20; None tells none.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    thinking_budget: int | None = None
    json_schema: str | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str | list):
            object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if isinstance(self.stop_token_ids, list):
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("presence_penalty", self.presence_penalty, -10.0, 10.0)
        _check("frequency_penalty", self.frequency_penalty, -10.0, 10.0)
        _check("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        _check_int("top_k", self.top_k, 0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**63 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        if self.thinking_budget is not None:
            _check_int("thinking_budget", self.thinking_budget, 0)
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise ConfigError(f"stop must be a string, or a list of strings, none of them empty; got {self.stop!r}.")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ConfigError(f"At most {MAX_STOP_STRINGS} stop strings are allowed; got {len(self.stop)}.")
        if self.json_schema is not None:
            _check_json_schema(self.json_schema)
            if self.moves_end:
                names = ", ".join(self.moves_end)
                raise ConfigError(f"{names} must be left out: a reply that follows a JSON schema ends where that does.")
        _check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens must be max_tokens ({self.max_tokens}) at most; got {self.min_tokens}.")
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos must be True or False; got {self.ignore_eos!r}.")
        _check_ids(self.stop_token_ids)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """True where the likeliest token is always taken."""
        return self.temperature <= _MAX_GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def moves_end(self) -> tuple[str, ...]:
        """What is set that ends a reply elsewhere than where a grammar does."""
        return tuple(name for name in ("stop", "stop_token_ids", "min_tokens", "ignore_eos") if getattr(self, name))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids that are named, which must be some that the model has."""
        return (*self.stop_token_ids, *dict(self.logit_bias))

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
        values = read_json(path)
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


def _schema_text(schema: Any) -> Any:
    """A schema as JSON text; what can't be one, as it is."""
    if isinstance(schema, type) and callable(of_class := getattr(schema, "model_json_schema", None)):
        schema = of_class()
    if not isinstance(schema, Mapping):
        return schema
    try:
        return json.dumps(dict(schema), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"json_schema can't be written as JSON ({error}).") from None


def _check_ids(ids: Any) -> None:
    if not isinstance(ids, tuple):
        raise ConfigError(f"stop_token_ids must be a tuple of token ids; got {ids!r}.")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise ConfigError(f"stop_token_ids may be {MAX_STOP_TOKEN_IDS} at most; got {len(ids)}.")
    for each in ids:
        _check_int("stop_token_ids: each", each, 0)


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    try:
        biases = dict(given)
    except (TypeError, ValueError):
        raise ConfigError(f"logit_bias must have a number for each token id; got {given!r}.") from None
    if len(biases) > MAX_LOGIT_BIASES:
        raise ConfigError(f"logit_bias may name {MAX_LOGIT_BIASES:,} tokens at most; got {len(biases):,}.")
    for token_id, bias in biases.items():
        _check_int("logit_bias: a token id", token_id, 0)
        _check(f"logit_bias: that of {token_id}", bias, -100.0, 100.0)
    return tuple(sorted(biases.items()))


def _check_json_schema(text: str) -> None:
    if not isinstance(text, str) or len(text) > MAX_JSON_SCHEMA_CHARS:
        came = f"{len(text):,}" if isinstance(text, str) else type(text).__name__
        what = f"a dict, a pydantic class, or JSON text of at most {MAX_JSON_SCHEMA_CHARS:,} characters"
        raise ConfigError(f"json_schema must be {what}; got {came}.")
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
