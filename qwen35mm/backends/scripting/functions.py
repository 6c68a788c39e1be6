"""Python functions as tools: their definitions from signature and docstring, and their calls.

pydantic reads the annotations, checks a call's arguments and converts them. Whatever fails becomes the call's result in
words, so that the model can try again.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from qwen35mm.contract import Image, Message, Result, Text, ToolCall, Video
from qwen35mm.contract.parts import is_picture
from qwen35mm.errors import MissingExtraError, PromptError

# How often a question's tools run before the answer has to come.
MAX_ROUNDS = 10

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SECTION = re.compile(
    r"\n[ \t]*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Attributes|Notes?):?[ \t]*\n"
)
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(\([^)]*\))?\s*:\s*(.*)")
_PARAM_FIELD = re.compile(r":param (?:[^:\n]+ )?(\w+):\s*(.+(?:\n[ \t]+[^:\s].*)*)")


class FunctionTool(dict[str, Any]):
    """A tool's definition in OpenAI's form, with the function that does it."""

    run: Callable[[Mapping[str, Any]], Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionTool:
        """
        Raises:
            PromptError: the function has no name that a tool can have, or parameters that JSON can't fill.
            MissingExtraError: pydantic isn't installed.
        """
        try:
            from pydantic import TypeAdapter
            from pydantic.errors import PydanticUserError
            from pydantic_core import ArgsKwargs
        except ModuleNotFoundError:
            raise MissingExtraError("A function as a tool", "schema") from None
        name = getattr(function, "__name__", None)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PromptError(f"A function that is a tool needs a name of letters, digits and _; got {name!r}.")
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(cast("Any", function))
            parameters = adapter.json_schema()
        # An annotation may also name something that isn't there.
        except (PydanticUserError, NameError, TypeError) as error:
            reason = str(error).split("\n", 1)[0]
            raise PromptError(f"The parameters of the function {name!r} have no JSON schema: {reason}") from None
        if parameters.get("type") != "object":
            raise PromptError(f"The function {name!r} takes parameters by place; a tool's are all named.")
        description, arguments = described(inspect.getdoc(function) or "")
        for parameter, schema in parameters.get("properties", {}).items():
            if parameter in arguments:
                schema.setdefault("description", arguments[parameter])
        parameters = _without_titles(parameters)
        made = cls(type="function", function={"name": name, "description": description, "parameters": parameters})
        made.run = lambda given: adapter.validate_python(ArgsKwargs((), dict(given)))
        return made

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        # Another process only sees the definition.
        return dict, (dict(self),)

    @property
    def name(self) -> str:
        return self["function"]["name"]


@dataclass(frozen=True, eq=False)
class ToolResult:
    """What a call gave, as the model will see it.

    Attributes:
        value: the function's own result; the exception if it failed.
        message: of role "tool".
    """

    call: ToolCall
    value: Any
    message: Message


def calls_to_run(result: Result, tools: Sequence[Mapping[str, Any]]) -> tuple[ToolCall, ...]:
    """The calls of an answer, if functions do all of them; none if the caller has to."""
    given = {tool["function"]["name"] for tool in tools if not isinstance(tool, FunctionTool)}
    has_functions = any(isinstance(tool, FunctionTool) for tool in tools)
    if not has_functions or result.finish_reason != "stop" or any(call.name in given for call in result.tool_calls):
        return ()
    return result.tool_calls


def run_calls(
    calls: Sequence[ToolCall],
    tools: Sequence[Mapping[str, Any]],
    wait: Callable[[Coroutine[Any, Any, Any]], Any],
) -> list[ToolResult]:
    """Runs the calls one after the other in this thread.

    Args:
        wait: waits for the result of an async function.
    """
    return [_result(call, _attempt(call, tools, wait)) for call in calls]


async def arun_calls(calls: Sequence[ToolCall], tools: Sequence[Mapping[str, Any]]) -> list[ToolResult]:
    """Runs the calls at the same time: async functions in this loop, others in threads."""

    async def run(call: ToolCall) -> ToolResult:
        value = await asyncio.to_thread(_attempt, call, tools, None)
        if inspect.isawaitable(value):
            try:
                value = await value
            except Exception as error:
                value = error
        return _result(call, value)

    return list(await asyncio.gather(*map(run, calls)))


def content_of(value: Any) -> str | tuple[Text | Image | Video, ...]:
    """A result as a message's content: pictures as they are, strings unchanged, anything else as JSON.

    Raises:
        PromptError: it can't be written as JSON.
    """
    if isinstance(value, str):
        return value
    pieces = value if isinstance(value, list | tuple) else (value,)
    if any(isinstance(piece, Image | Video) or is_picture(piece) for piece in pieces):
        parts = (Image(piece) if is_picture(piece) else piece for piece in pieces)
        return tuple(part if isinstance(part, Image | Video) else Text(_text_of(part)) for part in parts)
    return _text_of(value)


def _attempt(
    call: ToolCall, tools: Sequence[Mapping[str, Any]], wait: Callable[[Coroutine[Any, Any, Any]], Any] | None
) -> Any:
    """The function's result, or its exception; without `wait` also the awaitable of an async one."""
    known = {tool.name: tool for tool in tools if isinstance(tool, FunctionTool)}
    if call.name not in known:
        return LookupError(f"there is no tool {call.name!r}; the tools are {', '.join(sorted(known))}")
    try:
        value = known[call.name].run(call.arguments)
        return wait(_awaited(value)) if wait is not None and inspect.isawaitable(value) else value
    except Exception as error:
        return error


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _result(call: ToolCall, value: Any) -> ToolResult:
    try:
        content = f"Error: {_in_words(value)}" if isinstance(value, Exception) else content_of(value)
        message = Message("tool", content, tool_call_id=call.id, name=call.name)
    except PromptError as error:
        value, message = error, Message("tool", f"Error: {error}", tool_call_id=call.id, name=call.name)
    return ToolResult(call, value, message)


def _in_words(error: Exception) -> str:
    """An error for the model; of pydantic's each fault in a line."""
    faults: Any = getattr(error, "errors", None)
    if type(error).__name__ == "ValidationError" and callable(faults):
        return "; ".join(
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in cast("Any", faults)(include_url=False)
        )
    if isinstance(error, LookupError) and not isinstance(error, KeyError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=_as_json)
    except (TypeError, ValueError, RecursionError):
        what = type(value).__name__
        raise PromptError(f"A tool's result must be a string, JSON values or pictures; got {what}.") from None


def _as_json(value: Any) -> Any:
    """Dataclasses, pydantic's models, dates, sets and arrays as JSON values; raises ValueError for anything else."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    try:
        from pydantic_core import to_jsonable_python
    except ModuleNotFoundError:
        raise TypeError from None
    return to_jsonable_python(value)


def described(doc: str) -> tuple[str, dict[str, str]]:
    """A docstring's description of the function, and those of its parameters, in Google's or Sphinx's form."""
    pieces = _SECTION.split("\n" + doc + "\n")
    description = pieces[0].split("\n:param", 1)[0]
    arguments = {name: " ".join(text.split()) for name, text in _PARAM_FIELD.findall(doc)}
    for title, text in zip(pieces[1::2], pieces[2::2], strict=True):
        if title in ("Args", "Arguments", "Parameters"):
            arguments |= _arguments(text)
    return " ".join(description.split()), arguments


def _arguments(text: str) -> dict[str, str]:
    """Of lines `name (type): what it is`; what is indented deeper goes on."""
    found: dict[str, str] = {}
    lines = [line for line in text.split("\n") if line.strip()]
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    name = None
    for line in lines:
        match = _ARGUMENT.match(line.strip()) if len(line) - len(line.lstrip()) == indent else None
        if match is not None:
            name = match[1]
            found[name] = match[3]
        elif name is not None:
            found[name] += " " + line.strip()
    return found


def _without_titles(schema: Any) -> Any:
    """A schema without pydantic's titles, which repeat the names."""
    if isinstance(schema, list):
        return [_without_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        # A property may be called `title`; its schema is no string.
        key: {name: _without_titles(each) for name, each in value.items()}
        if key == "properties"
        else _without_titles(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }
