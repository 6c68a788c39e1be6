"""The routes, and what is the same for all of them: keys, the line, errors, a client that hangs up."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import anyio
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from qwen35mm.engine import Event, MediaPlanned, Progress
from qwen35mm.pools import PROMPTS
from qwen35mm.server.asked import Asked, Backend, events_of
from qwen35mm.server.chat_completions import ChatCompletionRequest, Reply, asked_of, known_fields
from qwen35mm.server.errors import ApiError, api_error, invalid
from qwen35mm.server.guards import OnlyThisMachine, SameOrigin
from qwen35mm.server.keys import Caller, Keys
from qwen35mm.server.line import FairLine
from qwen35mm.server.metrics import Metrics
from qwen35mm.server.parts import Sources

# A video of 512 MiB, as base64.
MAX_BODY_BYTES = 700 * 2**20
# A sender that stalls holds memory.
BODY_TIMEOUT_S = 120.0
# Proxies and clients give up on connections that say nothing.
KEEP_ALIVE_S = 10.0

_OBJECT = TypeAdapter(dict[str, Any], config=ConfigDict(allow_inf_nan=False))

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class TokenizeRequest(BaseModel):
    """The body of POST /tokenize: plain text, or a conversation as it would be prompted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str


class DetokenizeRequest(BaseModel):
    """The body of POST /detokenize."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    tokens: list[int]


def create_app(
    backend: Backend,
    *,
    keys: Keys | None = None,
    sources: Sources | None = None,
    num_places: int = 4,
    max_waiting: int = 64,
    max_body_bytes: int = MAX_BODY_BYTES,
    only_this_machine: bool = True,
) -> FastAPI:
    """The application.

    Args:
        backend: answers.
        keys: who may call; None is everybody who reaches it.
        sources: where media may come from besides the request itself.
        num_places: requests that are with the engine at one time.
        max_waiting: requests that wait for that before further ones are refused.
        max_body_bytes: of one request.
        only_this_machine: whether who calls this machine by another name than its own is refused.
    """
    middleware = [Middleware(SameOrigin)]
    if only_this_machine:
        middleware.insert(0, Middleware(OnlyThisMachine))
    app = FastAPI(
        title="qwen35mm",
        description="Qwen3.5 models, pictures and videos included, in OpenAI's protocol.",
        middleware=middleware,
    )
    api = Api(backend, keys or Keys([]), sources or Sources(), FairLine(num_places, max_waiting), max_body_bytes)
    app.add_exception_handler(Exception, answer_error)
    app.add_exception_handler(ApiError, answer_error)
    for path, method, handler, body in api.routes():
        app.add_api_route(
            path,
            answering(handler),
            methods=[method],
            response_model=None,
            summary=(handler.__doc__ or "").splitlines()[0],
            openapi_extra=_described(body),
        )
    return app


class Api:
    """What is asked over HTTP, answered by one backend."""

    def __init__(self, backend: Backend, keys: Keys, sources: Sources, line: FairLine, max_body_bytes: int) -> None:
        self._backend = backend
        self._keys = keys
        self._sources = sources
        self._line = line
        self._max_body_bytes = max_body_bytes
        self._metrics = Metrics(backend, line)

    def routes(self) -> list[tuple[str, str, Callable[[Request], Awaitable[Response]], type[BaseModel] | None]]:
        """Path, method, handler, and the model of the body."""
        return [
            ("/v1/chat/completions", "POST", self.chat_completions, ChatCompletionRequest),
            ("/v1/models", "GET", self.models, None),
            ("/v1/models/{name:path}", "GET", self.model, None),
            ("/tokenize", "POST", self.tokenize, TokenizeRequest),
            ("/detokenize", "POST", self.detokenize, DetokenizeRequest),
            ("/health", "GET", self.health, None),
            ("/ready", "GET", self.ready, None),
            ("/metrics", "GET", self.metrics, None),
        ]

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        caller = self._caller(request)
        body = await self._body(request, ChatCompletionRequest, known_fields)
        self._check_model(body.model)
        asked = await asked_of(body, caller, self._backend, self._sources)
        reply = Reply(self._backend.loaded.name, asked.tools, None if body.parallel_tool_calls else 1)
        if not body.stream:
            await while_connected(request, self._finish(asked, reply))
            return JSONResponse(reply.completion())
        events = self._answer(asked)
        try:
            first = await while_connected(request, _first(events))
        except BaseException:
            await events.aclose()
            raise
        chunks = reply.chunks(_again(first, events), include_usage=body.includes_usage)
        return StreamingResponse(_server_sent(chunks, events), media_type="text/event-stream", headers=_STREAM)

    async def _finish(self, asked: Asked, reply: Reply) -> None:
        async with contextlib.aclosing(self._answer(asked)) as events:
            async for event in events:
                reply.take(event)

    async def _answer(self, asked: Asked) -> AsyncGenerator[Event, None]:
        """The events of a request in its turn."""
        async with self._line.place(asked.caller.name):
            with self._metrics.request() as counted:
                async with contextlib.aclosing(events_of(asked, self._backend)) as events:
                    async for event in events:
                        counted.take(event)
                        yield event

    async def models(self, request: Request) -> Response:
        """The model that answers."""
        self._caller(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The model of this name."""
        self._caller(request)
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        length = self._backend.context_length
        return {
            "id": self._backend.loaded.name,
            "object": "model",
            "created": 0,
            "owned_by": "qwen35mm",
            "max_model_len": length,
            "meta": {"n_ctx": length},
        }

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text, control tokens not among them."""
        self._caller(request)
        body = await self._body(request, TokenizeRequest)
        self._check_model(body.model)
        try:
            tokens = await PROMPTS.run(self._backend.loaded.tokenizer.encode_plain, body.prompt)
        except ValueError as error:
            raise ApiError(400, str(error), "prompt") from None
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": self._backend.context_length})

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        self._caller(request)
        body = await self._body(request, DetokenizeRequest)
        self._check_model(body.model)
        tokenizer = self._backend.loaded.tokenizer
        if not all(0 <= each < tokenizer.vocab_size for each in body.tokens):
            raise ApiError(400, f"tokens must be ids from 0 to {tokenizer.vocab_size - 1:,}.", "tokens")
        return JSONResponse({"prompt": tokenizer.decode(body.tokens, skip_special=False)})

    async def health(self, _: Request) -> Response:
        """Whether the program runs."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether a request would be answered at once."""
        self._caller(request)
        return JSONResponse({"status": "ready", "waiting": self._line.num_waiting})

    async def metrics(self, request: Request) -> Response:
        """Counters and gauges, in Prometheus' format."""
        self._caller(request)
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def _caller(self, request: Request) -> Caller:
        return self._keys.caller(request.headers.get("authorization"), request.headers.get("x-api-key"))

    def _check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for another model than the one that answers."""
        own = self._backend.loaded.name
        if name not in (None, "", "default", own):
            raise ApiError(404, f"There is no model {name[:200]!r} here; {own!r} is.", "model", "model_not_found")

    async def _body(
        self, request: Request, model: type[M], prepare: Callable[[dict[str, Any]], dict[str, Any]] = dict
    ) -> M:
        """The body of a request.

        Raises:
            ApiError: it is too large, comes too slowly, is no JSON, or a field of it can't be used.
        """
        body = bytearray()
        try:
            with anyio.fail_after(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self._max_body_bytes:
                        most = f"{self._max_body_bytes / 2**20:,.0f} MiB"
                        raise ApiError(413, f"The body is too large: at most {most} are taken.", code="too_large")
        except TimeoutError:
            raise ApiError(408, f"The body didn't come within {BODY_TIMEOUT_S:.0f} seconds.", code="timeout") from None
        try:
            return model.model_validate(prepare(_OBJECT.validate_json(bytes(body))))
        except ValidationError as error:
            raise invalid(error) from None


_STREAM = {"cache-control": "no-store", "x-accel-buffering": "no"}


def answering(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """A route that answers errors in OpenAI's form."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return await answer_error(request, error)

    return answer


async def answer_error(_: Request, error: Exception) -> Response:
    told = api_error(error)
    return JSONResponse(told.body, status_code=told.status, headers=told.headers)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """What the work gives; it is called off when the client hangs up.

    Raises:
        ClientDisconnect: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _first(events: AsyncIterator[Event]) -> Event:
    """The first event by which a request is known to be one that can be answered: what is refused gets a status."""
    async for event in events:
        is_early = isinstance(event, MediaPlanned) or (isinstance(event, Progress) and event.phase in ("wait", "read"))
        if not is_early:
            return event
    raise AssertionError("a stream ends with its result")


async def _again(first: Event, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    yield first
    async for event in events:
        yield event


async def _server_sent(
    chunks: AsyncIterator[dict[str, Any]], events: AsyncGenerator[Event, None]
) -> AsyncIterator[bytes]:
    """A stream of server-sent events, with a comment where there is nothing to say for long."""
    following: asyncio.Future[dict[str, Any]] | None = None
    try:
        while True:
            following = following or asyncio.ensure_future(anext(chunks))
            done, _ = await asyncio.wait((following,), timeout=KEEP_ALIVE_S)
            if not done:
                yield b": working\n\n"
                continue
            try:
                chunk = following.result()
            except StopAsyncIteration:
                break
            except Exception as error:
                yield _event(api_error(error).body)
                break
            following = None
            yield _event(chunk)
        yield b"data: [DONE]\n\n"
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await events.aclose()


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _described(body: type[BaseModel] | None) -> dict[str, Any] | None:
    """The body's schema for the OpenAPI document: it is read by us, with a limit, and not by FastAPI."""
    if body is None:
        return None
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body.model_json_schema()}}}}
