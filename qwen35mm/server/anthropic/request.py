"""Anthropic's messages: from a request's body to a `GenerationRequest`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from qwen35mm.contract import GenerationRequest, SamplingParams
from qwen35mm.contract.sampling import NUMBERS
from qwen35mm.errors import ConfigError
from qwen35mm.server import fields
from qwen35mm.server.anthropic.blocks import Blocks
from qwen35mm.server.anthropic.tools import Tool, Toolbox, plain_tools
from qwen35mm.server.errors import ApiError
from qwen35mm.server.fields import EFFORTS, STRICT, Number, Values
from qwen35mm.server.generation import ServedBackend, check_constraints, tenant_of
from qwen35mm.server.keys import Caller
from qwen35mm.server.notes import UNSUPPORTED, Notes
from qwen35mm.server.parts import Parts, Sources
from qwen35mm.server.results import in_order_of_calls
from qwen35mm.server.shapes import AnthropicMessage, Described, OtherBlock, TextBlock
from qwen35mm.server.tools import forced_tool, free_choice

# Each with the values that ask for nothing.
HINTS: dict[str, Values] = {
    "billing_policy": (),
    "container": (),
    "context_management": ({}, {"edits": []}),
    "diagnostics": (),
    "fallback_credit_token": (),
    "fallbacks": ([],),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "user_profile_id": (),
    "workspace_id": (),
}
REFUSED: dict[str, Values] = {
    # The answer would have to be a summary in a form of its own.
    "compaction": (),
    # A conversation that is kept elsewhere.
    "thread": ({"type": "create"},),
}
# Change nothing here: the cache keeps everything anyway, and no field waits for a header.
_SILENT = ("anthropic_version", "betas", "cache_control")
# Deferred tools may be many: agents list those of all their servers.
_MAX_LISTED = 4096
_NUMBERS = ("temperature", "top_p", "top_k")


class Thinking(BaseModel):
    """How the model thinks: `type` is enabled, adaptive or disabled."""

    model_config = STRICT

    type: str
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    # Thinking is always shown as it is, and needs no seal.
    display: str | None = None
    block_binding: Any = None


class Format(BaseModel):
    """The form of the answer: `type` is json_schema."""

    model_config = STRICT

    type: str
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    name: str | None = None


class OutputConfig(BaseModel):
    model_config = STRICT

    effort: str | None = None
    format: Format | None = None


def _choice(value: Any) -> Any:
    """Converts a word to Anthropic's form."""
    return {"type": value} if isinstance(value, str) else value


class ToolChoice(BaseModel):
    """`type` is auto, any, none or tool."""

    model_config = STRICT

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountRequest(BaseModel):
    """The body of POST /v1/messages/count_tokens."""

    model_config = STRICT

    model: str | None = None
    messages: Annotated[
        list[Annotated[dict[str, Any], Described(AnthropicMessage)]], Field(min_length=1, max_length=10_000)
    ]
    system: str | list[str | Annotated[dict[str, Any], Described(TextBlock | OtherBlock)]] | None = None
    tools: Annotated[list[Tool], Field(max_length=_MAX_LISTED)] = []
    tool_choice: Annotated[str | ToolChoice, BeforeValidator(_choice)] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # The former place of `output_config.format`.
    output_format: Format | None = None

    @property
    def one_call(self) -> bool:
        return isinstance(self.tool_choice, ToolChoice) and self.tool_choice.disable_parallel_tool_use is True


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages. Unknown fields are noted."""

    max_tokens: int | None = None
    stream: bool = False
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    stop_sequences: list[str] = []
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


@dataclass(frozen=True)
class Asked:
    """A request for the backend.

    Attributes:
        tools: those that the reply may call: also the ones that the prompt doesn't list, but the conversation.
    """

    request: GenerationRequest
    tools: tuple[dict[str, Any], ...]


def known_fields(body: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """Drops null fields and those that have no effect, and translates tools of other forms.

    Raises:
        ApiError: 400, a field asks for something that can't be done.
    """
    if _clears_nothing(body.get("context_management")):
        del body["context_management"]
    body = fields.known_fields(body, notes, hints=HINTS, refused=REFUSED)
    body = {name: value for name, value in body.items() if name not in _SILENT}
    return {**body, "tools": plain_tools(body["tools"], notes)} if "tools" in body else body


def known_count_fields(body: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """As `known_fields`, without fields of a request for a reply, which don't change the count."""
    only_replies = MessagesRequest.model_fields.keys() - CountRequest.model_fields.keys()
    return known_fields({name: value for name, value in body.items() if name not in only_replies}, notes)


def _clears_nothing(management: Any) -> bool:
    edits = management.get("edits") if isinstance(management, dict) and len(management) == 1 else None
    return isinstance(edits, list) and all(
        isinstance(edit, dict) and edit.get("keep") == "all" and str(edit.get("type")).startswith("clear_thinking")
        for edit in edits
    )


async def asked_of(
    request: CountRequest, caller: Caller, backend: ServedBackend, sources: Sources, notes: Notes
) -> Asked:
    """Builds the request for the backend from a body.

    Raises:
        ApiError: 400, a field can't be used; says which and why.
        PromptError: the messages can't be used.
    """
    toolbox = Toolbox(request.tools, notes)
    choice = _chosen(request, toolbox, notes)
    toolbox.show(choice)
    blocks = Blocks(Parts(sources, backend.media, None, notes), toolbox, notes)
    messages = in_order_of_calls([*blocks.system(request.system or ()), *await blocks.messages(request.messages)])
    thinks, budget = _thinking(request, notes)
    effort = request.output_config and request.output_config.effort
    asked = GenerationRequest(
        messages,
        _params(request, backend.loaded.generation, budget, notes),
        enable_thinking=thinks,
        template_options={"reasoning_effort": effort} if effort in EFFORTS else {},
        tools=() if choice == "none" else toolbox.shown,
        tool_choice=choice,
        parallel_tool_calls=not request.one_call,
        # The client wrote the beginning of the reply.
        continue_reply=bool(messages) and messages[-1].role == "assistant" and not messages[-1].tool_calls,
        tenant=tenant_of(caller, ""),
    )
    await check_constraints(asked, caller, backend, notes)
    return Asked(asked, () if choice == "none" else toolbox.callable)


def _chosen(request: CountRequest, toolbox: Toolbox, notes: Notes) -> str:
    """The choice in the form that the backend's `stream` takes."""
    choice = request.tool_choice
    if not isinstance(choice, ToolChoice):
        return "auto"
    match choice.type:
        case "auto" | "none":
            return choice.type
        case "any" | "required" if toolbox.shown or not request.tools:
            return "required"
        case "tool" if not toolbox.names.has_lost(choice.name):
            return forced_tool(choice.name or "")
        case "any" | "required" | "tool":
            return free_choice(notes)
        case _:
            notes.ignore("tool_choice.type", UNSUPPORTED)
    return "auto"


def _thinking(request: CountRequest, notes: Notes) -> tuple[bool | None, int | None]:
    """Whether the model thinks, and for how many tokens at most; None leaves it to the template or the checkpoint."""
    effort = request.output_config and request.output_config.effort
    if effort is not None and effort not in EFFORTS:
        notes.ignore("output_config.effort", UNSUPPORTED)
        effort = None
    budget = None if effort is None else EFFORTS[effort]
    thinking = request.thinking
    if thinking is None:
        return None, budget
    if thinking.type not in ("enabled", "adaptive", "disabled"):
        notes.ignore("thinking.type", UNSUPPORTED)
        return None, budget
    is_given = thinking.type == "enabled" and thinking.budget_tokens is not None
    return thinking.type != "disabled", thinking.budget_tokens if is_given else budget


def _params(request: CountRequest, defaults: SamplingParams, budget: int | None, notes: Notes) -> SamplingParams:
    changes: dict[str, Any] = {"json_schema": _schema(request), "thinking_budget": budget}
    if isinstance(request, MessagesRequest):
        changes |= {name: getattr(request, name) for name in _NUMBERS}
        for name in _NUMBERS:
            if changes[name] is not None and NUMBERS[name].is_off(changes[name]):
                changes[name] = getattr(SamplingParams(), name)
        stop = tuple(filter(None, request.stop_sequences))
        if len(stop) < len(request.stop_sequences):
            notes.ignore("stop_sequences", "has empty texts")
        changes |= {"max_tokens": request.max_tokens, "stop": stop or None}
    try:
        return defaults.with_overrides(**changes)
    except ConfigError as error:
        raise ApiError(400, str(error)) from None


def _schema(request: CountRequest) -> str | None:
    named = {"output_format": request.output_format}
    if request.output_config is not None:
        named["output_config.format"] = request.output_config.format
    for place, asked in named.items():
        if asked is None or asked.type == "text":
            continue
        if asked.type != "json_schema" or asked.json_schema is None:
            raise ApiError(400, f"{place} must be of type json_schema with a schema; got {asked.type[:60]!r}.", place)
        return json.dumps(asked.json_schema)
    return None
