"""Deleted conversations: they can be restored for a while, then they are removed, even if no page is open."""

from __future__ import annotations

import asyncio
import logging

from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.errors import StorageError
from qwen35mm.pools import REQUESTS

logger = logging.getLogger(__name__)

# Longer than any page offers to undo.
UNDO_S = 30.0


class Trash:
    """Deletes conversations of a store, and purges them later. Used only in the event loop.

    Args:
        undo_s: seconds in which a conversation can be restored.
    """

    def __init__(self, store: ConversationStore, undo_s: float = UNDO_S) -> None:
        self._store = store
        self._undo_s = undo_s
        self._running: set[asyncio.Task[None]] = set()

    async def delete(self, owner: str, conversation_id: str) -> None:
        """Deletes a conversation. Raises NotFoundError, StorageError."""
        await REQUESTS.run(self._store.delete, owner, conversation_id)
        asyncio.get_running_loop().call_later(self._undo_s, self._begin_purge)

    def _begin_purge(self) -> None:
        self._running.add(task := asyncio.ensure_future(REQUESTS.run(purge, self._store, self._undo_s)))
        task.add_done_callback(self._running.discard)


def purge(store: ConversationStore, min_age_s: float = UNDO_S) -> None:
    """Removes conversations deleted at least `min_age_s` ago; logs a disk failure, and the next purge tries again."""
    try:
        store.purge(min_age_s)
    except StorageError as error:
        logger.warning("deleted conversations could not be removed: %s", error)
