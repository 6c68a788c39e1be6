"""Several models on one server. Each has the whole application (`create_app`); a request goes to that of its model.

So each model has its own queue and counts, and every protocol, error and limit is the same as with one model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Message, Receive, Scope, Send

from qwen35mm.backends.shelf import OnShelf, Shelf
from qwen35mm.errors import EngineError
from qwen35mm.http.bodies import MAX_BODY_BYTES, MAX_HELD_BYTES, read_bytes
from qwen35mm.http.settings import HttpSettings
from qwen35mm.http.streams import KEEP_ALIVE_S, while_connected
from qwen35mm.pools import PROMPTS
from qwen35mm.server.app import answering, create_app, limits, list_models, show_model
from qwen35mm.server.body import mended
from qwen35mm.server.errors import ApiError, api_error
from qwen35mm.server.keys import Keys
from qwen35mm.server.metrics import labelled
from qwen35mm.server.models import Listed, listed_offer
from qwen35mm.server.openai.responses.kept import KeptResponses
from qwen35mm.server.parts import Sources
from qwen35mm.server.paths import last_frame
from qwen35mm.server.service import ANY_NAME, MAX_NAME, no_such_model
from qwen35mm.server.shapes import STREAMING


def create_app_of_models(
    shelf: Shelf,
    *,
    keys: Keys | None = None,
    sources: Sources | None = None,
    kept: KeptResponses | None = None,
    num_places: Callable[[str], int] = lambda name: 4,
    max_waiting: int = 64,
    max_body_bytes: int = MAX_BODY_BYTES,
    max_held_bytes: int = MAX_HELD_BYTES,
    settings: HttpSettings | None = HttpSettings(),  # noqa: B008 - it is frozen
    only_this_machine: bool = True,
    names: Sequence[str] = (),
    default: Callable[[], str] | None = None,
    strict_fields: bool = False,
    keep_alive_s: float = KEEP_ALIVE_S,
) -> Starlette:
    """Creates the application of a shelf's models; its other arguments are `create_app`'s.

    Args:
        num_places: requests that a model's engine computes at one time, by its name.
        names: further names of the default model.
        default: gives the name of the model that answers requests that name none; it may raise ApiError. None is the
            first one.
        keep_alive_s: seconds between comments in a stream whose model is being loaded.
    """
    keys, kept = keys or Keys([]), kept or KeptResponses.in_memory()
    how: dict[str, Any] = {"keys": keys, "sources": sources, "kept": kept, "max_waiting": max_waiting}
    how |= {"max_body_bytes": max_body_bytes, "max_held_bytes": max_held_bytes, "strict_fields": strict_fields}
    first = default or (lambda: shelf.offers[0].name)

    def make(name: str) -> FastAPI:
        offer = shelf.offer(name)
        assert offer is not None
        return create_app(
            OnShelf(shelf, name),  # pyright: ignore[reportArgumentType] - it passes everything on
            num_places=num_places(name),
            settings=None,
            names=(*offer.names, *(names if name == first() else ())),
            **how,
        )

    front = _Front(shelf, make, keys, names, first, keep_alive_s)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        shelf.watch()
        yield

    routes = [
        Route("/v1/models", answering(front.models)),
        Route("/v1/models/{name:path}", answering(front.model)),
        Route("/ready", answering(front.ready)),
        Route("/metrics", answering(front.metrics)),
        Route("/{path:path}", front),
    ]
    return Starlette(
        routes=routes, middleware=limits(settings, only_this_machine, max_body_bytes, max_held_bytes), lifespan=lifespan
    )


class _Front:
    """ASGI application that passes requests on to their models' applications, each made for its first request."""

    def __init__(
        self,
        shelf: Shelf,
        make: Callable[[str], FastAPI],
        keys: Keys,
        names: Sequence[str],
        default: Callable[[], str],
        keep_alive_s: float,
    ) -> None:
        self._shelf = shelf
        self._make = make
        self._apps: dict[str, FastAPI] = {}
        self._keys = keys
        self._keep_alive_s = keep_alive_s
        self._created = int(time.time())
        self._names = names
        self._default = default

    def _app(self, name: str) -> FastAPI:
        if name not in self._apps:
            self._apps[name] = self._make(name)
        return self._apps[name]

    async def models(self, request: Request) -> Response:
        """List the models, with the state of each."""
        self._keys.caller_of(request)
        return list_models(request, self._listed(), self._created)

    async def model(self, request: Request) -> Response:
        """Describe the model of this name."""
        self._keys.caller_of(request)
        asked = request.path_params["name"]
        model = self._of(asked)
        found = {each.name: each for each in self._listed()}
        # One that answers to all names has the name that was asked for.
        other = found[model] if asked in ("default", *self._names) else replace(found[model], name=asked)
        return show_model(request, found.get(asked, other), self._created)

    async def ready(self, request: Request) -> Response:
        """Whether the server takes requests, and how many are waiting."""
        self._keys.caller_of(request)
        waiting = sum(app.state.api.num_waiting for app in self._apps.values())
        return JSONResponse({"status": "ready", "waiting": waiting + self._shelf.num_waiting})

    async def metrics(self, request: Request) -> Response:
        """The metrics of every model, with the label `model`."""
        self._keys.caller_of(request)
        loaded = (
            "# HELP qwen35mm_model_loaded Whether the model is loaded.\n# TYPE qwen35mm_model_loaded gauge\n"
            "qwen35mm_model_loaded {}\n"
        )
        texts = {
            name: self._app(name).state.api.counted().decode()
            + loaded.format(float(self._shelf.state(name) == "loaded"))
            for name in (offer.name for offer in self._shelf.offers)
        }
        return Response(labelled(texts, "model"), media_type=CONTENT_TYPE_LATEST)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._pass_on(scope, receive, send)
        except ClientDisconnect:
            return
        except Exception as error:
            problem = error

            async def refused(_: Request) -> Response:
                raise problem

            response = await answering(refused)(Request(scope))
            await response(scope, receive, send)

    def _listed(self) -> list[Listed]:
        found, first = [], self._default()
        for offer in self._shelf.offers:
            names = [*offer.names, *(name for name in self._names if name != ANY_NAME and offer.name == first)]
            error = self._shelf.error(offer.name)
            found += listed_offer(offer, names, self._shelf.state(offer.name), None if error is None else str(error))
        return found

    def _of(self, name: str | None) -> str:
        """The model that answers to a name. Raises ApiError: 404, none does."""
        name, offers = name or "", self._shelf.offers
        # A model's own name comes before another one's further names.
        if self._shelf.offer(name) is not None:
            return name
        known = next((each.name for each in offers if name in (*each.names, *each.adapters)), None)
        is_any = name in ("", "default", *self._names) or (ANY_NAME in self._names and len(name) <= MAX_NAME)
        if known is None and not is_any:
            raise no_such_model(name, [each.name for each in self._listed()])
        return known or self._default()

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        first, request = self._app(self._default()), Request(scope, receive)
        is_known = any(route.matches(scope)[0] is Match.FULL for route in first.routes)
        if scope["method"] != "POST" or not is_known:
            # No model is loaded for an address that doesn't exist.
            await first(scope, receive, send)
            return
        self._keys.caller_of(request)
        body = await read_bytes(request)
        asked = await PROMPTS.run(_read, body)
        received = _replayed(body, receive)
        # The application reads it into its own, and it may be large.
        del body
        if asked is None:
            # It says what is wrong with the body.
            await first(scope, received, send)
            return
        name = self._of(asked[0])
        late = _LateStream(send, scope["path"])
        taking = asyncio.ensure_future(self._shelf.take(name))
        try:
            while not taking.done():
                wait_s = self._keep_alive_s if asked[1] and request.url.path in STREAMING else None
                await while_connected(request, asyncio.wait({taking}, timeout=wait_s))
                if not taking.done():
                    await late.comment()
            try:
                await taking
            except EngineError as error:
                raise ApiError(503, str(error), code="model_not_loaded") from None
        except BaseException as error:
            if taking.cancel() is False and not taking.cancelled() and taking.exception() is None:
                self._shelf.give_back(name)
            if not (late.has_begun and isinstance(error, Exception)):
                raise
            if not isinstance(error, ClientDisconnect):
                await late.fail(api_error(error))
            return
        del taking
        try:
            await self._app(name)(scope, received, late if late.has_begun else send)
        finally:
            self._shelf.give_back(name)


def _read(body: bytes | bytearray) -> tuple[str | None, bool] | None:
    """The model that a body names, and whether it asks for a stream; None if it is no object.

    It is read as the applications read it, damaged characters included.
    """
    try:
        values = from_json(body)
    except ValueError:
        try:
            values = from_json(mended(body) or b"")
        except ValueError:
            return None
    if not isinstance(values, dict):
        return None
    model = values.get("model")
    return model if isinstance(model, str) else None, values.get("stream") is True


def _replayed(body: bytes | bytearray, receive: Receive) -> Receive:
    """Gives a body that was read, once, then what comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> Message:
        return messages.pop() if messages else await receive()

    return received


class _LateStream:
    """Sends the application's stream after comments, which were sent while its model was loaded.

    By then the answer has its status, so an error becomes the last event.
    """

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self._status = 200
        self._body = b""
        self.has_begun = False

    async def comment(self) -> None:
        """Says that the server works, so that nobody closes the connection."""
        if not self.has_begun:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
            headers.append((b"x-accel-buffering", b"no"))
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self.has_begun = True
        await self._send({"type": "http.response.body", "body": b": loading the model\n\n", "more_body": True})

    async def fail(self, error: ApiError) -> None:
        """Ends the stream with an error."""
        data = last_frame(error, self._path, 0)
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status == 200:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if message.get("more_body", False):
                return
            if not self._body:
                # An answer to a client that has hung up.
                await self._send(message)
            else:
                told = json.loads(self._body)["error"]
                await self.fail(ApiError(self._status, told["message"], told.get("param"), told.get("code")))
