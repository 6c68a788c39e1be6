"""One conversation in a script, with its messages and media plans."""

from __future__ import annotations

import contextlib
import threading
import uuid
import weakref
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from qwen35mm.backends.scripting import loop
from qwen35mm.backends.scripting.forms import (
    AskOptions,
    Clip,
    Params,
    Picture,
    Tools,
    conversation_of,
    question_of,
    request_of,
)
from qwen35mm.backends.scripting.functions import MAX_ROUNDS, arun_calls, content_of, run_calls
from qwen35mm.backends.scripting.replies import ReplyStream
from qwen35mm.backends.scripting.rounds import FunctionStream, Rounds, has_functions
from qwen35mm.contract import Event, GenerationRequest, Message, Result, Retain, SamplingParams, Text, pin_plans
from qwen35mm.contract.messages import Content
from qwen35mm.errors import ConfigError, PromptError, RequestError
from qwen35mm_preprocess import MediaPlan

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Answering(Protocol):
    """The part of `ScriptedModel` that a chat uses."""

    @property
    def default_params(self) -> SamplingParams | None: ...

    async def reply(self, request: GenerationRequest) -> tuple[Result, tuple[MediaPlan | None, ...] | None]: ...

    def events(self, request: GenerationRequest) -> AsyncGenerator[Event, None]: ...


class Chat:
    """A conversation with a model, made by `model.chat(...)`. Any thread may use it, one at a time.

    An error, or stopping `ask`, leaves the chat as it was before the question. After leaving a stream, the chat keeps
    the question and the part of the answer that was read, or nothing if none was.

    Args:
        model: answers the questions.
        messages: the first ones.
        tools: Python functions, or definitions in OpenAI's form, for every answer.
        thinking: whether the model thinks first; None takes its default.
        template_options: see `GenerationRequest`.
        params: for its answers; None takes the model's.
        name: of the conversation, which keeps its cache separate; None makes one up.
        tenant, retain: see `LocalBackend.stream`.

    Attributes:
        messages: all of them; may be changed between two questions.
    """

    def __init__(
        self,
        model: Answering,
        *,
        messages: Sequence[Message] = (),
        tools: Tools | None = None,
        thinking: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
        params: Params | None = None,
        name: str | None = None,
        tenant: str | None = None,
        retain: Retain = "conversation",
    ) -> None:
        if not isinstance(name, str | None):
            raise ConfigError(f"A conversation's name must be a string, or None; got {name!r}.")
        self.messages = list(messages)
        self.name = name or uuid.uuid4().hex
        self._model = model
        base = GenerationRequest(params=model.default_params, conversation=self.name, tenant=tenant, retain=retain)
        # The base of its requests; `tools` become those of the newest question.
        options = {"thinking": thinking, "template_options": template_options, "tools": tools}
        self._template = request_of(base, params, options)
        self._lock = threading.Lock()
        # The writer of the next answer: a question in progress, or a stream, whose reader may have left.
        self._writer: object | None = None

    def __repr__(self) -> str:
        return f"<Chat {self.name!r}, {len(self.messages)} messages>"

    def ask(
        self,
        text: Content = None,
        *,
        images: Picture | Sequence[Picture] = (),
        videos: Clip | Sequence[Clip] = (),
        params: Params | None = None,
        max_rounds: int = MAX_ROUNDS,
        **options: Unpack[AskOptions],
    ) -> Result:
        """Asks, and waits for the whole answer. Runs the calls of tools that are functions, until there is an answer.

        Args:
            text: the question, or a list of texts and pictures in order. Without text and media, the chat's last
                message is answered: a tool's result, or a question whose answer was dropped.
            images, videos: one or several, placed before the text.
            params: a SamplingParams, or a dict of some of its fields.
            max_rounds: how often functions may be called one after the other; beyond, RequestError is raised.
            options: single fields of SamplingParams; `schema` (a type, a dict or JSON text), by which the result gets
                `parsed`; `thinking`; `template_options`; `adapter`, by its name; `timeout_s`, for each round; and
                `tools`, which the chat keeps from then on.

        Raises:
            Qwen35mmError: as the model's `stream`, and for invalid arguments; the chat stays unchanged.
        """
        request = self._request(text, images, videos, params, options)
        with self._asked(request, max_rounds) as rounds:
            for current in rounds:
                result = self._keep(current, *loop.run(self._model.reply(current)))
                if not (calls := rounds.calls_of(result)):
                    return result
                rounds.add(run_calls(calls, request.tools, loop.run))
            raise AssertionError("rounds end with an answer or an error")

    async def aask(
        self,
        text: Content = None,
        *,
        images: Picture | Sequence[Picture] = (),
        videos: Clip | Sequence[Clip] = (),
        params: Params | None = None,
        max_rounds: int = MAX_ROUNDS,
        **options: Unpack[AskOptions],
    ) -> Result:
        """`ask` for programs with an event loop. Runs the calls of one answer at the same time."""
        request = self._request(text, images, videos, params, options)
        with self._asked(request, max_rounds) as rounds:
            for current in rounds:
                result = self._keep(current, *await loop.arun(self._model.reply(current)))
                if not (calls := rounds.calls_of(result)):
                    return result
                rounds.add(await arun_calls(calls, request.tools))
            raise AssertionError("rounds end with an answer or an error")

    def stream(
        self,
        text: Content = None,
        *,
        images: Picture | Sequence[Picture] = (),
        videos: Clip | Sequence[Clip] = (),
        params: Params | None = None,
        max_rounds: int = MAX_ROUNDS,
        **options: Unpack[AskOptions],
    ) -> ReplyStream | FunctionStream:
        """The answer's text as it is written, for `for` and `async for`; its `result` at the end. Arguments and errors
        as in `ask`. Another question ends a stream that was left.

        With functions as tools, a `FunctionStream` runs them as it is read, and its `events` also show the calls.
        """
        request = self._request(text, images, videos, params, options)
        if has_functions(request):
            return FunctionStream(self, Rounds(self, request, max_rounds), self._stream)
        return self._stream(request)

    def _stream(self, request: GenerationRequest) -> ReplyStream:
        def end(read: str, plans: tuple[MediaPlan | None, ...] | None, result: Result | None) -> None:
            if result is not None:
                self._keep(request, result, plans)
            elif read:
                self._store(request, plans, Message("assistant", read))

        try:
            self._begin(request)
            stream = ReplyStream(self._model.events(request), request.tools, end, request.schema)
            self._writer = weakref.ref(stream)
        finally:
            self._end(request)
        return stream

    def answer_calls(self, results: Iterable[Any]) -> None:
        """Adds the results of the last answer's tool calls, in their order; `ask()` then continues.

        Args:
            results: one for each call: a string, JSON values or pictures.

        Raises:
            PromptError: the last message has no calls, or another number of them.
        """
        calls = self.messages[-1].tool_calls if self.messages else ()
        given = [results] if isinstance(results, str) else list(results)
        if not calls or len(calls) != len(given):
            raise PromptError(f"The last message has {len(calls)} calls, and there are {len(given)} results for them.")
        self.messages += [
            Message("tool", content_of(result), tool_call_id=call.id, name=call.name)
            for call, result in zip(calls, given, strict=True)
        ]

    def drop_answer(self) -> None:
        """Removes the last answer and everything after it; `ask()` then writes another one.

        Raises:
            PromptError: there is no answer.
        """
        places = [at for at, message in enumerate(self.messages) if message.role == "assistant"]
        if not places:
            raise PromptError("This chat has no answer yet that could be dropped.")
        del self.messages[places[-1] :]

    def fork(self) -> Chat:
        """Another chat that continues from here; forking computes nothing."""
        other = Chat(self._model, messages=self.messages)
        other._template = replace(self._template, conversation=other.name)
        return other

    def _request(
        self, text: Content, images: Any, videos: Any, params: Params | None, options: AskOptions
    ) -> GenerationRequest:
        self._stop_left_stream()
        question = question_of(text, images, videos)
        messages = conversation_of([*self.messages, question] if question else self.messages)
        if messages[-1].role not in ("user", "tool"):
            raise PromptError("There is nothing to answer: ask something, or drop the last answer.")
        return replace(request_of(self._template, params, options), messages=messages)

    @contextlib.contextmanager
    def _asked(self, request: GenerationRequest, max_rounds: int) -> Iterator[Rounds]:
        """The rounds of one question; an error leaves the chat as it was before."""
        before, rounds = (self.messages, self._template), Rounds(self, request, max_rounds)
        try:
            self._begin(request)
            yield rounds
        except BaseException:
            if self._writer is request:
                self.messages, self._template = before
            raise
        finally:
            self._end(request)

    def _stop_left_stream(self) -> None:
        left = self._writer() if isinstance(self._writer, weakref.ref) else None
        if isinstance(left, ReplyStream):
            left.close(RequestError("This answer was stopped: its chat was asked something else meanwhile."))

    def _begin(self, request: GenerationRequest) -> None:
        with self._lock:
            if isinstance(self._writer, GenerationRequest):
                raise RequestError("This chat is writing an answer already. Wait for it, or ask a fork() of the chat.")
            self._writer = request

    def _end(self, request: GenerationRequest) -> None:
        if self._writer is request:
            self._writer = None

    def _keep(self, request: GenerationRequest, result: Result, plans: tuple[MediaPlan | None, ...] | None) -> Result:
        text, calls = result.text, result.tool_calls
        content = (Text(text),) if text or not calls else ()
        self._store(request, plans, Message("assistant", content, result.reasoning or None, calls))
        return result

    def _store(self, request: GenerationRequest, plans: tuple[MediaPlan | None, ...] | None, answer: Message) -> None:
        messages = request.messages if plans is None else pin_plans(request.messages, plans)
        self.messages = [*messages, answer]
        self._template = replace(self._template, tools=request.tools)
