"""The page's requests beside its stream of answers: JSON in, JSON out, and files."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from qwen35mm.chat.drafts import read_attachments
from qwen35mm.chat.replies import BUG_MESSAGE
from qwen35mm.chat.settings import Settings
from qwen35mm.errors import NotFoundError, PromptError, Qwen35mmError
from qwen35mm.web.chats import Chats, TooLongError
from qwen35mm.web.rendering.view import conversation_line
from qwen35mm.web.rendering.wording import describe_memory
from qwen35mm.web.serving.examples import Sample
from qwen35mm.web.serving.models import Models
from qwen35mm.web.serving.people import People, Person
from qwen35mm_preprocess import MediaError

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20
# A page of another site can't set it without asking first, which is never allowed.
HEADER = "x-qwen35mm"
_HALF_A_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")
_LARGEST = 2**53

Arguments = Mapping[str, Any]
Method = Callable[[Person, Arguments], Awaitable[Any]]


class Api:
    """What the page can ask for, by name."""

    def __init__(
        self,
        chats: Chats,
        people: People,
        describe_app: Callable[[], dict[str, Any]],
        examples: Sequence[Sample] = (),
        models: Models | None = None,
    ) -> None:
        self._models = models
        self._chats = chats
        self._examples = examples
        self._people = people
        self._describe_app = describe_app
        self._methods: dict[str, Method] = {
            name.removeprefix("do_"): getattr(self, name) for name in dir(self) if name.startswith("do_")
        }

    async def handle(self, request: Request) -> Response:
        """`POST .../api/NAME` with the arguments as a JSON object."""
        person = self._people.person(request.cookies)
        method = self._methods.get(request.path_params["name"])
        if HEADER not in request.headers or method is None:
            return _problem("There is no such request.", "not found", 404)
        if person is None and self._people.need_login:
            return _problem("Log in first: load the page again.", "login", 401)
        if person is None:
            return _problem("Load the page again: this browser isn't known here any more.", "unknown person", 401)
        return await answer(lambda: self._call(method, person, request))

    async def _call(self, method: Method, person: Person, request: Request) -> Response:
        body = await read_body(request, MAX_BODY_BYTES)
        arguments = json.loads(body.decode() or "{}")
        if _HALF_A_CHARACTER.search(body):
            # A half of a pair by itself, which no store and no model takes: a UnicodeEncodeError, and so a ValueError.
            json.dumps(arguments, ensure_ascii=False).encode()
        if not isinstance(arguments, dict):
            raise PromptError("The arguments of a request must be an object.")
        return JSONResponse(await method(person, arguments))

    async def do_start(self, person: Person, arguments: Arguments) -> Any:
        """What a page needs when it begins."""
        store = self._chats.store
        preferences, presets = await asyncio.gather(
            asyncio.to_thread(store.preferences, person.owner), asyncio.to_thread(store.presets, person.owner)
        )
        return {
            "app": self._describe_app(),
            "preferences": preferences,
            "presets": presets,
            "running": [reply.node.id for reply in self._chats.replies.of(person.owner)],
            **await self.do_list(person, arguments),
        }

    async def do_list(self, person: Person, arguments: Arguments) -> Any:
        """The conversations of the sidebar; `query` searches them."""
        query, offset = _optional_text(arguments, "query") or "", arguments.get("offset") or 0
        if not isinstance(offset, int) or not 0 <= offset < _LARGEST:
            raise PromptError("The request's offset must be a number of conversations.")
        found = await asyncio.to_thread(self._chats.store.list, person.owner, query=query, limit=201, offset=offset)
        return {"conversations": [conversation_line(each) for each in found[:200]], "more": len(found) > 200}

    async def do_open(self, person: Person, arguments: Arguments) -> Any:
        """A conversation."""
        return await self._chats.open(person, _text(arguments, "conversation"))

    async def do_send(self, person: Person, arguments: Arguments) -> Any:
        """Sends a message."""
        conversation_id, reply_id = await self._chats.send(person, **_message(arguments))
        return await self._shown(person, conversation_id, reply_id)

    async def do_example(self, person: Person, arguments: Arguments) -> Any:
        """An example's file, ready to be sent."""
        number = arguments.get("number")
        if isinstance(number, bool) or not isinstance(number, int) or number not in range(len(self._examples)):
            raise NotFoundError("There is no such example.")
        sample, store = self._examples[number], self._chats.store

        def take() -> tuple[str, int]:
            with sample.path.open("rb") as file:
                digest, num_bytes = store.media.add(file, max_bytes=sample.path.stat().st_size)
            store.hold(person.owner, digest)
            return digest, num_bytes

        digest, num_bytes = await asyncio.to_thread(take)
        name = sample.path.name
        return {"attachment": {"digest": digest, "kind": sample.kind, "name": name, "num_bytes": num_bytes}}

    async def do_measure(self, person: Person, arguments: Arguments) -> Any:
        """What a message would cost."""
        return await self._chats.measure(person, **_message(arguments))

    async def do_again(self, person: Person, arguments: Arguments) -> Any:
        """Another answer to a question."""
        conversation_id = _text(arguments, "conversation")
        await self._take_settings(person, conversation_id, arguments)
        reply_id = await self._chats.answer_again(person, conversation_id, _text(arguments, "node"))
        return await self._shown(person, conversation_id, reply_id)

    async def do_continue(self, person: Person, arguments: Arguments) -> Any:
        """Goes on with an answer that ended early."""
        conversation_id = _text(arguments, "conversation")
        await self._take_settings(person, conversation_id, arguments)
        reply_id = await self._chats.go_on(person, conversation_id, _text(arguments, "node"))
        return await self._shown(person, conversation_id, reply_id)

    async def do_stop(self, person: Person, arguments: Arguments) -> Any:
        """Ends a reply in progress."""
        await self._chats.stop(person, _text(arguments, "node"))
        return {}

    async def do_branch(self, person: Person, arguments: Arguments) -> Any:
        """Shows another branch."""
        conversation_id = _text(arguments, "conversation")
        await self._chats.show_branch(person, conversation_id, _text(arguments, "node"))
        return await self._shown(person, conversation_id)

    async def do_delete_message(self, person: Person, arguments: Arguments) -> Any:
        """Deletes a message and what follows it."""
        conversation_id = _text(arguments, "conversation")
        await self._chats.delete_message(person, conversation_id, _text(arguments, "node"))
        return await self._shown(person, conversation_id)

    async def do_shorten(self, person: Person, arguments: Arguments) -> Any:
        """Leaves old messages out of prompts, or takes them in again."""
        conversation_id = _text(arguments, "conversation")
        await self._chats.shorten(person, conversation_id, _optional_text(arguments, "first"))
        return await self._shown(person, conversation_id)

    async def do_summarise(self, person: Person, arguments: Arguments) -> Any:
        """A new conversation that begins with a summary."""
        return await self._shown(person, *await self._chats.summarise(person, _text(arguments, "conversation")))

    async def do_rename(self, person: Person, arguments: Arguments) -> Any:
        """Renames a conversation."""
        title = _text(arguments, "title").strip()[:200]
        await asyncio.to_thread(self._chats.store.rename, person.owner, _text(arguments, "conversation"), title)
        return {}

    async def do_delete(self, person: Person, arguments: Arguments) -> Any:
        """Deletes a conversation."""
        await self._chats.delete(person, _text(arguments, "conversation"))
        return {}

    async def do_settings(self, person: Person, arguments: Arguments) -> Any:
        """Checks settings, and keeps them: with a conversation where one is named, else for new ones."""
        settings = Settings.read(arguments.get("settings") or {})
        store, conversation_id = self._chats.store, _optional_text(arguments, "conversation")
        if conversation_id:
            await asyncio.to_thread(store.set_settings, person.owner, conversation_id, settings.values)
        return {"settings": dict(settings.values)}

    async def do_preferences(self, person: Person, arguments: Arguments) -> Any:
        """Keeps what belongs to no conversation: language, colours, settings of new chats."""
        preferences = arguments.get("preferences")
        if not isinstance(preferences, dict) or len(json.dumps(preferences)) > 200_000:
            raise PromptError("Preferences must be an object, and not a large one.")
        await asyncio.to_thread(self._chats.store.set_preferences, person.owner, preferences)
        return {}

    async def do_save_preset(self, person: Person, arguments: Arguments) -> Any:
        """Keeps settings under a name."""
        name = _text(arguments, "name").strip()[:100]
        if not name:
            raise PromptError("A preset needs a name.")
        settings = Settings.read(arguments.get("settings") or {})
        await asyncio.to_thread(self._chats.store.save_preset, person.owner, name, dict(settings.values))
        return {"presets": await asyncio.to_thread(self._chats.store.presets, person.owner)}

    async def do_delete_preset(self, person: Person, arguments: Arguments) -> Any:
        """Forgets a preset."""
        await asyncio.to_thread(self._chats.store.delete_preset, person.owner, _text(arguments, "name"))
        return {"presets": await asyncio.to_thread(self._chats.store.presets, person.owner)}

    async def do_models(self, person: Person, arguments: Arguments) -> Any:
        """The models of this machine."""
        return await self._changeable.list()

    async def do_change_model(self, person: Person, arguments: Arguments) -> Any:
        """Begins to load another model, or the same one with another context length."""
        source, length = arguments.get("source"), arguments.get("context_length")
        is_length = length is None or (isinstance(length, int) and not isinstance(length, bool) and length > 0)
        if not (source is None or isinstance(source, str)) or not is_length:
            raise PromptError("A model is named by its folder or its id, a context by its number of tokens.")
        self._changeable.change(source, length, is_new=bool(arguments.get("is_new")))
        return self._changeable.state()

    async def do_change_state(self, person: Person, arguments: Arguments) -> Any:
        """How far a change of model is."""
        return self._changeable.state()

    async def do_cancel_change(self, person: Person, arguments: Arguments) -> Any:
        """Ends a download."""
        self._changeable.cancel()
        return {}

    @property
    def _changeable(self) -> Models:
        if self._models is None:
            raise NotFoundError("The model can't be changed here.")
        return self._models

    async def do_memory(self, person: Person, arguments: Arguments) -> Any:
        """What the cache holds."""
        return describe_memory(await asyncio.to_thread(self._chats.backend.memory))

    async def _take_settings(self, person: Person, conversation_id: str, arguments: Arguments) -> None:
        if arguments.get("settings") is not None:
            await self.do_settings(person, arguments)

    async def _shown(self, person: Person, conversation_id: str, reply_id: str | None = None) -> Any:
        return {"chat": await self._chats.open(person, conversation_id), "reply": reply_id}


async def answer(work: Callable[[], Awaitable[Response]]) -> Response:
    """What the work answers, or its error in words; no library's message reaches a person."""
    try:
        return await work()
    except TooLongError as error:
        return _problem(str(error), "too long", 409, offers=error.offers)
    except NotFoundError as error:
        return _problem(str(error), "not found", 404)
    except (Qwen35mmError, MediaError) as error:
        return _problem(str(error), "refused", 400)
    except (ValueError, RecursionError):
        return _problem("The request is damaged: it isn't JSON as expected.", "refused", 400)
    except ClientDisconnect:
        return _problem("The connection was lost.", "refused", 400)
    except Exception:
        logger.exception("a request of the page failed")
        return _problem(BUG_MESSAGE, "bug", 500)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises PromptError where it is larger."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise PromptError(f"This is too large: at most {max_bytes // 2**20} MiB are taken. Attach it as a file.")
    return bytes(body)


def _message(arguments: Arguments) -> dict[str, Any]:
    return {
        "conversation_id": _optional_text(arguments, "conversation"),
        "parent": _optional_text(arguments, "parent"),
        "text": arguments.get("text") or "",
        "attachments": read_attachments(arguments.get("attachments") or []),
        "settings": arguments.get("settings"),
    }


def _optional_text(arguments: Arguments, name: str) -> str | None:
    return None if arguments.get(name) is None else _text(arguments, name)


def _text(arguments: Arguments, name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise PromptError(f"The request lacks its {name}.")
    return value


def _problem(message: str, kind: str, status: int, **more: Any) -> Response:
    return JSONResponse({"error": {"message": message, "kind": kind, **more}}, status_code=status)
