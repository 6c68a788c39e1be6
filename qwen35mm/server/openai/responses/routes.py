"""The routes of the responses API."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from qwen35mm.chat.store.store import new_id
from qwen35mm.contract import Image, Video
from qwen35mm.errors import ContextTooLongError, NotFoundError, Qwen35mmError
from qwen35mm.http.streams import while_connected
from qwen35mm.pools import REQUESTS, SAVING
from qwen35mm.server.body import read_body
from qwen35mm.server.errors import ApiError, api_error, invalid
from qwen35mm.server.generation import ServedBackend, num_tokens
from qwen35mm.server.keys import Caller
from qwen35mm.server.notes import notes_of
from qwen35mm.server.openai.responses.bodies import CountRequest, Includable, ResponsesRequest, known_fields
from qwen35mm.server.openai.responses.events import Answer
from qwen35mm.server.openai.responses.items import with_addresses
from qwen35mm.server.openai.responses.kept import KeptResponses, Past
from qwen35mm.server.openai.responses.request import Question, head_of, question_of
from qwen35mm.server.openapi import Route
from qwen35mm.server.parts import Sources
from qwen35mm.server.reply import ReplyReader
from qwen35mm.server.service import Service

logger = logging.getLogger(__name__)

# Limit for media in one page of items: without it a few small requests could need more memory than there is.
_MAX_PAGE_BYTES = 256 * 2**20
_ADDRESSES: dict[str, Includable] = {
    "input_image": "message.input_image.image_url",
    "input_video": "message.input_video.video_url",
}


class ResponseQuery(BaseModel):
    """The query of GET /v1/responses/ID."""

    model_config = ConfigDict(extra="forbid")

    include: list[Includable] = Field(default_factory=list)
    include_obfuscation: bool | None = None
    stream: Literal["false"] | None = None


class ItemsQuery(BaseModel):
    """The query of GET /v1/responses/ID/input_items."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = None
    include: list[Includable] = Field(default_factory=list)
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


class ResponsesRoutes:
    """Creates responses, and serves kept ones."""

    def __init__(self, service: Service, backend: ServedBackend, sources: Sources, kept: KeptResponses) -> None:
        self._service = service
        self._backend = backend
        self._sources = sources
        self._kept = kept

    def routes(self) -> list[Route]:
        """The routes to add to the application."""
        return [
            Route("/v1/responses", "POST", self.create, ResponsesRequest),
            Route("/v1/responses/input_tokens", "POST", self.count_tokens, CountRequest),
            Route("/v1/responses/{id}", "GET", self.retrieve, query=ResponseQuery),
            Route("/v1/responses/{id}", "DELETE", self.delete),
            Route("/v1/responses/{id}/input_items", "GET", self.input_items, query=ItemsQuery),
            Route("/v1/responses/{id}/cancel", "POST", self.cancel),
        ]

    async def create(self, request: Request) -> Response:
        """Answer a conversation, in the form of OpenAI's responses."""
        caller = self._service.caller(request)
        body = await read_body(request, ResponsesRequest, known_fields)
        model = self._service.check_model(body.model)
        past = await self._past(caller, body)
        question = await self._question(request, caller, body, past)
        asked, node = replace(question.asked, adapter=self._service.adapter_of(body.model)), new_id()
        reader = ReplyReader(asked.tools, None if body.parallel_tool_calls else 1)
        head = head_of(body, question.toolbox, node, model, asked.params or self._backend.loaded.generation)
        try:
            json.dumps(head, allow_nan=False)
        except ValueError:
            raise ApiError(400, "Numbers in tools, tool_choice and text must be finite.", "tools") from None
        keep = functools.partial(self._keep, caller, past, question, reader) if body.store else None
        summarizes = body.reasoning is not None and body.reasoning.asked_summary is not None
        answer = Answer(head, reader, question.toolbox.head_of, node=node, summarizes=summarizes, keep=keep)
        with _named_input():
            if body.stream:
                return await self._service.stream(request, caller, asked, answer.frames, answer.failed)
            await self._service.finish(request, caller, asked, answer)
        return JSONResponse(await answer.whole())

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a conversation, in the form of OpenAI's responses."""
        caller = self._service.caller(request)
        body = await read_body(request, CountRequest, known_fields)
        self._service.check_model(body.model)
        question = await self._question(request, caller, body, await self._past(caller, body))
        counted = await while_connected(request, num_tokens(question.asked, self._backend))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": counted})

    async def retrieve(self, request: Request) -> Response:
        """Get a kept response."""
        caller = self._service.caller(request)
        _query(request, ResponseQuery)
        kept = await self._found(request, self._kept.find, caller)
        return JSONResponse(kept.response)

    async def delete(self, request: Request) -> Response:
        """Delete a kept response."""
        caller = self._service.caller(request)
        await self._found(request, self._kept.delete, caller)
        return JSONResponse({"id": request.path_params["id"], "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        """List the input of a response, a page at a time."""
        caller = self._service.caller(request)
        query = _query(request, ItemsQuery)
        turn = (await self._found(request, self._kept.find, caller)).turn
        items = list(turn.items if query.order == "asc" else reversed(turn.items))
        if query.after is not None:
            ids = [item["id"] for item in items]
            if query.after not in ids:
                raise ApiError(400, f"after: there is no item {query.after[:200]!r} in this input.", "after")
            items = items[ids.index(query.after) + 1 :]
        data, left = [], _MAX_PAGE_BYTES

        def address_of(kind: str, at: int) -> str | None:
            nonlocal left
            if _ADDRESSES[kind] not in query.include:
                return None
            left -= self._kept.num_bytes(turn.media[at])
            return self._kept.address(turn.media[at]) if left >= 0 else None

        for item in items[: query.limit]:
            shown = await REQUESTS.run(with_addresses, item, address_of)
            if left < 0 and not data:
                message = f"include: the media of {item['id']} have more than {_MAX_PAGE_BYTES / 2**20:.0f} MiB."
                raise ApiError(400, message, "include", "too_large")
            if left < 0:
                break
            data.append(shown)
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": "", "last_id": ""}
        return JSONResponse({"object": "list", "data": data, **ends, "has_more": len(data) < len(items)})

    async def cancel(self, request: Request) -> Response:
        """Refused: no response runs in the background."""
        caller = self._service.caller(request)
        await self._found(request, self._kept.find, caller)
        message = "Only a response in the background can be cancelled, and there are none here: hang up to end one."
        raise ApiError(400, message, code="unsupported_field")

    async def _past(self, caller: Caller, body: CountRequest) -> Past:
        if body.previous_response_id is None:
            return self._kept.begin()
        try:
            return await REQUESTS.run(self._kept.past, caller, body.previous_response_id)
        except NotFoundError:
            place = "previous_response_id"
            message = f"{place}: there is no response {body.previous_response_id[:200]!r} to go on from: {_WHY_NONE}"
            raise ApiError(400, message, place, "previous_response_not_found") from None

    async def _question(self, request: Request, caller: Caller, body: CountRequest, past: Past) -> Question:
        async def find(item_id: str, place: str) -> tuple[dict[str, Any], Sequence[Image | Video]]:
            try:
                return await REQUESTS.run(self._kept.item, caller, item_id)
            except NotFoundError:
                raise ApiError(404, f"{place}: there is no item {item_id[:200]!r}: {_WHY_NONE}", place) from None

        asking = question_of(body, past, caller, self._backend, self._sources, find, notes_of(request))
        return await while_connected(request, asking)

    async def _found(self, request: Request, look: Callable[[Caller, str], Any], caller: Caller) -> Any:
        """Looks the path's response up. Raises ApiError 404."""
        response_id = request.path_params["id"]
        try:
            return await REQUESTS.run(look, caller, response_id)
        except NotFoundError:
            raise ApiError(404, f"There is no response {response_id[:200]!r}: {_WHY_NONE}", "response_id") from None

    async def _keep(
        self, caller: Caller, past: Past, question: Question, reader: ReplyReader, response: dict[str, Any]
    ) -> bool:
        turn, limits = question.turn, self._backend.media.limits
        plans = reader.plans[len(reader.plans) - len(turn.media) :] if reader.plans else ()
        try:
            await SAVING.run(self._kept.add, caller, past, question.node, turn, plans, response, limits)
        except Qwen35mmError as error:
            # The answer still goes out; its `store` says that it isn't kept.
            logger.warning("a response could not be kept: %s", error)
            return False
        return True


_WHY_NONE = "it was never kept (store: false), it failed, or it is deleted or too old."


@contextlib.contextmanager
def _named_input() -> Iterator[None]:
    """Names `input` as the field of a context that is too long."""
    try:
        yield
    except ContextTooLongError as error:
        raise replace(api_error(error), param="input") from None


def _query(request: Request, model: type[BaseModel]) -> Any:
    values: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        name = name.removesuffix("[]")
        if name == "include":
            values.setdefault(name, []).append(value)
        else:
            values[name] = value
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise invalid(error) from None
