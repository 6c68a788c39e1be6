"""What the review's pages share: their routes, and media as browsers show them."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from qwen35mm.assets import asset_path
from qwen35mm.chat.media.thumbnails import make_thumbnail, media_type, shown_picture
from qwen35mm.http.guards import guards
from qwen35mm.http.owner import Owner
from qwen35mm.http.requests import Handler, Requests, in_words, number_of
from qwen35mm.http.sessions import PageToken, TokenAddress
from qwen35mm.http.settings import HttpSettings
from qwen35mm.pools import REQUESTS, THUMBNAILS
from qwen35mm.review.similar import SMALL_SIDE
from qwen35mm_preprocess import MediaKind, MediaLimits

# The content of an address with its current version never changes.
_KEPT = {"cache-control": "private, max-age=31536000, immutable"}

Number = Annotated[int, Field(ge=0)]


class MediaPage(ABC):
    """A page with numbered media. Its methods with `request` are what it may ask.

    Args:
        limits: of the media that it shows.
    """

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits

    @abstractmethod
    def version(self, number: int) -> str:
        """A medium's version for browser caches; empty if it is gone."""

    @abstractmethod
    def medium(self, number: int) -> tuple[MediaKind, Path]:
        """A medium's kind, and the file that may be read for it. Raises Qwen35mmError."""

    async def show(self, _request: Request) -> Response:
        """The page itself."""
        return FileResponse(asset_path("web") / "review.html", headers={"cache-control": "no-cache"})

    async def media(self, request: Request) -> Response:
        """A medium in a form that browsers can show, upright."""
        number, headers = self._named(request)
        kind, path = await REQUESTS.run(self.medium, number)
        if kind == "image":
            shown = await THUMBNAILS.run(shown_picture, path, self._limits)
            if shown is not None:
                return Response(shown, media_type="image/jpeg", headers=headers)
        return FileResponse(path, media_type=await REQUESTS.run(media_type, path), headers=headers)

    async def small(self, request: Request) -> Response:
        """A small picture of a medium."""
        number, headers = self._named(request)
        _, path = await REQUESTS.run(self.medium, number)
        picture = await THUMBNAILS.run(make_thumbnail, path, self._limits, SMALL_SIDE)
        return Response(picture, media_type="image/jpeg", headers=headers)

    def _named(self, request: Request) -> tuple[int, dict[str, str]]:
        number = number_of(request)
        version = request.query_params.get("v", "")
        is_current = version and version == self.version(number)
        return number, _KEPT if is_current else {"cache-control": "no-store"}


async def _nothing() -> None:
    pass


def create_page_app(
    page: MediaPage, *, token: PageToken, max_bytes: int, close: Callable[[], Awaitable[None]] = _nothing
) -> Starlette:
    """The application of a page.

    Args:
        max_bytes: of a request.
        close: called when it shuts down.
    """
    owner = Owner(token)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncGenerator[None]:
        yield
        await close()

    def file(handle: Handler) -> Handler:
        async def handled(request: Request) -> Response:
            owner.check(request, takes_tickets=True)
            return await handle(request)

        return in_words(handled)

    requests = Requests(owner.check, page, max_bytes=max_bytes)
    return Starlette(
        routes=[
            Route("/", page.show),
            Route("/session", in_words(owner.begin), methods=["POST"]),
            Route("/api/{name}", in_words(requests), methods=["POST"]),
            Route("/media/{number}", file(page.media)),
            Route("/small/{number}", file(page.small)),
            Route("/icon.svg", _icon),
            Mount("/web", StaticFiles(directory=asset_path("web"))),
        ],
        middleware=[*guards(HttpSettings(), only_this_machine=True), Middleware(TokenAddress, token)],
        lifespan=lifespan,
    )


async def _icon(_request: Request) -> Response:
    return FileResponse(asset_path("icon.svg"))
