"""Grammars of replies that call tools, in the form that a checkpoint's template uses for calls.

In the XML form a parameter that may be a string is free text up to `</parameter>`, or one of its schema's listed
strings; every other parameter is JSON that follows its schema. In the JSON form the arguments follow the whole schema.
In both, parameters come in the schema's order, and the reply ends after the calls.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qwen35mm.contract import GenerationRequest, SamplingParams
from qwen35mm.engine.grammar import check_constraint, embedded, first_refused, refusal, refusal_of_tools
from qwen35mm.engine.grammar_check import Kind
from qwen35mm.errors import RequestError
from qwen35mm.model import LoadedModel
from qwen35mm.pools import GRAMMARS
from qwen35mm.prompt.call_values import kinds_of, resolved
from qwen35mm.prompt.calls import CLOSE, OPEN, CallForm, form_of
from qwen35mm.tokenizer import Tokenizer

MAX_CHARS = 500_000
# Names that a call can be parsed back with.
_NAME = re.compile(r"[^>\s]([^>\n]*[^>\s])?")
_END = "</parameter>"
# Keywords that a schema of parameters may have if each parameter is constrained separately.
_TOP = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
_NOTES = {"title", "description", "default", "examples", "deprecated", "$comment"}
_OF_TEXTS = {"minLength", "maxLength", "pattern", "format", "not", "if", "allOf", "contentEncoding", "contentMediaType"}
_ANY_PARAMETER = '("<parameter=" /[A-Za-z_][A-Za-z0-9_.-]*/ ">\\n" text "\\n")*'


@dataclass(frozen=True)
class CallGrammar:
    """The grammar of an answer's calls.

    Attributes:
        lark: in llguidance's dialect of Lark.
        unenforced: what of strict tools' schemas it can't enforce, in words.
    """

    lark: str
    unenforced: tuple[str, ...] = ()


async def constrained_calls(
    request: GenerationRequest, params: SamplingParams, loaded: LoadedModel, *, person: str | None = None
) -> CallGrammar | None:
    """The grammar that constrains an answer's calls; None if they are unconstrained.

    `tool_choice` "required" asks for at least one call, a tool's name for one call of that tool. With "auto" the answer
    is constrained if a tool is strict or a JSON schema is set: calls are calls of these tools, and the rest is free
    text or follows the schema. With a client's grammar and "auto", the answer follows that grammar and calls nothing.
    Tools' schemas are enforced as far as possible; `unenforced` says what of a strict one isn't.

    Threads check the schemas, including the answer's.

    Args:
        params: the reply's; the model's defaults if the request has none.
        person: who asks, if requests have names.

    Raises:
        RequestError: an unknown choice, or what `check_json_schema` or `grammar_of_calls` raises.
        MissingExtraError: llguidance isn't installed.
        EngineError: the schemas couldn't be checked.
    """
    schema, choice, tools = params.json_schema, request.tool_choice, request.shown_tools
    if params.is_constrained:
        await GRAMMARS.run_for(person, check_constraint, params)
    functions = [tool.get("function", tool) for tool in tools]
    named = [tool for tool, function in zip(tools, functions, strict=True) if function.get("name") == choice]
    if choice not in ("auto", "none", "required") and not named:
        raise RequestError(f"tool_choice must be auto, none, required or a tool's name; got {choice[:80]!r}.")
    is_strict = any(function.get("strict") for function in functions) or schema is not None
    if choice == "none" or (choice == "auto" and (params.grammar is not None or not (tools and is_strict))):
        return None
    if not tools:
        raise RequestError("tool_choice is required, and there are no tools to call.")
    form = form_of(loaded.template.source)
    if form is None:
        raise RequestError(
            "This model's chat template writes no tool calls in a known form: replies can't be constrained."
        )
    chosen = tools if choice in ("auto", "required") else tuple(named[:1])
    work = functools.partial(
        grammar_of_calls,
        chosen,
        form,
        loaded.tokenizer,
        several=request.parallel_tool_calls and chosen is tools,
        only_calls=choice != "auto",
        json_schema=schema,
    )
    return await GRAMMARS.run_for(person, work)


def grammar_of_calls(
    tools: Sequence[Mapping[str, Any]],
    form: CallForm,
    tokenizer: Tokenizer,
    *,
    several: bool,
    only_calls: bool,
    json_schema: str | None = None,
    loosened: bool = False,
) -> CallGrammar:
    """The grammar of an answer's calls.

    Args:
        several: whether several calls are allowed.
        only_calls: whether the answer must be calls, at least one.
        json_schema: what an answer without calls follows; None allows free text, and calls after it.
        loosened: whether to ignore what of strict tools' schemas can't be enforced.

    Raises:
        RequestError: a tool can't be called in this form, or its schema can't be read.
        MissingExtraError: llguidance isn't installed.
    """
    write = {"xml": _xml_function, "json": _json_function}[form]
    functions = [_Function.of(tool, loosened=loosened) for tool in tools]
    _check_num_chars(sum(function.num_chars for function in functions))
    marks = [_mark(mark, tokenizer) for mark in (OPEN, CLOSE)]
    call = f'"\\n" ({" | ".join(f"f{at}" for at in range(len(functions)))}) "\\n" {marks[1]}'
    more = '("\\n" call)*' if several else ""
    lines = [f"call: {marks[0]} {call}", f"calls: call {more}", f"text[suffix={_quoted(_END)}]: /(?s:.*)/"]
    if only_calls:
        lines.insert(0, "start: calls")
    elif json_schema is not None:
        answer = embedded(json.loads(json_schema), lenient=False)
        lines[:0] = ["start: answer | calls", f"answer: {answer}"]
    else:
        # Free text must not look like an unconstrained call.
        free = f"TEXT: /(?s:.+)/ & ~/(?s:.*){OPEN}(?s:.*)/"
        before = f"before[suffix={_quoted(OPEN)}]: /(?s:.*)/"
        as_text = marks[0] == _quoted(OPEN)
        start = f"TEXT? | before {call} {more}" if as_text else "TEXT? calls?"
        lines[:0] = [f"start: {start}", free, *([before] if as_text else [])]
    for at, function in enumerate(functions):
        lines += write(f"f{at}", function)
    grammar = "\n".join(lines)
    _check_num_chars(len(grammar))
    schemas = [held for function in functions for held in function.held]
    parts: list[tuple[Kind, str]] = [(held.kind, held.text) for held in schemas]
    refused = first_refused(*parts, ("lark", grammar))
    if refused is None:
        return CallGrammar(grammar, tuple(said for function in functions for said in function.unenforced))
    at, reason = refused
    if at == len(schemas):
        raise refusal_of_tools(reason)
    if schemas[at].kind == "lenient":
        raise RequestError(f"{schemas[at].place}: {refusal(reason)}")
    # What can be enforced is enforced in both ways.
    options = {"several": several, "only_calls": only_calls, "json_schema": json_schema}
    found = grammar_of_calls(tools, form, tokenizer, **options, loosened=True)
    return replace(found, unenforced=(*found.unenforced, f"{schemas[at].place}: {reason}"))


def _check_num_chars(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise RequestError(
            f"Replies can't be constrained to tools of this length: {MAX_CHARS:,} characters are the most."
        )


@dataclass(frozen=True)
class _Held:
    """A schema in a grammar of calls, and what it belongs to, for messages."""

    place: str
    kind: Kind
    text: str


@dataclass(frozen=True)
class _Function:
    name: str
    schema: Mapping[str, Any]
    strict: bool
    lenient: bool
    num_chars: int
    held: list[_Held] = field(default_factory=list[_Held])
    unenforced: list[str] = field(default_factory=list[str])

    @classmethod
    def of(cls, tool: Mapping[str, Any], *, loosened: bool) -> _Function:
        function = tool.get("function", tool)
        name, schema = function.get("name"), function.get("parameters")
        _check_name(name, f"The tool {name!r}")
        schema = {"type": "object", "properties": {}, "additionalProperties": False} if schema is None else schema
        # First, because later searches visit a schema once per reference to it.
        try:
            num_chars = len(json.dumps(schema))
        except RecursionError:
            raise RequestError(f"The tool {name!r}: its schema is nested too deeply.") from None
        if not _is_of_object(schema):
            raise RequestError(f"The tool {name!r}: its parameters must be a JSON schema of an object.")
        strict = bool(function.get("strict"))
        return cls(name, schema, strict, loosened or not strict, num_chars)


def _is_of_object(schema: Any) -> bool:
    if not isinstance(schema, Mapping) or kinds_of(schema, schema) not in ({"object"}, set()):
        return False
    required = schema.get("required", [])
    names = isinstance(required, list) and all(isinstance(each, str) for each in required)
    return names and isinstance(schema.get("properties", {}), Mapping)


def _json_function(rule: str, function: _Function) -> list[str]:
    schema = dict(function.schema) | {"type": "object"}
    value = _held(schema, function, f"The tool {function.name!r}")
    before = f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "arguments": '
    return [f'{rule}: {_quoted(before)} {rule}a "}}"', f"{rule}a: {value}"]


def _xml_function(rule: str, function: _Function) -> list[str]:
    schema = function.schema
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if function.strict and (left := schema.keys() - _TOP - _NOTES):
        function.unenforced.append(f"The tool {function.name!r}: {', '.join(sorted(left))} of its parameters")
    lines, parts = [], []
    for at, name in enumerate(dict.fromkeys([*properties, *required])):
        place = f"The parameter {name!r} of the tool {function.name!r}"
        _check_name(name, place)
        if properties.get(name) is False:
            if name in required:
                raise RequestError(f"{place} is required, but no value satisfies its schema.")
            continue
        value = _xml_value(properties.get(name), function, place, lines, f"{rule}p{at}".upper())
        lines.append(f"{rule}p{at}: {_quoted(f'<parameter={name}>')} {value}")
        parts.append(f"{rule}p{at}" if name in required else f"{rule}p{at}?")
    if not parts and schema.get("additionalProperties", True) is not False:
        parts = [_ANY_PARAMETER]
    return [f'{rule}: {_quoted(f"<function={function.name}>")} "\\n" {" ".join(parts)} "</function>"', *lines]


def _xml_value(given: Any, function: _Function, place: str, lines: list[str], name: str) -> str:
    """A parameter's value with its line ends and closing mark.

    Args:
        lines: gets a terminal of this name for listed values.
    """
    schema = resolved(given, function.schema)
    schema = schema if isinstance(schema, Mapping) else {}
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list) and listed:
        texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in listed]
        if unreadable := next((text for text in texts if _END in text), None):
            raise RequestError(f"{place}: no call can hold the value {unreadable[:80]!r}.")
        # One terminal up to the mark, so that thousands of texts are one automaton and one may begin another.
        lines.append(f'{name}: ({" | ".join(map(_quoted, texts))}) "\\n{_END}\\n"')
        return f'"\\n" {name}'
    kinds = kinds_of(schema, function.schema)
    if kinds and "string" not in kinds:
        return f'"\\n" {_nested(given, function, place)} "\\n{_END}\\n"'
    if function.strict and (left := _said_of_texts(schema, function.schema)):
        function.unenforced.append(f"{place}: {', '.join(left)}")
    elif function.strict and isinstance(given, Mapping):
        _nested(given, function, place)  # raises if it is no schema
    return '"\\n" text "\\n"'


def _nested(given: Mapping[str, Any], function: _Function, place: str) -> str:
    """A parameter's schema with the definitions that it may refer to."""
    definitions = {name: function.schema[name] for name in ("$defs", "definitions") if name in function.schema}
    return _held({**definitions, **given}, function, place)


def _held(schema: dict[str, Any], function: _Function, place: str) -> str:
    function.held.append(_Held(place, "lenient" if function.lenient else "strict", json.dumps(schema)))
    return embedded(schema, lenient=function.lenient)


def _said_of_texts(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[str]:
    """The schema's keywords about strings that can't be enforced, including its choices'."""
    choices = [each for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list) for each in schema[name]]
    found = set(schema) & _OF_TEXTS
    for choice in choices:
        choice = resolved(choice, root)
        if isinstance(choice, Mapping) and kinds_of(choice, root) & {"string"}:
            found |= set(choice) & (_OF_TEXTS | {"enum", "const"})
    return sorted(found)


def _check_name(name: Any, place: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"{place} can't be called: its name must be a line without '>', and no space at its ends.")


def _mark(mark: str, tokenizer: Tokenizer) -> str:
    """A mark as its control token if it is one, else as text."""
    token_id = tokenizer.control_ids.get(mark)
    return _quoted(mark) if token_id is None else f"<[{token_id}]>"


def _quoted(text: str) -> str:
    return json.dumps(text)
