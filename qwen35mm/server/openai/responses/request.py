"""From a request of the responses API to a `GenerationRequest`."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from qwen35mm.chat.store.store import new_id
from qwen35mm.contract import GenerationRequest, SamplingParams
from qwen35mm.pools import REQUESTS
from qwen35mm.server.generation import ServedBackend, check_constraints, conversation_of, tenant_of
from qwen35mm.server.keys import Caller
from qwen35mm.server.notes import Notes
from qwen35mm.server.openai.responses.bodies import LOGPROBS, CountRequest, JsonObject, JsonSchema, ResponsesRequest
from qwen35mm.server.openai.responses.item_reader import Find, read_turn
from qwen35mm.server.openai.responses.items import Turn, messages_of
from qwen35mm.server.openai.responses.kept import Past
from qwen35mm.server.openai.responses.tools import Toolbox
from qwen35mm.server.parts import Parts, Sources
from qwen35mm.server.results import in_order_of_calls


@dataclass(frozen=True)
class Question:
    """A request for the backend, with its input and the id of the node in which that is kept."""

    node: str
    turn: Turn
    asked: GenerationRequest
    toolbox: Toolbox


async def question_of(
    request: CountRequest,
    past: Past,
    caller: Caller,
    backend: ServedBackend,
    sources: Sources,
    find: Find,
    notes: Notes,
) -> Question:
    """Builds the request for the backend from a body and the history.

    Raises:
        ApiError: 400 or 404, a field can't be used; says which and why.
        PromptError, RequestError: the messages or the schema can't be used.
    """
    parts = Parts(sources, backend.media, request.mm_processor_kwargs, notes)
    node = new_id()
    turn = await read_turn(request.input, node, parts, find, notes)
    toolbox = Toolbox(request.tools, request.tool_choice, notes)
    max_tokens = request.max_output_tokens if isinstance(request, ResponsesRequest) else None
    params = request.params(
        backend.loaded,
        max_tokens=max_tokens,
        effort=request.effort,
        json_schema=_schema(request),
        logprobs=_num_logprobs(request, notes),
    )
    is_kept = isinstance(request, ResponsesRequest) and request.store
    # In a thread: a conversation may be long.
    messages = await REQUESTS.run(messages_of, (*past.turns, turn), request.instructions, notes)
    asked = GenerationRequest(
        # A turn's media are kept in the order in which they came.
        in_order_of_calls(messages, moves_media=False),
        params,
        enable_thinking=request.thinks(request.effort),
        template_options=request.template_options(request.effort, backend.loaded, notes),
        tools=toolbox.shown,
        tool_choice=toolbox.choice,
        parallel_tool_calls=request.parallel_tool_calls,
        tenant=tenant_of(caller, request.cache_salt or ""),
        conversation=past.conversation if is_kept else conversation_of(caller, request.prompt_cache_key),
    )
    await check_constraints(asked, caller, backend, notes)
    return Question(node, turn, asked, toolbox)


def head_of(
    request: ResponsesRequest, toolbox: Toolbox, node: str, model: str, params: SamplingParams
) -> dict[str, Any]:
    """The fields of a response that never change."""
    form = request.text and request.text.format
    said = (
        None
        if form is None
        else form.model_dump(include=set(type(form).model_fields), exclude_none=True, by_alias=True)
    )
    reasoning = request.reasoning
    return {
        "id": f"resp_{node}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": request.effort, "summary": None if reasoning is None else reasoning.asked_summary},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store,
        "temperature": params.temperature,
        "text": {"format": said or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": toolbox.said_choice,
        "tools": toolbox.said,
        "top_logprobs": request.top_logprobs,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": request.user,
    }


def _num_logprobs(request: CountRequest, notes: Notes) -> int | None:
    if not isinstance(request, ResponsesRequest) or LOGPROBS not in request.include:
        if isinstance(request, ResponsesRequest) and request.top_logprobs:
            notes.ignore("top_logprobs", f"needs logprobs: name {LOGPROBS} in include")
        return None
    return request.top_logprobs


def _schema(request: CountRequest) -> str | None:
    match request.text and request.text.format:
        case JsonObject():
            return '{"type": "object"}'
        case JsonSchema(json_schema=schema):
            return json.dumps(schema)
    return None
