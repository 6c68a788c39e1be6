"""Conversations over a fake backend and a store of their own, without a page, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwen35mm.assets import asset_path
from qwen35mm.chat.quotas import ALONE, Usage
from qwen35mm.chat.replies.replies import Replies
from qwen35mm.chat.replies.toolbox import Toolbox
from qwen35mm.chat.replies.turns import Person, Question, SentFile, Turns
from qwen35mm.chat.store.records import Attachment, Node
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.tools.servers import ToolServers
from qwen35mm.web.rendering.view import ReplyDrawing
from qwen35mm.web.serving.api import Api
from tests.chat.fake_backend import FakeBackend

ME = Person("ann", max_replies=2)
OTHER = Person("bob")
PICTURE = asset_path("samples") / "three-shapes.png"
CLIP = next(asset_path("samples").glob("*.mp4"))
# No time that anything else waits for.
GRACE_S = 98765.25


@dataclass(frozen=True)
class Asked:
    """A question's conversation, the id of its reply, and what was last seen of that."""

    conversation: str
    reply: str
    view: dict[str, Any]


class ChatKit:
    """What `build_app` puts together, and short words for what a page does."""

    def __init__(self, folder: Path, backend: Any = None, tools: ToolServers | None = None) -> None:
        self.backend: FakeBackend = backend or FakeBackend()
        self.store = ConversationStore(folder)
        self.replies = Replies(self.store, self.backend, grace_s=GRACE_S)
        self.toolbox = Toolbox(tools, self.store)
        self.turns = Turns(self.backend, self.store, self.replies, toolbox=self.toolbox)
        self.api = Api(self.backend, self.store, self.replies, self.turns, dict, Usage(self.store, ALONE))

    def attach(self, path: Path, person: Person = ME, kind: Any = "image", name: str | None = None) -> Attachment:
        """A file as it is after its upload."""
        with path.open("rb") as file:
            digest, num_bytes = self.store.media.add(file, max_bytes=1 << 30)
        self.store.media.hold(person.owner, digest)
        return Attachment(digest, kind, name or path.name, num_bytes)

    async def send(
        self,
        text: str,
        conversation: str | None = None,
        parent: str | None = None,
        *,
        files: Sequence[Attachment] = (),
        settings: dict[str, Any] | None = None,
        person: Person = ME,
        at_end: bool = False,
    ) -> tuple[str, str]:
        """Sends, and doesn't watch; ids of conversation and reply."""
        sent = [SentFile(digest=file.digest, kind=file.kind, name=file.name) for file in files]
        where = {"conversation": conversation, "parent": parent, "at_end": at_end}
        question = Question(**where, text=text, attachments=sent, settings=settings)
        return await self.turns.send(person, question)

    async def ask(self, text: str, conversation: str | None = None, parent: str | None = None, **how: Any) -> Asked:
        """Sends, and watches to the end."""
        conversation_id, reply_id = await self.send(text, conversation, parent, **how)
        return Asked(conversation_id, reply_id, await self.watch(reply_id, how.get("person", ME)))

    async def watch(
        self, reply_id: str, person: Person = ME, *, until: Callable[[dict[str, Any]], Any] = lambda view: False
    ) -> dict[str, Any]:
        """Watches until a view is as wanted, or to the end; the last view."""
        last: dict[str, Any] = {}
        drawing = ReplyDrawing()
        async with aclosing(self.replies.watch(person.owner, [reply_id])) as views:  # pyright: ignore[reportArgumentType]
            async for states in views:
                last = drawing.view(states[reply_id]) if reply_id in states else {}
                if last and until(last):
                    break
        return last

    async def begin(self, text: str, **how: Any) -> tuple[str, str, asyncio.Task[dict[str, Any]]]:
        """Sends, and watches in the background: once there is something, its ids and the task that ends with it."""
        conversation_id, reply_id = await self.send(text, **how)
        seen = asyncio.Event()
        watching = asyncio.create_task(
            self.watch(reply_id, until=lambda view: seen.set() if view["blocks"] or view["work"] else None)
        )
        await seen.wait()
        return conversation_id, reply_id, watching

    def node(self, conversation_id: str, node_id: str, person: Person = ME) -> Node:
        """A message as it is stored."""
        return self.store.read(person.owner, conversation_id)[1].nodes[node_id]

    def change(self, asked: Asked, **fields: Any) -> None:
        """Changes a reply as it is stored."""
        self.store.update(ME.owner, replace(self.node(asked.conversation, asked.reply), **fields))

    def path(self, conversation_id: str, person: Person = ME) -> tuple[Node, ...]:
        """The messages that are shown."""
        conversation, tree = self.store.read(person.owner, conversation_id)
        return tree.path(conversation.head)

    @property
    def prompt(self) -> list[tuple[str, str]]:
        """Roles and texts of the last call."""
        return [(message.role, message.text.strip()) for message in self.backend.calls[-1].messages]


class Timers:
    """Takes the loop's timers of `GRACE_S` into its own hands."""

    def __init__(self, monkeypatch: Any) -> None:
        self._waiting: list[tuple[Callable[[], None], asyncio.TimerHandle]] = []
        loop = asyncio.get_running_loop()
        real = loop.call_later

        def call_later(delay: float, callback: Callable[..., Any], *args: Any, **context: Any) -> asyncio.TimerHandle:
            handle = real(delay, callback, *args, **context)
            if delay == GRACE_S:
                self._waiting.append((callback, handle))
            return handle

        monkeypatch.setattr(loop, "call_later", call_later)

    @property
    def live(self) -> int:
        """Timers that would fire."""
        return sum(not handle.cancelled() for _, handle in self._waiting)

    def fire(self) -> None:
        """The time is over for all that wait now."""
        waiting, self._waiting = self._waiting, []
        for callback, handle in waiting:
            if not handle.cancelled():
                handle.cancel()
                callback()
