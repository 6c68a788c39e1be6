"""One address for several engines: passes each request on to one of them and its answer back.

Each engine has the whole application (`create_app`), so every protocol, error and limit is the same as on one machine.
The front checks keys and body sizes, chooses the engine, and retries on another engine if one dies before its answer's
body begins.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from qwen35mm.http.bodies import MAX_BODY_BYTES, MAX_HELD_BYTES, read_bytes
from qwen35mm.http.errors import HttpError
from qwen35mm.http.settings import HttpSettings
from qwen35mm.http.streams import until_the_end, while_connected
from qwen35mm.pools import PROMPTS
from qwen35mm.server.app import answering, limits
from qwen35mm.server.cluster.calls import AsgiMessage, Call, EngineLostError, scope_of
from qwen35mm.server.cluster.conversations import addresses_of
from qwen35mm.server.errors import ApiError, api_error
from qwen35mm.server.keys import ANYBODY, Keys
from qwen35mm.server.metrics import labelled
from qwen35mm.server.paths import last_frame

# A request isn't sent again after this many engines died on it.
_MAX_BEGUN = 3
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
# The path of one response, and the id at the beginning of a new response's answer.
_NAMED = re.compile(r"/v1/responses/(resp_[0-9a-f]{32})(?:/.*)?")
_GOES_ON = re.compile(rb'"previous_response_id"\s*:\s*"resp_')
_MADE = re.compile(rb'"id":"(resp_[0-9a-f]{32})"')
_MOST_RESPONSES = 20_000


class Cluster(Protocol):
    """Several engines."""

    def answer(self, call: Call) -> AsyncGenerator[list[AsgiMessage], None]:
        """One engine's answer, several messages at a time. Leaving the iterator cancels it.

        Raises:
            EngineLostError: the engine has ended.
        """
        ...

    async def everywhere(self, call: Call) -> Mapping[str, tuple[int, bytes]]:
        """The answer of every engine: status and body, by the engine's name."""
        ...


def create_front(
    cluster: Cluster,
    *,
    keys: Keys | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    max_held_bytes: int = MAX_HELD_BYTES,
    settings: HttpSettings | None = None,
    only_this_machine: bool = True,
) -> Starlette:
    """Creates the application in front of several engines. Arguments as `create_app`."""
    front = _Front(cluster, keys or Keys([]))
    routes = [
        Route("/health", answering(front.health)),
        Route("/metrics", answering(front.metrics)),
        Route("/{path:path}", answering(front.pass_on), methods=_METHODS),
    ]
    return Starlette(
        routes=routes, middleware=limits(settings or HttpSettings(), only_this_machine, max_body_bytes, max_held_bytes)
    )


class _Front:
    def __init__(self, cluster: Cluster, keys: Keys) -> None:
        self._cluster = cluster
        self._keys = keys
        # The addresses of requests that were answered by responses, by caller and response id.
        self._ended: OrderedDict[tuple[str, str], tuple[bytes, ...]] = OrderedDict()

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """The metrics of every engine, with the label `engine`."""
        self._keys.caller_of(request)
        answers = await self._cluster.everywhere(Call(scope_of(request)))
        texts = {engine: body.decode() for engine, (status, body) in answers.items() if status == 200}
        return Response(labelled(texts, "engine"), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def pass_on(self, request: Request) -> Response:
        scope, body, addresses, caller, is_bound = scope_of(request), b"", (), ANYBODY, False
        if named := _NAMED.fullmatch(request.url.path):
            # If responses are in memory, only the engine that made one has it.
            caller = self._keys.caller_of(request)
            addresses = self._ended.get((caller.name, named[1]), ())
            is_bound = True
        elif request.method not in ("GET", "HEAD", "OPTIONS"):
            caller = self._keys.caller_of(request)
            body = bytes(await read_bytes(request))
            addresses = await PROMPTS.run(addresses_of, body, caller.name, self._ended)
            is_bound = _GOES_ON.search(body) is not None
            if addresses and request.url.path == "/v1/responses":
                # Other requests may have the same messages; the random address marks the engine with this response.
                addresses += (os.urandom(16),)
        answer = self._noted(self._answer(Call(scope, body, addresses, is_bound)), caller.name, addresses)
        try:
            head = await while_connected(request, anext(answer))
        except BaseException:
            await answer.aclose()
            raise
        response = StreamingResponse(_body(answer, request), head["status"])
        response.raw_headers = [(bytes(name), bytes(value)) for name, value in head["headers"]]
        return response

    async def _noted(
        self, answer: AsyncGenerator[AsgiMessage, None], caller: str, addresses: tuple[bytes, ...]
    ) -> AsyncGenerator[AsgiMessage, None]:
        """Passes an answer through. If it is a response, remembers its request's addresses by its id."""
        async with contextlib.aclosing(answer):
            async for message in answer:
                if addresses and (found := _MADE.search(message.get("body", b""))):
                    self._ended[caller, found[1].decode()] = addresses
                    if len(self._ended) > _MOST_RESPONSES:
                        self._ended.popitem(last=False)
                    addresses = ()
                yield message

    async def _answer(self, call: Call) -> AsyncGenerator[AsgiMessage, None]:
        """An engine's answer. Asks another engine if one dies before the body begins."""
        for is_last in (*[False] * (_MAX_BEGUN - 1), True):
            head: AsgiMessage | None = None
            begun = is_last
            try:
                async with contextlib.aclosing(self._cluster.answer(call)) as batches:
                    async for message in _flat(batches):
                        if message["type"] == "http.response.start":
                            head = message
                            continue
                        begun = True
                        if head is not None:
                            yield head
                            head = None
                        yield message
                return
            except EngineLostError:
                if begun:
                    text = "The machine that answered has ended. Ask again: another one goes on."
                    raise ApiError(503, text, code="engine_lost", headers={"retry-after": "1"}) from None


async def _flat(batches: AsyncIterator[list[AsgiMessage]]) -> AsyncGenerator[AsgiMessage, None]:
    async for batch in batches:
        for message in batch:
            yield message


async def _body(answer: AsyncGenerator[AsgiMessage, None], request: Request) -> AsyncGenerator[bytes, None]:
    num_events = 0
    async with contextlib.aclosing(answer), contextlib.aclosing(until_the_end(request.scope, answer)) as messages:
        try:
            async for message in messages:
                data = message.get("body", b"")
                num_events += data.count(b"\n\n")
                yield data
        except (ApiError, HttpError) as error:
            yield last_frame(api_error(error), request.url.path, num_events)
