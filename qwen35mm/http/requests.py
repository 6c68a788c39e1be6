"""The page's requests: JSON in, JSON out, errors in words."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction, signature
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, validate_call
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from qwen35mm.chat.replies.prompting import TooLongError
from qwen35mm.chat.replies.turns import BusyError
from qwen35mm.chat.store.records import place_of
from qwen35mm.errors import NotFoundError, PromptError, QuotaError, Qwen35mmError, report_bug
from qwen35mm.http.bodies import read_bytes
from qwen35mm.http.errors import HttpError
from qwen35mm.http.sessions import HEADER
from qwen35mm.http.streams import while_connected
from qwen35mm.pools import REQUESTS, Asker
from qwen35mm_preprocess.say import Said, said_of, say

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20

_MARK = "is_request"
_ARGUMENTS = TypeAdapter(dict[str, Any])
T = TypeVar("T")
Method = Callable[..., Awaitable[Any]]
Handler = Callable[[Request], Awaitable[Response]]


def request(method: Callable[..., Any]) -> Method:
    """Makes a method callable by the page, with its arguments or with all of them as one `question`.

    Arguments are strict: no "5" for 5; unknown ones are ignored. A `person` argument gets who asks. An `asker` argument
    gets who waits; the work ends when they leave. A method that isn't asynchronous runs in a thread.

    Raises:
        PromptError: when called with a missing argument or one of another form.
    """

    # Checks only the arguments: errors inside the method aren't the caller's mistake.
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
    """The requests of objects or classes, by their names for the page, with the names of their arguments."""
    methods = [(name, getattr(service, name)) for service in services for name in dir(service)]
    return {
        name.rstrip("_"): (method, frozenset(signature(method).parameters) - {"self"})
        for name, method in methods
        if hasattr(method, _MARK)
    }


class Requests:
    """`POST .../api/NAME` with the arguments as a JSON object.

    Args:
        who: returns who asks. Raises HttpError if they may not.
        services: objects with the requests.
        max_bytes: of a body.
    """

    def __init__(self, who: Callable[[Request], object], *services: object, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._who = who
        self._requests = requests_of(*services)
        self._max_bytes = max_bytes

    async def __call__(self, request: Request) -> Response:
        name = request.path_params["name"]
        if HEADER not in request.headers or name not in self._requests:
            raise NotFoundError(say("There is no such request."))
        person = self._who(request)
        arguments = await read_json(request, _ARGUMENTS, self._max_bytes)
        result = await self.answer(request, person, name, arguments)
        return result if isinstance(result, Response) else JSONResponse(result)

    async def answer(self, request: Request, person: Any, name: str, arguments: dict[str, Any]) -> Any:
        """The result of a request's method."""
        return await call(self._requests[name], request, person, arguments)


async def call(
    method: tuple[Method, frozenset[str]], request: Request, person: object, arguments: dict[str, Any]
) -> Any:
    """Calls a method of `requests_of`. With an `asker`, only as long as the client is connected."""
    function, names = method
    if "question" in names:
        arguments = {"question": arguments}
    arguments = {each: value for each, value in arguments.items() if each in names - {"asker", "person"}}
    who = (person,) if "person" in names else ()
    if "asker" not in names:
        return await function(*who, **arguments)
    return await while_waited_for(request, lambda asker: function(*who, asker=asker, **arguments))


async def read_json(request: Request, form: TypeAdapter[T], max_bytes: int = MAX_BODY_BYTES) -> T:
    """The parsed body of a request. Raises HttpError, PromptError: it is too large, or of another form."""
    body = await read_bytes(request, max_bytes)
    try:
        return form.validate_json(body or b"{}")
    except ValidationError:
        raise PromptError(say("The request is damaged: it isn't JSON as expected.")) from None


def number_of(request: Request) -> int:
    """The number in a request's path. Raises NotFoundError if it isn't one, or is too long."""
    text = request.path_params["number"]
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise NotFoundError(say("There is no such request."))
    return int(text)


def in_words(handle: Handler) -> Handler:
    """A route that answers its errors in words; no library's message reaches a person."""

    async def handled(request: Request) -> Response:
        try:
            return await handle(request)
        except Exception as error:
            return answer_to(error)

    return handled


def answer_to(error: Exception) -> Response:
    """The response to an error."""
    if isinstance(error, HttpError):
        return problem(error.words, error.code, error.status, headers=error.headers)
    if isinstance(error, TooLongError):
        return problem(said_of(error), "too long", 409, offers=error.offers)
    if isinstance(error, BusyError):
        return problem(said_of(error), "busy", 409, answers=error.answers)
    if isinstance(error, NotFoundError):
        return problem(said_of(error), "not found", 404)
    if isinstance(error, QuotaError):
        return problem(said_of(error), "refused", 429)
    if isinstance(error, Qwen35mmError):
        return problem(said_of(error), "refused", 400)
    if isinstance(error, ClientDisconnect):
        return problem(say("The connection was lost."), "refused", 400)
    if isinstance(error, HTTPException | MultiPartException):
        return problem(say("The request is damaged: it isn't of the form that is expected."), "refused", 400)
    return problem(report_bug(logger, "a request of the page failed", error), "bug", 500)


async def while_waited_for(request: Request, work: Callable[[Asker], Awaitable[T]]) -> T:
    """Runs the work for a request whose body was read. Ends it if the connection is lost.

    Raises:
        ClientDisconnect: the connection was lost.
        HttpError: the server ends.
    """
    asker = Asker()
    try:
        return await while_connected(request, work(asker))
    finally:
        # Once the work is done, this ends nothing.
        asker.leave()


def problem(message: Said, kind: str, status: int, *, headers: dict[str, str] | None = None, **more: Any) -> Response:
    """An error response for the page; `kind` is for its code, `message` for a person."""
    kept = {"cache-control": "no-store", **(headers or {})}
    return JSONResponse({"error": {"message": message, "kind": kind, **more}}, status, kept)
