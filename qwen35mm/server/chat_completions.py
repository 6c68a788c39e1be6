"""OpenAI's chat completions: a body as what is asked of the model, and its events as what a client reads."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from qwen35mm.engine import Event, Finished, Result, TextDelta, check_json_schema
from qwen35mm.errors import ConfigError
from qwen35mm.prompt import ToolCall
from qwen35mm.prompt.calls import CallParser
from qwen35mm.sampling import SamplingParams
from qwen35mm.server.asked import Asked, Backend
from qwen35mm.server.errors import ApiError
from qwen35mm.server.keys import Caller
from qwen35mm.server.parts import Parts, Sources

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


class Reply:
    """One reply in the making, and what a client reads of it.

    Args:
        model: the name that the reply says.
        tools: those that it may call; without any, what looks like a call is text.
        most_calls: the calls that are passed on; None is all.
    """

    def __init__(self, model: str, tools: Sequence[dict[str, Any]] = (), most_calls: int | None = None) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._parser = CallParser(tools) if tools else None
        self._most_calls = most_calls
        self._text: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._num_reasoning = 0
        self.result: Result | None = None

    def take(self, event: Event) -> list[dict[str, Any]]:
        """Takes the next event in; what is new by it, as the `delta`s of a stream."""
        if isinstance(event, Finished):
            self.result = event.result
            return self._deltas(self._parser.flush() if self._parser else [])
        if not isinstance(event, TextDelta) or not event.text:
            return []
        if event.channel == "reasoning":
            self._num_reasoning = event.num_generated_tokens or self._num_reasoning
            return [_reasoning(event.text)]
        return self._deltas(self._parser.push(event.text) if self._parser else [event.text])

    def _deltas(self, found: list[str | ToolCall]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for each in found:
            if isinstance(each, str):
                self._text.append(each)
                deltas.append({"content": each})
            elif self._most_calls is None or len(self._calls) < self._most_calls:
                arguments = json.dumps(dict(each.arguments), ensure_ascii=False)
                function = {"name": each.name, "arguments": arguments}
                call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
                deltas.append({"tool_calls": [{"index": len(self._calls), **call}]})
                self._calls.append(call)
        return deltas

    @property
    def _finish_reason(self) -> str:
        assert self.result is not None, "the reply isn't finished"
        return "tool_calls" if self._calls and self.result.finish_reason == "stop" else self.result.finish_reason

    def completion(self) -> dict[str, Any]:
        """The whole reply, once it is finished."""
        assert self.result is not None, "the reply isn't finished"
        text = "".join(self._text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._calls:
            message |= {"content": text or None, "tool_calls": self._calls}
        if self.result.reasoning:
            message |= _reasoning(self.result.reasoning)
        choice = {"index": 0, "message": message, "finish_reason": self._finish_reason, "logprobs": None}
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": self._usage(self.result),
            "timings": _timings(self.result),
        }

    async def chunks(self, events: AsyncIterator[Event], *, include_usage: bool) -> AsyncIterator[dict[str, Any]]:
        """The pieces of a stream."""
        yield self._chunk({"role": "assistant", "content": ""})
        async for event in events:
            for delta in self.take(event):
                yield self._chunk(delta)
        assert self.result is not None, "a stream ends with its result"
        yield {**self._chunk({}, self._finish_reason), "timings": _timings(self.result)}
        if include_usage:
            yield {**self._chunk(None), "usage": self._usage(self.result)}

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
            "completion_tokens_details": {"reasoning_tokens": self._num_reasoning},
        }


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
