"""Fields that OpenAI's protocols share, with vLLM's and llama.cpp's additions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from qwen35mm.contract import SamplingParams
from qwen35mm.contract.sampling import MAX_STOP_STRINGS, NUMBERS
from qwen35mm.contract.sampling import Number as SamplingNumber
from qwen35mm.engine import check_token_ids
from qwen35mm.errors import ConfigError, RequestError
from qwen35mm.model import LoadedModel
from qwen35mm.server import constraints
from qwen35mm.server.errors import ApiError
from qwen35mm.server.notes import UNSUPPORTED, Notes
from qwen35mm.server.other_names import as_switch, in_our_names

# Values aren't converted. Unknown fields are noted; see `Notes.ignore_extras`.
STRICT = ConfigDict(extra="allow", strict=True)
# An object or its text.
JsonSchema = dict[str, Any] | str
Number = Annotated[float, Field(allow_inf_nan=False)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Limits for thinking tokens; None is no limit.
EFFORTS = {"none": 0, "minimal": 512, "low": 1024, "medium": 4096, "high": None, "xhigh": None, "max": None}
# The protocols have fields of their own for these.
_ASKED_OTHERWISE = ("max_tokens", "logprobs")
_NUMBERS = {name: number for name, number in NUMBERS.items() if name not in _ASKED_OTHERWISE}
_NEUTRAL = SamplingParams()
# Fields that describe a request; the model doesn't see them.
_DESCRIBING: dict[str, type] = {"user": str, "safety_identifier": str, "prompt_cache_key": str, "metadata": dict}
# Values of a field that ask for nothing.
Values = tuple[Any, ...]


_WHOLE = {"type": "integer", "minimum": 1, "exclusiveMaximum": 1e12}
_MEDIA = {
    "properties": {
        "fps": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e12},
        **dict.fromkeys(("num_frames", "max_frames", "max_pixels"), _WHOLE),
    },
    "additionalProperties": False,
}


def told(**limits: Any) -> Any:
    """Limits for the OpenAPI document only; SamplingParams checks the values."""
    return Field(json_schema_extra=limits)


def _field_of(name: str, number: SamplingNumber) -> Any:
    low = number.low if number.off_from is None else number.off_from
    # `in_our_names` reads a top_p of 0.
    limits = {"exclusiveMinimum" if number.is_open and name != "top_p" else "minimum": low}
    if number.high is not None:
        limits["maximum"] = number.high
    kind: Any = Annotated[int if number.is_whole else Number, told(**limits)]
    return kind | None


if TYPE_CHECKING:
    _NumberFields = BaseModel
else:
    _NumberFields = create_model(
        "_NumberFields", **{name: (_field_of(name, number), None) for name, number in _NUMBERS.items()}
    )


class RequestFields(_NumberFields):
    """The numbers are those of SamplingParams. Unknown fields are noted; each protocol's REFUSED names those that are
    refused."""

    model_config = STRICT

    model: str | None = None
    stream: bool | None = None
    # Empty ones and nulls are dropped before.
    stop: str | Annotated[list[str | None], told(maxItems=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, Number], told(propertyNames={"pattern": "^[0-9]{1,9}$"})] | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: Annotated[dict[str, Any], told(**_MEDIA)] | None = None
    # What the answer follows, in the words of vLLM, SGLang, llama.cpp and Ollama: see `constraints`.
    structured_outputs: dict[str, Any] | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: JsonSchema | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    format: JsonSchema | None = None
    cache_salt: Annotated[str, Field(max_length=200)] | None = None
    # See _DESCRIBING.
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: str | None = None

    def thinks(self, effort: Effort | None) -> bool | None:
        """Whether the model thinks first; None leaves it to the template."""
        said = as_switch((self.chat_template_kwargs or {}).get("enable_thinking"))
        if said is not None and not isinstance(said, bool):
            raise ApiError(400, f"enable_thinking must be true or false; got {said!r:.40}.", "chat_template_kwargs")
        if said is None and effort is not None:
            return effort != "none"
        return said

    def template_options(self, effort: Effort | None, loaded: LoadedModel, notes: Notes) -> dict[str, Any]:
        """The values of the chat template's switches. Notes those that the template doesn't read."""
        given = {name: value for name, value in (self.chat_template_kwargs or {}).items() if value is not None}
        for name in sorted(given.keys() - loaded.template.switches - {"enable_thinking"}):
            notes.ignore(f"chat_template_kwargs.{name}", "isn't read by the model's chat template")
        return given if effort is None else {"reasoning_effort": effort, **given}

    def params(
        self,
        loaded: LoadedModel,
        *,
        max_tokens: int | None,
        effort: Effort | None,
        json_schema: str | None,
        logprobs: int | None = None,
    ) -> SamplingParams:
        """The sampling parameters; the checkpoint's own values fill the rest. `check_constraints` checks the schema.

        Args:
            json_schema: the answer's, if the protocol has its own place for it.

        Raises:
            ApiError: 400, a field can't be used; says which and why.
        """
        changes: dict[str, Any] = {name: getattr(self, name) for name in _NUMBERS}
        for name, number in _NUMBERS.items():
            if changes[name] is not None and number.is_off(changes[name]):
                changes[name] = getattr(_NEUTRAL, name)
        if changes["thinking_budget"] is None:
            changes["thinking_budget"] = EFFORTS[effort or "high"]
        changes |= {"max_tokens": max_tokens, "ignore_eos": self.ignore_eos}
        if self.stop:
            changes["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(filter(None, self.stop))
        changes |= {"stop_token_ids": _tuple(self.stop_token_ids), "logit_bias": self._biases()}
        said = {name: getattr(self, name, None) for name in constraints.NAMES} | {"text.format": json_schema}
        constraint = constraints.constraint_of(said) or constraints.Constraint()
        changes |= {"json_schema": constraint.json_schema, "grammar": constraint.grammar, "logprobs": logprobs}
        try:
            params = loaded.generation.with_overrides(**changes)
            check_token_ids(params, loaded.config.text.vocab_size)
        except (ConfigError, RequestError) as error:
            named = max((name for name in changes if str(error).startswith(name)), key=len, default=None)
            raise ApiError(400, str(error), named) from None
        return params

    def _biases(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        for token_id in self.logit_bias:
            if not (token_id.isascii() and token_id.isdecimal() and len(token_id) < 10):
                raise ApiError(400, f"logit_bias must have token ids for names; got {token_id[:40]!r}.", "logit_bias")
        return {int(token_id): bias for token_id, bias in self.logit_bias.items()}


def _tuple(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def known_fields(
    body: dict[str, Any],
    notes: Notes,
    *,
    hints: Mapping[str, Values],
    refused: Mapping[str, Values],
    can_write_nothing: bool = False,
) -> dict[str, Any]:
    """Drops null fields and those that have no effect, and reads the names of other servers.

    Args:
        hints: fields that may be ignored, each with the values that ask for nothing: other values are noted.
        refused: fields without which the answer would mean something else, each with the values that ask for nothing.
        can_write_nothing: see `in_our_names`.

    Raises:
        ApiError: 400, a field asks for something that can't be done.
    """
    for name, harmless in (*hints.items(), *refused.items()):
        value = body.pop(name, None)
        # In Python, True == 1.
        if value is None or any(value == each and _is_bool(value) == _is_bool(each) for each in harmless):
            continue
        if name in refused:
            raise ApiError(400, f"{name} isn't supported here. Leave it out.", name, "unsupported_field")
        notes.ignore(name, UNSUPPORTED)
    body = {name: value for name, value in body.items() if value is not None}
    for name, kind in _DESCRIBING.items():
        if name in body and not isinstance(body[name], kind):
            notes.ignore(name, f"isn't {'an object' if kind is dict else 'a text'}")
            del body[name]
    return in_our_names(body, can_write_nothing=can_write_nothing)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)
