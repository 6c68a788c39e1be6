"""Replies in progress, and who watches them.

A reply belongs to no page: a page that is loaded again goes on watching it. One that nobody watches any more is ended
after a while, because its tab was closed or its connection lost. One that ended and could not be stored, because the
disk was full, stays here and can be seen until it is stored.
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

# A browser that went away is only noticed when something is sent to it.
HEARTBEAT_S = 1.0
# A page that is loaded again, or a phone that comes back to it, finds its reply still growing.
GRACE_S = 20.0


class Replies:
    """All replies in progress, by their messages' ids.

    Args:
        store: what they are written into.
        backend: answers.
        grace_s: seconds after which a reply that nobody watches is ended; a page may ask for one's end as long.
    """

    def __init__(self, store: ConversationStore, backend: Backend, *, grace_s: float = GRACE_S) -> None:
        self._store = store
        self._backend = backend
        self._grace_s = grace_s
        self._replies: dict[str, Reply] = {}
        self._unwatched: dict[Reply, asyncio.TimerHandle] = {}
        self._running: set[asyncio.Task[None]] = set()
        # Told that somebody asks for an answer, and that one has ended.
        self.asked: Callable[[], None] = lambda: None
        self.ended: Callable[[Reply], None] = lambda reply: None
        self._coming: set[object] = set()
        self._is_temporary = False

    @property
    def are_wanted(self) -> bool:
        """Whether any reply is in progress, or about to be."""
        return bool(self._coming) or any(not reply.done for reply in self._replies.values())

    @contextlib.contextmanager
    def coming(self) -> Iterator[None]:
        """While what a reply is made from is prepared."""
        self._coming.add(mine := object())
        self.asked()
        try:
            yield
        finally:
            self._coming.discard(mine)

    def add(self, work: Work) -> Reply:
        """A reply that begins as soon as a page watches it."""
        if self._is_temporary:
            # A salt of its own: what the cache has of it is found for nobody else.
            tenant = f"temporary {work.conversation_id}"
            work = replace(work, request=replace(work.request, retain="memory", tenant=tenant))
        reply = self._replies[work.node.id] = Reply(work, self._store, self._backend, self._end)
        self._end_later(reply)
        return reply

    def beside(self, store: ConversationStore) -> Replies:
        """The same replies, save that those which are added here are temporary, and kept by another store."""
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
        """A conversation's replies of which the store has less than was written."""
        return [
            reply
            for reply in self._replies.values()
            if reply.unsaved is not None and (reply.work.owner, reply.work.conversation_id) == (owner, conversation_id)
        ]

    async def store_missed(self, owner: str, conversation_id: str) -> None:
        """Stores what could not be of a conversation's ended replies, for those that build on them.

        Raises:
            StorageError: it still can't be.
        """
        for reply in self.unsaved(owner, conversation_id):
            await reply.store_missed()
            if reply.unsaved is not None:
                raise StorageError(reply.unsaved)

    def close(self) -> None:
        """Tries once more to store what could not be: with the process it is lost."""
        for reply in list(self._replies.values()):
            if reply.unsaved is not None:
                reply.store_newest()

    def find(self, owner: str, node_id: str) -> Reply | None:
        """A person's reply that is in progress, or was a moment ago."""
        reply = self._replies.get(node_id)
        return reply if reply is not None and reply.work.owner == owner else None

    async def watch(self, owner: str, node_ids: Sequence[str]) -> AsyncGenerator[dict[str, Reply], None]:
        """Replies by id, whenever there is something new to see, and every `HEARTBEAT_S`; the last with all done and
        stored."""
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
        """A page that asks for a reply just as it ends must still get to see its end; one that isn't stored stays."""

        async def store_again() -> None:
            await reply.store_missed()
            self._forget_later(reply)

        def forget() -> None:
            # It may have been continued meanwhile.
            if self._replies.get(reply.node.id) is not reply:
                return
            if reply.unsaved is None:
                del self._replies[reply.node.id]
            else:
                self._run(store_again())

        self._keep(reply)
        asyncio.get_running_loop().call_later(self._grace_s, forget)
