"""Builds a response: its items, and the events of its stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

from qwen35mm.contract import Event, Result, TokenLogprob, ToolCall
from qwen35mm.http.streams import frame
from qwen35mm.prompt.calls import CallArguments, CallBegun, CallLost
from qwen35mm.server.errors import ApiError, api_error
from qwen35mm.server.openai.responses.items import item_id
from qwen35mm.server.openai.responses.tools import input_of
from qwen35mm.server.reply import Part, Piece, ReplyReader

# The responses API's error codes; every other status is the server's fault.
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}

_ARGUMENTS = "response.function_call_arguments"
_INPUT = "response.custom_tool_call_input"

Values = dict[str, Any]
# What an item of a call says about its tool, by the name that the model called.
HeadOf = Callable[[str], Values]


class Answer:
    """One response in OpenAI's form.

    Args:
        head: the fields that never change, among them `id`.
        reader: reads its reply.
        head_of: gives the form of a call.
        node: 32 hex digits, the id under which it is kept.
        summarizes: put the thinking where clients look for its summary.
        keep: stores the finished response and returns whether it could; None if it isn't to be kept.
    """

    def __init__(
        self,
        head: Values,
        reader: ReplyReader,
        head_of: HeadOf,
        *,
        node: str,
        summarizes: bool,
        keep: Callable[[Values], Awaitable[bool]] | None,
    ) -> None:
        self.reader = reader
        self._head = head
        self._keep = keep
        self._output = Output(node, head_of, summarizes=summarizes)
        self._num_events = 0

    def take(self, event: Event) -> Iterator[Values]:
        """Reads the next event of the reply and yields the response's events."""
        for found in self.reader.take(event):
            yield from self._output.take(found, self.reader.take_logprobs())

    async def whole(self) -> Values:
        """The whole response, once its reply is finished. Keeps it."""
        for _ in self._output.end(self._status):
            pass
        return await self._kept(self._finished())

    async def frames(self, events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
        """The server-sent events of a stream."""
        for name in ("created", "in_progress"):
            yield self._frame({"type": f"response.{name}", "response": self._response("in_progress", [])})
        try:
            async for event in events:
                for each in self.take(event):
                    yield self._frame(each)
        except Exception as error:
            told = api_error(error)
            for each in self._output.end("incomplete"):
                yield self._frame(each)
            yield self._frame({"type": "error", "code": told.code, "message": told.message, "param": told.param})
            failed = await self._kept(self._failed(told))
            yield self._frame({"type": "response.failed", "response": failed})
            return
        for each in self._output.end(self._status):
            yield self._frame(each)
        response = await self._kept(self._finished())
        yield self._frame({"type": f"response.{response['status']}", "response": response})

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that failed."""
        return self._frame({"type": "error", "code": error.code, "message": error.message, "param": error.param})

    @property
    def _status(self) -> str:
        return "completed" if self.reader.finished.finish_reason == "stop" else "incomplete"

    def _finished(self) -> Values:
        status, result, output = self._status, self.reader.finished, self._output
        if status == "completed":
            return self._response(status, output.items, completed_at=int(time.time()), usage=self._usage(result))
        why = {"reason": "max_output_tokens"}
        return self._response(status, output.items, incomplete_details=why, usage=self._usage(result))

    def _failed(self, error: ApiError) -> Values:
        told = {"code": _CODES.get(error.status, "server_error"), "message": error.message}
        return self._response("failed", self._output.items, error=told)

    def _response(self, status: str, output: list[Values], **said: Any) -> Values:
        empty = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": status, "output": output, **empty, **said}

    async def _kept(self, response: Values) -> Values:
        is_kept = self._keep is not None and await self._keep(response)
        return {**response, "store": is_kept}

    def _usage(self, result: Result) -> Values:
        return {
            "input_tokens": result.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": result.cache.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": result.num_generated_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reader.num_thinking},
            "total_tokens": result.num_prompt_tokens + result.num_generated_tokens,
        }

    def _frame(self, event: Values) -> bytes:
        self._num_events += 1
        return frame({**event, "sequence_number": self._num_events - 1}, event["type"])


class Output:
    """The items of a response and their events. An event may refer to an item that still changes: write it before you
    take the next.

    Attributes:
        items: all so far. The last one has its text or arguments once it ends.
    """

    def __init__(self, node: str, head_of: HeadOf, *, summarizes: bool = False) -> None:
        self.items: list[Values] = []
        self._node = node
        self._head_of = head_of
        self._summarizes = summarizes
        # The kind of the last item while it grows.
        self._open: str | None = None
        # Its text or arguments so far: adding to a text in a dict copies it.
        self._written: list[str] = []
        # The head of a call of a custom tool while it is written.
        self._custom: Values | None = None

    def take(self, found: Part, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Values]:
        """The events of the reply's next chunk.

        Args:
            logprobs: of its tokens, if requested; not sent for calls.
        """
        if isinstance(found, CallBegun):
            yield from self.end()
            yield from self._begin_call(found.name)
            return
        if isinstance(found, CallArguments):
            if self._open == "call":
                self._written.append(found.json)
                yield {"type": f"{_ARGUMENTS}.delta", **self._place, "delta": found.json}
            return
        if isinstance(found, ToolCall) and self._custom is not None:
            yield from self._custom_call(self._custom, found)
            return
        if isinstance(found, CallLost) and self._custom is not None:
            self._custom = None
            found = Piece("text", found.text)
        if not isinstance(found, Piece):
            yield from self.end("completed" if isinstance(found, ToolCall) else "incomplete")
            return
        if self._open != found.kind:
            yield from self.end()
            yield from self._begin(found.kind)
        self._written.append(found.text)
        told: Values = {}
        if found.kind == "text":
            self._part["logprobs"] += [_logprob(each) for each in logprobs]
            told["logprobs"] = list(map(_without_bytes, map(_logprob, logprobs)))
        yield {"type": f"{self._text_event}.delta", **self._place, "delta": found.text, **told}

    def end(self, status: str = "completed") -> Iterator[Values]:
        """Ends the item that still grows, if there is one."""
        if self._open is None:
            return
        item = self.items[-1]
        if self._open == "call":
            # Of an incomplete one, the part that was told.
            item["arguments"] = "".join(self._written)
            yield {"type": f"{_ARGUMENTS}.done", **self._place, "arguments": item["arguments"]}
            item["status"] = status
            self._open = None
            yield self._of_item("done", item)
            return
        part = self._part
        part["text"] = "".join(self._written)
        told = {"logprobs": list(map(_without_bytes, part["logprobs"]))} if self._open == "text" else {}
        yield {"type": f"{self._text_event}.done", **self._place, "text": part["text"], **told}
        yield {"type": f"{self._part_event}.done", **self._place, "part": part}
        item["status"] = status
        self._open = None
        yield self._of_item("done", item)

    def _begin(self, kind: str) -> Iterator[Values]:
        self._open, self._written = kind, []
        item: Values
        if kind == "text":
            item = {"type": "message", "role": "assistant", "content": []}
            part: Values = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"type": "reasoning", "summary": []} | ({} if self._summarizes else {"content": []})
            part = {"type": "summary_text" if self._summarizes else "reasoning_text", "text": ""}
        yield self._of_item("added", self._new({"status": "in_progress", **item}))
        item = self.items[-1]
        (item["summary"] if self._is_summary else item["content"]).append(part)
        yield {"type": f"{self._part_event}.added", **self._place, "part": part}

    def _begin_call(self, name: str) -> Iterator[Values]:
        head = self._head_of(name)
        if head["type"] == "custom_tool_call":
            # Clients run the text of any custom call, which has no status: it is told once the call is complete.
            self._custom = head
            return
        self._open, self._written = "call", []
        call_id = f"call_{uuid.uuid4().hex[:24]}"
        item = self._new({**head, "call_id": call_id, "arguments": "", "status": "in_progress"})
        yield self._of_item("added", item)

    def _custom_call(self, head: Values, call: ToolCall) -> Iterator[Values]:
        """The events of a call of a custom tool, which is told once it is whole."""
        self._custom = None
        item = self._new({**head, "call_id": f"call_{uuid.uuid4().hex[:24]}", "input": ""})
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        yield self._of_item("added", item)
        item["input"] = text = input_of(call.arguments)
        yield {"type": f"{_INPUT}.delta", **place, "delta": text}
        yield {"type": f"{_INPUT}.done", **place, "input": text}
        yield self._of_item("done", item)

    def _new(self, item: Values) -> Values:
        self.items.append({"id": item_id(item["type"], self._node, len(self.items)), **item})
        return self.items[-1]

    def _of_item(self, what: str, item: Values) -> Values:
        return {"type": f"response.output_item.{what}", "output_index": len(self.items) - 1, "item": item}

    @property
    def _is_summary(self) -> bool:
        return self._open == "thinking" and self._summarizes

    @property
    def _part(self) -> Values:
        item = self.items[-1]
        return (item["summary"] if self._is_summary else item["content"])[0]

    @property
    def _place(self) -> Values:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return place if self._open == "call" else {**place, "summary_index" if self._is_summary else "content_index": 0}

    @property
    def _text_event(self) -> str:
        if self._open == "text":
            return "response.output_text"
        return "response.reasoning_summary_text" if self._summarizes else "response.reasoning_text"

    @property
    def _part_event(self) -> str:
        return "response.reasoning_summary_part" if self._is_summary else "response.content_part"


def _logprob(told: TokenLogprob) -> Values:
    own, *top = ({"token": each.text, "logprob": each.logprob, "bytes": list(each.bytes)} for each in (told, *told.top))
    return {**own, "top_logprobs": top}


def _without_bytes(told: Values) -> Values:
    """Without `bytes`, the form in deltas."""
    top = [{"token": each["token"], "logprob": each["logprob"]} for each in told["top_logprobs"]]
    return {"token": told["token"], "logprob": told["logprob"], "top_logprobs": top}
