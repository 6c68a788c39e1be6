"""The routes, and what they share: keys, the queue, errors, hang-ups."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from qwen35mm.contract import Event, GenerationRequest
from qwen35mm.http.bodies import MAX_BODY_BYTES, MAX_HELD_BYTES, BodyLimits
from qwen35mm.http.guards import guards
from qwen35mm.http.settings import HttpSettings
from qwen35mm.http.streams import event_stream, frame, streaming, while_connected
from qwen35mm.pools import PROMPTS
from qwen35mm.prompt.outside import MAX_OUTSIDE_CHARS
from qwen35mm.server.anthropic import messages
from qwen35mm.server.body import read_body
from qwen35mm.server.docs import DOCS, docs_file, show_docs
from qwen35mm.server.errors import ApiError, api_error
from qwen35mm.server.generation import ServedBackend, num_tokens
from qwen35mm.server.keys import Caller, Keys
from qwen35mm.server.metrics import Metrics
from qwen35mm.server.openai import chat_completions
from qwen35mm.server.openai.choices import OfChoice, events_of_choices
from qwen35mm.server.openai.completion import Completion
from qwen35mm.server.openai.responses.kept import KeptResponses
from qwen35mm.server.openai.responses.routes import ResponsesRoutes
from qwen35mm.server.openai.texts.routes import TextRoutes
from qwen35mm.server.openapi import Handler, Route, add_routes
from qwen35mm.server.parts import Sources
from qwen35mm.server.queue import FairQueue
from qwen35mm.server.reply import ReplyReader
from qwen35mm.server.streams import first_of, read_ahead

_NUMBERS_AT_ONCE = 10_000
# For one request that asks for several replies; other requests wait in the queue, too.
_STREAMS_AT_ONCE = 4
# An event of one reply, or of one of several replies.
E = TypeVar("E", Event, OfChoice)
E_contra = TypeVar("E_contra", contravariant=True)


class TokenizeRequest(BaseModel):
    """The body of POST /tokenize: plain text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: Annotated[str, Field(max_length=MAX_OUTSIDE_CHARS)]


class DetokenizeRequest(BaseModel):
    """The body of POST /detokenize."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=MAX_OUTSIDE_CHARS)]


def create_app(
    backend: ServedBackend,
    *,
    keys: Keys | None = None,
    sources: Sources | None = None,
    kept: KeptResponses | None = None,
    num_places: int = 4,
    max_waiting: int = 64,
    max_body_bytes: int = MAX_BODY_BYTES,
    max_held_bytes: int = MAX_HELD_BYTES,
    settings: HttpSettings | None = HttpSettings(),  # noqa: B008 - it is frozen
    only_this_machine: bool = True,
    names: Sequence[str] = (),
) -> FastAPI:
    """Creates the application.

    Args:
        backend: generates the replies.
        keys: who may call; None lets everybody in.
        sources: where media may come from besides the request itself.
        kept: the store of responses; None keeps them in memory.
        num_places: requests that the engine computes at one time.
        max_waiting: requests that wait in the queue; more are refused.
        max_body_bytes: limit for one request.
        max_held_bytes: limit for the bodies of all unanswered requests together.
        settings: how the server is reached; None where something in front of it already guards it.
        only_this_machine: refuse requests that address this machine by a name that isn't local.
        names: further names of the model.
    """
    app = FastAPI(
        title="qwen35mm",
        description="Qwen3.5 models, pictures and videos included, in OpenAI's protocol.",
        middleware=limits(settings, only_this_machine, max_body_bytes, max_held_bytes),
        # The document needs a key like every other route.
        openapi_url=None,
    )
    sources = sources or Sources()
    api = Api(backend, keys or Keys([]), sources, FairQueue(num_places, max_waiting), names)
    responses = ResponsesRoutes(api, backend, sources, kept or KeptResponses.in_memory())
    texts = TextRoutes(api, backend)
    app.add_exception_handler(Exception, answer_error)
    app.add_exception_handler(ApiError, answer_error)
    app.add_exception_handler(HTTPException, answer_error)
    add_routes(app, [*api.routes(), *responses.routes(), *texts.routes()], answering)
    for path, handler in ((DOCUMENT, api.document), (DOCS, show_docs), (f"{DOCS}/{{name}}", docs_file)):
        app.add_api_route(path, answering(handler), include_in_schema=False)
    return app


class Reader(Protocol[E_contra]):
    """Reads the events of a reply."""

    def take(self, event: E_contra, /) -> Iterable[object]: ...


def limits(
    settings: HttpSettings | None, only_this_machine: bool, max_body_bytes: int, max_held_bytes: int
) -> list[Middleware]:
    """The middleware that limits who may call and how much they may send. Arguments as `create_app`."""
    found = [] if settings is None else guards(settings, only_this_machine=only_this_machine, refuse=refuse)
    return [*found, Middleware(BodyLimits, max_body_bytes, max_held_bytes)]


class Api:
    """The routes of one backend."""

    def __init__(
        self, backend: ServedBackend, keys: Keys, sources: Sources, line: FairQueue, names: Sequence[str] = ()
    ) -> None:
        self._backend = backend
        self._keys = keys
        self._sources = sources
        self._line = line
        self._names = names
        self._metrics = Metrics(backend, line)

    def routes(self) -> list[Route]:
        """The routes to add to the application."""
        return [
            Route("/v1/chat/completions", "POST", self.chat_completions, chat_completions.ChatCompletionRequest),
            Route("/v1/messages", "POST", self.messages, messages.MessagesRequest),
            Route("/v1/messages/count_tokens", "POST", self.count_tokens, messages.CountRequest),
            Route("/v1/models", "GET", self.models),
            Route("/v1/models/{name:path}", "GET", self.model),
            Route("/tokenize", "POST", self.tokenize, TokenizeRequest),
            Route("/detokenize", "POST", self.detokenize, DetokenizeRequest),
            Route("/health", "GET", self.health),
            Route("/ready", "GET", self.ready),
            Route("/metrics", "GET", self.metrics),
        ]

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        caller = self.caller(request)
        body = await read_body(request, chat_completions.ChatCompletionRequest, chat_completions.known_fields)
        self.check_model(body.model)
        asked = await chat_completions.asked_of(body, caller, self._backend, self._sources)
        readers = [ReplyReader(asked.tools, None if body.parallel_tool_calls else 1) for _ in range(body.n)]
        reply = Completion(self._backend.loaded.name, readers, includes_usage=body.includes_usage)
        events = events_of_choices(asked, body.n, functools.partial(self.answer, caller))
        if body.stream:
            return await self.stream_events(request, events, reply.frames, lambda error: frame(error.body))
        await self.read(request, [(events, reply)])
        return JSONResponse(reply.whole())

    async def messages(self, request: Request) -> Response:
        """Answer a conversation, in Anthropic's form."""
        caller = self.caller(request)
        body = await read_body(request, messages.MessagesRequest, messages.known_fields)
        self.check_model(body.model)
        asked = await messages.asked_of(body, caller, self._backend, self._sources)
        reader = ReplyReader(asked.tools, 1 if body.one_call else None)
        reply = messages.Reply(self._backend.loaded.name, reader)
        if body.stream:
            return await self.stream(request, caller, asked, reply.frames, messages.error_frame)
        await self.finish(request, caller, asked, reader)
        return JSONResponse(reply.whole())

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a conversation, in Anthropic's form."""
        caller = self.caller(request)
        body = await read_body(request, messages.CountRequest, messages.known_fields)
        self.check_model(body.model)
        asked = await messages.asked_of(body, caller, self._backend, self._sources)
        return JSONResponse({"input_tokens": await num_tokens(asked, self._backend)})

    async def finish(self, request: Request, caller: Caller, asked: GenerationRequest, reader: Reader[Event]) -> None:
        """Reads a reply to its end.

        Raises:
            ClientDisconnect: the client hung up.
        """

        await self.read(request, [(self.answer(caller, asked), reader)])

    async def read(self, request: Request, streams: Sequence[tuple[AsyncGenerator[E, None], Reader[E]]]) -> None:
        """Reads streams to their end, a few at a time.

        Raises:
            ClientDisconnect: the client hung up.
        """
        turns = asyncio.Semaphore(_STREAMS_AT_ONCE)

        async def read_one(stream: AsyncGenerator[E, None], reader: Reader[E]) -> None:
            async with turns, contextlib.aclosing(stream) as events:
                async for event in events:
                    for _ in reader.take(event):
                        pass

        async def read_all() -> None:
            tasks = [asyncio.ensure_future(read_one(*each)) for each in streams]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        await while_connected(request, read_all())

    async def stream(
        self,
        request: Request,
        caller: Caller,
        asked: GenerationRequest,
        frames: Callable[[AsyncGenerator[Event, None]], AsyncIterator[bytes]],
        failed: Callable[[ApiError], bytes],
    ) -> Response:
        """Streams a reply as frames. Raises what refuses the request before the first frame.

        Raises:
            ClientDisconnect: the client hung up before its turn.
        """
        return await self.stream_events(request, self.answer(caller, asked), frames, failed)

    async def stream_events(
        self,
        request: Request,
        events: AsyncGenerator[E, None],
        frames: Callable[[AsyncGenerator[E, None]], AsyncIterator[bytes]],
        failed: Callable[[ApiError], bytes],
    ) -> Response:
        """Like `stream`, for events that exist already."""
        events = read_ahead(events)
        try:
            begun = await while_connected(request, first_of(events))
        except BaseException:
            await events.aclose()
            raise
        return streaming(self._sent(request, events, frames(begun), failed))

    async def _sent(
        self,
        request: Request,
        events: AsyncGenerator[E, None],
        frames: AsyncIterator[bytes],
        failed: Callable[[ApiError], bytes],
    ) -> AsyncGenerator[bytes, None]:
        """The frames of a stream. Closes `events` however the stream ends."""
        async with contextlib.aclosing(events):
            stream = event_stream(request.scope, frames, lambda error: failed(api_error(error)))
            async with contextlib.aclosing(stream):
                async for data in stream:
                    yield data

    async def answer(
        self, caller: Caller, asked: GenerationRequest, is_more: bool = False
    ) -> AsyncGenerator[Event, None]:
        """The events of a reply, once it is the caller's turn. `is_more`: not the first reply of its request."""
        answering = self.in_turn(caller, lambda: self._backend.stream(asked), is_more=is_more)
        async with contextlib.aclosing(answering) as events:
            async for event in events:
                yield event

    async def in_turn(
        self, caller: Caller, begin: Callable[[], AsyncGenerator[Event, None]], *, is_more: bool = False
    ) -> AsyncGenerator[Event, None]:
        """Calls `begin` when it is the caller's turn and yields its events."""
        async with self._line.place(caller.name, may_be_refused=not is_more):
            with self._metrics.request() as counted:
                async with contextlib.aclosing(begin()) as events:
                    async for event in events:
                        counted.take(event)
                        yield event

    async def models(self, request: Request) -> Response:
        """List the names of the model."""
        self.caller(request)
        names = (self._backend.loaded.name, *self._names)
        return JSONResponse({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """Describe the model of this name."""
        self.caller(request)
        name = request.path_params["name"]
        self.check_model(name)
        return JSONResponse(self._model(name if name in self._names else self._backend.loaded.name))

    def _model(self, name: str) -> dict[str, Any]:
        length = self._backend.context_length
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "qwen35mm",
            "max_model_len": length,
            "meta": {"n_ctx": length},
        }

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text; control tokens count as plain text."""
        self.caller(request)
        body = await read_body(request, TokenizeRequest)
        self.check_model(body.model)
        try:
            content = await PROMPTS.run(self._tokens, body.prompt)
        except ValueError as error:
            raise ApiError(400, str(error), "prompt") from None
        return Response(content, media_type="application/json")

    def _tokens(self, text: str) -> str:
        """The body of `tokenize`'s answer, written in chunks: one call for millions of numbers would block others."""
        tokens = self._backend.loaded.tokenizer.encode_plain(text)
        pieces = (tokens[at : at + _NUMBERS_AT_ONCE] for at in range(0, len(tokens), _NUMBERS_AT_ONCE))
        listed = ",".join(",".join(map(str, piece)) for piece in pieces)
        rest = f'"count":{len(tokens)},"max_model_len":{self._backend.context_length}'
        return f'{{"tokens":[{listed}],{rest}}}'

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        self.caller(request)
        body = await read_body(request, DetokenizeRequest)
        self.check_model(body.model)
        tokenizer = self._backend.loaded.tokenizer
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < tokenizer.vocab_size:
            raise ApiError(400, f"tokens must be ids from 0 to {tokenizer.vocab_size - 1:,}.", "tokens")
        return JSONResponse({"prompt": await PROMPTS.run(tokenizer.decode, body.tokens, skip_special=False)})

    async def health(self, _: Request) -> Response:
        """Whether the program runs."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether the server takes requests, and how many are waiting."""
        self.caller(request)
        return JSONResponse({"status": "ready", "waiting": self._line.num_waiting})

    async def metrics(self, request: Request) -> Response:
        """Counters and gauges, in Prometheus' format."""
        self.caller(request)
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def document(self, request: Request) -> Response:
        """The OpenAPI document."""
        self.caller(request)
        return JSONResponse(request.app.openapi())

    def caller(self, request: Request) -> Caller:
        return self._keys.caller_of(request)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 if `name` isn't a name of this model."""
        own = self._backend.loaded.name
        if name not in (None, "", "default", own, *self._names):
            raise ApiError(404, f"There is no model {name[:200]!r} here; {own!r} is.", "model", "model_not_found")


DOCUMENT = "/openapi.json"
_REFUSED = {
    403: "Websites aren't answered, save those of this server's own address.",
    421: "This server is for this machine: call it 127.0.0.1 or localhost.",
}


def answering(handler: Handler) -> Handler:
    """Wraps a handler so that it answers errors in its protocol's form."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return await answer_error(request, error)

    return answer


async def answer_error(request: Request, error: Exception) -> Response:
    return _told(request.url.path, api_error(error))


async def refuse(scope: Scope, receive: Receive, send: Send, status: int, _: str) -> None:
    """Answers a request that the guards refuse, in the form of every other error."""
    await _told(scope["path"], ApiError(status, _REFUSED[status], code="refused"))(scope, receive, send)


def _told(path: str, error: ApiError) -> Response:
    body = messages.error_body(error) if path.startswith("/v1/messages") else error.body
    return JSONResponse(body, status_code=error.status, headers=error.headers)
