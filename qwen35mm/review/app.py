"""The page's routes: JSON in, JSON out, errors in words; and the media."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from qwen35mm.assets import asset_path
from qwen35mm.captioning.records import printable
from qwen35mm.captioning.texts.presets import PRESETS, preset_question
from qwen35mm.captioning.texts.prompts import Question
from qwen35mm.chat.thumbnails import make_thumbnail, media_type, shown_picture
from qwen35mm.errors import NotFoundError, PromptError, Qwen35mmError, report_bug
from qwen35mm.pools import REQUESTS, SEARCH, THUMBNAILS
from qwen35mm.review.asking import Asker
from qwen35mm.review.changes import MAX_TEXT_BYTES, ChangedError
from qwen35mm.review.collection import Collection, Search
from qwen35mm.review.similar import SMALL_SIDE
from qwen35mm.server.guards import OnlyThisMachine, SameOrigin, SecurityHeaders
from qwen35mm.server.page_token import OnlyWithToken, PageToken
from qwen35mm_preprocess import MediaError
from qwen35mm_preprocess.say import Said, said_of, say

logger = logging.getLogger(__name__)

# A caption as JSON, every character of which may be escaped.
_MAX_BODY_BYTES = 8 * MAX_TEXT_BYTES
_MAX_ITEMS = 200
# How often it is seen to whether somebody still waits for the model.
_LOOK_S = 0.5
# What is at an address with its version never changes.
_KEPT = {"cache-control": "private, max-age=31536000, immutable"}

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
Number = Annotated[int, Field(ge=0)]
Words = Annotated[str, Field(max_length=MAX_TEXT_BYTES)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Items(_Body):
    numbers: Annotated[list[Number], Field(max_length=_MAX_ITEMS)]


class _Saved(_Body):
    number: Number
    digest: str
    text: Words
    editing: str = ""


class _Accepted(_Body):
    number: Number
    digest: str
    accepted: bool


class _Asked(_Body):
    number: Number
    prompt: Words = ""
    preset: str = ""


def create_app(reviewed: Collection[Any], asker: Asker, *, token: PageToken) -> Starlette:
    """The application; it closes the asker at its end."""
    page = _Page(reviewed, asker)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncGenerator[None]:
        yield
        await asker.close()

    requests = {
        "look": page.look,
        "find": page.find,
        "items": page.items,
        "save": page.save,
        "accept": page.accept,
        "undo": page.undo,
        "ask": page.ask,
    }
    return Starlette(
        routes=[
            Route("/", page.show),
            *(Route(f"/api/{name}", _in_words(handle), methods=["POST"]) for name, handle in requests.items()),
            Route("/media/{number:int}", _in_words(page.media)),
            Route("/small/{number:int}", _in_words(page.small)),
            Route("/icon.svg", _icon),
            Mount("/web", StaticFiles(directory=asset_path("web"))),
        ],
        middleware=[
            Middleware(SecurityHeaders),
            Middleware(OnlyThisMachine),
            Middleware(SameOrigin),
            Middleware(OnlyWithToken, token=token),
        ],
        lifespan=lifespan,
    )


async def _icon(_request: Request) -> Response:
    return FileResponse(asset_path("icon.svg"))


class _Page:
    def __init__(self, reviewed: Collection[Any], asker: Asker) -> None:
        self._reviewed = reviewed
        self._asker = asker

    async def show(self, _request: Request) -> Response:
        return FileResponse(asset_path("web") / "review.html", headers={"cache-control": "no-cache"})

    async def look(self, _request: Request) -> Response:
        """What there is, without opening a file."""
        numbers = await SEARCH.run(self._reviewed.look)
        counts = self._reviewed.counts()
        title = printable(self._reviewed.title)
        return JSONResponse({"title": title, "numbers": numbers, "counts": counts, "presets": list(PRESETS)})

    async def find(self, request: Request) -> Response:
        return JSONResponse(await SEARCH.run(self._reviewed.find, await _read(request, Search)))

    async def items(self, request: Request) -> Response:
        wanted = await _read(request, _Items)
        return JSONResponse({"items": await REQUESTS.run(self._reviewed.describe, wanted.numbers)})

    async def save(self, request: Request) -> Response:
        asked = await _read(request, _Saved)
        return await self._changed(asked.number, self._reviewed.save, asked.text, asked.digest, asked.editing)

    async def accept(self, request: Request) -> Response:
        asked = await _read(request, _Accepted)
        return await self._changed(asked.number, self._reviewed.accept, asked.digest, asked.accepted)

    async def undo(self, _request: Request) -> Response:
        number = await REQUESTS.run(self._reviewed.undo)
        items = [] if number is None else await REQUESTS.run(self._reviewed.describe, [number])
        return JSONResponse({"items": items, "counts": self._reviewed.counts()})

    async def ask(self, request: Request) -> Response:
        asked = await _read(request, _Asked)
        entry, path = await REQUESTS.run(self._reviewed.medium, asked.number)
        text = (await REQUESTS.run(self._reviewed.describe, [asked.number]))[0]["text"]
        question = preset_question(asked.preset) if asked.preset else Question(asked.prompt)
        asking = asyncio.ensure_future(self._asker.ask(entry.name, path, question, text))
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=_LOOK_S)
                if await request.is_disconnected():
                    raise ClientDisconnect
        finally:
            asking.cancel()
        caption = asking.result()
        return JSONResponse({"text": caption.text, "flags": [printable(flag) for flag in caption.flags]})

    async def media(self, request: Request) -> Response:
        """A medium as browsers show it, upright."""
        number, headers = self._named(request)
        entry, path = await REQUESTS.run(self._reviewed.medium, number)
        if entry.kind == "image":
            shown = await THUMBNAILS.run(shown_picture, path)
            if shown is not None:
                return Response(shown, media_type="image/jpeg", headers=headers)
        return FileResponse(path, media_type=await REQUESTS.run(media_type, path), headers=headers)

    async def small(self, request: Request) -> Response:
        """A small picture of a medium."""
        number, headers = self._named(request)
        _, path = await REQUESTS.run(self._reviewed.medium, number)
        return Response(
            await THUMBNAILS.run(make_thumbnail, path, SMALL_SIDE), media_type="image/jpeg", headers=headers
        )

    def _named(self, request: Request) -> tuple[int, dict[str, str]]:
        number = request.path_params["number"]
        version = request.query_params.get("v", "")
        is_current = version and version == self._reviewed.version(number)
        return number, _KEPT if is_current else {"cache-control": "no-store"}

    async def _changed(self, number: int, change: Callable[..., dict[str, Any]], *arguments: object) -> Response:
        try:
            item = await REQUESTS.run(change, number, *arguments)
        except ChangedError as error:
            (item,) = await REQUESTS.run(self._reviewed.describe, [number])
            return _problem(said_of(error), 409, item=item)
        return JSONResponse({"item": item, "counts": self._reviewed.counts()})


def _in_words(handle: Handler) -> Handler:
    async def handled(request: Request) -> Response:
        try:
            return await handle(request)
        except NotFoundError as error:
            return _problem(said_of(error), 404)
        except (Qwen35mmError, MediaError) as error:
            return _problem(said_of(error), 400)
        except ClientDisconnect:
            return _problem(say("The connection was lost."), 400)
        except Exception as error:
            return _problem(report_bug(logger, "a request of the page failed", error), 500)

    return handled


def _problem(message: Said, status: int, **more: Any) -> Response:
    headers = {"cache-control": "no-store"}
    return JSONResponse({"error": {"message": message, **more}}, status, headers)


async def _read(request: Request, form: type[T]) -> T:
    """A request's body. Raises PromptError where it is of another form."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise PromptError(say("The request is too large."))
    try:
        return TypeAdapter(form).validate_json(body)
    except ValidationError:
        raise PromptError(say("The request is damaged: it isn't JSON as expected.")) from None
