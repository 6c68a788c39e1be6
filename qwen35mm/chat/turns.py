"""A question with the reply that begins: how both come into the store together, and the question for a summary."""

from __future__ import annotations

import bisect
import contextlib
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from qwen35mm.chat.archive import export_markdown
from qwen35mm.chat.drafts import Draft, Drafts
from qwen35mm.chat.settings import Settings
from qwen35mm.chat.store import ConversationStore, new_id
from qwen35mm.chat.tree import Attachment, Conversation, Node, Tree
from qwen35mm.errors import RequestError, StorageError

_SUMMARISE = (
    "Summarise the attached conversation so that it can be gone on with from your summary alone. Keep names, numbers, "
    "decisions, what was seen in pictures and videos, and what is still open. Write nothing else."
)


@dataclass(frozen=True)
class Turn:
    """What is about to be stored and answered.

    Attributes:
        conversation: with the settings that it will have.
        path: the messages before the question that the prompt holds.
        is_new: whether the conversation begins with it.
        is_asked: whether the question is in the store already.
        is_summary: whether later prompts begin with the reply.
    """

    conversation: Conversation
    path: tuple[Node, ...]
    question: Node
    is_new: bool = False
    is_asked: bool = False
    is_summary: bool = False


def store_turn(store: ConversationStore, owner: str, turn: Turn, reply: Node) -> None:
    """Stores the turn with its reply, which is then shown.

    Raises:
        StorageError: it can't be stored; nothing is changed.
    """
    mine, question = turn.conversation, turn.question
    if turn.is_new:
        first = reply.id if turn.is_summary else None
        store.insert(owner, [(replace(mine, head=reply.id, first=first), Tree([question, reply]))])
        _try(lambda: [store.release(owner, attachment.digest) for attachment in question.attachments])
        return
    before = store.get(owner, mine.id)
    with contextlib.ExitStack() as undo:
        if dict(before.settings) != dict(mine.settings):
            store.set_settings(owner, mine.id, mine.settings)
            undo.callback(_try, lambda: store.set_settings(owner, mine.id, before.settings))
        if not turn.is_asked:
            store.add(owner, mine.id, question)
            undo.callback(_try, lambda: _take_back(store, owner, before, question))
        store.add(owner, mine.id, reply)
        undo.callback(_try, lambda: _take_back(store, owner, before, reply))
        if turn.is_summary:
            store.set_first(owner, mine.id, reply.id)
        undo.pop_all()


def summary_question(
    store: ConversationStore, drafts: Drafts, owner: str, title: str, path: Sequence[Node], settings: Settings
) -> Node:
    """Asks for a summary of a conversation, as a text file with its newest messages: as many as fit.

    Raises:
        RequestError: there are none, or not even the last one fits.
    """
    if not path:
        raise RequestError("There is nothing to sum up yet.")

    def ask(start: int) -> Node:
        messages = Tree([replace(path[start], parent=None), *path[start + 1 :]])
        data = export_markdown(messages, path[-1].id, title).encode()
        digest, num_bytes = store.media.add(io.BytesIO(data), max_bytes=len(data))
        store.hold(owner, digest)
        file = Attachment(digest, "text", f"{title or 'conversation'}.md", num_bytes)
        return Node(new_id(), None, "user", time.time(), text=_SUMMARISE, attachments=(file,))

    def fits(start: int) -> bool:
        question = ask(start)
        fitting = drafts.fits(Draft((), question, settings))
        store.release(owner, question.attachments[0].digest)
        return fitting

    start = bisect.bisect_left(range(len(path)), True, key=fits)
    if start == len(path):
        raise RequestError("Not even the last message fits into the context: begin a new chat.")
    return ask(start)


def _take_back(store: ConversationStore, owner: str, before: Conversation, node: Node) -> None:
    # What is sent again after an error needs its files.
    for attachment in node.attachments:
        store.hold(owner, attachment.digest)
    store.delete_node(owner, node.id)
    store.set_head(owner, before.id, before.head)


def _try(work: Callable[[], object]) -> None:
    """What puts things in order after an error may fail too; the first error is the one to tell."""
    with contextlib.suppress(StorageError):
        work()
