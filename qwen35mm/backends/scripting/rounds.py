"""The rounds of one question whose tools are functions: an answer, the results of its calls, and so on."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from qwen35mm.backends.scripting import loop
from qwen35mm.backends.scripting.functions import (
    MAX_ROUNDS,
    FunctionTool,
    ToolResult,
    arun_calls,
    calls_to_run,
    run_calls,
)
from qwen35mm.backends.scripting.replies import ReplyStream
from qwen35mm.contract import GenerationRequest, Message, Result, ToolCall
from qwen35mm.errors import RequestError

if TYPE_CHECKING:
    from qwen35mm.backends.scripting.chat import Chat

# What a stream with functions shows, in order.
AnswerEvent = str | ToolCall | ToolResult


class Rounds:
    """The requests of one question: itself, then each time its conversation with the results of the last calls.

    Args:
        max_rounds: how often functions may be called.

    Raises:
        RequestError: `max_rounds` isn't a number of rounds.
    """

    def __init__(self, chat: Chat, request: GenerationRequest, max_rounds: int = MAX_ROUNDS) -> None:
        if not isinstance(max_rounds, int) or isinstance(max_rounds, bool) or max_rounds < 1:
            raise RequestError(f"max_rounds must be a whole number, 1 or more; got {max_rounds!r}.")
        self.tools = request.tools
        self._chat, self._request, self._left = chat, request, max_rounds
        self._max_rounds = max_rounds
        self._messages: list[Message] | None = None

    def __iter__(self) -> Iterator[GenerationRequest]:
        while True:
            if self._messages is not None and self._chat.messages is not self._messages:
                raise RequestError("This answer was stopped: its chat was asked something else meanwhile.")
            yield self._request

    def calls_of(self, result: Result) -> tuple[ToolCall, ...]:
        """The calls to run before the model continues; none after the last answer.

        Raises:
            RequestError: it would be one round too many.
        """
        calls = calls_to_run(result, self.tools)
        if calls and not self._left:
            raise RequestError(
                f"The model called tools {self._max_rounds} times for one question, and would call more. Allow it with "
                "a larger max_rounds, or ask more narrowly."
            )
        self._left -= 1
        return calls

    def add(self, results: Sequence[ToolResult]) -> None:
        """Gives the results to the model's next round."""
        self._messages = self._chat.messages = [*self._chat.messages, *(result.message for result in results)]
        # A forced call is forced once: else the answer could never come.
        self._request = replace(self._request, messages=self._messages, tool_choice="auto")


class FunctionStream:
    """An answer's text as it is written, with functions run in between, for `for` and `async for`.

    `events` and `aevents` also show calls and results. Leaving it early ends the answer. Only one reader may use it.

    Args:
        start: begins one round.
    """

    def __init__(self, chat: Chat, rounds: Rounds, start: Callable[[GenerationRequest], ReplyStream]) -> None:
        self._chat, self._rounds, self._start = chat, rounds, start
        self._before = chat.messages
        self._result: Result | None = None
        self._stream: ReplyStream | None = None
        self._has_reader = self._is_closed = False
        # For `next` and `anext` alone: a loop has its own, which ends when it is left.
        self._texts: Iterator[str] | None = None
        self._atexts: AsyncIterator[str] | None = None

    @property
    def result(self) -> Result:
        """The last answer. Raises RequestError before the stream was read to its end."""
        if self._result is None:
            raise RequestError("This answer isn't complete: read its stream to the end first.")
        return self._result

    def __iter__(self) -> Iterator[str]:
        return _texts(self.events())

    def __next__(self) -> str:
        if self._texts is None:
            self._texts = iter(self)
        return next(self._texts)

    def __aiter__(self) -> AsyncIterator[str]:
        return _atexts(self.aevents())

    async def __anext__(self) -> str:
        if self._atexts is None:
            self._atexts = aiter(self)
        return await anext(self._atexts)

    def events(self) -> Generator[AnswerEvent, None, None]:
        """Its texts, and each call before it runs and its `ToolResult`, in order."""
        with self._read() as is_first:
            for request in self._rounds if is_first else ():
                with contextlib.closing(self._begin(request)) as stream:
                    yield from stream
                if self._is_closed:
                    return
                calls = self._rounds.calls_of(stream.result)
                yield from calls or stream.result.tool_calls
                if not calls:
                    self._result = stream.result
                    return
                results = run_calls(calls, self._rounds.tools, loop.run)
                self._rounds.add(results)
                yield from results

    async def aevents(self) -> AsyncGenerator[AnswerEvent, None]:
        """`events` for programs with an event loop."""
        with self._read() as is_first:
            for request in self._rounds if is_first else ():
                with contextlib.closing(self._begin(request)) as stream:
                    async for text in stream:
                        yield text
                if self._is_closed:
                    return
                calls = self._rounds.calls_of(stream.result)
                for call in calls or stream.result.tool_calls:
                    yield call
                if not calls:
                    self._result = stream.result
                    return
                results = await arun_calls(calls, self._rounds.tools)
                self._rounds.add(results)
                for result in results:
                    yield result

    def close(self) -> None:
        """Ends the answer; the chat keeps the rounds whose calls have results, and the text read since."""
        self._has_reader = self._is_closed = True
        if self._stream is not None:
            self._stream.close()

    def _begin(self, request: GenerationRequest) -> ReplyStream:
        self._stream = self._start(request)
        return self._stream

    @contextlib.contextmanager
    def _read(self) -> Iterator[bool]:
        """Whether this is the first reader. An error leaves the chat as before the question; leaving keeps all but
        calls without results."""
        is_first, self._has_reader = not self._has_reader, True
        try:
            yield is_first
        except Exception:
            self._chat.messages = self._before
            raise
        except BaseException:
            if self._chat.messages and self._chat.messages[-1].tool_calls:
                self._chat.messages = self._chat.messages[:-1]
            raise


def _texts(events: Generator[AnswerEvent, None, None]) -> Generator[str, None, None]:
    between = _Between()
    with contextlib.closing(events):
        for event in events:
            yield from between.of(event)


async def _atexts(events: AsyncGenerator[AnswerEvent, None]) -> AsyncGenerator[str, None]:
    between = _Between()
    async with contextlib.aclosing(events):
        async for event in events:
            for text in between.of(event):
                yield text


class _Between:
    """The texts among events, with an empty line between two rounds that both have text."""

    def __init__(self) -> None:
        self._has_text = self._is_new_round = False

    def of(self, event: AnswerEvent) -> Iterator[str]:
        if not isinstance(event, str):
            self._is_new_round = True
            return
        if self._has_text and self._is_new_round:
            yield "\n\n"
        self._has_text, self._is_new_round = True, False
        yield event


def has_functions(request: GenerationRequest) -> bool:
    return any(isinstance(tool, FunctionTool) for tool in request.tools)
