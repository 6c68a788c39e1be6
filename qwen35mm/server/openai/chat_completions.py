"""OpenAI's chat completions: from a request's body to a `GenerationRequest`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from qwen35mm.contract import GenerationRequest
from qwen35mm.contract.sampling import MAX_TOP_LOGPROBS
from qwen35mm.server import fields
from qwen35mm.server.fields import (
    EFFORTS,
    STRICT,
    Effort,
    RequestFields,
    Values,
    told,
)
from qwen35mm.server.generation import ServedBackend, check_constraints, conversation_of, tenant_of
from qwen35mm.server.keys import Caller
from qwen35mm.server.notes import UNSUPPORTED, Notes
from qwen35mm.server.openai.chat_messages import continues, read_messages
from qwen35mm.server.openai.choices import MAX_CHOICES
from qwen35mm.server.other_names import thinking_in_our_names
from qwen35mm.server.parts import Parts, Sources
from qwen35mm.server.results import in_order_of_calls
from qwen35mm.server.shapes import ChatMessage, Described, ResponseFormat
from qwen35mm.server.tools import KNOWN, MAX_TOOLS, Names, ToolChoice, chosen, flat, free_choice, inner_of, name_of

MAX_MESSAGES = 10_000
# Each with the values that ask for nothing.
HINTS: dict[str, Values] = {
    "audio": (),
    "prediction": (),
    "service_tier": ("auto", "default", "flex", "priority"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
REFUSED: dict[str, Values] = {
    # Other prompts, weights or tokens than this server's.
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "chat_template": ("",),
    "custom_logit_processor": (),
    "lora_path": (),
    # Texts that the model would have to read.
    "documents": ([],),
    # The former form of tools, whose answers have another form, too.
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"], ["text", "audio"], ["audio", "text"]),
}


class StreamOptions(BaseModel):
    model_config = STRICT

    include_usage: bool = False
    # The usage of a stream comes at its end.
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Function(BaseModel):
    model_config = STRICT

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = STRICT

    type: Literal["function"]
    function: Function


class ChatCompletionRequest(RequestFields):
    """The body of POST /v1/chat/completions. `known_fields` says which other fields are refused."""

    messages: Annotated[
        list[Annotated[dict[str, Any], Described(ChatMessage)]], Field(min_length=1, max_length=MAX_MESSAGES)
    ]
    stream_options: StreamOptions | None = None
    max_completion_tokens: Annotated[int, told(minimum=1)] | None = None
    max_tokens: Annotated[int, told(minimum=1)] | None = None
    response_format: Annotated[dict[str, Any], Described(ResponseFormat)] | None = None
    tools: Annotated[list[Tool], Field(default_factory=list, max_length=MAX_TOOLS)]
    tool_choice: ToolChoice = "auto"
    reasoning_effort: Effort | None = None
    continue_final_message: bool = False
    return_token_ids: bool = False
    add_generation_prompt: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def note_stream_options(body: dict[str, Any], notes: Notes) -> None:
    """Notes that a stream's usage is not in each of its chunks."""
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("continuous_usage_stats"):
        notes.ignore("stream_options.continuous_usage_stats", UNSUPPORTED)


def known_fields(body: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """Drops what has no effect. Raises ApiError: 400, a field asks for something that can't be done."""
    note_stream_options(body, notes)
    body = fields.known_fields(thinking_in_our_names(body, notes), notes, hints=HINTS, refused=REFUSED)
    if (effort := body.get("reasoning_effort")) is not None and effort not in list(EFFORTS):
        notes.ignore("reasoning_effort", UNSUPPORTED)
        del body["reasoning_effort"]
    names = Names(notes)
    if isinstance(given := body.get("tools"), list):
        body["tools"] = _functions(given, names, notes)
    body = _only_allowed(body)
    if _asks_in_vain(body.get("tool_choice"), names):
        body["tool_choice"] = free_choice(notes)
    if body.get("add_generation_prompt") is False and not body.get("continue_final_message"):
        notes.ignore("add_generation_prompt", UNSUPPORTED)
    # llama.cpp's and vLLM's form: how many of the likeliest tokens to tell.
    if isinstance(number := body.get("logprobs"), int) and not isinstance(number, bool):
        body |= {"logprobs": True, "top_logprobs": body.get("top_logprobs", number)}
    return body


def _only_allowed(body: dict[str, Any]) -> dict[str, Any]:
    """Leaves only the tools that a choice of type allowed_tools names; its mode is the choice."""
    match body.get("tool_choice"):
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(listed)}}:
            pass
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(listed)}:
            pass
        case _:
            return body
    names, tools = {name_of(tool) for tool in listed} - {None}, body.get("tools")
    kept = [tool for tool in tools if name_of(tool) in names] if isinstance(tools, list) else tools
    return {**body, "tool_choice": mode} | ({} if tools is None else {"tools": kept})


def _asks_in_vain(choice: Any, names: Names) -> bool:
    """Whether the choice can only be a tool that was left out."""
    try:
        word = chosen(choice)
    except ValueError:
        return False
    return names.has_lost_all if word == "required" else names.has_lost(word)


def _functions(tools: list[Any], names: Names, notes: Notes) -> list[Any]:
    """The tools in the protocol's form, without those that can't be called. Notes their unknown fields."""
    found: list[Any] = []
    for at, tool in enumerate(tools):
        place = f"tools.{at}"
        read = flat(tool) if isinstance(tool, dict) else {"type": "function"}
        kind, name = read["type"], read.get("name")
        if kind not in ("function", ""):
            names.leave_out(name, f"{place} of type {kind!r:.60}")
        elif names.take(name, place):
            notes.ignore_rest(_said(tool), KNOWN, place)
            if inner := inner_of(tool):
                notes.ignore_rest(_said(inner[1]), KNOWN, f"{place}.{inner[0]}")
            function = {key: read[key] for key in ("name", "description", "parameters", "strict") if key in read}
            found.append({"type": "function", "function": function})
    return found


def _said(values: dict[str, Any]) -> list[str]:
    return [name for name, value in values.items() if value is not None]


async def asked_of(
    request: ChatCompletionRequest, caller: Caller, backend: ServedBackend, sources: Sources, notes: Notes
) -> GenerationRequest:
    """Builds the request for the backend from a body.

    Raises:
        ApiError: 400, a field can't be used; says which and why.
        PromptError, RequestError: the messages or the schema can't be used.
    """
    parts = Parts(sources, backend.media, request.mm_processor_kwargs, notes)
    messages = in_order_of_calls(await read_messages(request.messages, parts, notes))
    is_begun = continues(request.messages[-1])
    if is_begun and not (messages[-1].text or messages[-1].tool_calls or messages[-1].reasoning):
        # There is nothing to continue.
        messages.pop()
        is_begun = False
    asked = GenerationRequest(
        messages,
        request.params(
            backend.loaded,
            max_tokens=request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens,
            effort=request.reasoning_effort,
            json_schema=None,
            logprobs=_num_logprobs(request, notes),
        ),
        enable_thinking=request.thinks(request.reasoning_effort),
        template_options=request.template_options(request.reasoning_effort, backend.loaded, notes),
        tools=tools_of(request),
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        conversation=conversation_of(caller, request.prompt_cache_key),
        continue_reply=request.continue_final_message or is_begun,
        tenant=tenant_of(caller, request.cache_salt or ""),
    )
    await check_constraints(asked, caller, backend, notes)
    return asked


def tools_of(request: ChatCompletionRequest) -> tuple[dict[str, Any], ...]:
    """The tools that the prompt lists, in OpenAI's form; empty if the model may call none."""
    if request.tool_choice == "none":
        return ()
    return tuple(tool.model_dump(exclude_none=True) for tool in request.tools)


def _num_logprobs(request: ChatCompletionRequest, notes: Notes) -> int | None:
    if request.top_logprobs and not request.logprobs:
        notes.ignore("top_logprobs", "needs logprobs: set it to true")
    return request.top_logprobs if request.logprobs else None
