"""A page of one person, which its address with the token opens."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, TypeAdapter
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response

from qwen35mm.errors import NotFoundError
from qwen35mm.http.errors import HttpError
from qwen35mm.http.requests import read_json
from qwen35mm.http.sessions import HEADER, PageToken, Tickets, name_of_key
from qwen35mm_preprocess.say import say

_MAX_BODY_BYTES = 4096


class Beginning(BaseModel):
    """A page's request for a key: the code of the address that opened it."""

    model_config = ConfigDict(strict=True)

    once: str | None = None


_BEGINNING = TypeAdapter(Beginning)


class Owner:
    """Lets in the page's owner. Only in the event loop.

    Args:
        token: lets the owner in; None lets in everybody who reaches the page.
    """

    def __init__(self, token: PageToken | None) -> None:
        self._token = token
        self._tickets = Tickets()

    async def begin(self, request: Request) -> Response:
        """`POST .../session`: exchanges the code of the opening address for the page's key and the ticket for files."""
        asked = await read_beginning(request)
        if self._token is None:
            return JSONResponse({"key": None, "ticket": None})
        if asked.once is None or not self._token.take(asked.once):
            raise _no_token()
        return JSONResponse(self._tickets.opened(self._token.key))

    def check(self, connection: HTTPConnection, *, takes_tickets: bool = False) -> None:
        """Raises HttpError if the connection isn't the owner's.

        Args:
            takes_tickets: whether a ticket suffices, as for files.
        """
        token = self._token
        if token is None:
            return
        if token.is_shown(connection):
            self._tickets.of(token.key)
        elif not takes_tickets or self._tickets.name(connection) != name_of_key(token.key):
            raise _no_token()


async def read_beginning(request: Request) -> Beginning:
    """The body of a page's request for a key. Raises HttpError, Qwen35mmError."""
    if HEADER not in request.headers:
        raise NotFoundError(say("There is no such request."))
    return await read_json(request, _BEGINNING, _MAX_BODY_BYTES)


def _no_token() -> HttpError:
    words = say(
        "This page is for the person who started it. Open the whole address that the program has written in its "
        "terminal, with the token at its end."
    )
    return HttpError(403, words, "token")
