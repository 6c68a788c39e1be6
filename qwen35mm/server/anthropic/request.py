"""Anthropic's messages: from a request's body to a `GenerationRequest`."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from qwen35mm.contract import (
    GenerationRequest,
    Image,
    Message,
    SamplingParams,
    Text,
    ToolCall,
)
from qwen35mm.errors import ConfigError
from qwen35mm.server.errors import ApiError
from qwen35mm.server.fields import MAX_TOOLS, STRICT, FunctionName, Number
from qwen35mm.server.generation import ServedBackend, check_constraints, tenant_of
from qwen35mm.server.keys import Caller
from qwen35mm.server.notes import Notes
from qwen35mm.server.parts import Parts, Sources
from qwen35mm.server.shapes import AnthropicMessage, Described, TextBlock


class Thinking(BaseModel):
    model_config = STRICT

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class Tool(BaseModel):
    model_config = STRICT

    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] = "custom"
    strict: bool | None = None


class ToolChoice(BaseModel):
    model_config = STRICT

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @property
    def choice(self) -> str:
        """The choice in the form that the backend's `stream` takes."""
        return {"any": "required", "tool": self.name or ""}.get(self.type, self.type)


class CountRequest(BaseModel):
    """The body of POST /v1/messages/count_tokens."""

    model_config = STRICT

    model: str
    messages: Annotated[
        list[Annotated[dict[str, Any], Described(AnthropicMessage)]], Field(min_length=1, max_length=10_000)
    ]
    system: str | list[Annotated[dict[str, Any], Described(TextBlock)]] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None

    @property
    def one_call(self) -> bool:
        return self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages. Unknown and unsupported fields are refused by name."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool = False
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    stop_sequences: list[str] = []
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


def known_fields(body: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """Drops null fields and `cache_control`: the cache keeps everything anyway."""
    return {
        name: _without_marks(value) for name, value in body.items() if value is not None and name != "cache_control"
    }


def _without_marks(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_marks(each) for each in value]
    if isinstance(value, dict) and "cache_control" in value and ("type" in value or "input_schema" in value):
        value = {name: each for name, each in value.items() if name != "cache_control"}
    if isinstance(value, dict) and isinstance(value.get("content"), list):
        return {**value, "content": _without_marks(value["content"])}
    return value


async def asked_of(
    request: CountRequest, caller: Caller, backend: ServedBackend, sources: Sources, notes: Notes
) -> GenerationRequest:
    """Builds the request for the backend from a body.

    Raises:
        ApiError: 400, a field can't be used; says which and why.
        PromptError: the messages can't be used.
    """
    parts = Parts(sources, backend.media, None, notes)
    messages = [Message("system", (Text(_system(request.system)),))] if request.system else []
    for at, values in enumerate(request.messages):
        messages += await _messages(values, f"messages.{at}", parts)
    thinking = request.thinking
    choice = "auto" if request.tool_choice is None else request.tool_choice.choice
    asked = GenerationRequest(
        messages,
        _params(request, backend.loaded.generation) if isinstance(request, MessagesRequest) else SamplingParams(),
        enable_thinking=None if thinking is None else thinking.type != "disabled",
        tools=tuple(_tool(tool) for tool in request.tools) if choice != "none" else (),
        tool_choice=choice,
        parallel_tool_calls=not request.one_call,
        # The client wrote the beginning of the reply.
        continue_reply=messages[-1].role == "assistant" and not messages[-1].tool_calls,
        tenant=tenant_of(caller, ""),
    )
    await check_constraints(asked, caller, backend, notes)
    return asked


def _params(request: MessagesRequest, defaults: SamplingParams) -> SamplingParams:
    thinking = request.thinking
    try:
        return defaults.with_overrides(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            max_tokens=request.max_tokens,
            stop=tuple(request.stop_sequences) or None,
            thinking_budget=thinking.budget_tokens if thinking and thinking.type == "enabled" else None,
        )
    except ConfigError as error:
        raise ApiError(400, str(error)) from None


def _tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    function |= {"strict": tool.strict}
    return {"type": "function", "function": {name: each for name, each in function.items() if each is not None}}


def _system(system: str | list[dict[str, Any]]) -> str:
    if isinstance(system, str):
        return system
    for at, block in enumerate(system):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise ApiError(400, f"system.{at} must be a block of type text.", f"system.{at}")
    return "\n\n".join(block["text"] for block in system)


async def _messages(values: dict[str, Any], place: str, parts: Parts) -> list[Message]:
    """Converts one message of a body. Each tool result becomes a turn of its own."""
    role, content = values.get("role"), values.get("content")
    if role not in ("user", "assistant"):
        raise ApiError(400, f"{place}.role must be user or assistant; got {role!r}.", f"{place}.role")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise ApiError(400, f"{place}.content must be a string or a list of blocks.", f"{place}.content")
    results: list[Message] = []
    own: list[Text | Image] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for at, block in enumerate(blocks):
        where = f"{place}.content.{at}"
        match block:
            case {"type": "text", "text": str(text)}:
                own.append(Text(text))
            case {"type": "image", "source": dict(source)} if role == "user":
                own.append(await _image(source, where, parts))
            case {"type": "tool_result", "tool_use_id": str(name)} if role == "user":
                results.append(Message("tool", await _result(block, where, parts), tool_call_id=name))
            case {"type": "tool_use", "id": str(name), "name": str(function), "input": dict(arguments)}:
                calls.append(ToolCall(function, arguments, name))
            case {"type": "thinking", "thinking": str(text)}:
                thoughts.append(text)
            case {"type": "redacted_thinking"}:
                pass
            case _:
                kind = block.get("type")
                raise ApiError(400, f"{where}: a block of type {kind!r} isn't supported here.", where)
    if role == "assistant":
        return [Message("assistant", tuple(own), reasoning="".join(thoughts) or None, tool_calls=tuple(calls))]
    return [*results, *([Message("user", tuple(own))] if own or not results else [])]


async def _result(block: dict[str, Any], place: str, parts: Parts) -> tuple[Text | Image, ...]:
    content = block.get("content")
    if content is None or isinstance(content, str):
        return (Text(content or ""),)
    if not isinstance(content, list):
        raise ApiError(400, f"{place}.content must be a string or a list of blocks.", f"{place}.content")
    found: list[Text | Image] = []
    for at, each in enumerate(content):
        match each:
            case {"type": "text", "text": str(text)}:
                found.append(Text(text))
            case {"type": "image", "source": dict(source)}:
                found.append(await _image(source, f"{place}.content.{at}", parts))
            case _:
                raise ApiError(400, f"{place}.content.{at} must be a block of type text or image.", place)
    return tuple(found)


async def _image(source: dict[str, Any], place: str, parts: Parts) -> Image:
    match source:
        case {"type": "base64", "data": str(data)}:
            try:
                return parts.image(base64.b64decode(data, validate=True))
            except (binascii.Error, ValueError):
                raise ApiError(400, f"{place}.source.data isn't base64.", f"{place}.source.data") from None
        case {"type": "url", "url": str(url)}:
            return parts.image(await parts.source(url, f"{place}.source.url"))
    raise ApiError(400, f"{place}.source must be of type base64 or url.", f"{place}.source")
