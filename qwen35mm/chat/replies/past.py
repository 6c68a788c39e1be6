"""The messages before one that is being written: read once for all that is typed after them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from qwen35mm.chat.replies.prompting import prompt_path_before
from qwen35mm.chat.replies.replies import Replies
from qwen35mm.chat.store.records import Attachment, Conversation, Node
from qwen35mm.chat.store.store import ConversationStore

# Conversations whose messages are at hand for those who write in them.
_NUM_KEPT = 16


@dataclass(frozen=True, eq=False)
class Past:
    """Messages before others; what is counted of one isn't counted again.

    Attributes:
        path: those that a prompt holds.
        known: files that may have been read before; theirs are the plans to be used again.
    """

    path: tuple[Node, ...] = ()
    known: tuple[Attachment, ...] = ()


class Pasts:
    """Reads what stands before messages; the same one for as long as nothing changes but an answer that grows."""

    def __init__(self, store: ConversationStore, replies: Replies) -> None:
        self._store = store
        self._replies = replies
        self._kept = functools.lru_cache(maxsize=_NUM_KEPT)(self._read)

    def before(
        self, owner: str, conversation: Conversation, parent: str | None, first: str | None
    ) -> tuple[Past, tuple[Node, ...]]:
        """What stands before a message after `parent`, and what of it is still being written: a question and its answer
        so far.

        Args:
            first: the oldest message of it, where the conversation's is an older one.

        Raises:
            PromptError: the parent is a question.
            NotFoundError: it isn't there.
        """
        reply = None if parent is None else self._replies.find(owner, parent)
        if reply is None or reply.done:
            return self._kept(owner, conversation.id, parent, conversation.first, first, conversation.updated_s), ()
        question = next(node for node in reversed(reply.work.path) if node.role == "user")
        past = self._kept(owner, conversation.id, question.parent, conversation.first, first, reply.node.id)
        return past, (question, reply.shown) if reply.shown.text else ()

    def _read(
        self, owner: str, conversation_id: str, parent: str | None, first: str | None, own: str | None, _version: object
    ) -> Past:
        _, tree = self._store.read(owner, conversation_id)
        known = tuple(attachment for each in tree.nodes.values() for attachment in each.attachments)
        return Past(tuple(prompt_path_before(tree, parent, first, own)), known)
