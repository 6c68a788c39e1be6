"""Temporary conversations, which are never stored.

Their texts are only in this process's memory. Their files are in a folder and are deleted with the conversation. The
engine keeps nothing of them on disk. One ends when its page says so, or some minutes after the page falls silent,
since a killed browser says nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from qwen35mm.chat.store.records import DIGEST, Conversation
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.chat.store.tree import Tree
from qwen35mm.errors import NotFoundError, StorageError
from qwen35mm.pools import REQUESTS

logger = logging.getLogger(__name__)

# A page reports every minute, in the background a little later.
SILENCE_S = 300.0
_PREFIX = "qwen35mm-temporary-"
# Requests that may come before the conversation exists.
_OF_FILES = frozenset({"preview"})
_BEGINNINGS = frozenset({"send", "measure", "strip", "chapters", "example", "crop"})


class TemporaryStore(ConversationStore):
    """Conversations in memory, with their files in a temporary folder.

    Attributes:
        owners: the owner of each conversation that hasn't ended, by its id.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, in_memory=True)
        self.owners: dict[str, str] = {}

    def insert(self, owner: str, conversations: Iterable[tuple[Conversation, Tree]]) -> None:
        conversations = list(conversations)
        super().insert(owner, conversations)
        self.owners.update({conversation.id: owner for conversation, _ in conversations})

    def remove(self, owner: str, conversation_id: str | None, *, is_last: bool) -> None:
        """Removes a conversation with its files.

        Args:
            is_last: whether the owner's other data go too: no page of theirs is about to send something.
        """
        digests: set[str] = set()
        with contextlib.suppress(NotFoundError):
            if conversation_id is not None:
                _, tree = self.read(owner, conversation_id)
                digests |= {each.digest for node in tree.nodes.values() for each in node.attachments}
                self.delete(owner, conversation_id)
        self.owners.pop(conversation_id or "", None)
        if is_last and owner not in self.owners.values():
            digests |= self.media.held(owner)
            self.delete_owner(owner)
        self.purge()
        self.media.discard(digests)
        self.media.collect_garbage()


class TemporaryChats:
    """Ends temporary conversations. Used only in the event loop.

    Args:
        stop: ends a conversation's replies.
        silence_s: a page that is silent for this many seconds counts as gone.
    """

    def __init__(self, store: TemporaryStore, stop: Callable[[str, str], Any], *, silence_s: float = SILENCE_S) -> None:
        self.store = store
        self._stop = stop
        self._silence_s = silence_s
        self._timers: dict[tuple[str, str | None], asyncio.TimerHandle] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def is_meant(self, owner: str, name: str, arguments: Mapping[str, Any]) -> bool:
        """Whether a request is about a temporary conversation, or begins one; if so, notes that its page is alive."""
        conversation = arguments.get("conversation")
        digest = arguments.get("digest")
        if name in _OF_FILES and isinstance(digest, str) and re.fullmatch(DIGEST, digest):
            return self.store.media.is_of(owner, digest)
        mine = isinstance(conversation, str) and self.store.owners.get(conversation) == owner
        if mine or (name in _BEGINNINGS and arguments.get("temporary") is True):
            self.heard(owner, conversation if mine else None)
            return True
        return False

    def mark(self, owner: str, answer: dict[str, Any]) -> None:
        """Marks a conversation in an answer as temporary, and notes that its page is alive."""
        chat = answer.get("chat", answer)
        if "messages" in chat:
            chat["temporary"] = True
            self.heard(owner, chat["id"])

    def heard(self, owner: str, conversation_id: str | None) -> None:
        """Notes that a conversation's page is alive; None is a chat that hasn't begun but may have files."""
        key = (owner, conversation_id)
        if key in self._timers:
            self._timers[key].cancel()
        self._timers[key] = asyncio.get_running_loop().call_later(self._silence_s, self._end_soon, *key)

    async def end(self, owner: str, conversation_id: str | None) -> None:
        """Ends a conversation and deletes all of its data. Does nothing for another owner's.

        Chats that haven't begun have no names, so None ends only with the last page that has one.
        """
        if conversation_id is not None and self.store.owners.get(conversation_id) != owner:
            return
        timer = self._timers.pop((owner, conversation_id), None)
        if timer is not None:
            timer.cancel()
        if conversation_id is not None:
            await self._stop(owner, conversation_id)
        is_last = (owner, None) not in self._timers
        try:
            await REQUESTS.run(partial(self.store.remove, owner, conversation_id, is_last=is_last))
        except StorageError as error:
            logger.warning("a temporary conversation could not be removed: %s", error)

    def _end_soon(self, owner: str, conversation_id: str | None) -> None:
        self._ending.add(task := asyncio.ensure_future(self.end(owner, conversation_id)))
        task.add_done_callback(self._ending.discard)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is deleted after the block. Also deletes leftover folders of killed processes."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        found = re.fullmatch(rf"{_PREFIX}(\d+)-.*", folder.name)
        if found and not _is_running(int(found[1])):
            shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def _is_running(process: int) -> bool:
    if os.name != "posix":  # os.kill would end the process on Windows
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
