"""A streamed answer: OpenAI's chunks as chunks for the caller, and collected into a Result."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qwen35mm.backends.remote import words
from qwen35mm.backends.remote.faults import Fault, damaged, stream_error
from qwen35mm.backends.remote.logprobs import read_logprobs
from qwen35mm.backends.remote.programs import is_count
from qwen35mm.contract import (
    CacheReport,
    Channel,
    FinishReason,
    Prefilled,
    Progress,
    Result,
    TextDelta,
    TokenLogprob,
    ToolCall,
)
from qwen35mm.errors import PromptError, RefusedError
from qwen35mm.prompt.replies import read_reply

DONE = "[DONE]"
Piece = Progress | Prefilled | TextDelta

# Older servers name the token or the string that they stopped at.
_FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "length": "length",
}
_THINK, _ANSWER = "<think>", "</think>"


class Reply:
    """The part of one attempt that has arrived.

    Args:
        asked_s: when the caller asked, by `time.monotonic`.
        sent: the parameters of the request that a server may not know.
        tools: the request's, for servers that leave calls in the text.
        finds_thinking: whether to separate thinking that is left in the text.

    Attributes:
        has_text: whether some of its text was yielded.
    """

    def __init__(
        self,
        asked_s: float,
        sent: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        finds_thinking: bool = True,
    ) -> None:
        self.sent = sent
        self.has_text = False
        self._tools = tools
        self._asked_s = asked_s
        self._texts: dict[Channel, list[str]] = {"answer": [], "reasoning": []}
        self._thinking = _Thinking(None if finds_thinking else "answer")
        self._thinks_apart = False
        self._calls: dict[int, _Call] = {}
        self._read_calls: list[ToolCall] = []
        self._logprobs: list[TokenLogprob] = []
        self._num_told = 0
        self._finish_reason: str | None = None
        self._stopped_by: str | int | None = None
        self._usage: dict[str, Any] = {}
        self._timings: dict[str, Any] = {}
        self._first_s: float | None = None
        self._last_s = asked_s

    def add(self, data: str) -> Iterator[Piece]:
        """Takes the next chunk, of a chat or of a text; ignores objects without choices, usage and error.

        Raises:
            Fault: it isn't a chunk, or it reports an error.
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
        delta = (choice.get("delta") or {"content": choice.get("text")}) if isinstance(choice, dict) else None
        if not isinstance(delta, dict) or not isinstance(usage, dict | None):
            raise damaged("a chunk of another form than OpenAI's")
        finish_reason = choice.get("finish_reason")
        if not isinstance(finish_reason, str | None):
            raise damaged(f"a finish_reason that is a {type(finish_reason).__name__}, not a string")
        self._usage = usage or self._usage
        self._timings = found if isinstance(found := values.get("timings"), dict) else self._timings
        yield from self._progress(values.get("prompt_progress"))
        self._logprobs += read_logprobs(choice.get("logprobs"))
        answer = _text(delta.get("content"))
        reasoning = _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
        is_called = self._add_calls(delta.get("tool_calls"))
        if answer or reasoning or is_called:
            self._last_s = time.monotonic()
            if self._first_s is None:
                self._first_s = self._last_s
                yield from self._prefilled()
        if reasoning:
            self._thinks_apart = True
            yield from self._given("reasoning", reasoning)
        for channel, text in self._thinking.push(answer) if answer else ():
            yield from self._given(channel, text)
        self._finish_reason = finish_reason or self._finish_reason
        if isinstance(stopped_by := choice.get("stop_reason"), str | int) and not isinstance(stopped_by, bool):
            self._stopped_by = stopped_by

    def end(self) -> Iterator[Piece]:
        """Yields the text that was held back.

        Raises:
            Fault: the answer is unfinished, was withheld, or ended with an unknown reason.
        """
        if self._finish_reason is None:
            raise damaged("it ended before the reply was finished")
        if self._finish_reason == "content_filter":
            raise Fault(RefusedError, words.withheld)
        if self._finish_reason not in _FINISH_REASONS:
            raise damaged(f"it ended with the reason '{self._finish_reason}'")
        for channel, text in self._thinking.flush():
            yield from self._given(channel, text)
        for call in self._calls.values():
            read = call.read()
            if read is None:
                yield from self._given("answer", call.as_text())
            else:
                self._read_calls.append(read)

    def texts(self) -> Iterator[TextDelta]:
        """The whole text so far."""
        for channel in ("reasoning", "answer"):
            if text := "".join(self._texts[channel]):
                yield TextDelta(text, channel)

    def result(self) -> Result:
        """The finished reply. Token counts are the server's, 0 if not reported; there are no token ids."""
        assert self._finish_reason is not None, "see end()"
        num_prompt, num_cached = self._prompt_counts()
        num_generated = _count(self._usage, "completion_tokens") or _count(self._timings, "predicted_n")
        decode_s = 0.0 if self._first_s is None else self._last_s - self._first_s
        # The server's own time excludes a slow network.
        decode_s = _seconds(self._timings, "predicted_ms") or decode_s
        reason = _FINISH_REASONS[self._finish_reason]
        read = read_reply(
            "".join(self._texts["answer"]),
            "".join(self._texts["reasoning"]) or None,
            () if self._calls else self._tools,
            is_cut=reason != "stop" or self._stopped_by is not None,
        )
        return Result(
            text=read.text,
            reasoning=read.reasoning or None,
            finish_reason=reason,
            token_ids=(),
            prompt_token_ids=(),
            num_prompt_tokens=num_prompt,
            num_generated_tokens=num_generated,
            ttft_s=None if self._first_s is None else self._first_s - self._asked_s,
            decode_tokens_per_s=(num_generated - 1) / decode_s if num_generated > 1 and decode_s > 0 else None,
            seed=self.sent.get("seed"),
            cache=CacheReport(
                num_cached_tokens=num_cached,
                num_prefilled_tokens=num_prompt - num_cached,
                prefill_s=_seconds(self._timings, "prompt_ms"),
                decode_s=decode_s,
            ),
            tool_calls=read.calls or tuple(self._read_calls),
            stopped_by=self._stopped_by,
            logprobs=tuple(self._logprobs) or None,
        )

    def _given(self, channel: Channel, text: str) -> Iterator[TextDelta]:
        if not self._texts[channel] and (channel == "reasoning" or self._thinks_apart):
            # White space that the template puts around thinking, even if empty; `transformers serve` passes it on.
            text = text.lstrip()
        if not text:
            return
        self._texts[channel].append(text)
        self.has_text = True
        number = _count(self._usage, "completion_tokens") or _count(self._timings, "predicted_n") or None
        told, self._num_told = tuple(self._logprobs[self._num_told :]), len(self._logprobs)
        yield TextDelta(text, channel, number, None if number is None else self._last_s, told)

    def _progress(self, values: Any) -> Iterator[Progress]:
        """llama-server's progress of prefill."""
        total = _count(values, "total") if isinstance(values, dict) else 0
        if total and self._first_s is None:
            yield Progress("prefill", min(_count(values, "processed"), total), total)

    def _prefilled(self) -> Iterator[Prefilled]:
        num_prompt, num_cached = self._prompt_counts()
        if num_prompt and self._first_s is not None:
            cache = CacheReport(
                num_cached_tokens=num_cached,
                num_prefilled_tokens=num_prompt - num_cached,
                prefill_s=_seconds(self._timings, "prompt_ms"),
            )
            yield Prefilled(num_prompt, self._first_s - self._asked_s, self.sent.get("seed"), cache)

    def _prompt_counts(self) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them came from the cache."""
        cached = _count(self._timings, "cache_n")
        num_prompt = _count(self._usage, "prompt_tokens") or _count(self._timings, "prompt_n") + cached
        cached = _count(self._usage, "prompt_tokens_details", "cached_tokens") or cached
        return num_prompt, min(cached, num_prompt)

    def _add_calls(self, deltas: Any) -> bool:
        """Takes the next chunks of calls; whether there were any."""
        if deltas is None:
            return False
        if not isinstance(deltas, list):
            raise damaged(f"tool_calls that are a {type(deltas).__name__}, not a list")
        for at, delta in enumerate(deltas):
            function = delta.get("function") or {} if isinstance(delta, dict) else None
            if not isinstance(function, dict):
                raise damaged("a tool call of another form than OpenAI's")
            index = delta.get("index")
            call = self._calls.setdefault(index if isinstance(index, int) else at, _Call())
            call.id = _text(delta.get("id")) or call.id
            call.name += _text(function.get("name"))
            call.arguments.append(_text(function.get("arguments")))
        return bool(deltas)


class _Call:
    """A call that is still arriving."""

    def __init__(self) -> None:
        self.id: str | None = None
        self.name = ""
        self.arguments: list[str] = []

    def read(self) -> ToolCall | None:
        """The call; None if its arguments aren't a JSON object."""
        try:
            arguments = json.loads("".join(self.arguments) or "{}")
            return ToolCall(self.name, arguments, self.id)
        except (ValueError, RecursionError, PromptError):
            return None

    def as_text(self) -> str:
        """The call as text, so that nothing of a reply is lost."""
        return f"\n<tool_call>\n{self.name}: {''.join(self.arguments)}\n</tool_call>"


class _Thinking:
    """Separates thinking from the answer for servers that leave it in the text, which then begins with its tag."""

    def __init__(self, channel: Channel | None = None) -> None:
        self._held = ""
        # None as long as the text may be either.
        self._channel: Channel | None = channel

    def push(self, text: str) -> Iterator[tuple[Channel, str]]:
        self._held += text
        if self._channel is None:
            begun = self._held.lstrip()
            if begun.startswith(_THINK):
                self._channel, self._held = "reasoning", begun.removeprefix(_THINK).lstrip()
            elif not _THINK.startswith(begun):
                self._channel = "answer"
        if self._channel == "reasoning":
            thought, mark, rest = self._held.partition(_ANSWER)
            if mark:
                self._channel, self._held = "answer", rest.lstrip()
                yield from _nonempty("reasoning", thought.rstrip())
            else:
                stop = _held_from(thought)
                self._held = thought[stop:]
                yield from _nonempty("reasoning", thought[:stop])
        if self._channel == "answer":
            known, self._held = self._held, ""
            yield from _nonempty("answer", known)

    def flush(self) -> Iterator[tuple[Channel, str]]:
        known, self._held = self._held, ""
        yield from _nonempty(self._channel or "answer", known)


def _nonempty(channel: Channel, text: str) -> Iterator[tuple[Channel, str]]:
    if text:
        yield channel, text


def _held_from(thought: str) -> int:
    """Where a possible end tag of thinking begins, white space before it included."""
    lengths = (length for length in range(len(_ANSWER) - 1, 0, -1) if thought.endswith(_ANSWER[:length]))
    return len(thought[: len(thought) - next(lengths, 0)].rstrip())


def _count(usage: dict[str, Any], *path: str) -> int:
    """A token count in a usage object; 0 if missing or impossible."""
    value: Any = usage
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if is_count(value) else 0


def _seconds(timings: dict[str, Any], name: str) -> float:
    """A time in milliseconds, in seconds; 0 if missing or impossible."""
    value = timings.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 0.0
    return value / 1000 if 0 < value < 1e12 else 0.0


def _text(value: Any) -> str:
    # A JSON escape can hold half a character, which can't be written to a file.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""
