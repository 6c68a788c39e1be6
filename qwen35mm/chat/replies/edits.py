"""Edited answers: an edit of an answer makes a branch, as an edit of a question does."""

from __future__ import annotations

import time

from qwen35mm.chat.replies.turns import MAX_TEXT_CHARS
from qwen35mm.chat.store.records import Node
from qwen35mm.chat.store.store import ConversationStore, new_id
from qwen35mm.errors import PromptError
from qwen35mm_preprocess.say import say


def edit_answer(store: ConversationStore, owner: str, conversation_id: str, node_id: str, text: str) -> Node:
    """Adds an edited answer beside the model's own. The page shows it, and later prompts contain it.

    Thinking and statistics stay with the model's answer.

    Raises:
        PromptError: the text is empty or too long, or the message is not an answer.
        NotFoundError: no such message.
    """
    if not text.strip():
        raise PromptError(say("An answer can't be empty. To remove it, delete it."))
    if len(text) > MAX_TEXT_CHARS:
        raise PromptError(say("A message's text has at most {most} characters.", most=MAX_TEXT_CHARS))
    conversation, tree = store.read(owner, conversation_id)
    (*_, node) = tree.path(node_id)
    if node.role != "assistant":
        raise PromptError(say("Only an answer can be edited this way. A question is edited and sent again."))
    edited = Node(new_id(), node.parent, "assistant", time.time(), text.strip("\n"), model=node.model, edited=True)
    is_summary = conversation.first == node_id
    store.add(owner, conversation_id, edited, first=edited.id if is_summary else None)
    return edited
