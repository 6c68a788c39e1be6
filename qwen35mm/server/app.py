"""The routes, and what is the same for all of them: keys, the line, errors, a client that hangs up."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import anyio
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from qwen35mm.engine import Event
from qwen35mm.pools import PROMPTS
from qwen35mm.server import chat_completions, messages
from qwen35mm.server.asked import Asked, Backend, events_of, num_tokens
from qwen35mm.server.errors import ApiError, api_error, invalid
from qwen35mm.server.guards import OnlyThisMachine, SameOrigin
from qwen35mm.server.keys import Caller, Keys
from qwen35mm.server.line import FairLine
from qwen35mm.server.metrics import Metrics
from qwen35mm.server.parts import Sources
from qwen35mm.server.reply import ReplyReader
from qwen35mm.server.streams import first_of, frame, server_sent, while_connected

# A video of 512 MiB, as base64.
MAX_BODY_BYTES = 700 * 2**20
# A sender that stalls holds memory.
BODY_TIMEOUT_S = 120.0
_OBJECT = TypeAdapter(dict[str, Any], config=ConfigDict(allow_inf_nan=False))

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
            ("/v1/chat/completions", "POST", self.chat_completions, chat_completions.ChatCompletionRequest),
            ("/v1/messages", "POST", self.messages, messages.MessagesRequest),
            ("/v1/messages/count_tokens", "POST", self.count_tokens, messages.CountRequest),
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
        body = await self._body(request, chat_completions.ChatCompletionRequest, chat_completions.known_fields)
        self._check_model(body.model)
        asked = await chat_completions.asked_of(body, caller, self._backend, self._sources)
        reader = ReplyReader(asked.tools, None if body.parallel_tool_calls else 1)
        name = self._backend.loaded.name
        reply = chat_completions.Completion(name, reader, includes_usage=body.includes_usage)
        return await self._respond(request, asked, reply, streams=bool(body.stream), failed=lambda e: frame(e.body))

    async def messages(self, request: Request) -> Response:
        """Answer a conversation, in Anthropic's form."""
        caller = self._caller(request)
        body = await self._body(request, messages.MessagesRequest, messages.known_fields)
        self._check_model(body.model)
        asked = await messages.asked_of(body, caller, self._backend, self._sources)
        reader = ReplyReader(asked.tools, 1 if body.one_call else None)
        reply = messages.Reply(self._backend.loaded, reader, asked.params)
        return await self._respond(request, asked, reply, streams=body.stream, failed=messages.error_frame)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a conversation, in Anthropic's form."""
        caller = self._caller(request)
        body = await self._body(request, messages.CountRequest, messages.known_fields)
        self._check_model(body.model)
        asked = await messages.asked_of(body, caller, self._backend, self._sources)
        return JSONResponse({"input_tokens": await num_tokens(asked, self._backend)})

    async def _respond(
        self,
        request: Request,
        asked: Asked,
        reply: chat_completions.Completion | messages.Reply,
        *,
        streams: bool,
        failed: Callable[[ApiError], bytes],
    ) -> Response:
        """A reply in one piece, or as it is written."""
        if not streams:
            await while_connected(request, self._finish(asked, reply.reader))
            return JSONResponse(reply.whole())
        events = self._answer(asked)
        try:
            begun = await while_connected(request, first_of(events))
        except BaseException:
            await events.aclose()
            raise
        body = server_sent(reply.frames(begun), events, failed)
        return StreamingResponse(body, media_type="text/event-stream", headers=_STREAM)

    async def _finish(self, asked: Asked, reader: ReplyReader) -> None:
        async with contextlib.aclosing(self._answer(asked)) as events:
            async for event in events:
                for _ in reader.take(event):
                    pass

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


async def answer_error(request: Request, error: Exception) -> Response:
    told = api_error(error)
    body = messages.error_body(told) if request.url.path.startswith("/v1/messages") else told.body
    return JSONResponse(body, status_code=told.status, headers=told.headers)


def _described(body: type[BaseModel] | None) -> dict[str, Any] | None:
    """The body's schema for the OpenAPI document: it is read by us, with a limit, and not by FastAPI."""
    if body is None:
        return None
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body.model_json_schema()}}}}
