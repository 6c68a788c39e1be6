"""A page of one person: who has opened it by its address is let in."""

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
    """What a page that has no key shows for one: the code of the address that opened it."""

    model_config = ConfigDict(strict=True)

    once: str | None = None


_BEGINNING = TypeAdapter(Beginning)


class Owner:
    """Lets in the person whose page it is. Only in the event loop.

    Args:
        token: what lets them in; None lets in everybody who reaches the page.
    """

    def __init__(self, token: PageToken | None) -> None:
        self._token = token
        self._tickets = Tickets()

    async def begin(self, request: Request) -> Response:
        """`POST .../session`: the page's key, for the code of the address that opened it, with the ticket for files."""
        asked = await read_beginning(request)
        if self._token is None:
            return JSONResponse({"key": None, "ticket": None})
        if asked.once is None or not self._token.take(asked.once):
            raise _no_token()
        return JSONResponse(self._tickets.opened(self._token.key))

    def check(self, connection: HTTPConnection, *, takes_tickets: bool = False) -> None:
        """Raises HttpError: it isn't the owner's.

        Args:
            takes_tickets: whether a ticket is enough, as for files.
        """
        token = self._token
        if token is None:
            return
        if token.is_shown(connection):
            self._tickets.of(token.key)
        elif not takes_tickets or self._tickets.name(connection) != name_of_key(token.key):
            raise _no_token()


async def read_beginning(request: Request) -> Beginning:
    """What a page says when it asks for a key. Raises HttpError, Qwen35mmError."""
    if HEADER not in request.headers:
        raise NotFoundError(say("There is no such request."))
    return await read_json(request, _BEGINNING, _MAX_BODY_BYTES)


def _no_token() -> HttpError:
    words = say(
        "This page is for the person who started it. Open the whole address that the program has written in its "
        "terminal, with the token at its end."
    )
    return HttpError(403, words, "token")
