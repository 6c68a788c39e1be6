"""Replies to chat completions, whole or streamed."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

from qwen35mm.contract import Finished, Result, TokenLogprob, ToolCall
from qwen35mm.http.streams import frame
from qwen35mm.prompt.calls import CallArguments, CallBegun
from qwen35mm.server.openai.choices import OfChoice
from qwen35mm.server.reply import Part, Piece, ReplyReader


class Completion:
    """The answer to one request.

    Args:
        model: the model's name in the answer.
        readers: one for each reply.
        fingerprint: of what computes the answer.
        tells_ids: whether the answer has the token ids of the prompt and of the replies; a stream has them at its end.
    """

    def __init__(
        self,
        model: str,
        readers: Sequence[ReplyReader],
        *,
        fingerprint: str,
        includes_usage: bool = False,
        tells_ids: bool = False,
    ) -> None:
        self._tells_ids = tells_ids
        self._choices = [_Choice(index, reader) for index, reader in enumerate(readers)]
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._head = head | {"system_fingerprint": fingerprint, "service_tier": "default"}
        self._includes_usage = includes_usage

    def take(self, told: OfChoice) -> Iterable[object]:
        """Reads the next event."""
        return self._choices[told.index].reader.take(told.event)

    def whole(self) -> dict[str, Any]:
        """The whole answer, once it is finished."""
        choices = [choice.whole() | self._ids(choice) for choice in self._choices]
        head = {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage()}
        head |= self._prompt_ids(self._choices[0])
        return head | {"timings": _timings([choice.reader.finished for choice in self._choices])}

    async def frames(self, events: AsyncIterator[OfChoice]) -> AsyncIterator[bytes]:
        """The server-sent events of a stream."""
        async for told in events:
            choice = self._choices[told.index]
            for part in choice.parts(told):
                more: dict[str, Any] = {}
                if isinstance(told.event, Finished) and part["finish_reason"]:
                    part |= self._ids(choice)
                    more = {"timings": _timings([choice.reader.finished]), **self._prompt_ids(choice)}
                yield frame(self._chunk([part]) | more)
        if self._includes_usage:
            yield frame(self._chunk([]) | {"usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _ids(self, choice: _Choice) -> dict[str, Any]:
        return {"token_ids": list(choice.reader.finished.token_ids)} if self._tells_ids else {}

    def _prompt_ids(self, choice: _Choice) -> dict[str, Any]:
        return {"prompt_token_ids": list(choice.reader.finished.prompt_token_ids)} if self._tells_ids else {}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def _usage(self) -> dict[str, Any]:
        results = [choice.reader.finished for choice in self._choices]
        num_prompt, num_generated = results[0].num_prompt_tokens, sum(each.num_generated_tokens for each in results)
        num_thinking = sum(choice.reader.num_thinking for choice in self._choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": results[0].cache.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": num_thinking},
        }


class _Choice:
    """One reply."""

    def __init__(self, index: int, reader: ReplyReader) -> None:
        self.reader = reader
        self._index = index
        self._has_begun = False
        # Of the call that is being written; a lost one keeps its own.
        self._call_index = -1

    def whole(self) -> dict[str, Any]:
        """The whole choice, once it is finished."""
        result, calls = self.reader.finished, self.reader.calls
        message: dict[str, Any] = {"role": "assistant", "content": self.reader.text, "refusal": None}
        if calls:
            message |= {"content": self.reader.text or None, "tool_calls": [_called(call) for call in calls]}
        if self.reader.thinking:
            message |= _reasoning(self.reader.thinking)
        return {"index": self._index, "message": message, **self._end, "logprobs": self._logprobs(result)}

    def parts(self, told: OfChoice) -> Iterator[dict[str, Any]]:
        """The parts of a stream's chunks for the next event."""
        if not self._has_begun:
            self._has_begun = True
            yield self._part({"role": "assistant", "content": ""})
        for found in self.reader.take(told.event):
            if (delta := self._delta(found)) is not None:
                yield self._part(delta)
        if isinstance(told.event, Finished):
            yield {**self._part({}), **self._end}

    def _delta(self, found: Part) -> dict[str, Any] | None:
        """None for the end of a call: what was told of it is all."""
        if isinstance(found, Piece):
            return {"content": found.text} if found.kind == "text" else _reasoning(found.text)
        if isinstance(found, CallBegun):
            self._call_index += 1
            return {"tool_calls": [{"index": self._call_index, **_call(found.name, "")}]}
        if isinstance(found, CallArguments):
            return {"tool_calls": [{"index": self._call_index, "function": {"arguments": found.json}}]}
        return None

    def _part(self, delta: dict[str, Any]) -> dict[str, Any]:
        logprobs = None if "reasoning" in delta or "role" in delta else self._logprobs()
        return {"index": self._index, "delta": delta, "finish_reason": None, "logprobs": logprobs}

    @property
    def _end(self) -> dict[str, Any]:
        """Why the reply ended; `stop_reason` is vLLM's field for the request's stop string or token."""
        result = self.reader.finished
        reason = "tool_calls" if self.reader.calls and result.finish_reason == "stop" else result.finish_reason
        return {"finish_reason": reason, "stop_reason": result.stopped_by}

    def _logprobs(self, result: Result | None = None) -> dict[str, Any] | None:
        """Log-probabilities of the tokens not sent yet; None if there are none and `result` has none."""
        told = self.reader.take_logprobs()
        if not told and (result is None or result.logprobs is None):
            return None
        return {"content": [_logprob(each, with_top=True) for each in told], "refusal": None}


def _called(call: ToolCall) -> dict[str, Any]:
    return _call(call.name, json.dumps(dict(call.arguments), ensure_ascii=False))


def _call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _logprob(told: TokenLogprob, *, with_top: bool = False) -> dict[str, Any]:
    own = {"token": told.text, "logprob": told.logprob, "bytes": list(told.bytes)}
    return own | {"top_logprobs": [_logprob(each) for each in told.top]} if with_top else own


def _reasoning(text: str) -> dict[str, str]:
    """The thinking, under both names that clients look for."""
    return {"reasoning": text, "reasoning_content": text}


def _timings(results: Sequence[Result]) -> dict[str, Any]:
    """As llama-server's. With several replies: the first one's prompt, all tokens, the longest time."""
    cache, num_tokens = results[0].cache, sum(each.num_generated_tokens for each in results)
    decode_s = max(each.cache.decode_s for each in results)
    speed = results[0].decode_tokens_per_s if len(results) == 1 else num_tokens / decode_s if decode_s else None
    return {
        "cache_n": cache.num_cached_tokens,
        "prompt_n": cache.num_prefilled_tokens,
        "prompt_ms": cache.prefill_s * 1000,
        "prompt_per_second": cache.num_prefilled_tokens / cache.prefill_s if cache.prefill_s else None,
        "predicted_n": num_tokens,
        "predicted_ms": decode_s * 1000,
        "predicted_per_second": speed,
        "draft_n": sum(each.num_drafted_tokens for each in results),
        "draft_n_accepted": sum(each.num_accepted_tokens for each in results),
    }
