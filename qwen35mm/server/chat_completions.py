"""OpenAI's chat completions: a body as what is asked of the model, and its events as what a client reads."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from qwen35mm.engine import Event, Result, check_json_schema
from qwen35mm.errors import ConfigError
from qwen35mm.prompt import ToolCall
from qwen35mm.sampling import SamplingParams
from qwen35mm.server.asked import Asked, Backend
from qwen35mm.server.errors import ApiError
from qwen35mm.server.keys import Caller
from qwen35mm.server.parts import Parts, Sources
from qwen35mm.server.reply import Piece, ReplyReader
from qwen35mm.server.streams import frame

MAX_MESSAGES = 10_000
MAX_TOOLS = 256
# What clients send with every request though it asks for nothing; any other value is refused by name.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
}
# The tokens that may be thought, by `reasoning_effort`.
_EFFORTS = {"none": 0, "minimal": 512, "low": 1024, "medium": 4096, "high": None, "xhigh": None}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: bool | None = None


class Function(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    # A reply's arguments are as the model writes them: promised would be what isn't held.
    strict: Literal[False] | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: Function


class TemplateOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    enable_thinking: bool | None = None


Number = Annotated[float, Field(allow_inf_nan=False)]


class ChatCompletionRequest(BaseModel):
    """The body of POST /v1/chat/completions. What isn't known or can't be done is refused by its name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    repetition_penalty: Number | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    thinking_budget: int | None = None
    chat_template_kwargs: TemplateOptions | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str, Field(max_length=200)] | None = None
    # Said of the request, and nothing to the model.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def known_fields(body: dict[str, Any]) -> dict[str, Any]:
    """The body without what asks for nothing.

    Raises:
        ApiError: 400, a field asks for what can't be had here.
    """
    for name, harmless in _NOTHING.items():
        value = body.pop(name, None)
        if value is not None and value not in harmless:
            raise ApiError(400, f"{name} can't be had here: leave it out.", name, "unsupported_field")
    return {name: value for name, value in body.items() if value is not None}


async def asked_of(request: ChatCompletionRequest, caller: Caller, backend: Backend, sources: Sources) -> Asked:
    """What a body asks of the model.

    Raises:
        ApiError: 400, which field can't be used, and why.
        PromptError, RequestError: the messages, or the schema, can't be used.
    """
    parts = Parts(sources, backend.media, request.mm_processor_kwargs)
    messages = [
        await parts.message({**values, "role": _role(values.get("role"))}, f"messages.{at}")
        for at, values in enumerate(request.messages)
    ]
    return Asked(
        caller,
        messages,
        _params(request, backend.loaded.generation),
        enable_thinking=_thinks(request),
        tools=tools_of(request),
        continues=request.continue_final_message,
        media=tuple(parts.options),
        salt=request.cache_salt or "",
    )


def tools_of(request: ChatCompletionRequest) -> tuple[dict[str, Any], ...]:
    """The tools that the model is told of, in OpenAI's form: none where it may call none."""
    if request.tool_choice == "none":
        return ()
    return tuple(tool.model_dump(exclude_none=True) for tool in request.tools)


def _role(role: Any) -> Any:
    return "system" if role == "developer" else role


def _thinks(request: ChatCompletionRequest) -> bool | None:
    said = None if request.chat_template_kwargs is None else request.chat_template_kwargs.enable_thinking
    if said is None and request.reasoning_effort is not None:
        return request.reasoning_effort != "none"
    return said


def _params(request: ChatCompletionRequest, defaults: SamplingParams) -> SamplingParams:
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty", "seed")
    changes = {name: getattr(request, name) for name in names}
    # llama.cpp's and vLLM's word for all.
    changes["top_k"] = 0 if request.top_k == -1 else request.top_k
    changes["max_tokens"] = request.max_completion_tokens or request.max_tokens
    changes["thinking_budget"] = (
        _EFFORTS[request.reasoning_effort or "high"] if request.thinking_budget is None else request.thinking_budget
    )
    if request.stop:
        changes["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    changes["json_schema"] = _schema(request.response_format)
    try:
        params = defaults.with_overrides(**changes)
    except ConfigError as error:
        named = next((name for name in changes if str(error).startswith(name)), None)
        raise ApiError(400, str(error), named) from None
    if params.json_schema is not None:
        check_json_schema(params.json_schema)
    return params


def _schema(response_format: dict[str, Any] | None) -> str | None:
    """The JSON schema, as text, that answers are held to; None for plain text."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return '{"type": "object"}'
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return json.dumps(schema)
    place = "response_format"
    raise ApiError(400, f'{place} must be {{"type": "text"}}, "json_object" or "json_schema" with a schema.', place)


class Completion:
    """One reply as a client of chat completions reads it.

    Args:
        model: the name that it says.
    """

    def __init__(self, model: str, reader: ReplyReader, *, includes_usage: bool = False) -> None:
        self.reader = reader
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._includes_usage = includes_usage
        self._num_calls = 0

    def whole(self) -> dict[str, Any]:
        """All of it, once it is finished."""
        result, calls = self.reader.finished, self.reader.calls
        message: dict[str, Any] = {"role": "assistant", "content": self.reader.text, "refusal": None}
        if calls:
            message |= {"content": self.reader.text or None, "tool_calls": [_call(call) for call in calls]}
        if result.reasoning:
            message |= _reasoning(result.reasoning)
        choice = {"index": 0, "message": message, "finish_reason": self._finish_reason, "logprobs": None}
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": self._usage(result),
            "timings": _timings(result),
        }

    async def frames(self, events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
        """The server-sent events of a stream."""
        yield frame(self._chunk({"role": "assistant", "content": ""}))
        async for event in events:
            for found in self.reader.take(event):
                yield frame(self._chunk(self._delta(found)))
        result = self.reader.finished
        yield frame({**self._chunk({}, self._finish_reason), "timings": _timings(result)})
        if self._includes_usage:
            yield frame({**self._chunk(None), "usage": self._usage(result)})
        yield b"data: [DONE]\n\n"

    def _delta(self, found: Piece | ToolCall) -> dict[str, Any]:
        if isinstance(found, ToolCall):
            self._num_calls += 1
            return {"tool_calls": [{"index": self._num_calls - 1, **_call(found)}]}
        return {"content": found.text} if found.kind == "text" else _reasoning(found.text)

    @property
    def _finish_reason(self) -> str:
        reason = self.reader.finished.finish_reason
        return "tool_calls" if self.reader.calls and reason == "stop" else reason

    def _chunk(self, delta: dict[str, Any] | None, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        choices = [] if delta is None else [choice]
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def _usage(self, result: Result) -> dict[str, Any]:
        return {
            "prompt_tokens": result.num_prompt_tokens,
            "completion_tokens": result.num_generated_tokens,
            "total_tokens": result.num_prompt_tokens + result.num_generated_tokens,
            "prompt_tokens_details": {"cached_tokens": result.cache.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reader.num_thinking},
        }


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _reasoning(text: str) -> dict[str, str]:
    """Under both names that clients look for."""
    return {"reasoning": text, "reasoning_content": text}


def _timings(result: Result) -> dict[str, Any]:
    """As llama-server's."""
    cache = result.cache
    prompt_ms, decode_ms = cache.prefill_s * 1000, cache.decode_s * 1000
    return {
        "cache_n": cache.num_cached_tokens,
        "prompt_n": cache.num_prefilled_tokens,
        "prompt_ms": prompt_ms,
        "prompt_per_second": cache.num_prefilled_tokens / cache.prefill_s if cache.prefill_s else None,
        "predicted_n": result.num_generated_tokens,
        "predicted_ms": decode_ms,
        "predicted_per_second": result.decode_tokens_per_s,
    }
