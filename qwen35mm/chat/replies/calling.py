"""The calls before a reply: looks the tools up, runs what a person allowed, and stores the results."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from qwen35mm.chat.documents.documents import MAX_TEXT_CHARS, detect_document, read_pdf_text, read_text
from qwen35mm.chat.replies.prompting import with_names
from qwen35mm.chat.replies.reply import Reply, Work
from qwen35mm.chat.replies.toolbox import Toolbox
from qwen35mm.chat.store.media import MediaStore
from qwen35mm.chat.store.records import Attachment, Call, Node, ReplyStatus, file_name
from qwen35mm.contract import Backend, Message
from qwen35mm.decoding import asked_by
from qwen35mm.decoding.processor import check_picture_by, kind_by
from qwen35mm.errors import DocumentError, MediaError, Qwen35mmError
from qwen35mm.pools import DOCUMENTS, REQUESTS, THUMBNAILS, UPLOADS, Asker
from qwen35mm.tools.answers import MAX_FILE_BYTES, MAX_RESULT_CHARS, AnsweredFile, ToolAnswer, failed, shortened
from qwen35mm.tools.servers import Tool
from qwen35mm_preprocess.say import english, said_of, say

# What a person answers: run it this time; always run this tool; don't.
Answer = Literal["once", "always", "no"]
_REFUSED = "The person didn't allow this call."
_STOPPED = "The person stopped this call."
_BROKEN = "Error: the program failed, and this call has no result."
_MAX_PDF_PAGES = 100


@dataclass(frozen=True)
class Allowed:
    """A call with its result's message, and what a person said of it."""

    call: Call
    result: Node
    answer: Answer


@dataclass(frozen=True)
class Calling:
    """The steps of one reply.

    Args:
        servers: that the chat uses.
        messages_of: the prompt of a path.
        plan: fixes how a picture or a video goes into the prompt. Raises MediaError.
        line: see `Person.line`.
    """

    backend: Backend
    media: MediaStore
    toolbox: Toolbox
    servers: tuple[str, ...]
    messages_of: Callable[[Sequence[Node]], list[Message]]
    plan: Callable[[Attachment], Attachment]
    line: str | None
    calls: tuple[Allowed, ...] = ()

    async def run(self, work: Work, reply: Reply) -> None:
        """See `Steps`. Raises ToolError: the servers can't be asked."""
        left = list(self.calls)
        try:
            if self.servers:
                reply.do(say("Asking the tool servers"))
            tools = {tool.shown: tool for tool in await self.toolbox.tools(work.owner, self.servers)}
            work.digests = {name: tool.digest for name, tool in tools.items()}
            while left:
                result = await self._result(work.owner, left[0], tools, reply)
                reply.keep(result)
                work.path = (*work.path, result)
                del left[0]
        except BaseException as error:
            is_stopped = isinstance(error, asyncio.CancelledError)
            words = f"Error: {english(said_of(error))}" if isinstance(error, Qwen35mmError) else _BROKEN
            _keep_ends(left, reply, _STOPPED if is_stopped else words, "stopped" if is_stopped else "failed")
            raise
        messages = await REQUESTS.run(self.messages_of, work.path)
        definitions = [tool.definition for tool in tools.values()]
        work.request = replace(work.request, messages=messages, tools=definitions)

    def skip(self, reply: Reply) -> None:
        """See `Steps`."""
        _keep_ends(self.calls, reply, _STOPPED, "stopped")

    async def _result(self, owner: str, allowed: Allowed, tools: dict[str, Tool], reply: Reply) -> Node:
        call, tool = allowed.call, tools.get(allowed.call.name)
        if allowed.answer == "no":
            return replace(allowed.result, status="stopped", text=_REFUSED)
        if tool is None:
            names = ", ".join(tools) or "none"
            answer = failed(f"there is no tool {call.name!r}; the tools are: {names}.")
        elif call.digest != tool.digest:
            answer = failed("the tool has changed since it was called, and was not run. Call it again if you need it.")
        else:
            if allowed.answer == "always":
                await REQUESTS.run(self.toolbox.allow, owner, tool)
            reply.do(say("Calling {tool}", tool=call.name))
            assert self.toolbox.servers is not None, "a tool has a server"
            answer = await self.toolbox.servers.call(tool, call.arguments, owner)
        return await self._stored(owner, allowed.result, answer)

    async def _stored(self, owner: str, result: Node, answer: ToolAnswer) -> Node:
        text, files = answer.text, []
        for file in answer.files:
            found = await self._take(owner, file)
            if isinstance(found, Attachment):
                files.append(found)
            else:
                text = "\n\n".join(filter(None, (text, found)))
        # A token has a character at least, mostly four: a result leaves room for more of them.
        text = shortened(text, min(MAX_RESULT_CHARS, self.backend.context_length))
        status = "failed" if answer.has_failed else "finished"
        return replace(result, status=status, text=text.replace("\0", ""), attachments=tuple(files))

    async def _take(self, owner: str, file: AnsweredFile) -> Attachment | str:
        """Stores a file of a result, read as uploads are; in words for the model why it can't be."""
        digest, num_bytes = await UPLOADS.run(self.media.add, io.BytesIO(file.data), max_bytes=MAX_FILE_BYTES)
        await REQUESTS.run(self.media.hold, owner, digest)
        found = Attachment(digest, "image", file_name(file.name), num_bytes)
        asker = Asker()
        try:
            return await self._read(owner, found, asker)
        except (MediaError, DocumentError) as error:
            await REQUESTS.run(self.media.release, owner, digest)
            return f"[{found.name} is left out: {english(with_names(said_of(error), [found]))}]"
        finally:
            asker.leave()

    async def _read(self, owner: str, file: Attachment, asker: Asker) -> Attachment:
        path, media = self.media.path(file.digest), asked_by(self.backend.media, asker)
        kind = await UPLOADS.run(detect_document, path, file.name)
        if kind == "pdf":
            how: dict[str, Any] = {"max_pages": _MAX_PDF_PAGES, "name": file.name, "asker": asker}
            pages = await DOCUMENTS.run_for(self.line, read_pdf_text, path, **how)
            return await self._text(owner, file, "\n\n".join(page.strip() for page in pages))
        if kind == "text":
            text, _ = await UPLOADS.run(read_text, path, max_bytes=4 * MAX_TEXT_CHARS, name=file.name)
            return await self._text(owner, file, text)
        found = replace(file, kind=await THUMBNAILS.run_for(self.line, kind_by, media, path))
        if found.kind == "image":
            await THUMBNAILS.run_for(self.line, check_picture_by, media, path)
        found = await THUMBNAILS.run_for(self.line, self.plan, found)
        if found.kind == "video" and found.plan is not None:
            # Nobody could take a video that can't be decoded out of the chat again.
            await THUMBNAILS.run_for(self.line, media.prepare, path, found.plan)
        return found

    async def _text(self, owner: str, file: Attachment, text: str) -> Attachment:
        data = shortened(text, min(MAX_RESULT_CHARS, self.backend.context_length)).encode()
        digest, num_bytes = await UPLOADS.run(self.media.add, io.BytesIO(data), max_bytes=len(data))
        await REQUESTS.run(self.media.hold, owner, digest)
        return Attachment(digest, "text", file.name, num_bytes)


def _keep_ends(calls: Sequence[Allowed], reply: Reply, words: str, status: ReplyStatus) -> None:
    for each in calls:
        reply.keep(replace(each.result, status=status, text=words))
