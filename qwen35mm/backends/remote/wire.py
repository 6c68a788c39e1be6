"""OpenAI's chat completions: the parameters that a request sends, and a streamed answer gathered into a result.

What servers take, of what isn't in OpenAI's own API (their request schemas, and the server of transformers):

    parameter                   vLLM    SGLang  llama-server        transformers serve
    top_k, min_p                yes     yes     yes                 refused
    repetition_penalty          yes     yes     as repeat_penalty   refused
    chat_template_kwargs        yes     yes     yes                 yes
    response_format json_schema yes     yes     yes                 ignored
    video_url                   yes     yes     no                  yes
    reasoning arrives in        reasoning       reasoning_content (all others)
"""

from __future__ import annotations

import codecs
import io
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from qwen35mm.backends.remote.faults import Fault, damaged, stream_error
from qwen35mm.cache import CacheReport
from qwen35mm.engine import Result
from qwen35mm.engine.events import FinishReason
from qwen35mm.errors import RefusedError, RequestError
from qwen35mm.sampling import SamplingParams

DONE = "[DONE]"
# Far above any chunk of an answer: what is longer is no event stream.
_MAX_EVENT_CHARS = 2**20
# Python's own numbers have no end; whoever divides or stores what a server counts needs one.
_MAX_COUNT = 2**53

# Servers older than the common names end with the token or the string that they stopped at.
_FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "length": "length",
}


def sampling_fields(params: SamplingParams | None, *, enable_thinking: bool | None) -> dict[str, Any]:
    """The parameters of a request that decide its reply; None leaves everything to the server.

    Of the parameters outside OpenAI's API only those go out that do something, since some servers refuse their names:
    with `top_k` and `min_p` 0 and `repetition_penalty` 1, a server's own defaults for them hold.

    Raises:
        RequestError: something that no server can be asked for.
    """
    fields: dict[str, Any] = {}
    if params is not None:
        if params.thinking_budget:
            raise RequestError(
                "A thinking budget can't be asked of a server. Turn thinking off, or limit the reply with max_tokens."
            )
        enable_thinking = False if params.thinking_budget == 0 else enable_thinking
        fields["temperature"] = 0.0 if params.greedy else params.temperature
        if not params.greedy:
            fields["top_p"] = params.top_p
            fields |= {"top_k": params.top_k} if params.top_k else {}
            fields |= {"min_p": params.min_p} if params.min_p else {}
            fields |= {"seed": params.seed} if params.seed is not None else {}
        if params.presence_penalty:
            fields["presence_penalty"] = params.presence_penalty
        if params.repetition_penalty != 1.0:
            # The second is llama-server's name; each server passes over the other's.
            fields["repetition_penalty"] = fields["repeat_penalty"] = params.repetition_penalty
        if params.max_tokens is not None:
            fields["max_tokens"] = params.max_tokens
        if params.stop:
            fields["stop"] = list(params.stop)
        if params.json_schema is not None:
            schema = {"name": "reply", "schema": json.loads(params.json_schema), "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if enable_thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": enable_thinking}
    return fields


class EventReader:
    """Server-sent events (WHATWG HTML, 9.2.6) from bytes that are cut anywhere: gives the data of each event."""

    def __init__(self) -> None:
        # Text without a byte order mark, whose lines end with "\n".
        self._text = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
        self._rest = ""

    def feed(self, chunk: bytes) -> Iterator[str]:
        """The events that end within `chunk`; an empty one is the stream's end, where the last may lack its empty line.

        Raises:
            Fault: a line without an end, or text that isn't UTF-8.
        """
        try:
            self._rest += self._text.decode(chunk, final=not chunk)
        except UnicodeDecodeError:
            raise damaged("text that isn't UTF-8") from None
        *events, self._rest = (self._rest if chunk else f"{self._rest}\n\n").split("\n\n")
        if len(self._rest) > _MAX_EVENT_CHARS:
            raise damaged(f"an event of more than {_MAX_EVENT_CHARS:,} characters")
        for event in events:
            fields = (line.partition(":") for line in event.split("\n"))
            data = [value.removeprefix(" ") for name, _, value in fields if name == "data"]
            if data:
                yield "\n".join(data)


class Reply:
    """What one attempt has brought so far.

    Args:
        asked_s: when the caller asked, by `time.monotonic`.
        sent: the parameters of the request that a server may not know.
    """

    def __init__(self, asked_s: float, sent: Mapping[str, Any]) -> None:
        self.sent = sent
        self._asked_s = asked_s
        self._answer: list[str] = []
        self._reasoning: list[str] = []
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] = {}
        self._first_s: float | None = None
        self._last_s = asked_s

    def add(self, data: str) -> None:
        """Takes the next chunk; objects without choices, usage and error bring nothing.

        Raises:
            Fault: not a chunk, or one that tells of an error.
        """
        try:
            values = json.loads(data)
        except (ValueError, RecursionError):
            raise damaged("an event that isn't JSON") from None
        if not isinstance(values, dict):
            raise damaged(f"an event that is a {type(values).__name__}, not an object")
        if values.get("error"):
            raise stream_error(values["error"], self.sent)
        choices, usage = values.get("choices") or [], values.get("usage")
        choice = choices[0] if isinstance(choices, list) and choices else {}
        delta = (choice.get("delta") or {}) if isinstance(choice, dict) else None
        if not isinstance(delta, dict) or not isinstance(usage, dict | None):
            raise damaged("a chunk of another form than OpenAI's")
        finish_reason = choice.get("finish_reason")
        if not isinstance(finish_reason, str | None):
            raise damaged(f"a finish_reason that is a {type(finish_reason).__name__}, not a string")
        answer = _text(delta.get("content"))
        reasoning = _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
        if answer or reasoning:
            self._last_s = time.monotonic()
            if self._first_s is None:
                self._first_s = self._last_s
        self._answer.append(answer)
        self._reasoning.append(reasoning)
        self._finish_reason = finish_reason or self._finish_reason
        self._usage = usage or self._usage

    def result(self) -> Result:
        """The finished reply. Numbers of tokens are the server's, 0 where it gives none; token ids it never gives.

        Raises:
            Fault: it isn't finished, was withheld, or ended in a way that no reply should.
        """
        if self._finish_reason is None:
            raise damaged("it ended before the reply was finished")
        if self._finish_reason == "content_filter":
            raise Fault(RefusedError, "withheld its answer: its content filter stepped in.")
        if self._finish_reason not in _FINISH_REASONS:
            raise damaged(f"it ended with the reason '{self._finish_reason}'")
        num_prompt, num_generated = _count(self._usage, "prompt_tokens"), _count(self._usage, "completion_tokens")
        num_cached = min(_count(self._usage, "prompt_tokens_details", "cached_tokens"), num_prompt)
        decode_s = 0.0 if self._first_s is None else self._last_s - self._first_s
        return Result(
            text="".join(self._answer),
            reasoning="".join(self._reasoning) or None,
            finish_reason=_FINISH_REASONS[self._finish_reason],
            token_ids=(),
            prompt_token_ids=(),
            num_prompt_tokens=num_prompt,
            num_generated_tokens=num_generated,
            ttft_s=None if self._first_s is None else self._first_s - self._asked_s,
            decode_tokens_per_s=(num_generated - 1) / decode_s if num_generated > 1 and decode_s > 0 else None,
            seed=self.sent.get("seed"),
            cache=CacheReport(
                num_cached_tokens=num_cached, num_prefilled_tokens=num_prompt - num_cached, decode_s=decode_s
            ),
        )


def _count(usage: dict[str, Any], *path: str) -> int:
    """A number of tokens in a usage object; 0 where the server doesn't say, or gives a number that none can be."""
    value: Any = usage
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MAX_COUNT else 0


def _text(value: Any) -> str:
    # A JSON escape can hold half a character, which nothing could write to a file.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""
