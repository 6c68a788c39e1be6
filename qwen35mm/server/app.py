"""The routes, and what they share: keys, the queue, errors, hang-ups."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import replace

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from qwen35mm import __version__
from qwen35mm.http.bodies import MAX_BODY_BYTES, MAX_HELD_BYTES, RETRY_AFTER_S, BodyLimits
from qwen35mm.http.guards import guards
from qwen35mm.http.settings import HttpSettings
from qwen35mm.http.streams import frame, while_connected
from qwen35mm.server.anthropic import reply as anthropic_reply
from qwen35mm.server.anthropic import request as anthropic
from qwen35mm.server.body import read_body
from qwen35mm.server.docs import DOCS, docs_file, show_docs
from qwen35mm.server.errors import ApiError, api_error
from qwen35mm.server.generation import ServedBackend, num_tokens
from qwen35mm.server.identity import request_id_header, system_fingerprint
from qwen35mm.server.keys import Keys
from qwen35mm.server.models import Listed, anthropic_model, anthropic_models, listed, openai_model
from qwen35mm.server.notes import HEADER, Notes, notes_of
from qwen35mm.server.openai import chat_completions
from qwen35mm.server.openai.choices import events_of_choices
from qwen35mm.server.openai.completion import Completion
from qwen35mm.server.openai.responses.kept import KeptResponses
from qwen35mm.server.openai.responses.routes import ResponsesRoutes
from qwen35mm.server.openai.texts.routes import TextRoutes
from qwen35mm.server.openapi import Handler, Route, add_routes
from qwen35mm.server.parts import Sources
from qwen35mm.server.paths import ForgivingPaths
from qwen35mm.server.queue import FairQueue
from qwen35mm.server.reply import ReplyReader
from qwen35mm.server.service import ANY_NAME, Service
from qwen35mm.server.tokens import TokenRoutes


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
    strict_fields: bool = False,
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
        names: further names of the model; `ANY_NAME` among them stands for all.
        strict_fields: refuse what would be ignored or translated (see `qwen35mm.server.notes`).
    """
    app = FastAPI(
        title="qwen35mm",
        description="Qwen3.5 models, pictures and videos included, in OpenAI's protocol.",
        middleware=limits(settings, only_this_machine, max_body_bytes, max_held_bytes),
        # The document needs a key like every other route.
        openapi_url=None,
    )
    sources = sources or Sources()
    keys = keys or Keys([])
    queue = FairQueue(num_places, max_waiting, several=len(keys) > 1)
    api = Api(backend, keys, sources, queue, names)
    responses = ResponsesRoutes(api, backend, sources, kept or KeptResponses.in_memory())
    texts = TextRoutes(api, backend)
    tokens = TokenRoutes(api, backend, sources)
    app.state.api = api
    app.add_exception_handler(Exception, answer_error)
    app.add_exception_handler(ApiError, answer_error)
    app.add_exception_handler(HTTPException, answer_error)
    wrapped = functools.partial(answering, strict_fields=strict_fields)
    add_routes(app, [*api.routes(), *responses.routes(), *texts.routes(), *tokens.routes()], wrapped)
    for path, handler in ((DOCUMENT, api.document), (DOCS, show_docs), (f"{DOCS}/{{name}}", docs_file)):
        app.add_api_route(path, answering(handler), include_in_schema=False)
    return app


def limits(
    settings: HttpSettings | None, only_this_machine: bool, max_body_bytes: int, max_held_bytes: int
) -> list[Middleware]:
    """The middleware that limits who may call and how much they may send. Arguments as `create_app`."""
    found = [] if settings is None else guards(settings, only_this_machine=only_this_machine, refuse=refuse)
    return [*found, Middleware(ForgivingPaths), Middleware(BodyLimits, max_body_bytes, max_held_bytes)]


class Api(Service):
    """The routes of one backend."""

    def routes(self) -> list[Route]:
        """The routes to add to the application."""
        return [
            Route("/v1/chat/completions", "POST", self.chat_completions, chat_completions.ChatCompletionRequest),
            Route("/v1/messages", "POST", self.messages, anthropic.MessagesRequest),
            Route("/v1/messages/count_tokens", "POST", self.count_tokens, anthropic.CountRequest),
            Route("/v1/models", "GET", self.models),
            Route("/v1/models/{name:path}", "GET", self.model),
            Route("/version", "GET", self.version),
            Route("/health", "GET", self.health),
            Route("/ready", "GET", self.ready),
            Route("/metrics", "GET", self.metrics),
        ]

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        caller = self.caller(request)
        body = await read_body(request, chat_completions.ChatCompletionRequest, chat_completions.known_fields)
        model = self.check_model(body.model)
        asking = chat_completions.asked_of(body, caller, self._backend, self._sources, notes_of(request))
        asked = await while_connected(request, asking)
        asked = replace(asked, adapter=self.adapter_of(body.model))
        readers = [ReplyReader(asked.tools, None if body.parallel_tool_calls else 1) for _ in range(body.n)]
        fingerprint = system_fingerprint(self._backend.loaded, asked.adapter)
        tells = {"includes_usage": body.includes_usage, "tells_ids": body.return_token_ids}
        reply = Completion(model, readers, fingerprint=fingerprint, **tells)
        events = events_of_choices(asked, body.n, functools.partial(self.answer, caller))
        if body.stream:
            return await self.stream_events(request, events, reply.frames, lambda error: frame(error.body))
        await self.read(request, [(events, reply)])
        return JSONResponse(reply.whole())

    async def messages(self, request: Request) -> Response:
        """Answer a conversation, in Anthropic's form."""
        caller = self.caller(request)
        body = await read_body(request, anthropic.MessagesRequest, anthropic.known_fields)
        model = self.check_model(body.model)
        asking = anthropic.asked_of(body, caller, self._backend, self._sources, notes_of(request))
        asked = await while_connected(request, asking)
        reader = ReplyReader(asked.tools, 1 if body.one_call else None)
        reply = anthropic_reply.Reply(model, reader)
        asked_request = replace(asked.request, adapter=self.adapter_of(body.model))
        if body.stream:
            return await self.stream(request, caller, asked_request, reply.frames, anthropic_reply.error_frame)
        await self.finish(request, caller, asked_request, reader)
        return JSONResponse(reply.whole())

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a conversation, in Anthropic's form."""
        caller = self.caller(request)
        body = await read_body(request, anthropic.CountRequest, anthropic.known_count_fields)
        self.check_model(body.model)
        asking = anthropic.asked_of(body, caller, self._backend, self._sources, notes_of(request))
        asked = await while_connected(request, asking)
        counted = await while_connected(request, num_tokens(asked.request, self._backend))
        return JSONResponse({"input_tokens": counted})

    async def models(self, request: Request) -> Response:
        """List the names of the model."""
        self.caller(request)
        return list_models(request, self._listed(), self._created)

    async def model(self, request: Request) -> Response:
        """Describe the model of this name."""
        self.caller(request)
        name = request.path_params["name"]
        known = self.check_model(name)
        shown = name if name in self._names else known
        found = {each.name: each for each in self._listed()}
        return show_model(
            request, replace(found.get(shown, found[self._backend.loaded.name]), name=shown), self._created
        )

    def _listed(self) -> list[Listed]:
        return listed(self._backend, [name for name in self._names if name != ANY_NAME])

    async def version(self, request: Request) -> Response:
        """The program's version."""
        self.caller(request)
        return JSONResponse({"version": __version__})

    async def health(self, _: Request) -> Response:
        """Whether the program runs, and its engine."""
        self._check_engine()
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether the server takes requests, and how many are waiting."""
        self.caller(request)
        self._check_engine()
        return JSONResponse({"status": "ready", "waiting": self.num_waiting})

    def _check_engine(self) -> None:
        """Raises ApiError: 503, the engine failed; who watches the server starts it again."""
        if self._backend.has_ended:
            message = "The engine failed and is stopped until the program is started again; the log has the details."
            raise ApiError(503, message, code="engine_ended")

    async def metrics(self, request: Request) -> Response:
        """Counters and gauges, in Prometheus' format."""
        self.caller(request)
        return Response(self.counted(), media_type=CONTENT_TYPE_LATEST)

    async def document(self, request: Request) -> Response:
        """The OpenAPI document."""
        self.caller(request)
        return JSONResponse(await asyncio.to_thread(request.app.openapi))


def list_models(request: Request, models: Sequence[Listed], created: int) -> Response:
    """All models, in the client's protocol."""
    if _is_anthropic(request):
        return JSONResponse(anthropic_models([each.name for each in models], created))
    return JSONResponse({"object": "list", "data": [openai_model(each, created) for each in models]})


def show_model(request: Request, model: Listed, created: int) -> Response:
    """One model, in the client's protocol."""
    shown = anthropic_model(model.name, created) if _is_anthropic(request) else openai_model(model, created)
    return JSONResponse(shown)


def _is_anthropic(request: Request) -> bool:
    """Whether an Anthropic client asks, for a path that both protocols have."""
    return "anthropic-version" in request.headers


DOCUMENT = "/openapi.json"
_REFUSED = {
    403: "Websites aren't answered, save those of this server's own address.",
    421: "This server answers to its own names: call it 127.0.0.1 or localhost, or allow a name by --allowed-host.",
}


def answering(handler: Handler, *, strict_fields: bool = False) -> Handler:
    """Wraps a handler so that it answers errors in its protocol's form, and tells what it ignored."""

    async def answer(request: Request) -> Response:
        notes = request.state.notes = Notes(strict=strict_fields)
        try:
            response = await handler(request)
            if told := notes.header:
                response.headers[HEADER] = told
                notes.log(request.url.path)
        except ClientDisconnect:
            response = Response(status_code=499)
        except Exception as error:
            response = await answer_error(request, error)
        name, value = request_id_header(request.url.path)
        response.headers[name] = value
        return response

    return answer


async def answer_error(request: Request, error: Exception) -> Response:
    return _told(request.url.path, api_error(error))


async def refuse(scope: Scope, receive: Receive, send: Send, status: int, _: str) -> None:
    """Answers a request that the guards refuse, in the form of every other error."""
    await _told(scope["path"], ApiError(status, _REFUSED[status], code="refused"))(scope, receive, send)


def _told(path: str, error: ApiError) -> Response:
    body = anthropic_reply.error_body(error) if path.startswith("/v1/messages") else error.body
    headers = {"retry-after": str(RETRY_AFTER_S)} if error.status == 503 else {}
    return JSONResponse(body, status_code=error.status, headers=headers | error.headers)
