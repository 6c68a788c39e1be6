"""How a reply's tokens are chosen and where it ends: a frozen description, no tensor work.

`engine/sampler.py` carries it out. Defaults come from the checkpoint's generation_config.json.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypedDict

from qwen35mm.contract.grammars import MAX_GRAMMAR_CHARS, grammar_of_choices, grammar_of_pattern, lark_of
from qwen35mm.contract.typed_schemas import is_type, schema_of
from qwen35mm.errors import CheckpointError, ConfigError
from qwen35mm.outside_json import read_json

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_TOP_LOGPROBS = 20
# An enum of thousands of labels fits.
MAX_JSON_SCHEMA_CHARS = 524_288
# Dividing a logit by less gets close to the limit of float32.
_MAX_GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Number:
    """The range of a numeric parameter. Options, forms and checks are made from it.

    Attributes:
        low, high: its limits; `high` None means no limit.
        is_open: whether it must be above `low`.
        is_whole: whether it is a whole number.
        in_row: whether it is a column of `SamplingRows`, which the kernels read.
        is_for_draws: whether greedy decoding ignores it.
        on_page: whether the chat's settings offer it.
        off_from: requests may send this up to below `low` for the neutral value, as in vLLM or llama.cpp.
        help: help text of its command-line option; without it there is no option.
    """

    low: float
    high: float | None = None
    is_open: bool = False
    is_whole: bool = False
    in_row: bool = False
    is_for_draws: bool = False
    on_page: bool = False
    off_from: float | None = None
    help: str = ""

    def is_off(self, value: float) -> bool:
        """Whether a request means the neutral value by this one."""
        return self.off_from is not None and self.off_from <= value < self.low

    def check(self, name: str, value: Any) -> None:
        """Raises ConfigError if the parameter can't have this value."""
        if self.is_whole:
            _check_int(name, value, int(self.low), None if self.high is None else int(self.high))
        else:
            assert self.high is not None
            _check(name, value, self.low, self.high, is_open=self.is_open)


def _number(neutral: float | None, low: float, high: float | None = None, **how: Any) -> Any:
    return field(default=neutral, metadata={"number": Number(low, high, **how)})


def _row(neutral: float, low: float, high: float | None = None, **how: Any) -> Any:
    return _number(neutral, low, high, in_row=True, **how)


@dataclass(frozen=True)
class SamplingParams:
    """Everything that decides a reply besides the prompt.

    Order of operations: biases, penalties (repetition, presence, frequency), mask (vision tokens, ends before
    `min_tokens`, tokens that a grammar forbids), temperature, top-n-sigma, then top-k, top-p, min-p and typical-p on
    the remaining tokens, as in transformers' logits processors (generation/logits_process.py). Logprobs come from the
    raw logits, before all of these.

    Attributes:
        temperature: up to 1e-5 takes the likeliest token (greedy); above, the logits are divided by it.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; 1.0 keeps all.
        min_p: drop tokens less likely than this share of the likeliest one; 0.0 drops none.
        typical_p: keep the smallest set of tokens whose surprise is nearest to the entropy and whose probability
            reaches this; 1.0 keeps all. Locally typical sampling, arXiv:2202.00666, last as in transformers.
        top_n_sigma: keep tokens whose logit is no more than this many standard deviations of all logits below the
            highest; 0.0 keeps all. Masked tokens don't count. Top-nσ, arXiv:2411.07641, the first filter as in
            llama.cpp; the temperature doesn't change what it keeps.
        presence_penalty: subtracted once from the logit of each token generated so far.
        frequency_penalty: subtracted from a token's logit once for each time it was generated so far, at most 255
            times.
        repetition_penalty: divides (multiplies, if negative) the logits of tokens in the prompt or the reply.
        seed: of the reply's own random generator; None draws one, which the result reports.
        max_tokens: most tokens of a reply, thinking included; None goes up to the end of the context.
        stop: one or more strings that end the reply; they are not part of it. Only the answer is searched, not the
            thinking. An answer that follows a schema or a grammar ends where that does: `stop`, `stop_token_ids`,
            `min_tokens` and `ignore_eos` have no effect on it.
        thinking_budget: most tokens of thinking; 0 allows none, None doesn't limit it.
        json_schema: a JSON schema as JSON text, a dict or a type; stored as text. It constrains the answer, not the
            thinking, token by token. The answer satisfies it if the reply ends with "stop"; "length" means it was cut
            off. Needs the extra `schema`.
        grammar: another constraint of the answer, stored as text in llguidance's dialect of Lark. A compiled regular
            expression, a list of strings to choose from and GBNF become such a text. Needs the extra `schema`.
        min_tokens: least tokens of the reply, thinking included. Before that, neither the model's end nor one of
            `stop_token_ids` is chosen, and the text isn't searched for `stop`.
        ignore_eos: whether the reply continues past the model's own end token.
        stop_token_ids: ids that end the reply, wherever they come; their text is not part of it.
        logit_bias: -100 to 100 by token id, added to the logits; kept as pairs in the order of ids.
        logprobs: None reports no log probabilities; a number from 0 to 20 reports that of each token, and of so many of
            the likeliest tokens at its place.
    """

    temperature: float = _row(1.0, 0, 100, on_page=True, help="0 always takes the likeliest token.")
    top_k: int = _row(
        0, 0, is_whole=True, is_for_draws=True, on_page=True, off_from=-1, help="Keep so many of the likeliest tokens."
    )
    top_p: float = _row(
        1.0, 0, 1, is_open=True, is_for_draws=True, on_page=True, help="Keep the likeliest tokens up to this share."
    )
    min_p: float = _row(
        0.0, 0, 1, is_for_draws=True, on_page=True, help="Drop tokens below this share of the likeliest one."
    )
    typical_p: float = _row(
        1.0, 0, 1, is_open=True, is_for_draws=True, help="Keep the tokens of expected surprise up to this share."
    )
    top_n_sigma: float = _row(
        0.0, 0, 100, is_for_draws=True, off_from=-100, help="Keep tokens so many standard deviations below the best."
    )
    presence_penalty: float = _row(0.0, -10, 10, on_page=True, help="Above 0 avoids tokens of the reply.")
    frequency_penalty: float = _row(0.0, -10, 10, help="Above 0 avoids tokens by how often the reply has them.")
    repetition_penalty: float = _row(
        1.0, 0, 10, is_open=True, on_page=True, help="Above 1 avoids tokens of the prompt and the reply."
    )
    seed: int | None = _number(None, 0, 2**63 - 1, is_whole=True, is_for_draws=True, on_page=True)
    max_tokens: int | None = _number(None, 1, is_whole=True, on_page=True)
    stop: tuple[str, ...] = ()
    thinking_budget: int | None = _number(None, 0, is_whole=True, on_page=True)
    json_schema: str | None = None
    grammar: str | None = None
    min_tokens: int = _number(0, 0, is_whole=True)
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    logprobs: int | None = _number(None, 0, MAX_TOP_LOGPROBS, is_whole=True)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str | list):
            object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if isinstance(self.stop_token_ids, list):
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        object.__setattr__(self, "grammar", _grammar_text(self.grammar))
        for name, number in NUMBERS.items():
            if (value := getattr(self, name)) is not None or _NEUTRAL[name] is not None:
                number.check(name, value)
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise ConfigError(f"stop must be a string, or a list of strings, none of them empty; got {self.stop!r}.")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ConfigError(f"At most {MAX_STOP_STRINGS} stop strings are allowed; got {len(self.stop)}.")
        if self.json_schema is not None:
            _check_json_schema(self.json_schema)
            if self.grammar is not None:
                raise ConfigError("grammar can't be combined with json_schema: an answer follows one of them.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens must be max_tokens ({self.max_tokens}) at most; got {self.min_tokens}.")
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos must be True or False; got {self.ignore_eos!r}.")
        _check_ids(self.stop_token_ids)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature <= _MAX_GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def is_constrained(self) -> bool:
        """Whether the answer follows a schema or a grammar."""
        return self.json_schema is not None or self.grammar is not None

    @property
    def moves_end(self) -> tuple[str, ...]:
        """The fields set that could end a reply elsewhere than a grammar does; a constrained answer ignores them."""
        return tuple(name for name in ("stop", "stop_token_ids", "min_tokens", "ignore_eos") if getattr(self, name))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids named here, which must be ids of the model."""
        return (*self.stop_token_ids, *dict(self.logit_bias))

    def with_overrides(self, **changes: Any) -> SamplingParams:
        """A copy with the given values that aren't None."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    @classmethod
    def from_generation_config(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The defaults that a generation_config.json states; `do_sample: false` means greedy.

        Raises:
            ConfigError: a value can't be used.
        """
        if not values.get("do_sample", False):
            return cls(temperature=0.0, repetition_penalty=values.get("repetition_penalty") or 1.0)
        # transformers' own default; checkpoints that sample without naming top_k rely on it.
        given: dict[str, Any] = {"top_k": 50}
        given |= {name: values[name] for name in row_numbers() if values.get(name) is not None}
        if isinstance(given["top_k"], float) and given["top_k"].is_integer():
            given["top_k"] = int(given["top_k"])
        return cls(**given)


# The numeric parameters by name, in the order of the fields.
NUMBERS: Mapping[str, Number] = {
    each.name: each.metadata["number"] for each in fields(SamplingParams) if "number" in each.metadata
}
_NEUTRAL = {each.name: each.default for each in fields(SamplingParams)}


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams as keyword arguments; None keeps the model's default."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    top_n_sigma: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    seed: int | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    thinking_budget: int | None
    json_schema: Any
    grammar: Any
    min_tokens: int | None
    ignore_eos: bool | None
    stop_token_ids: Sequence[int] | None
    logit_bias: Mapping[int, float] | None
    logprobs: int | None


assert SamplingOptions.__annotations__.keys() == _NEUTRAL.keys(), "SamplingOptions names the fields of SamplingParams"


def row_numbers() -> dict[str, Number]:
    """The parameters that the kernels read from `SamplingRows`."""
    return {name: number for name, number in NUMBERS.items() if number.in_row}


def changed(params: SamplingParams) -> dict[str, Any]:
    """The fields that aren't at their neutral values."""
    return {name: value for name, neutral in _NEUTRAL.items() if (value := getattr(params, name)) != neutral}


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Reads the checkpoint's generation_config.json as a dict; empty if the file is missing.

    Raises:
        CheckpointError: the file isn't a JSON object.
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


def _check(name: str, value: float, low: float, high: float, *, is_open: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf
    if not is_number or value > high or value < low or (is_open and value == low):
        bound = "above" if is_open else "from"
        raise ConfigError(f"{name} must be a number {bound} {low:g} to {high:g}; got {value!r}.")


def _schema_text(schema: Any) -> Any:
    """A schema as JSON text; anything else unchanged."""
    if is_type(schema):
        schema = schema_of(schema)
    if not isinstance(schema, Mapping):
        return schema
    try:
        return json.dumps(dict(schema), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"json_schema can't be written as JSON ({error}).") from None


def _grammar_text(grammar: Any) -> str | None:
    """A grammar as Lark text."""
    if grammar is None:
        return None
    if isinstance(grammar, re.Pattern):
        text = grammar_of_pattern(grammar)
    elif isinstance(grammar, list | tuple):
        text = grammar_of_choices(grammar)
    elif isinstance(grammar, str) and grammar.strip():
        text = lark_of(grammar)
    else:
        what = "a text in Lark or GBNF, a compiled regular expression, or a list of strings to choose from"
        raise ConfigError(f"grammar must be {what}; got {grammar!r:.80}.")
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ConfigError(f"grammar may have {MAX_GRAMMAR_CHARS:,} characters; it has {len(text):,}.")
    return text


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
        what = f"a dict, a type, or JSON text of at most {MAX_JSON_SCHEMA_CHARS:,} characters"
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
