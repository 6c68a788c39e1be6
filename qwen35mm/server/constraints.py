"""What constrains an answer, from all the ways in which clients say it: OpenAI's `response_format`, and what vLLM,
SGLang, llama.cpp, Fireworks, Together and Ollama add."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qwen35mm.contract import GenerationRequest, SamplingParams
from qwen35mm.contract.grammars import grammar_of_choices, grammar_of_regex, lark_of
from qwen35mm.errors import ConfigError
from qwen35mm.outside_json import JsonLimitError, load_json
from qwen35mm.server.errors import ApiError

# Of a schema that comes as JSON text.
MAX_SCHEMA_CHARS = 1 << 20
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_KINDS = "text, json_object, json_schema, regex, choice or grammar"


@dataclass(frozen=True)
class Constraint:
    """What an answer follows; one of the two is None.

    Attributes:
        json_schema: a JSON schema as text.
        grammar: a grammar in llguidance's dialect of Lark.
    """

    json_schema: str | None = None
    grammar: str | None = None


def constraint_of(said: Mapping[str, Any]) -> Constraint | None:
    """The constraint that a request asks for; None if there is none.

    Args:
        said: values by the names of `NAMES`; the others and None values are ignored.

    Raises:
        ApiError: 400, a value can't be read, or two of them ask for different answers.
    """
    found: dict[str, Constraint] = {}
    for name, read in _READ.items():
        if said.get(name) is not None:
            try:
                constraint = read(said[name])
            except ConfigError as error:
                raise ApiError(400, f"{name}: {str(error).removeprefix('grammar: ')}", name) from None
            except _OtherError as error:
                raise ApiError(400, f"{name} {error}", name) from None
            if constraint is not None:
                found[name] = constraint
    if len(set(found.values())) > 1:
        first, second, *_ = found
        # `json_object` says less than a schema beside it.
        loose = [name for name, each in found.items() if each == _any_object()]
        if len(found) == 2 and len(loose) == 1:
            return next(each for name, each in found.items() if name not in loose)
        raise ApiError(400, f"{first} and {second} ask for different answers. Leave one of them out.", second)
    return next(iter(found.values()), None)


def without_effect(params: SamplingParams, request: GenerationRequest) -> tuple[str, ...]:
    """The fields that have no effect because a constraint ends the reply: see `SamplingParams`.

    In free text before calls, `stop` and `stop_token_ids` have one.
    """
    if params.is_constrained or (request.tool_choice not in ("auto", "none") and request.tools):
        return params.moves_end
    functions = [tool.get("function", tool) for tool in request.shown_tools or ()]
    if request.tool_choice == "auto" and any(function.get("strict") for function in functions):
        return tuple(name for name in params.moves_end if name not in ("stop", "stop_token_ids"))
    return ()


class _OtherError(Exception):
    """A value of another form; the argument continues the field's name."""


def _any_object() -> Constraint:
    return Constraint(json.dumps(_ANY_OBJECT))


def _schema(value: Any) -> Constraint:
    """A JSON schema as an object or as JSON text."""
    if isinstance(value, str):
        if len(value) > MAX_SCHEMA_CHARS:
            raise _OtherError(f"may have {MAX_SCHEMA_CHARS:,} characters; it has {len(value):,}.")
        try:
            value = load_json(value)
        except JsonLimitError as error:
            raise _OtherError(f"must be a JSON schema; {error}") from None
        except ValueError:
            raise _OtherError("must be a JSON schema; this text isn't JSON.") from None
    if isinstance(value, bool):
        # "Anything" and "nothing"; only the first can be written.
        value = {} if value else {"not": {}}
    if not isinstance(value, dict):
        raise _OtherError(f"must be a JSON schema: an object, or its text; got {type(value).__name__}.")
    return Constraint(json.dumps(value))


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _OtherError(f"must be a text that isn't empty; got {value!r:.80}.")
    return value


def _regex(value: Any) -> Constraint:
    return Constraint(grammar=grammar_of_regex(_text(value)))


def _grammar(value: Any) -> Constraint:
    """GBNF or Lark."""
    return Constraint(grammar=lark_of(_text(value)))


def _choice(value: Any) -> Constraint:
    if not isinstance(value, list):
        raise _OtherError(f"must be a list of texts to choose from; got {type(value).__name__}.")
    return Constraint(grammar=grammar_of_choices(value))


def _response_format(value: Any) -> Constraint | None:
    if not isinstance(value, Mapping):
        raise _OtherError(f"must be an object with a type: {_KINDS}.")
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object" | "json_schema", "schema": schema} if schema is not None:
            return _schema(schema)
        case {"type": "json_object"}:
            return _any_object()
        case {"type": "json_schema", "json_schema": {"schema": schema}} if schema is not None:
            return _schema(schema)
        case {"type": "regex", "pattern": pattern} | {"type": "regex", "regex": pattern}:
            return _regex(pattern)
        case {"type": "choice", "choice": choices} | {"type": "choice", "choices": choices}:
            return _choice(choices)
        case {"type": "grammar" | "ebnf", "grammar": grammar}:
            return _grammar(grammar)
        case {"type": "structural_tag"}:
            raise _OtherError("of type structural_tag can't be enforced here. Take strict tools, or a grammar.")
    raise _OtherError(f"must be of the type {_KINDS}, with what belongs to it; json_schema comes with a schema.")


def _structured_outputs(value: Any) -> Constraint | None:
    if not isinstance(value, Mapping):
        raise _OtherError("must be an object with json, json_object, regex, choice or grammar.")
    said = {name: each for name, each in value.items() if each not in (None, False)}
    if "structural_tag" in said:
        raise _OtherError("with structural_tag can't be enforced here. Take strict tools, or a grammar.")
    if unknown := [name for name in said if name not in _OUTPUTS and name not in _STYLES]:
        raise _OtherError(f"with {unknown[0]} isn't known here; json, json_object, regex, choice and grammar are.")
    kinds = [name for name in said if name in _OUTPUTS]
    if len(kinds) > 1:
        raise _OtherError(f"asks for {kinds[0]} and {kinds[1]}; an answer follows one of them.")
    return _OUTPUTS[kinds[0]](said[kinds[0]]) if kinds else None


def _format(value: Any) -> Constraint | None:
    """Ollama's: "json", a schema, or "" for none."""
    if value in ("", "json"):
        return _any_object() if value else None
    return _schema(value)


# How the answer is written, which a grammar here leaves to the model.
_STYLES = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback", "whitespace_pattern")
_OUTPUTS: Mapping[str, Callable[[Any], Constraint]] = {
    "json": _schema,
    "json_object": lambda _: _any_object(),
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_READ: Mapping[str, Callable[[Any], Constraint | None]] = {
    "response_format": _response_format,
    # That of Responses, already read.
    "text.format": _schema,
    # vLLM's, and its earlier names.
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    # SGLang's and llama.cpp's.
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _grammar,
    "grammar": _grammar,
    # Ollama's.
    "format": _format,
}
# Fields that say what an answer follows.
NAMES = tuple(_READ)
