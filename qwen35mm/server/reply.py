"""Splits the events of a reply into text, thinking and calls, for each protocol to write in its form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qwen35mm.contract import Event, Finished, MediaPlanned, Result, TextDelta, TokenLogprob, ToolCall
from qwen35mm.prompt.calls import CallParser
from qwen35mm_preprocess import MediaPlan


@dataclass(frozen=True)
class Piece:
    """The next part of a reply's text or thinking."""

    kind: Literal["text", "thinking"]
    text: str


class ReplyReader:
    """Reads the events of one reply.

    Args:
        tools: those that it may call; without any, everything is text.
        most_calls: further calls are dropped; None is no limit.

    Attributes:
        calls: all so far.
        plans: how the media were read, in order of appearance.
        num_thinking: thinking tokens so far.
        result: None until the reply is finished.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = (), most_calls: int | None = None) -> None:
        self._parser = CallParser(tools) if tools else None
        self._most_calls = most_calls
        self.calls: list[ToolCall] = []
        self.plans: tuple[MediaPlan, ...] = ()
        self.num_thinking = 0
        self.result: Result | None = None
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    @property
    def text(self) -> str:
        """The answer so far, without its calls."""
        return "".join(self._text)

    def take(self, event: Event) -> Iterator[Piece | ToolCall]:
        """Reads the next event and yields what it adds."""
        if isinstance(event, Finished):
            self.result = event.result
            yield from self._known(self._parser.flush() if self._parser else [])
        elif isinstance(event, MediaPlanned):
            self.plans = event.plans
        elif isinstance(event, TextDelta):
            self._logprobs += event.logprobs if event.channel == "answer" else ()
            if not event.text:
                return
            if event.channel == "reasoning":
                self.num_thinking = event.num_generated_tokens or self.num_thinking
                yield Piece("thinking", event.text)
            else:
                yield from self._known(self._parser.push(event.text) if self._parser else [event.text])

    def take_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the answer's tokens since the last call, calls included; empty if not requested."""
        taken, self._logprobs = self._logprobs, []
        return taken

    def _known(self, found: list[str | ToolCall]) -> Iterator[Piece | ToolCall]:
        for each in found:
            if isinstance(each, str):
                self._text.append(each)
                yield Piece("text", each)
            elif self._most_calls is None or len(self.calls) < self._most_calls:
                self.calls.append(each)
                yield each

    @property
    def finished(self) -> Result:
        """The result. The stream must have ended."""
        assert self.result is not None, "a stream ends with its result"
        return self.result
