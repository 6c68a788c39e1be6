"""Anthropic's messages: replies, stream events and errors."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from qwen35mm.contract import Event, Prefilled, Result
from qwen35mm.http.streams import frame
from qwen35mm.prompt.calls import CallArguments, CallBegun
from qwen35mm.server.errors import ApiError, short
from qwen35mm.server.reply import Part, Piece, ReplyReader

_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class Reply:
    """One reply in Anthropic's form."""

    def __init__(self, model: str, reader: ReplyReader) -> None:
        self.reader = reader
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
        # The content block that is being written.
        self._index = -1
        self._kind = ""
        self._thought = hashlib.sha256()

    def whole(self) -> dict[str, Any]:
        """The whole reply, once it is finished."""
        result = self.reader.finished
        content: list[dict[str, Any]] = []
        if thinking := self.reader.thinking:
            signature = _signature(hashlib.sha256(thinking.encode()))
            content.append({"type": "thinking", "thinking": thinking, "signature": signature})
        for block in self.reader.blocks:
            if isinstance(block, str):
                content.append({"type": "text", "text": block})
            else:
                content.append({**_call(block.name), "input": dict(block.arguments)})
        usage = {**_usage(result), "service_tier": "standard"}
        return {**self._head, "content": content, **self._end(result), "usage": usage}

    async def frames(self, events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
        """The server-sent events of a stream."""
        started = False
        async for event in events:
            found = list(self.reader.take(event))
            if not started and (found or isinstance(event, Prefilled)):
                started = True
                yield self._start(event)
            for part in found:
                for data in self._part(part):
                    yield data
        result = self.reader.finished
        if not started:
            yield self._start(None)
        for data in self._stop():
            yield data
        yield _named("message_delta", delta=self._end(result), usage=_usage(result))
        yield _named("message_stop")

    def _part(self, part: Part) -> Iterator[bytes]:
        """The events of a reply's next part; none for the end of a call, which the next block ends."""
        kind = part.kind if isinstance(part, Piece) else "call"
        if isinstance(part, CallBegun) or (isinstance(part, Piece) and kind != self._kind):
            yield from self._stop()
            self._index, self._kind = self._index + 1, kind
            yield _named("content_block_start", index=self._index, content_block=_begun(part))
        if isinstance(part, CallArguments):
            yield self._delta(type="input_json_delta", partial_json=part.json)
        elif isinstance(part, Piece) and kind == "text":
            yield self._delta(type="text_delta", text=part.text)
        elif isinstance(part, Piece):
            self._thought.update(part.text.encode())
            yield self._delta(type="thinking_delta", thinking=part.text)

    def _stop(self) -> Iterator[bytes]:
        """Ends the block that is being written, if there is one."""
        if self._kind == "thinking":
            yield self._delta(type="signature_delta", signature=_signature(self._thought))
        if self._kind:
            yield _named("content_block_stop", index=self._index)
        self._kind = ""

    def _delta(self, **delta: str) -> bytes:
        return _named("content_block_delta", index=self._index, delta=delta)

    def _start(self, event: Event | None) -> bytes:
        known = isinstance(event, Prefilled)
        cached = event.cache.num_cached_tokens if known else 0
        usage = {
            "input_tokens": event.num_prompt_tokens - cached if known else 0,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": 0,
            "service_tier": "standard",
        }
        empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _named("message_start", message={**self._head, **empty})

    def _end(self, result: Result) -> dict[str, Any]:
        if result.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self.reader.calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        stop = result.stopped_by
        return {"stop_reason": "end_turn" if stop is None else "stop_sequence", "stop_sequence": stop}


def _begun(part: Piece | CallBegun) -> dict[str, Any]:
    if isinstance(part, CallBegun):
        return {**_call(part.name), "input": {}}
    if part.kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "thinking", "thinking": "", "signature": ""}


def _call(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": name}


def _signature(thought: Any) -> str:
    """Clients send a thinking back only with a signature; nothing here depends on it."""
    return f"qwen35mm-{thought.hexdigest()[:32]}"


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
