"""Replies in progress, and who watches them.

A reply belongs to no page: a page that is loaded again continues to watch it. A reply that nobody watches (its tab was
closed, or the connection lost) is stopped after a while. A finished reply that could not be stored, because the disk
was full, stays visible here until it is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

from qwen35mm.chat.replies.reply import Reply, Work
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.contract import Backend
from qwen35mm.errors import StorageError

logger = logging.getLogger(__name__)

# The server only notices that a browser is gone when it sends something.
HEARTBEAT_S = 1.0
# Time to load the page again, or to come back to it on a phone.
GRACE_S = 20.0


class Replies:
    """All replies in progress, by their messages' ids.

    Args:
        grace_s: a reply that nobody watches stops after this many seconds; a finished one stays visible as long.
    """

    def __init__(self, store: ConversationStore, backend: Backend, *, grace_s: float = GRACE_S) -> None:
        self._store = store
        self._backend = backend
        self._grace_s = grace_s
        self._replies: dict[str, Reply] = {}
        self._unwatched: dict[Reply, asyncio.TimerHandle] = {}
        self._running: set[asyncio.Task[None]] = set()
        # Called when somebody asks for an answer, and when a reply has ended.
        self.asked: Callable[[], None] = lambda: None
        self.ended: Callable[[Reply], None] = lambda reply: None
        self._coming: set[object] = set()
        self._is_temporary = False

    @property
    def are_wanted(self) -> bool:
        """Whether any reply is in progress or being prepared."""
        return bool(self._coming) or any(not reply.done for reply in self._replies.values())

    @contextlib.contextmanager
    def coming(self) -> Iterator[None]:
        """Counts a reply as wanted while it is being prepared."""
        self._coming.add(mine := object())
        self.asked()
        try:
            yield
        finally:
            self._coming.discard(mine)

    def add(self, work: Work) -> Reply:
        """Adds a reply, which begins as soon as a page watches it."""
        if self._is_temporary:
            # A salt of its own: nobody else gets cache hits on it.
            tenant = f"temporary {work.conversation_id}"
            work = replace(work, request=replace(work.request, retain="memory", tenant=tenant))
        reply = self._replies[work.node.id] = Reply(work, self._store, self._backend, self._end)
        self._end_later(reply)
        return reply

    def beside(self, store: ConversationStore) -> Replies:
        """The same replies, but those added here are temporary and go into another store."""
        other = copy.copy(self)
        other._store, other._is_temporary = store, True
        return other

    def of(self, owner: str, conversation_id: str | None = None) -> list[Reply]:
        """A person's replies in progress, in all conversations or in one."""
        return [
            reply
            for reply in self._replies.values()
            if reply.work.owner == owner and not reply.done and conversation_id in (None, reply.work.conversation_id)
        ]

    def unsaved(self, owner: str, conversation_id: str) -> list[Reply]:
        """A conversation's replies whose newest state could not be stored."""
        return [
            reply
            for reply in self._replies.values()
            if reply.unsaved is not None and (reply.work.owner, reply.work.conversation_id) == (owner, conversation_id)
        ]

    async def store_missed(self, owner: str, conversation_id: str) -> None:
        """Tries again to store a conversation's unsaved replies, before another one builds on them.

        Raises:
            StorageError: a reply still can't be stored.
        """
        for reply in self.unsaved(owner, conversation_id):
            await reply.store_missed()
            if reply.unsaved is not None:
                raise StorageError(reply.unsaved)

    def close(self) -> None:
        """Tries a last time to store unsaved replies, which end with the process."""
        for reply in list(self._replies.values()):
            if reply.unsaved is not None:
                reply.store_newest()

    def find(self, owner: str, node_id: str) -> Reply | None:
        """A person's reply that is in progress or ended a moment ago."""
        reply = self._replies.get(node_id)
        return reply if reply is not None and reply.work.owner == owner else None

    async def watch(self, owner: str, node_ids: Sequence[str]) -> AsyncGenerator[dict[str, Reply], None]:
        """Yields the replies by id at each change and every `HEARTBEAT_S`, until all are done and stored."""
        watched = {node_id: reply for node_id in node_ids if (reply := self.find(owner, node_id))}
        news = asyncio.Event()
        for reply in watched.values():
            reply.watchers.add(news)
            self._keep(reply)
            reply.start()
        try:
            while True:
                news.clear()
                done = all(reply.done and reply.unsaved is None for reply in watched.values())
                yield watched
                if done:
                    return
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(news.wait(), HEARTBEAT_S)
        finally:
            for reply in watched.values():
                reply.watchers.remove(news)
                if not reply.watchers and not reply.done:
                    self._end_later(reply)

    def _end_later(self, reply: Reply) -> None:
        def end() -> None:
            self._unwatched.pop(reply, None)
            if not reply.done:
                logger.info("nobody watches a reply any more: it is ended")
                self._run(reply.stop())

        self._keep(reply)
        self._unwatched[reply] = asyncio.get_running_loop().call_later(self._grace_s, end)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._running.add(task := asyncio.ensure_future(work))
        task.add_done_callback(self._running.discard)

    def _keep(self, reply: Reply) -> None:
        timer = self._unwatched.pop(reply, None)
        if timer is not None:
            timer.cancel()

    def _end(self, reply: Reply) -> None:
        self.ended(reply)
        self._forget_later(reply)

    def _forget_later(self, reply: Reply) -> None:
        """Removes an ended reply after a while: a page that asks late still sees its end. Unsaved replies stay."""

        async def store_again() -> None:
            await reply.store_missed()
            self._forget_later(reply)

        def forget() -> None:
            # The reply may have been continued meanwhile.
            if self._replies.get(reply.node.id) is not reply:
                return
            if reply.unsaved is None:
                del self._replies[reply.node.id]
            else:
                self._run(store_again())

        self._keep(reply)
        asyncio.get_running_loop().call_later(self._grace_s, forget)
