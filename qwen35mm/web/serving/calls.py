"""Answers programs that don't use OpenAI's protocol: Gradio's clients (guest.py) and MCP."""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message as AsgiMessage
from starlette.types import Receive

from qwen35mm.chat.quotas import Usage
from qwen35mm.chat.replies.prompting import with_names
from qwen35mm.chat.replies.replies import Replies
from qwen35mm.chat.replies.turns import MAX_ATTACHMENTS, MAX_TEXT_CHARS, Person
from qwen35mm.chat.settings import Settings
from qwen35mm.chat.store.records import Attachment, place_of
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.contract import Backend, GenerationRequest, Image, Message, Text, TextDelta, Video
from qwen35mm.errors import NotFoundError, PromptError, QueueFullError
from qwen35mm.http.bodies import too_large
from qwen35mm.pools import MEDIA, REQUESTS, UPLOADS
from qwen35mm.web.serving.people import People
from qwen35mm_preprocess import MediaError
from qwen35mm_preprocess.say import said_of, say

# Time between two updates of a growing answer.
_UPDATE_S = 1 / 15
# Limit of a form without its files.
_FORM_BYTES = 1 << 16


class Said(BaseModel):
    """A message of a call's history."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["user", "assistant"]
    content: str


_HISTORY = TypeAdapter(list[Said])
_FILES = TypeAdapter(list[dict[str, Any]])
_SETTINGS = TypeAdapter(dict[str, Any])


@dataclass(frozen=True)
class _Asked:
    """A checked call."""

    message: str
    files: list[tuple[Path, str]]
    messages: list[Message]
    settings: Settings


class Calls:
    """Answers calls. Nothing is stored; callers send the history themselves.

    Args:
        replies: the page's replies, notified of each call so that idle work stops.
    """

    def __init__(
        self, backend: Backend, store: ConversationStore, replies: Replies, people: People, usage: Usage
    ) -> None:
        self._backend = backend
        self._media = store.media
        self._replies = replies
        self._people = people
        self._usage = usage
        self._running: Counter[str] = Counter()
        # Uploads that no call has used yet, by owner and digest.
        self._coming: Counter[tuple[str, str]] = Counter()

    @property
    def max_file_bytes(self) -> int:
        """Limit of one file of a call."""
        return self._backend.media.limits.max_bytes(None)

    async def upload(self, request: Request) -> Response:
        """`POST /gradio_api/upload`, instead of Gradio's: stores files as the page does, under the same limits.

        Returns names that look like Gradio's paths, for one call of the same person; no file is at these paths.
        """
        person = self._people.calling(request)
        most = self.max_file_bytes
        paths = []
        async with self._usage.receiving(person) as take:
            form = Request(request.scope, _limited(request.receive, most + _FORM_BYTES, take))
            async with form.form(max_files=MAX_ATTACHMENTS, max_fields=8) as fields:
                for file in fields.getlist("files"):
                    if not isinstance(file, UploadFile):
                        continue
                    digest, _ = await UPLOADS.run(self._media.add, file.file, max_bytes=most)
                    await REQUESTS.run(self._media.hold, person.owner, digest)
                    self._coming[person.owner, digest] += 1
                    paths.append(f"{digest}/{Path(file.filename or 'file').name}")
        return JSONResponse(paths)

    async def answer(
        self, person: Person, message: Any, files: Any, system_prompt: Any, history: Any, settings: Any
    ) -> AsyncGenerator[str, None]:
        """Yields the text so far as the answer grows.

        Args:
            files: objects with a `path` from `upload`.
            history: objects with a role (user or assistant) and a content.
            settings: the page's settings.

        Raises:
            Qwen35mmError: the call can't be answered.
        """
        checked = _checked(message, files, system_prompt, history, settings)
        async with self._place(person), self._files(person, checked.files) as found:
            parts = [await MEDIA.run(self._read, path, name, checked.settings) for path, name in found]
            question = Message("user", (*parts, Text(checked.message)) if checked.message else tuple(parts))
            model, settings = self._backend.info, checked.settings
            # A stranger's call leaves nothing in the cache that anybody could hit.
            alone = person.tenant is None
            asked = GenerationRequest(
                [*checked.messages, question],
                settings.params(model),
                enable_thinking=settings.enable_thinking(model),
                template_options=settings.template_options(model),
                adapter=settings.adapter(model),
                model=model.name,
                retain="conversation" if alone else "nothing",
                tenant=None if alone else f"call {secrets.token_hex(16)}",
            )
            text, shown, shown_s = "", None, -math.inf
            async with aclosing(self._backend.stream(asked)) as events:
                async for event in events:
                    if not isinstance(event, TextDelta) or event.channel != "answer":
                        continue
                    text += event.text
                    if time.monotonic() - shown_s >= _UPDATE_S:
                        yield text
                        shown, shown_s = text, time.monotonic()
            if text != shown:
                yield text

    def _read(self, path: Path, name: str, settings: Settings) -> Image | Video:
        processor = self._backend.media
        try:
            plan = replace(processor, budget=settings.budget(processor.budget)).plan(path)
        except MediaError as error:
            file = Attachment(path.name, "image", name, 0)
            raise type(error)(with_names(said_of(error), [file])) from None
        return Image(path, plan) if plan.kind == "image" else Video(path, plan)

    @asynccontextmanager
    async def _place(self, person: Person) -> AsyncGenerator[None, None]:
        """Reserves a place for one more answer of an account."""
        account = person.account or person.owner
        most = person.max_replies
        if self._running[account] >= most == 1:
            raise QueueFullError(say("You already have an answer in progress. Wait for it, or stop it."))
        if self._running[account] >= most:
            raise QueueFullError(say("You already have {n} answers in progress. Wait for one, or stop one.", n=most))
        self._running[account] += 1
        try:
            with self._replies.coming():
                yield
        finally:
            self._running[account] -= 1

    @asynccontextmanager
    async def _files(
        self, person: Person, files: Sequence[tuple[Path, str]]
    ) -> AsyncGenerator[list[tuple[Path, str]], None]:
        """The paths and names of a call's files; releases the files afterwards."""
        digests = [path.parent.name for path, _ in files]
        for digest, (_, name) in zip(digests, files, strict=True):
            if not await REQUESTS.run(self._media.is_of, person.owner, digest):
                raise NotFoundError(say("The file '{name}' no longer exists. Attach it again.", name=name))
        try:
            yield [(self._media.path(digest), name) for digest, (_, name) in zip(digests, files, strict=True)]
        finally:
            for digest in digests:
                self._coming[person.owner, digest] -= 1
                if self._coming[person.owner, digest] <= 0:
                    del self._coming[person.owner, digest]
                    await REQUESTS.run(self._media.release, person.owner, digest)


def _checked(message: Any, files: Any, system_prompt: Any, history: Any, settings: Any) -> _Asked:
    """Checks a call's arguments. Raises PromptError, ConfigError."""
    try:
        said = _HISTORY.validate_python(history or [])
        sent = _FILES.validate_python(files or [])
        given = _SETTINGS.validate_python(settings or {})
    except ValidationError as error:
        place = place_of(error)
        raise PromptError(say("The request's {place} is missing, or is of another form.", place=place)) from None
    if not isinstance(message, str) or not isinstance(system_prompt or "", str):
        raise PromptError(say("The request's {place} is missing, or is of another form.", place="message"))
    if not message.strip() and not sent:
        raise PromptError(say("Type a question, or add a picture or a video."))
    if sum(map(len, (message, *(each.content for each in said)))) > MAX_TEXT_CHARS:
        raise PromptError(
            say("A message's text has at most {most} characters; attach the rest as files.", most=MAX_TEXT_CHARS)
        )
    if len(sent) > MAX_ATTACHMENTS:
        raise PromptError(say("A message has at most {most} files; got {n}.", most=MAX_ATTACHMENTS, n=len(sent)))
    values = Settings.read({**given, **({"system": system_prompt} if system_prompt else {})})
    messages = [Message("system", (Text(values.system),))] if values.system else []
    messages += [Message(each.role, (Text(each.content),)) for each in said]
    paths = [Path(str(file.get("path", ""))) for file in sent]
    return _Asked(message, [(path, path.name) for path in paths], messages, values)


def _limited(receive: Receive, most: int, take: Any) -> Receive:
    """Raises if a body is larger than `most` bytes; calls `take` with the bytes of each chunk."""
    num_bytes = 0

    async def limited() -> AsgiMessage:
        nonlocal num_bytes
        message = await receive()
        size = len(message.get("body", b""))
        num_bytes += size
        if num_bytes > most:
            raise too_large(most)
        take(size)
        return message

    return limited
