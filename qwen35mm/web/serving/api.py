"""The page's requests beside its stream of answers: JSON in, JSON out. Also how any request's errors are answered."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from inspect import iscoroutinefunction, signature
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, validate_call
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from qwen35mm.chat.backend import ChatBackend
from qwen35mm.chat.records import place_of
from qwen35mm.chat.replies import Replies
from qwen35mm.chat.reply import BUG_MESSAGE
from qwen35mm.chat.settings import Settings
from qwen35mm.chat.store import ConversationStore
from qwen35mm.chat.turns import Person, Question, TooLongError, Turns
from qwen35mm.errors import NotFoundError, PromptError, Qwen35mmError
from qwen35mm.web.rendering.view import chat_view, conversation_line
from qwen35mm.web.rendering.wording import describe_memory
from qwen35mm.web.serving.examples import Sample
from qwen35mm.web.serving.models import Models
from qwen35mm.web.serving.people import People
from qwen35mm_preprocess import MediaError

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20
MAX_LISTED = 200
MAX_PREFERENCES_CHARS = 200_000
# A page of another site can't set it without asking first, which is never allowed.
HEADER = "x-qwen35mm"

_ARGUMENTS = TypeAdapter(dict[str, Any])
Offset = Annotated[int, Field(ge=0, lt=2**53)]
Length = Annotated[int, Field(gt=0)]


def _request(method: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """A request; its arguments are what they say: no "5" for 5. One that isn't asynchronous runs in a thread."""
    checked = validate_call(config=ConfigDict(strict=True, arbitrary_types_allowed=True))(method)
    if iscoroutinefunction(method):
        return checked

    @functools.wraps(checked)
    async def in_thread(*args: Any, **named: Any) -> Any:
        return await asyncio.to_thread(checked, *args, **named)

    return in_thread


class Api:
    """What the page can ask for: each `_request` is one, by its name and with its arguments, or with all of them as a
    `question`. An argument that it doesn't know is left alone.

    Args:
        describe_app: what a page needs to know of the program.
        examples: those of an empty page.
        models: where the model can be changed.
    """

    def __init__(
        self,
        backend: ChatBackend,
        store: ConversationStore,
        replies: Replies,
        turns: Turns,
        people: People,
        describe_app: Callable[[], dict[str, Any]],
        examples: Sequence[Sample] = (),
        models: Models | None = None,
    ) -> None:
        self._backend = backend
        self._store = store
        self._replies = replies
        self._turns = turns
        self._people = people
        self._describe_app = describe_app
        self._examples = examples
        self._models = models

    async def handle(self, request: Request) -> Response:
        """`POST .../api/NAME` with the arguments as a JSON object."""
        person = self._people.person(request.cookies)
        name = request.path_params["name"]
        if HEADER not in request.headers or name not in REQUESTS:
            return _problem("There is no such request.", "not found", 404)
        if person is None and self._people.need_login:
            return _problem("Log in first: load the page again.", "login", 401)
        if person is None:
            return _problem("Load the page again: this browser isn't known here any more.", "unknown person", 401)
        arguments = _ARGUMENTS.validate_json(await read_body(request, MAX_BODY_BYTES) or b"{}")
        method, names = REQUESTS[name]
        if names == {"question"}:
            arguments = {"question": arguments}
        try:
            result = await method(self, person, **{each: value for each, value in arguments.items() if each in names})
        except ValidationError as error:
            raise PromptError(f"The request's {place_of(error)} is missing, or is of another form.") from None
        return JSONResponse(result)

    # Conversations

    @_request
    async def start(self, person: Person) -> Any:
        """What a page needs when it begins."""
        return {
            "app": self._describe_app(),
            "preferences": await asyncio.to_thread(self._store.preferences, person.owner),
            "presets": await asyncio.to_thread(self._store.presets, person.owner),
            **await self.list(person),
            "running": [reply.node.id for reply in self._replies.of(person.owner)],
        }

    @_request
    def list(self, person: Person, query: str | None = None, offset: Offset = 0) -> Any:
        """The conversations of the sidebar; `query` searches them."""
        found = self._store.find(person.owner, query=query or "", limit=MAX_LISTED + 1, offset=offset)
        lines = [conversation_line(each) for each in found[:MAX_LISTED]]
        return {"conversations": lines, "more": len(found) > MAX_LISTED}

    @_request
    async def open(self, person: Person, conversation: str) -> Any:
        """A conversation."""
        running = {reply.node.id for reply in self._replies.of(person.owner, conversation)}

        def read() -> dict[str, Any]:
            return chat_view(*self._store.read(person.owner, conversation), running, self._backend.context_length)

        return await asyncio.to_thread(read)

    @_request
    def rename(self, person: Person, conversation: str, title: str) -> Any:
        """Renames a conversation."""
        self._store.change(person.owner, conversation, title=title.strip()[:200])
        return {}

    @_request
    async def delete(self, person: Person, conversation: str) -> Any:
        """Deletes a conversation; files that no other one holds go soon after."""
        await self._turns.stop(person, conversation)
        await asyncio.to_thread(self._store.delete, person.owner, conversation)
        return {}

    @_request
    async def branch(self, person: Person, conversation: str, node: str) -> Any:
        """Shows the branch that a message is on, down to its newest message."""

        def show() -> None:
            _, tree = self._store.read(person.owner, conversation)
            self._store.change(person.owner, conversation, head=tree.newest_leaf(node))

        await asyncio.to_thread(show)
        return await self._shown(person, conversation)

    @_request
    async def delete_message(self, person: Person, conversation: str, node: str) -> Any:
        """Deletes a message and what follows it."""
        _, tree = await asyncio.to_thread(self._store.read, person.owner, conversation)
        await self._turns.stop(person, conversation, tree.subtree(node))
        await asyncio.to_thread(self._store.delete_node, person.owner, node)
        return await self._shown(person, conversation)

    @_request
    async def shorten(self, person: Person, conversation: str, first: str | None = None) -> Any:
        """Leaves what is before `first` out of prompts from now on; None takes everything again."""
        await asyncio.to_thread(self._store.change, person.owner, conversation, first=first)
        return await self._shown(person, conversation)

    # Messages and their replies

    @_request
    async def measure(self, person: Person, question: Question) -> Any:
        """What a message would cost."""
        return await self._turns.measure(person, question)

    @_request
    async def send(self, person: Person, question: Question) -> Any:
        """Sends a message."""
        return await self._shown(person, *await self._turns.send(person, question))

    @_request
    def example(self, person: Person, number: int) -> Any:
        """An example's file, ready to be sent."""
        if number not in range(len(self._examples)):
            raise NotFoundError("There is no such example.")
        sample, media = self._examples[number], self._store.media
        with sample.path.open("rb") as file:
            digest, num_bytes = media.add(file, max_bytes=sample.path.stat().st_size)
        media.hold(person.owner, digest)
        name = sample.path.name
        return {"attachment": {"digest": digest, "kind": sample.kind, "name": name, "num_bytes": num_bytes}}

    @_request
    async def again(self, person: Person, conversation: str, node: str, settings: dict[str, Any] | None = None) -> Any:
        """Another answer to a question."""
        await self._take_settings(person, conversation, settings)
        return await self._shown(person, conversation, await self._turns.answer_again(person, conversation, node))

    @_request
    async def continue_(
        self, person: Person, conversation: str, node: str, settings: dict[str, Any] | None = None
    ) -> Any:
        """Goes on with an answer that ended early."""
        await self._take_settings(person, conversation, settings)
        return await self._shown(person, conversation, await self._turns.go_on(person, conversation, node))

    @_request
    async def summarise(self, person: Person, conversation: str) -> Any:
        """A new conversation that begins with a summary."""
        return await self._shown(person, *await self._turns.summarise(person, conversation))

    @_request
    async def stop(self, person: Person, node: str) -> Any:
        """Ends a reply in progress; answers when its end is stored."""
        reply = self._replies.find(person.owner, node)
        if reply is not None:
            await reply.stop()
        return {}

    # Settings

    @_request
    def settings(self, person: Person, settings: dict[str, Any] | None = None, conversation: str | None = None) -> Any:
        """Checks settings, and keeps them with a conversation where one is named."""
        checked = Settings.read(settings or {})
        if conversation is not None:
            self._store.change(person.owner, conversation, settings=checked.values)
        return {"settings": dict(checked.values)}

    @_request
    def preferences(self, person: Person, preferences: dict[str, Any]) -> Any:
        """Keeps what belongs to no conversation: language, colours, settings of new chats."""
        if len(json.dumps(preferences)) > MAX_PREFERENCES_CHARS:
            raise PromptError("Preferences must be an object, and not a large one.")
        self._store.set_preferences(person.owner, preferences)
        return {}

    @_request
    def save_preset(self, person: Person, name: str, settings: dict[str, Any] | None = None) -> Any:
        """Keeps settings under a name."""
        name = name.strip()[:100]
        if not name:
            raise PromptError("A preset needs a name.")
        self._store.save_preset(person.owner, name, Settings.read(settings or {}).values)
        return {"presets": self._store.presets(person.owner)}

    @_request
    def delete_preset(self, person: Person, name: str) -> Any:
        """Forgets a preset."""
        self._store.delete_preset(person.owner, name)
        return {"presets": self._store.presets(person.owner)}

    # The model

    @_request
    async def models(self, person: Person) -> Any:
        """The models of this machine."""
        return await self._changeable.list()

    @_request
    async def change_model(
        self,
        person: Person,
        source: str | None = None,
        context_length: Length | None = None,
        is_new: bool = False,
    ) -> Any:
        """Begins to load another model, or the same one with another context length."""
        self._changeable.change(source, context_length, is_new=is_new)
        return self._changeable.state()

    @_request
    async def change_state(self, person: Person) -> Any:
        """How far a change of model is."""
        return self._changeable.state()

    @_request
    async def cancel_change(self, person: Person) -> Any:
        """Ends a download."""
        self._changeable.cancel()
        return {}

    @_request
    def memory(self, person: Person) -> Any:
        """What the cache holds."""
        return describe_memory(self._backend.memory())

    @property
    def _changeable(self) -> Models:
        if self._models is None:
            raise NotFoundError("The model can't be changed here.")
        return self._models

    async def _take_settings(self, person: Person, conversation: str, settings: dict[str, Any] | None) -> None:
        if settings is not None:
            await self.settings(person, settings, conversation)

    async def _shown(self, person: Person, conversation: str, reply: str | None = None) -> Any:
        return {"chat": await self.open(person, conversation), "reply": reply}


# The methods by their names in a page's request, with the names of their arguments.
REQUESTS: dict[str, tuple[Callable[..., Awaitable[Any]], frozenset[str]]] = {
    name.rstrip("_"): (method, frozenset(signature(method).parameters) - {"self", "person"})
    for name, method in vars(Api).items()
    if hasattr(method, "raw_function")
}


def in_words(handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """A route that answers its errors in words; no library's message reaches a person."""

    async def handled(request: Request) -> Response:
        try:
            return await handle(request)
        except Exception as error:
            return _answer_to(error)

    return handled


def _answer_to(error: Exception) -> Response:
    if isinstance(error, TooLongError):
        return _problem(str(error), "too long", 409, offers=error.offers)
    if isinstance(error, NotFoundError):
        return _problem(str(error), "not found", 404)
    if isinstance(error, (Qwen35mmError, MediaError)):
        return _problem(str(error), "refused", 400)
    if isinstance(error, (ValueError, RecursionError)):
        return _problem("The request is damaged: it isn't JSON as expected.", "refused", 400)
    if isinstance(error, ClientDisconnect):
        return _problem("The connection was lost.", "refused", 400)
    logger.error("a request of the page failed", exc_info=error)
    return _problem(BUG_MESSAGE, "bug", 500)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises PromptError where it is larger."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise PromptError(f"This is too large: at most {max_bytes // 2**20} MiB are taken. Attach it as a file.")
    return bytes(body)


def _problem(message: str, kind: str, status: int, **more: Any) -> Response:
    return JSONResponse({"error": {"message": message, "kind": kind, **more}}, status_code=status)
