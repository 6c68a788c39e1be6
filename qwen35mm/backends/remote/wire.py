"""OpenAI's chat completions: the parameters that a request sends, and the events of a streamed answer.

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

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qwen35mm.errors import RequestError
from qwen35mm.sampling import SamplingParams

DONE = "[DONE]"
# Far above any chunk of an answer: what is longer is no event stream.
_MAX_LINE_BYTES = 2**20
# Python's own numbers have no end; whoever divides or stores what a server counts needs one.
_MAX_COUNT = 2**53
_LINE_END = re.compile(rb"\r\n|\n|\r")


class DamageError(Exception):
    """What came is no stream of chat completion chunks; the text says why."""


@dataclass(frozen=True)
class Delta:
    """What one chunk of a streamed answer brings."""

    answer: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: Any = None


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
        self._rest = b""
        self._data: list[str] = []
        self._is_start = True

    def feed(self, chunk: bytes) -> Iterator[str]:
        """The events that end within `chunk`.

        Raises:
            DamageError: a line without an end, or text that isn't UTF-8.
        """
        rest = self._rest + chunk
        if self._is_start and rest:
            if len(rest) < 3 and b"\xef\xbb\xbf".startswith(rest):
                self._rest = rest
                return
            rest, self._is_start = rest.removeprefix(b"\xef\xbb\xbf"), False
        # A carriage return at the end may be half of a line's end.
        held = b"\r" if rest.endswith(b"\r") else b""
        *lines, last = _LINE_END.split(rest[: len(rest) - len(held)])
        self._rest = last + held
        if len(self._rest) > _MAX_LINE_BYTES:
            raise DamageError(f"a line of more than {_MAX_LINE_BYTES:,} bytes")
        for line in lines:
            yield from self._line(line)

    def end(self) -> Iterator[str]:
        """The last event, where the stream ended without the empty line after it."""
        yield from self._line(self._rest)
        yield from self._line(b"")

    def _line(self, line: bytes) -> Iterator[str]:
        if not line.strip(b"\r"):
            if self._data:
                yield "\n".join(self._data)
                self._data = []
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            try:
                self._data.append(value.rstrip(b"\r").removeprefix(b" ").decode())
            except UnicodeDecodeError:
                raise DamageError("text that isn't UTF-8") from None


def read_chunk(data: str) -> Delta:
    """One chunk of a streamed answer; objects without choices, usage and error bring nothing.

    Raises:
        DamageError: not a chunk.
    """
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        raise DamageError("an event that isn't JSON") from None
    if not isinstance(values, dict):
        raise DamageError(f"an event that is a {type(values).__name__}, not an object")
    if values.get("error"):
        return Delta(error=values["error"])
    choices, usage = values.get("choices") or [], values.get("usage")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    delta = (choice.get("delta") or {}) if isinstance(choice, dict) else None
    if not isinstance(delta, dict) or not isinstance(usage, dict | None):
        raise DamageError("a chunk of another form than OpenAI's")
    finish_reason = choice.get("finish_reason")
    if not isinstance(finish_reason, str | None):
        raise DamageError(f"a finish_reason that is a {type(finish_reason).__name__}, not a string")
    return Delta(
        answer=_text(delta.get("content")),
        reasoning=_text(delta.get("reasoning_content")) or _text(delta.get("reasoning")),
        finish_reason=finish_reason,
        usage=usage,
    )


def read_models(body: bytes) -> list[str]:
    """The names in an answer to GET /models.

    Raises:
        DamageError: it is of another form.
    """
    try:
        return [str(model["id"]) for model in json.loads(body)["data"]]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise DamageError("a list of models of another form than OpenAI's") from None


def count(usage: dict[str, Any], *path: str) -> int:
    """A number of tokens in a usage object; 0 where the server doesn't say, or gives a number that none can be."""
    value: Any = usage
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MAX_COUNT else 0


def _text(value: Any) -> str:
    # A JSON escape can hold half a character, which nothing could write to a file.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""
