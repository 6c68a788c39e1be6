"""The messages before the one that a person is typing: read once, not at each key."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from qwen35mm.chat.replies.prompting import prompt_path_before
from qwen35mm.chat.replies.replies import Replies
from qwen35mm.chat.store.records import Attachment, Conversation, Node
from qwen35mm.chat.store.store import ConversationStore

# Conversations whose messages stay in memory while people write in them.
_NUM_KEPT = 16


@dataclass(frozen=True, eq=False)
class Past:
    """Messages before a new one. Compared by identity, so that counts of it can be cached.

    Attributes:
        path: the messages in the prompt.
        known: the conversation's files, whose plans can be reused.
    """

    path: tuple[Node, ...] = ()
    known: tuple[Attachment, ...] = ()


class Pasts:
    """Reads the past of messages. Returns the same object until something other than a growing answer changes."""

    def __init__(self, store: ConversationStore, replies: Replies) -> None:
        self._store = store
        self._replies = replies
        self._kept = functools.lru_cache(maxsize=_NUM_KEPT)(self._read)

    def before(
        self, owner: str, conversation: Conversation, parent: str | None, first: str | None
    ) -> tuple[Past, tuple[Node, ...]]:
        """The past of a message after `parent`, and a question with its unfinished answer, if there is one.

        Args:
            first: the oldest message in the prompt, if it is newer than the conversation's `first`.

        Raises:
            PromptError: the parent is a question.
            NotFoundError: the parent doesn't exist.
        """
        reply = None if parent is None else self._replies.find(owner, parent)
        if reply is None or reply.done:
            return self._kept(owner, conversation.id, parent, conversation.first, first, conversation.updated_s), ()
        path = reply.work.path
        question = next(node for node in reversed(path) if node.role == "user")
        past = self._kept(owner, conversation.id, question.parent, conversation.first, first, reply.node.id)
        # Also the calls between them; a continued answer is in the path already.
        growing = (*(node for node in path[path.index(question) :] if node.id != reply.node.id), reply.shown)
        return past, growing if reply.shown.text else ()

    def _read(
        self, owner: str, conversation_id: str, parent: str | None, first: str | None, own: str | None, _version: object
    ) -> Past:
        _, tree = self._store.read(owner, conversation_id)
        known = tuple(attachment for each in tree.nodes.values() for attachment in each.attachments)
        return Past(tuple(prompt_path_before(tree, parent, first, own)), known)
