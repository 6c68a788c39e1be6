"""How the page's requests are answered: JSON in, JSON out, errors in words."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from inspect import iscoroutinefunction, signature
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, validate_call
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from qwen35mm.chat.prompting import TooLongError
from qwen35mm.chat.records import place_of
from qwen35mm.chat.temporary import TemporaryChats
from qwen35mm.chat.turns import Person
from qwen35mm.errors import NotFoundError, PromptError, QuotaError, Qwen35mmError, report_bug
from qwen35mm.pools import REQUESTS, Asker
from qwen35mm.web.serving.people import People
from qwen35mm_preprocess.say import Said, said_of, say

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20
# A page of another site can't set it without asking first, which is never allowed.
HEADER = "x-qwen35mm"

_MARK = "is_request"
_ARGUMENTS = TypeAdapter(dict[str, Any])
T = TypeVar("T")
Method = Callable[..., Awaitable[Any]]
Handler = Callable[[Request], Awaitable[Response]]


def request(method: Callable[..., Any]) -> Method:
    """A method, of a person and arguments, that the page can ask for, by its name and with its arguments, or with all
    of them as a `question`. They are what they say: no "5" for 5; one that isn't known is left alone. One with an
    `asker` is given who waits for it, and ends when they are gone.

    One that isn't asynchronous runs in a thread.

    Raises:
        PromptError: an argument is missing, or is of another form; by the method that is made.
    """

    # Only the arguments: what goes wrong in the method itself is not the asker's mistake.
    @validate_call(config=ConfigDict(strict=True, arbitrary_types_allowed=True))
    @functools.wraps(method)
    def check(*args: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, named

    @functools.wraps(method)
    async def asked(*args: Any, **named: Any) -> Any:
        try:
            args, named = check(*args, **named)
        except ValidationError as error:
            raise PromptError(
                say("The request's {place} is missing, or is of another form.", place=place_of(error))
            ) from None
        return await (method(*args, **named) if iscoroutinefunction(method) else REQUESTS.run(method, *args, **named))

    setattr(asked, _MARK, True)
    return asked


def requests_of(*services: object) -> dict[str, tuple[Method, frozenset[str]]]:
    """The requests of objects, or of classes, by their names for the page, with the names of their arguments."""
    methods = [(name, getattr(service, name)) for service in services for name in dir(service)]
    return {
        name.rstrip("_"): (method, frozenset(signature(method).parameters) - {"self", "person"})
        for name, method in methods
        if hasattr(method, _MARK)
    }


def answer_requests(people: People, *services: object, temporary: TemporaryApi | None = None) -> Handler:
    """`POST .../api/NAME` with the arguments as a JSON object.

    Args:
        temporary: answers what is asked about temporary conversations.
    """
    requests = requests_of(*services)
    in_memory = {} if temporary is None else requests_of(*temporary.services)

    async def handle(request: Request) -> Response:
        person = people.asking(request)
        name = request.path_params["name"]
        if HEADER not in request.headers or name not in requests:
            return problem(say("There is no such request."), "not found", 404)
        if person is None and people.need_login:
            return log_in_first()
        if person is None:
            return problem(say("Load the page again: this browser isn't known here any more."), "unknown person", 401)
        body = await read_body(request, MAX_BODY_BYTES)
        try:
            arguments = _ARGUMENTS.validate_json(body or b"{}")
        except ValidationError:
            raise PromptError(say("The request is damaged: it isn't JSON as expected.")) from None
        chats = temporary.chats if temporary is not None and name in in_memory else None
        is_temporary = chats is not None and chats.is_meant(person.owner, name, arguments)
        method, names = (in_memory if is_temporary else requests)[name]
        if "question" in names:
            arguments = {"question": arguments}
        arguments = {each: value for each, value in arguments.items() if each in names - {"asker"}}
        if "asker" not in names:
            result = await method(person, **arguments)
        else:
            result = await while_waited_for(request, lambda asker: method(person, asker=asker, **arguments))
        if chats is not None and is_temporary:
            chats.mark(person.owner, result)
        return JSONResponse(result)

    return handle


@dataclass(frozen=True)
class TemporaryApi:
    """The temporary conversations, and what answers requests about them."""

    chats: TemporaryChats
    services: tuple[object, ...]

    @request
    async def end_temporary(self, person: Person, conversation: str | None = None) -> Any:
        """Ends a temporary conversation, or forgets the files of one that was still to begin."""
        await self.chats.end(person.owner, conversation)
        return {}


def in_words(handle: Handler) -> Handler:
    """A route that answers its errors in words; no library's message reaches a person."""

    async def handled(request: Request) -> Response:
        try:
            return await handle(request)
        except Exception as error:
            return _answer_to(error)

    return handled


def _answer_to(error: Exception) -> Response:
    if isinstance(error, TooLongError):
        return problem(said_of(error), "too long", 409, offers=error.offers)
    if isinstance(error, NotFoundError):
        return problem(said_of(error), "not found", 404)
    if isinstance(error, QuotaError):
        return problem(said_of(error), "refused", 429)
    if isinstance(error, Qwen35mmError):
        return problem(said_of(error), "refused", 400)
    if isinstance(error, ClientDisconnect):
        return problem(say("The connection was lost."), "refused", 400)
    return problem(report_bug(logger, "a request of the page failed", error), "bug", 500)


async def while_waited_for(request: Request, work: Callable[[Asker], Awaitable[T]]) -> T:
    """What comes of work for a request whose body was read. If the connection is lost meanwhile, the work ends.

    Raises:
        ClientDisconnect: it was.
    """
    asker = Asker()

    async def lost() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, losing = asyncio.ensure_future(work(asker)), asyncio.ensure_future(lost())
    try:
        await asyncio.wait({working, losing}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        losing.cancel()
        # Where it is done, nothing is left that this could end.
        asker.leave()
        working.cancel()


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises PromptError where it is larger."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise PromptError(
                say("This is too large: at most {most} MiB are taken. Attach it as a file.", most=max_bytes // 2**20)
            )
    return bytes(body)


def log_in_first() -> Response:
    """What is answered where nobody is logged in."""
    return problem(say("Log in first: load the page again."), "login", 401)


def problem(message: Said, kind: str, status: int, **more: Any) -> Response:
    """An error as the page reads it; `kind` is for the page, `message` for a person."""
    return JSONResponse({"error": {"message": message, "kind": kind, **more}}, status_code=status)
