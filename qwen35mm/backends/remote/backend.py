"""RemoteBackend: turns, attempts and deadlines around the requests to a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, get_args

import anyio

from qwen35mm.backends.remote.connection import Connection, RemoteTimeouts
from qwen35mm.backends.remote.faults import Fault, delay_s
from qwen35mm.backends.remote.media import VideoMode, default_media, encode_medium, encode_message
from qwen35mm.backends.remote.wire import Reply, sampling_fields
from qwen35mm.engine import Event, Finished, MediaPlanned, Progress, Result, Retain, TextDelta, check_call
from qwen35mm.errors import ConfigError, RequestError, RequestTimeoutError
from qwen35mm.prompt import EncodedMedium, Image, Message, Video, iter_media
from qwen35mm.prompt.messages import check_conversation
from qwen35mm.sampling import SamplingParams
from qwen35mm_preprocess import MediaBudget, MediaLimits

# A request's media are read while as many requests as are answered at once are under way.
_READ_AHEAD = 2

_T = TypeVar("_T")


class RemoteBackend:
    """Answers with a model behind an OpenAI-compatible server: vLLM, SGLang, llama-server, `transformers serve`.

    `max_concurrent` requests are out at a time; the media of as many more are read meanwhile. They go out in the order
    in which their media are read; without media, in the order of asking. To be used from one event loop.

    Args:
        url: the server's address, with or without `/v1`.
        model: its name there; None takes the only one that the server has.
        api_key: sent as a bearer token; it is in no message and no log.
        max_concurrent: most requests that the server has at once.
        timeout_s: the most that a request may take from its turn on, all attempts included; and before, its media.
        max_attempts: how often a request is tried where another attempt can help.
        video: "frames" sends a video as pictures with their times as text between them, which every server reads;
            "video_url" sends the file, which vLLM, SGLang and `transformers serve` sample by themselves.
        budget: how large pictures are and which frames are sent; None takes a GPU's, with at most 32 frames.
        limits: what media are refused; None takes the defaults.
        timeouts: how long the server may be silent.
        sleep, jitter: how to wait between two attempts, and a number from 0 to 1 for each wait.

    Raises:
        ConfigError: a setting can't be used.
    """

    is_demo = False

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        max_concurrent: int = 4,
        timeout_s: float = 900.0,
        max_attempts: int = 5,
        video: VideoMode = "frames",
        budget: MediaBudget | None = None,
        limits: MediaLimits | None = None,
        timeouts: RemoteTimeouts | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        for name, value in (("max_concurrent", max_concurrent), ("max_attempts", max_attempts)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1; got {value!r}.")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s must be a number of seconds above 0; got {timeout_s!r}.")
        if video not in get_args(VideoMode):
            raise ConfigError(f"video must be one of {', '.join(get_args(VideoMode))}; got {video!r}.")
        self.media = default_media(budget, limits, video)
        self._model = model
        self._video: VideoMode = video
        self._timeout_s = timeout_s
        self._max_attempts = max_attempts
        self._connection = Connection(url, api_key, timeouts or RemoteTimeouts())
        self._sleep = sleep
        self._jitter = jitter
        # Who finds a place free takes it at once: else those behind couldn't tell how many are before them.
        self._places = anyio.Semaphore(_READ_AHEAD * max_concurrent, fast_acquire=True)
        self._turns = anyio.Semaphore(max_concurrent, fast_acquire=True)
        self._connecting = anyio.Semaphore(1)

    @property
    def name(self) -> str:
        """The model's name. Raises ConfigError before `connect`, where none was given."""
        if self._model is None:
            raise ConfigError("The server's model isn't known yet: connect first, or name it.")
        return self._model

    @property
    def fingerprint(self) -> str:
        """Which model this is, as far as can be told: the server's address, without credentials, and the model's name.

        Raises:
            ConfigError: see `name`.
        """
        return f"{self._connection.base_url} {self.name}"

    async def connect(self) -> None:
        """Finds out whether the server answers and lets us in, and its model where none was named.

        Raises:
            ConfigError: it has no model, or several and none was named.
            RequestError, EngineError: it refused, or can't be reached.
        """
        deadline = Deadline.after(self._timeout_s)
        with self._faults_in_words():
            async with _until(deadline):
                await self._connect(deadline)

    async def _connect(self, deadline: Deadline) -> None:
        async def list_models() -> list[str]:
            try:
                return await self._connection.list_models()
            except Fault as fault:
                # Some servers list no models, and the one of transformers only those of its cache, if it has one.
                if self._model is None or fault.status in (None, 401, 403):
                    raise
                return [self._model]

        models = await self._attempt(list_models, deadline)
        if self._model is not None:
            return
        if len(models) != 1:
            names = self._connection.safe(", ".join(f"'{name}'" for name in models[:20]))
            found = f"it has {names}" if models else "it has none"
            raise ConfigError(f"Name the model to use of the server at {self._connection.host}: {found}.")
        self._model = models[0]

    async def stream(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        enable_thinking: bool | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        conversation: str | None = None,
        retain: Retain = "conversation",
        tenant: str | None = None,
        timeout_s: float | None = None,
        continue_reply: bool = False,
    ) -> AsyncGenerator[Event, None]:
        """Answers the last message; its text comes when it is complete, since what breaks off is asked for again.

        Args:
            messages: the conversation. Plans of its media aren't looked at.
            params: None takes the server's defaults; see `sampling_fields` for what goes out.
            enable_thinking: None takes the server's default.
            tools, continue_reply: can't be had of a server.
            conversation, retain, tenant: a server's cache is its own; these change nothing.
            timeout_s: the most that this may take, waiting for its turn and reading its media included.

        Yields:
            Progress, one MediaPlanned where there are media, TextDelta, and at last Finished. Leaving the iterator
            closes the connection.

        Raises:
            MediaError, PromptError: the messages can't be sent.
            RequestError: the server refuses the request, has too many, or took too long.
            EngineError: it can't be reached, or failed, at each attempt; or this was closed.
        """
        if tools or continue_reply:
            what = "Tools" if tools else "The rest of a reply"
            raise RequestError(f"{what} can't be asked of a server. Use a model in this process.")
        check_conversation(messages)
        check_call(params, retain, timeout_s)
        fields = sampling_fields(params, enable_thinking=enable_thinking)
        asked_s = time.monotonic()
        deadline = Deadline.after(math.inf if timeout_s is None else timeout_s)
        with self._faults_in_words():
            if not self._places.value:
                before = _num_waiting(self._places) + _num_waiting(self._turns)
                yield Progress("wait", before + 1, before + 1)
            async with _place(self._places, deadline):
                media: list[EncodedMedium] = []
                parts = list(iter_media(messages))
                reading = min(deadline, Deadline.after(self._timeout_s))
                for number, part in enumerate(parts):
                    yield Progress("read", number, len(parts))
                    media.append(await self._encode(part, reading))
                if media:
                    yield MediaPlanned(
                        tuple(medium.plan for medium in media), tuple(text for m in media for text in m.warnings)
                    )
                if not self._turns.value:
                    before = _num_waiting(self._turns)
                    yield Progress("wait", before + 1, before + 1)
                async with _place(self._turns, deadline):
                    turn = min(deadline, Deadline.after(self._timeout_s))
                    async with _until(turn):
                        result = await self._answer(messages, media, fields, turn, asked_s)
            if result.reasoning:
                yield TextDelta(result.reasoning, "reasoning")
            if result.text:
                yield TextDelta(result.text)
            yield Finished(result)

    async def aclose(self) -> None:
        """Closes the connections; running streams end with an error."""
        await self._connection.aclose()

    async def _answer(
        self,
        messages: Sequence[Message],
        media: list[EncodedMedium],
        fields: dict[str, Any],
        deadline: Deadline,
        asked_s: float,
    ) -> Result:
        """`media` is used up by it: what goes out is large, and is there once."""
        async with self._connecting:
            if self._model is None:
                await self._connect(deadline)
        body = await asyncio.to_thread(_body, self.name, messages, media, fields)
        return await self._attempt(lambda: self._connection.chat(body, Reply(asked_s, fields)), deadline)

    async def _attempt(self, request: Callable[[], Awaitable[_T]], deadline: Deadline) -> _T:
        """Makes a request as often as it can help. Raises the last Fault."""
        num_failed = 0
        while True:
            try:
                return await request()
            except Fault as fault:
                self._connection.check_open()
                if not fault.is_passing:
                    raise
                num_failed += 1
                pause_s = delay_s(num_failed, self._jitter(), fault.retry_after_s)
                if num_failed >= self._max_attempts or pause_s >= deadline.left_s():
                    fault.words += f" It was tried {'once' if num_failed == 1 else f'{num_failed} times'}."
                    raise
            await self._sleep(pause_s)

    @contextlib.contextmanager
    def _faults_in_words(self) -> Iterator[None]:
        try:
            yield
        except Fault as fault:
            raise self._connection.error_of(fault) from None

    async def _encode(self, part: Image | Video, deadline: Deadline) -> EncodedMedium:
        encoding = asyncio.to_thread(encode_medium, part, self.media, self._video)
        try:
            with anyio.fail_after(deadline.left_s()):
                return await encoding
        except TimeoutError:
            raise RequestTimeoutError(
                f"The request's images and videos were not read within {deadline.timeout_s:g} s. Send fewer or smaller "
                f"ones, or allow more time."
            ) from None


class Deadline(NamedTuple):
    """When something must be over, by `time.monotonic`, and how long that was from the beginning."""

    at_s: float
    timeout_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        return cls(time.monotonic() + timeout_s, timeout_s)

    def left_s(self) -> float:
        return max(self.at_s - time.monotonic(), 0.0)


@contextlib.asynccontextmanager
async def _until(deadline: Deadline) -> AsyncIterator[None]:
    """Ends what is in it at the deadline. Raises Fault."""
    try:
        # Not asyncio's wait_for, which up to Python 3.11 loses a cancellation that comes with the result.
        with anyio.fail_after(deadline.left_s()):
            yield
    except TimeoutError:
        words = f"gave no whole answer within {deadline.timeout_s:g} s. "
        words += "Allow more time, or send it fewer requests at a time."
        raise Fault(RequestTimeoutError, words) from None


@contextlib.asynccontextmanager
async def _place(places: anyio.Semaphore, deadline: Deadline) -> AsyncIterator[None]:
    """Waits for one of so many places, in the order of asking, and holds it."""
    async with _until(deadline):
        await places.acquire()
    try:
        yield
    finally:
        places.release()


def _num_waiting(places: anyio.Semaphore) -> int:
    return places.statistics().tasks_waiting


def _body(model: str, messages: Sequence[Message], media: list[EncodedMedium], fields: dict[str, Any]) -> bytes:
    values = {
        "model": model,
        "messages": [encode_message(message, media) for message in messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    # A file's name in a prompt may hold halves of characters, which no server reads.
    return json.dumps(values, ensure_ascii=False).encode("utf-8", "replace")
