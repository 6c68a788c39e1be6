"""Anthropic's messages: replies, stream events and errors."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from qwen35mm.contract import Event, Prefilled, Result, ToolCall
from qwen35mm.http.streams import frame
from qwen35mm.server.errors import ApiError, short
from qwen35mm.server.reply import Piece, ReplyReader

_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class Reply:
    """One reply in Anthropic's form."""

    def __init__(self, model: str, reader: ReplyReader) -> None:
        self.reader = reader
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}

    def whole(self) -> dict[str, Any]:
        """The whole reply, once it is finished."""
        result = self.reader.finished
        content: list[dict[str, Any]] = []
        if result.reasoning:
            content.append({"type": "thinking", "thinking": result.reasoning, "signature": ""})
        if self.reader.text:
            content.append({"type": "text", "text": self.reader.text})
        content += [{**_call(call), "input": dict(call.arguments)} for call in self.reader.calls]
        return {**self._head, "content": content, **self._end(result), "usage": _usage(result)}

    async def frames(self, events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
        """The server-sent events of a stream."""
        started, index, kind = False, -1, ""
        async for event in events:
            found = list(self.reader.take(event))
            if not started and (found or isinstance(event, Prefilled)):
                started = True
                yield self._start(event)
            for each in found:
                new = "call" if isinstance(each, ToolCall) else each.kind
                if new != kind or new == "call":
                    if kind:
                        yield _named("content_block_stop", index=index)
                    index, kind = index + 1, new
                    yield _named("content_block_start", index=index, content_block=_begun(each))
                yield _named("content_block_delta", index=index, delta=_delta(each))
        result = self.reader.finished
        if not started:
            yield self._start(None)
        if kind:
            yield _named("content_block_stop", index=index)
        yield _named("message_delta", delta=self._end(result), usage=_usage(result))
        yield _named("message_stop")

    def _start(self, event: Event | None) -> bytes:
        known = isinstance(event, Prefilled)
        usage = {"input_tokens": event.num_prompt_tokens if known else 0, "output_tokens": 0}
        empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _named("message_start", message={**self._head, **empty})

    def _end(self, result: Result) -> dict[str, Any]:
        if result.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self.reader.calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        stop = result.stopped_by
        return {"stop_reason": "end_turn" if stop is None else "stop_sequence", "stop_sequence": stop}


def _begun(found: Piece | ToolCall) -> dict[str, Any]:
    if isinstance(found, ToolCall):
        return {**_call(found), "input": {}}
    return (
        {"type": "text", "text": ""} if found.kind == "text" else {"type": "thinking", "thinking": "", "signature": ""}
    )


def _delta(found: Piece | ToolCall) -> dict[str, Any]:
    if isinstance(found, ToolCall):
        return {"type": "input_json_delta", "partial_json": json.dumps(dict(found.arguments), ensure_ascii=False)}
    if found.kind == "text":
        return {"type": "text_delta", "text": found.text}
    return {"type": "thinking_delta", "thinking": found.text}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": call.name}


def _usage(result: Result) -> dict[str, Any]:
    cached = result.cache.num_cached_tokens
    return {
        "input_tokens": result.num_prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": result.num_generated_tokens,
    }


def _named(name: str, **values: Any) -> bytes:
    return frame({"type": name, **values}, name)


def error_body(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's form."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": short(error.message)}}


def error_frame(error: ApiError) -> bytes:
    """An error as the last event of a stream."""
    return frame(error_body(error), "error")
