"""Splits the events of a reply into text, thinking and calls, for each protocol to write in its form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qwen35mm.contract import Event, Finished, MediaPlanned, Result, TextDelta, TokenLogprob, ToolCall
from qwen35mm.prompt.calls import CallArguments, CallBegun, CallLost, CallParser, Found
from qwen35mm.prompt.replies import is_cut
from qwen35mm_preprocess import MediaPlan


@dataclass(frozen=True)
class Piece:
    """The next part of a reply's text or thinking."""

    kind: Literal["text", "thinking"]
    text: str


Part = Piece | CallBegun | CallArguments | CallLost | ToolCall


class ReplyReader:
    """Reads the events of one reply.

    A call comes as the parser tells it: its beginning, its arguments in parts, and the whole call. A call that was lost
    after its beginning was told is part of `text`, not of a stream's text.

    Args:
        tools: those that it may call; without any, everything is text.
        most_calls: further calls are dropped; None is no limit.

    Attributes:
        calls: all whole ones so far.
        plans: how the media were read, in order of appearance; None for one that couldn't be.
        num_thinking: thinking tokens so far.
        result: None until the reply is finished.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = (), most_calls: int | None = None) -> None:
        self._parser = CallParser(tools) if tools else None
        # Calls in a thinking count only if the reply ends there.
        self._thinking_parser = CallParser(tools, only_last=True) if tools else None
        self._most_calls = most_calls
        self._num_begun = 0
        self.calls: list[ToolCall] = []
        self.plans: tuple[MediaPlan | None, ...] = ()
        self.num_thinking = 0
        self.result: Result | None = None
        # Texts in parts, and calls between them.
        self._answer: list[list[str] | ToolCall] = []
        self._thinking: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    @property
    def text(self) -> str:
        """The answer so far, without its calls."""
        return "".join(each for each in self.blocks if isinstance(each, str))

    @property
    def blocks(self) -> list[str | ToolCall]:
        """The answer so far: texts and calls in order."""
        return ["".join(each) if isinstance(each, list) else each for each in self._answer]

    @property
    def thinking(self) -> str:
        """The thinking so far, without its calls."""
        return "".join(self._thinking)

    def take(self, event: Event) -> Iterator[Part]:
        """Reads the next event and yields what it adds."""
        if isinstance(event, Finished):
            self.result = event.result
            cut = is_cut(event.result)
            if self._thinking_parser:
                yield from self._known(self._thinking_parser.flush(is_cut=cut), "thinking")
            if self._parser:
                yield from self._known(self._parser.flush(is_cut=cut), "text")
        elif isinstance(event, MediaPlanned):
            self.plans = event.plans
        elif isinstance(event, TextDelta):
            self._logprobs += event.logprobs if event.channel == "answer" else ()
            if not event.text:
                return
            if event.channel == "reasoning":
                self.num_thinking = event.num_generated_tokens or self.num_thinking
                parser = self._thinking_parser
                yield from self._known(parser.push(event.text) if parser else [event.text], "thinking")
                return
            if self._thinking_parser:
                yield from self._known(self._thinking_parser.flush(is_cut=True), "thinking")
                self._thinking_parser = None
            yield from self._known(self._parser.push(event.text) if self._parser else [event.text], "text")

    def take_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the answer's tokens since the last call, calls included; empty if not requested."""
        taken, self._logprobs = self._logprobs, []
        return taken

    def _known(self, found: list[Found], kind: Literal["text", "thinking"]) -> Iterator[Part]:
        for each in found:
            if isinstance(each, str):
                self._add(each) if kind == "text" else self._thinking.append(each)
                yield Piece(kind, each)
                continue
            self._num_begun += isinstance(each, CallBegun)
            if self._most_calls is not None and self._num_begun > self._most_calls:
                continue
            if isinstance(each, ToolCall):
                self.calls.append(each)
                self._answer.append(each)
            elif isinstance(each, CallLost):
                self._add(each.text)
            yield each

    def _add(self, text: str) -> None:
        last = self._answer[-1] if self._answer else None
        if isinstance(last, list):
            last.append(text)
        else:
            self._answer.append([text])

    @property
    def finished(self) -> Result:
        """The result. The stream must have ended."""
        assert self.result is not None, "a stream ends with its result"
        return self.result
