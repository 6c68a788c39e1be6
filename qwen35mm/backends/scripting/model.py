"""What every backend offers to scripts besides `stream`: chats, batches and `close`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

from qwen35mm.backends.scripting.chat import Chat
from qwen35mm.backends.scripting.forms import (
    GenerateOptions,
    Params,
    Prompt,
    Tools,
    conversation_of,
    prompts_of,
    request_of,
)
from qwen35mm.backends.scripting.replies import InOrder
from qwen35mm.contract import Event, Finished, GenerationRequest, MediaPlanned, Message, Result, Retain, SamplingParams
from qwen35mm.errors import BatchError, ConfigError, PromptError, QueueFullError, Qwen35mmError, RequestTimeoutError
from qwen35mm_preprocess import MediaPlan

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

OnError = Literal["raise", "return"]

# How many prompts may run ahead of the next result, per place: one long answer must not leave the others idle.
_AHEAD = 8
# Seconds before retrying a request that the engine's full queue refused.
_ROOM_POLL_S = 0.05


class ScriptedModel(ABC):
    """A model for scripts, such as LocalBackend and RemoteBackend.

    Methods that wait for an answer block. Each has a twin for programs with an event loop, whose name starts with `a`.
    Streams work with `for` and `async for`. None needs an event loop or minds a running one: all answers are computed
    in one thread of their own.
    """

    # Whether `stream` refuses requests while its queue is full, so that they wait here.
    _refuses_when_full = False

    @property
    @abstractmethod
    def default_params(self) -> SamplingParams | None:
        """Sampling parameters where a script gives none; None if only a server knows them."""

    @property
    @abstractmethod
    def most_at_once(self) -> int:
        """How many requests keep it busy: those being answered, and those whose media are read meanwhile."""

    @abstractmethod
    def stream(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """The events of one answer; see `LocalBackend.stream`."""

    @abstractmethod
    def close(self) -> None:
        """Closes the model; unfinished requests end with an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def chat(
        self,
        system: str | None = None,
        *,
        messages: Prompt = (),
        tools: Tools | None = None,
        thinking: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
        params: Params | None = None,
        name: str | None = None,
        tenant: str | None = None,
        retain: Retain = "conversation",
    ) -> Chat:
        """A conversation that starts with a system message or with existing messages; see `Chat`.

        Raises:
            PromptError, ConfigError: an invalid value.
        """
        if not isinstance(system, str | None):
            raise PromptError(f"The system message must be a string; got {type(system).__name__}.")
        given = conversation_of(messages) if messages else []
        if system is not None:
            given = conversation_of([Message("system", system), *given])
        return Chat(
            self,
            messages=given,
            tools=tools,
            thinking=thinking,
            template_options=template_options,
            params=params,
            name=name,
            tenant=tenant,
            retain=retain,
        )

    @overload
    def generate(
        self,
        prompts: str | Message | dict[str, Any] | Sequence[Message] | Sequence[dict[str, Any]],
        params: Params | None = None,
        *,
        n: None = None,
        on_error: OnError = "raise",
        progress: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: Params | None = None,
        *,
        n: None = None,
        on_error: Literal["raise"] = "raise",
        progress: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> list[Result]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params | None = None,
        *,
        n: int | None = None,
        on_error: OnError = "raise",
        progress: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Any: ...

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params | None = None,
        *,
        n: int | None = None,
        on_error: OnError = "raise",
        progress: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Any:
        """Answers one prompt or many, as many at a time as keep the model busy; none is refused for their number.

        Args:
            prompts: one is a string, a Message, a dict with role and content, or a list of messages. Many are a list of
                prompts, or any other iterable, which is read as the answers proceed.
            params: a SamplingParams, or a dict of some of its fields; the same for all.
            n: the number of answers to each prompt, as a list; counts a seed up. None is one answer, not a list.
            on_error: what to do with prompts that fail: "raise" answers all others, then raises an error with their
                results; "return" returns the error in place of the result.
            progress: shows a bar.
            options: as in `Chat.ask`, plus `retain` (default "shared") and `tenant` as in `stream`.

        Returns:
            The Result of one prompt, or a list in the prompts' order.

        Raises:
            Qwen35mmError: a single prompt's error, or one that concerns all.
            BatchError: some of many failed.
        """
        return self._batch(prompts, params, options, n, on_error).waited(progress)

    async def agenerate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params | None = None,
        *,
        n: int | None = None,
        on_error: OnError = "raise",
        progress: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Any:
        """`generate` for programs with an event loop."""
        return await self._batch(prompts, params, options, n, on_error).awaited(progress)

    def generate_each(
        self,
        prompts: Iterable[Prompt],
        params: Params | None = None,
        *,
        n: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> InOrder[Prompt, Any]:
        """The answers to many prompts one by one, in order, for `for` and `async for`; keeps none of them.

        Arguments as in `generate`. A prompt that fails yields its error in place of the result.
        """
        return self._batch(prompts, params, options, n, "return").results()

    async def in_turn(
        self, stream: Callable[[float | None], AsyncGenerator[Event, None]], timeout_s: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """The events of one request, once its turn has come. Runs on the loop of scripts.

        Args:
            stream: starts it, given the seconds left of `timeout_s`; None is without limit.
        """
        async with self._script_turns:
            asked_s = time.monotonic()
            while True:
                left_s = timeout_s if timeout_s is None else timeout_s - (time.monotonic() - asked_s)
                if left_s is not None and left_s <= 0:
                    raise RequestTimeoutError(
                        f"The request's turn did not come within {timeout_s:g} s. Allow more time."
                    )
                try:
                    async with contextlib.aclosing(stream(left_s)) as events:
                        async for event in events:
                            yield event
                    return
                except QueueFullError:
                    if not self._refuses_when_full or (left_s is not None and left_s <= _ROOM_POLL_S):
                        raise
                await asyncio.sleep(_ROOM_POLL_S)

    def events(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """`stream`, once its turn has come."""
        return self.in_turn(lambda left_s: self.stream(replace(request, timeout_s=left_s)), request.timeout_s)

    async def reply(self, request: GenerationRequest) -> tuple[Result, tuple[MediaPlan | None, ...] | None]:
        """A whole answer, and the plans of its media; see `events`."""
        plans = None
        async with contextlib.aclosing(self.events(request)) as events:
            async for event in events:
                if isinstance(event, MediaPlanned):
                    plans = event.plans
                elif isinstance(event, Finished):
                    return replace(event.result, schema=request.schema), plans
        raise AssertionError("a stream ends with Finished or an error")

    def template(self, params: Params | None, options: Mapping[str, Any]) -> GenerationRequest:
        """A request without messages, the template for many prompts."""
        return request_of(GenerationRequest(params=self.default_params, retain="shared"), params, options)

    def _batch(
        self, prompts: Any, params: Params | None, options: Mapping[str, Any], n: int | None, on_error: OnError
    ) -> Batch:
        async def answer(prompt: Prompt, template: GenerationRequest) -> Result:
            return (await self.reply(replace(template, messages=conversation_of(prompt))))[0]

        return Batch(self, prompts_of(prompts), answer, self.template(params, options), n, on_error)

    @functools.cached_property
    def _script_turns(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(self.most_at_once)


class Batch:
    """Prompts on their way to their results.

    Args:
        prompts: many or one; and whether it is a single one.
        answer: gives the result of one prompt with the template's options.
        n: the number of results for each; None is one, not a list.
    """

    def __init__(
        self,
        model: ScriptedModel,
        prompts: tuple[Iterable[Any], bool],
        answer: Callable[[Any, GenerationRequest], Awaitable[Any]],
        template: GenerationRequest,
        n: int | None,
        on_error: OnError,
    ) -> None:
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
            raise ConfigError(f"n must be a whole number, 1 or more, or None; got {n!r}.")
        if on_error not in ("raise", "return"):
            raise ConfigError(f"on_error must be 'raise' or 'return'; got {on_error!r}.")
        self._prompts, self._is_one = prompts
        self._answer_one = answer
        self._model, self._n, self._on_error = model, n, on_error
        self._templates = [_with_seed(template, at) for at in range(n or 1)]
        self._report: Callable[[], object] = lambda: None
        # Prompts ahead don't all wait in the model's queue, so that other requests are answered in between.
        self._places = asyncio.Semaphore(model.most_at_once)

    def results(self) -> InOrder[Any, Any]:
        return InOrder(self._prompts, self._answer, _AHEAD * self._model.most_at_once)

    def waited(self, progress: bool) -> Any:
        """The single result, or a list; raises instead if `on_error` says so."""
        with self._shown(progress):
            return self._whole(list(self.results()))

    async def awaited(self, progress: bool) -> Any:
        """As `waited`, for a task of any loop."""
        with self._shown(progress):
            async with contextlib.aclosing(aiter(self.results())) as results:
                return self._whole([result async for result in results])

    def _whole(self, results: list[Any]) -> Any:
        if self._on_error == "raise":
            failed = [(at, result) for at, result in enumerate(results) if isinstance(result, Qwen35mmError)]
            if failed:
                at, error = failed[0]
                if self._is_one:
                    raise error
                what = f"{len(failed)} of {len(results)} prompts could not be answered; the first is number {at + 1}"
                raise BatchError(f"{what}: {error}", results) from error
        return results[0] if self._is_one else results

    @contextlib.contextmanager
    def _shown(self, progress: bool) -> Iterator[None]:
        """Shows a bar meanwhile."""
        if not progress:
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=len(self._prompts) if isinstance(self._prompts, Sized) else None)
            self._report = lambda: bar.advance(task)
            yield

    async def _answer(self, prompt: Any) -> Any:
        """One result, a list of `n`, or the error in their place."""
        try:
            work = [self._in_place(prompt, template) for template in self._templates]
            if self._n is None:
                return await work[0]
            results = await asyncio.gather(*work, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            return results
        except Qwen35mmError as error:
            return error
        finally:
            self._report()

    async def _in_place(self, prompt: Any, template: GenerationRequest) -> Any:
        async with self._places:
            return await self._answer_one(prompt, template)


def _with_seed(template: GenerationRequest, number: int) -> GenerationRequest:
    """Gives each of several answers its own seed."""
    params = template.params
    if params is None or params.seed is None or not number:
        return template
    return replace(template, params=replace(params, seed=(params.seed + number) % 2**63))
