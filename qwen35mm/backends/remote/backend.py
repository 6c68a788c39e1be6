"""RemoteBackend: turns, attempts and deadlines around the requests to a server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import random
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, get_args

import anyio

from qwen35mm.backends.options import check_options
from qwen35mm.backends.remote import words
from qwen35mm.backends.remote.apart import encode_by
from qwen35mm.backends.remote.attempts import Attempts
from qwen35mm.backends.remote.connection import Connection
from qwen35mm.backends.remote.counting import estimate
from qwen35mm.backends.remote.deadline import Deadline, RemoteTimeouts, num_waiting, place, until
from qwen35mm.backends.remote.faults import Fault
from qwen35mm.backends.remote.media import VideoMode, default_media, pinned_plan
from qwen35mm.backends.remote.reply import Reply
from qwen35mm.backends.remote.request import reply_fields, request_body
from qwen35mm.backends.remote.served import ServedModel
from qwen35mm.backends.remote.texts import RemoteTexts
from qwen35mm.backends.stand_ins import check_stand_in
from qwen35mm.contract import (
    EncodedMedium,
    Event,
    GenerationRequest,
    Image,
    MediaPlanned,
    Message,
    ModelInfo,
    Progress,
    Video,
    iter_media,
)
from qwen35mm.contract.messages import check_conversation, with_stand_ins
from qwen35mm.decoding import Decoders, DecodingProcessor, asked_by
from qwen35mm.errors import ConfigError, RequestError, RequestTimeoutError
from qwen35mm.pools import Asker
from qwen35mm_preprocess import MediaBudget, MediaError, MediaLimits, MediaPlan, PreparedMedia
from qwen35mm_preprocess.say import say

# A request's media are read while this many times `max_concurrent` requests are under way.
_READ_AHEAD = 2

_T = TypeVar("_T")


class RemoteBackend(RemoteTexts):
    """Answers with a model behind an OpenAI-compatible server: vLLM, SGLang, llama-server, `transformers serve`, ours.

    At most `max_concurrent` requests are at the server; the media of as many more are read meanwhile. Requests go out
    in the order in which their media are ready; without media, in the order of the calls. Use it from one event loop at
    a time; methods that don't wait for an answer, from any thread. `connect` fills `info`.

    Args:
        url: the server's address, with or without `/v1`.
        model: its name there; None takes the server's only one.
        api_key: sent as a bearer token; never in messages or logs.
        max_concurrent: most requests at the server at once.
        timeout_s: the most seconds from a request's turn on, all attempts included; also the most for its media before.
        max_attempts: how often to try a request when another attempt can help.
        whole: whether to yield a reply's text only when it is complete. Then one that breaks off is requested again.
        video: "frames" sends a video as pictures with their times as text between them, which every server reads;
            "video_url" sends the file, which vLLM, SGLang and `transformers serve` sample themselves.
        budget: the size of pictures and the choice of frames; None takes a GPU's, with at most 32 frames.
        limits: which media are refused; None takes the defaults.
        timeouts: how long the server may be silent.
        decoders: processes for reading media; None reads them in this process.
        sleep, jitter: how to wait between attempts, and a number from 0 to 1 for each wait.

    Raises:
        ConfigError: a setting can't be used.
    """

    is_demo = False
    # Each request may cost money, and others may be waiting.
    idles = False

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        max_concurrent: int = 4,
        timeout_s: float = 900.0,
        max_attempts: int = 5,
        whole: bool = False,
        video: VideoMode = "frames",
        budget: MediaBudget | None = None,
        limits: MediaLimits | None = None,
        timeouts: RemoteTimeouts | None = None,
        decoders: Decoders | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        for name, value in (("max_concurrent", max_concurrent), ("max_attempts", max_attempts)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1; got {value!r}.")
        if not isinstance(timeout_s, int | float) or not timeout_s > 0:
            raise ConfigError(f"timeout_s must be a number of seconds above 0; got {timeout_s!r}.")
        if video not in get_args(VideoMode):
            raise ConfigError(f"video must be one of {', '.join(get_args(VideoMode))}; got {video!r}.")
        check_options(
            model=(model, str),
            api_key=(api_key, str),
            budget=(budget, MediaBudget),
            limits=(limits, MediaLimits),
            timeouts=(timeouts, RemoteTimeouts),
            decoders=(decoders, Decoders),
        )
        media = default_media(budget, limits, video)
        self.media = media if decoders is None else DecodingProcessor.of(media, decoders)
        self._video: VideoMode = video
        self._timeout_s = timeout_s
        self._whole = whole
        self._connection = Connection(url, api_key, timeouts or RemoteTimeouts())
        self._model = ServedModel(self._connection, model)
        self._attempts = Attempts(self._connection, max_attempts, sleep, jitter)
        # A request takes a free place at once, so that those behind it can count the requests ahead.
        self._most_at_once = _READ_AHEAD * max_concurrent
        self._places = anyio.Semaphore(_READ_AHEAD * max_concurrent, fast_acquire=True)
        self._turns = anyio.Semaphore(max_concurrent, fast_acquire=True)
        self._connecting = anyio.Semaphore(1)
        self._num_streams = 0
        self._idle = threading.Condition()

    @property
    def info(self) -> ModelInfo:
        """The model, as far as the server describes it. Raises ConfigError before `connect`."""
        return self._model.info

    @property
    def context_length(self) -> int:
        """Most tokens of a conversation; 131,072 if the server doesn't say. Raises ConfigError before `connect`."""
        return self._model.context_length

    @property
    def default_params(self) -> None:
        return None

    @property
    def most_at_once(self) -> int:
        return self._most_at_once

    @property
    def name(self) -> str:
        """The model's name. Raises ConfigError before `connect`, unless it was given."""
        return self._model.name

    @property
    def host(self) -> str:
        """The server as host and port."""
        return self._connection.host

    @property
    def base_url(self) -> str:
        """The server's address with the API's version, without credentials."""
        return self._connection.base_url

    async def list_models(self, timeout_s: float = math.inf) -> list[str]:
        """The names of the server's models. Raises RequestError, EngineError."""
        deadline = Deadline.after(min(timeout_s, self._timeout_s))
        with self._faults_in_words():
            async with until(deadline):
                return list(await self._attempts.make(self._connection.list_models, deadline))

    async def connect(self, timeout_s: float = math.inf) -> None:
        """Finds out whether the server accepts us, its model if none was named, and what it can do.

        Args:
            timeout_s: the most seconds for this, if less than for a request.

        Raises:
            ConfigError: it has no model, or several and none was named.
            RequestError, EngineError: it refused, or can't be reached.
        """
        with self._faults_in_words():
            await self._connect(Deadline.after(min(timeout_s, self._timeout_s)))

    async def _connect(self, deadline: Deadline) -> None:
        async with until(deadline):
            await self._model.connect(lambda request: self._attempts.make(request, deadline))

    def check(self, request: GenerationRequest) -> None:
        """Raises RequestError, in words, for what the server is known to lack."""
        reply_fields(request, self._model.program)
        if request.shown_tools and self._model.is_known and self.info.tools is False:
            raise RequestError(words.no_tools(words.Where(self._connection.host)))

    def count_tokens(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> int:
        """Tokens of the prompt that these messages become. The server counts at most the texts, see
        `info.exact_counts`; media count as in their plans, and tools as the text of their definitions.

        Raises:
            MediaError, PromptError: the messages can't be sent.
            ConfigError: before `connect`.
        """
        check_conversation(messages)
        counter = self._model.counter
        plans = [self._plan(part) for part in iter_media(messages)]
        messages = with_stand_ins(messages, plans)
        num_tools = estimate(json.dumps(tools)) if tools else 0
        num_media = sum(plan.num_prompt_tokens for plan in plans if plan is not None)
        return counter.count(messages, enable_thinking, template_options or {}) + num_media + num_tools

    def memory(self) -> dict[str, int]:
        """Nothing: the server manages its own memory."""
        return {}

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Blocks until no answer is awaited; False if the time was over first."""
        with self._idle:
            return self._idle.wait_for(lambda: self._num_streams == 0, timeout_s)

    def close(self) -> None:
        """Closes the connections. Thread-safe; running streams end with an error."""
        self._connection.close()
        self._model.close()

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Answers the last message. A request that breaks off before its first text is repeated. After that the failure
        is an error, and the text stays (see `whole`).

        Args:
            request: without `params` the server's defaults apply; see `sampling_fields` for the fields sent. A server's
                cache is its own: `conversation`, `retain` and `tenant` have no effect. `timeout_s` includes waiting and
                reading media.

        Yields:
            Progress, one MediaPlanned if there are media, TextDelta, and finally Finished. Leaving the iterator closes
            the connection. Prefilled, and token counts so far, come only from servers that report them.

        Raises:
            MediaError, PromptError: the messages can't be sent.
            RequestError: the server refuses the request, is full, took too long, or can't do what is requested.
            EngineError: it can't be reached, or failed in every attempt or amid its answer; or this backend was closed.
        """
        check_conversation(request.messages)
        timeout_s = request.timeout_s
        asked_s = time.monotonic()
        deadline = Deadline.after(math.inf if timeout_s is None else timeout_s)
        with self._faults_in_words(), self._counted():
            if request.continue_reply and not self._model.is_known:
                async with self._connecting:
                    await self._connect(min(deadline, Deadline.after(self._timeout_s)))
            self.check(request)
            if not self._places.value:
                before = num_waiting(self._places) + num_waiting(self._turns)
                yield Progress("wait", before + 1, before + 1)
            async with place(self._places, deadline):
                found: list[EncodedMedium | None] = []
                parts = list(iter_media(request.messages))
                reading = min(deadline, Deadline.after(self._timeout_s))
                for number, part in enumerate(parts):
                    yield Progress("read", number, len(parts))
                    found.append(await self._encode(part, reading))
                media = [medium for medium in found if medium is not None]
                if found:
                    plans = tuple(None if medium is None else medium.plan for medium in found)
                    yield MediaPlanned(plans, tuple(text for medium in media for text in medium.warnings))
                    request = replace(request, messages=with_stand_ins(request.messages, plans))
                del found
                if not self._turns.value:
                    before = num_waiting(self._turns)
                    yield Progress("wait", before + 1, before + 1)
                async with place(self._turns, deadline):
                    turn = min(deadline, Deadline.after(self._timeout_s))
                    async with contextlib.aclosing(self._answer(request, media, turn, asked_s)) as events:
                        async for event in events:
                            yield event

    async def aclose(self) -> None:
        """Closes the connections; running streams end with an error."""
        self._model.close()
        await self._connection.aclose()

    @contextlib.asynccontextmanager
    async def _request(self, timeout_s: float | None) -> AsyncIterator[Deadline]:
        waits = Deadline.after(math.inf if timeout_s is None else timeout_s)
        with self._counted():
            async with place(self._turns, waits):
                deadline = min(waits, Deadline.after(self._timeout_s))
                await self._name_model(deadline)
                yield deadline

    async def _name_model(self, deadline: Deadline) -> None:
        async with until(deadline), self._connecting:
            if not self._model.is_named:
                await self._connect(deadline)

    async def _answer(
        self, request: GenerationRequest, media: list[EncodedMedium], deadline: Deadline, asked_s: float
    ) -> AsyncGenerator[Event, None]:
        """Empties `media`, so that the large request body isn't in memory twice."""
        await self._name_model(deadline)
        async with until(deadline):
            program = self._model.program
            sent = self._model.spare({**reply_fields(request, program), **program.stream_fields})
            # A refusal may also be about images, which are no field.
            about = {**sent, **({"images": True} if media else {})}
            body = await asyncio.to_thread(request_body, request.adapter or self.name, request.messages, media, sent)
        begin = functools.partial(Reply, asked_s, tools=request.tools)
        learn, whole = self._model.learn, self._whole
        replies = self._attempts.reply("chat/completions", body, about, begin, learn, deadline, whole=whole)
        async with contextlib.aclosing(replies) as events:
            async for event in events:
                yield event

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._idle:
            self._num_streams += 1
        try:
            yield
        finally:
            with self._idle:
                self._num_streams -= 1
                self._idle.notify_all()

    @contextlib.contextmanager
    def _faults_in_words(self) -> Iterator[None]:
        try:
            yield
        except Fault as fault:
            raise self._connection.error_of(fault) from None

    def _plan(self, part: Image | Video) -> MediaPlan | None:
        """None if the medium's stand-in takes its place."""
        plan = pinned_plan(part, self.media)
        if plan is not None:
            return plan
        assert not isinstance(part.source, PreparedMedia | EncodedMedium), "these have a plan"
        try:
            return part.planner(self.media).plan(part.source, kind=part.kind, clip=part.clip)
        except MediaError as error:
            check_stand_in(part, error)
            return None

    async def _encode(self, part: Image | Video, deadline: Deadline) -> EncodedMedium | None:
        """None if the medium's stand-in takes its place."""
        asker = Asker()
        encoding = asyncio.to_thread(encode_by, part, asked_by(part.planner(self.media), asker), self._video)
        try:
            with anyio.fail_after(deadline.left_s()):
                return await encoding
        except MediaError as error:
            check_stand_in(part, error)
            return None
        except TimeoutError:
            raise RequestTimeoutError(
                say(
                    "The request's images and videos were not read within {seconds} s. Send fewer or smaller ones, or "
                    "allow more time.",
                    seconds=f"{deadline.timeout_s:g}",
                )
            ) from None
        finally:
            # Once it is read, this ends nothing.
            asker.leave()
